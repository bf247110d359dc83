"""The settings of how it is known which models are served, and how requests reach servers that are warm."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.settings.models import ModelSettings
from dispatcher.settings.section import Section
from dispatcher.settings.signals import VllmSettings
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import HttpUrl, SecretUrl, Text, header_of_ours, refuse

Observe = Literal["auto", "off", "gateway", "endpoints"]
LIST_PATH = "/v1/models"
_PAGE, _TENSORRT = "/metrics", "/prometheus"
"""Of metrics pages: the end of their paths, and what TensorRT-LLM has before it."""


class WarmupSettings(Section):
    """How servers that have a version newly are warmed up."""

    by: Literal["auto", "gateway", "endpoints"] = Field(
        "auto",
        description="`endpoints`: straight to each server. `gateway`: through the gateway, with "
        "`serving.subset_header`. `auto`: through the gateway where that header is named or the gateway is "
        "what is asked for its models, else straight.",
    )
    timeout_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds that the warm-up of one server may take altogether."
    )


class ServingSettings(Section):
    """How it is known which models the pool serves ([signals.md](signals.md#which-models-are-served)).

    Each model server is asked for its list of models, or the gateway for all of them.
    """

    observe: Observe = Field(
        "auto",
        description="`endpoints`: each model server is asked. `gateway`: the gateway, for all. `off`. "
        "`auto`: off while `models` names none; else the servers where `urls` or the Kubernetes watch know "
        "them, or `signals.vllm.urls` does; else the gateway.",
    )
    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (),
        description="Whole URLs, one per model server; without a path: `/v1/models`. Empty: the servers of "
        "`signals.vllm.urls`, else the pool's ready endpoints as the Kubernetes watch sees them.",
    )
    interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Seconds between two questions to each server."
    )
    absent: Literal["wait", "fail"] = Field(
        "wait",
        description="What becomes of a request for a model that was served before, is not now, and is not "
        "among `models`: it waits for the model, or ends as MODEL_NOT_FOUND.",
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token for the model servers, read again for each round. The gateway "
        "gets its own.",
    )
    tls: TlsSettings = Field(
        TlsSettings(), description="Anything set: what the watch finds is asked by https."
    )

    subset_header: Text = Field(
        "",
        description="Header that tells the gateway which servers a request may go to, as `ip:port,ip:port`: "
        "those that are warm. Something before the endpoint picker has to turn it into the subset that "
        "pickers know ([models.md](models.md#only-to-servers-that-are-warm)). Empty: any server may get it.",
    )
    warmup: WarmupSettings = WarmupSettings()

    @field_validator("subset_header")
    @classmethod
    def _ours_to_set(cls, name: str) -> str:
        return header_of_ours(name)

    @field_validator("warmup")
    @classmethod
    def _reaches_each(cls, warmup: WarmupSettings, info: ValidationInfo) -> WarmupSettings:
        observe, header = info.data.get("observe"), info.data.get("subset_header")
        if warmup.by == "endpoints" and observe == "gateway":
            raise refuse(
                "by: endpoints cannot be had with serving.observe: gateway, which knows of no server"
            )
        if warmup.by == "gateway" and header == "" and (observe == "endpoints" or info.data.get("urls")):
            raise refuse("by: gateway needs serving.subset_header, for else it cannot name a server")
        return warmup

    @field_validator("urls")
    @classmethod
    def _asked_once(cls, urls: tuple[SecretUrl, ...], info: ValidationInfo) -> tuple[SecretUrl, ...]:
        if not all(urls):
            raise refuse("holds an empty URL")
        plain = [each.reveal().rstrip("/").removesuffix(LIST_PATH) for each in urls]
        if len(set(plain)) < len(plain):
            raise refuse("has a server twice")
        if urls and info.data.get("observe") == "gateway":
            raise refuse("stands beside serving.observe: gateway, which asks no server")
        return urls


def observes(serving: ServingSettings, models: tuple[ModelSettings, ...]) -> bool:
    """Whether it is to be known which models are served. Where not, nothing is asked and nothing waits."""
    return serving.observe != "off" and (serving.observe != "auto" or bool(models))


def with_servers_of(vllm: VllmSettings, serving: ServingSettings) -> ServingSettings:
    """`serving`, and where it names no server those whose metrics pages are read, by the same means.

    They are not taken where the gateway is to be asked, or warm-ups go through it and cannot name a server;
    nor where a page is not at a path from which it follows where the server takes requests.
    """
    by_gateway = serving.observe == "gateway" or (
        serving.warmup.by == "gateway" and serving.subset_header == ""
    )
    lists = [_list_beside(page) for page in vllm.urls]
    if serving.urls or by_gateway or not lists or not all(lists):
        return serving
    taken = {
        "urls": tuple(lists),
        "token_file": serving.token_file or vllm.token_file,
        "tls": vllm.tls if serving.tls == TlsSettings() else serving.tls,
    }
    return serving.model_copy(update=taken)


def _list_beside(page: SecretUrl) -> SecretUrl:
    """Where a server of that metrics page lists its models; empty: that does not follow."""
    parts = urlsplit(page.reveal())
    path = parts.path.rstrip("/")
    if parts.query or (path and not path.endswith(_PAGE)):
        return SecretUrl("")
    base = path.removesuffix(_PAGE).removesuffix(_TENSORRT)
    return SecretUrl(urlunsplit((parts.scheme, parts.netloc, f"{base}{LIST_PATH}", "", "")))
