"""Settings for observing which models are served, and for sending requests to warm servers."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.settings.models import ModelSettings
from dispatcher.settings.section import Section
from dispatcher.settings.signals import VllmSettings
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import HttpUrl, SecretUrl, Text, check_own_header, setting_error

Observe = Literal["auto", "off", "gateway", "endpoints"]
LIST_PATH = "/v1/models"
_METRICS_PATH, _TENSORRT_PREFIX = "/metrics", "/prometheus"
"""Path of a metrics page, and the prefix of that path for TensorRT-LLM."""


class WarmupSettings(Section):
    """Warm-up of servers that have started to serve a version of a model."""

    by: Literal["auto", "gateway", "endpoints"] = Field(
        "auto",
        description="`endpoints`: warm-up requests are sent directly to each server. `gateway`: they are "
        "sent through the gateway, with `serving.subset_header`. `auto`: through the gateway if that header "
        "is set or if the gateway is asked for its models, otherwise directly.",
    )
    timeout_s: float = Field(
        300.0, gt=0, le=86_400, description="Longest total time of the warm-up of one server, in seconds."
    )


class ServingSettings(Section):
    """Observation of the models that the pool serves ([models.md](models.md#which-models-are-served)).

    Each model server is asked for its list of models, or the gateway for the models of all servers.
    """

    observe: Observe = Field(
        "auto",
        description="`endpoints`: each model server is asked. `gateway`: the gateway is asked for all "
        "servers. `off`: models are not observed. `auto`: `off` if `models` is empty. Otherwise `endpoints` "
        "if the servers are known from `urls`, the Kubernetes watch or `signals.vllm.urls`, and else "
        "`gateway`.",
    )
    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (),
        description="Complete URLs, one per model server. Without a path, `/v1/models` is used. If empty, "
        "the servers of `signals.vllm.urls` are asked, or else the ready endpoints of the pool in the "
        "Kubernetes watch.",
    )
    interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Seconds between two requests to each server for its models."
    )
    when_not_served: Literal["wait", "fail"] = Field(
        "wait",
        description="What happens to a request for a model that was served before, is not served now, and is "
        "not in `models`. `wait`: it waits for the model. `fail`: it fails with MODEL_NOT_FOUND.",
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token for the model servers, which is read again for each round. The "
        "gateway gets the token of `gateway.token_file`.",
    )
    tls: TlsSettings = Field(
        TlsSettings(),
        description="TLS settings. If any is set, endpoints of the Kubernetes watch are asked over https.",
    )

    subset_header: Text = Field(
        "",
        description="Header that tells the gateway to which servers a request may be sent, as "
        "`ip:port,ip:port`. It names the warm servers. A component before the endpoint picker must translate "
        "it into the subset hint of the picker ([models.md](models.md#only-to-servers-that-are-warm)). If "
        "empty, a request may be sent to any server.",
    )
    warmup: WarmupSettings = WarmupSettings()

    @field_validator("subset_header")
    @classmethod
    def _check_subset_header(cls, name: str) -> str:
        return check_own_header(name)

    @field_validator("warmup")
    @classmethod
    def _check_warmup_target(cls, warmup: WarmupSettings, info: ValidationInfo) -> WarmupSettings:
        observe, header = info.data.get("observe"), info.data.get("subset_header")
        if warmup.by == "endpoints" and observe == "gateway":
            raise setting_error(
                "by: endpoints cannot be had with serving.observe: gateway, which knows of no server"
            )
        if warmup.by == "gateway" and header == "" and (observe == "endpoints" or info.data.get("urls")):
            raise setting_error("by: gateway needs serving.subset_header, for else it cannot name a server")
        return warmup

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[SecretUrl, ...], info: ValidationInfo) -> tuple[SecretUrl, ...]:
        if not all(urls):
            raise setting_error("holds an empty URL")
        plain = [each.reveal().rstrip("/").removesuffix(LIST_PATH) for each in urls]
        if len(set(plain)) < len(plain):
            raise setting_error("has a server twice")
        if urls and info.data.get("observe") == "gateway":
            raise setting_error("stands beside serving.observe: gateway, which asks no server")
        return urls


def is_observing_models(serving: ServingSettings, models: tuple[ModelSettings, ...]) -> bool:
    """Return whether models are observed. If not, no server is asked, and no request waits for a model."""
    return serving.observe != "off" and (serving.observe != "auto" or bool(models))


def with_vllm_servers(vllm: VllmSettings, serving: ServingSettings) -> ServingSettings:
    """Return the section `serving`. If it names no servers, use those of `signals.vllm`, with their token and
    TLS settings.

    They are not used if the gateway is asked for the models, if warm-ups go through the gateway and cannot
    name a server, or if the path of a metrics page does not tell where the server takes requests.
    """
    is_by_gateway = serving.observe == "gateway" or (
        serving.warmup.by == "gateway" and serving.subset_header == ""
    )
    # An empty URL stands for a server that is unknown. With one of them, the list would be incomplete.
    lists = [_model_list_url(page) for page in vllm.urls]
    if serving.urls or is_by_gateway or not lists or not all(lists):
        return serving
    updates = {
        "urls": tuple(lists),
        "token_file": serving.token_file or vllm.token_file,
        "tls": vllm.tls if serving.tls == TlsSettings() else serving.tls,
    }
    return serving.model_copy(update=updates)


def _model_list_url(page: SecretUrl) -> SecretUrl:
    """Return the URL at which the server of a metrics page lists its models, or empty if it is unknown."""
    parts = urlsplit(page.reveal())
    path = parts.path.rstrip("/")
    if parts.query or (path and not path.endswith(_METRICS_PATH)):
        return SecretUrl("")
    base = path.removesuffix(_METRICS_PATH).removesuffix(_TENSORRT_PREFIX)
    return SecretUrl(urlunsplit((parts.scheme, parts.netloc, f"{base}{LIST_PATH}", "", "")))
