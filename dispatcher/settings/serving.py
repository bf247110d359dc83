"""The settings of models: which requests may name, and how it is known what the pool serves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from dispatcher.core.lanes import MODEL_BYTES
from dispatcher.settings.section import Section
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import HttpUrl, SecretUrl, Text, refuse

MODELS_MOST = 1000
"""Named in the settings."""

Observe = Literal["auto", "off", "gateway", "endpoints"]


def _model_name(name: str) -> str:
    if not name or name != name.strip():
        raise refuse("must not be empty, nor have blanks at its ends")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise refuse("is not valid Unicode") from None
    if size > MODEL_BYTES:
        raise refuse(f"must not be longer than {MODEL_BYTES} bytes")
    return name


ModelName = Annotated[Text, AfterValidator(_model_name)]


class ServingSettings(Section):
    """How it is known which models the pool serves ([signals.md](signals.md#which-models-are-served)).

    Each model server is asked for its list of models, or the gateway for all of them.
    """

    observe: Observe = Field(
        "auto",
        description="`endpoints`: each model server is asked. `gateway`: the gateway, for all. `off`. "
        "`auto`: off while `models` names none; else the servers where `urls` or the Kubernetes watch know "
        "them, and the gateway where neither does.",
    )
    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (),
        description="Whole URLs, one per model server; without a path: `/v1/models`. Empty: the pool's ready "
        "endpoints as the Kubernetes watch sees them.",
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
    subset_header: Text = Field(
        "",
        description="The header by which the gateway's endpoint picker is told which model servers a request "
        "may go to (`ip:port,ip:port`); callers cannot set it. Empty: it cannot be told.",
    )
    tls: TlsSettings = Field(
        TlsSettings(), description="Anything set: what the watch finds is asked by https."
    )

    @field_validator("urls")
    @classmethod
    def _asked_once(cls, urls: tuple[SecretUrl, ...], info: ValidationInfo) -> tuple[SecretUrl, ...]:
        if not all(urls):
            raise refuse("holds an empty URL")
        plain = [each.reveal().rstrip("/").removesuffix("/v1/models") for each in urls]
        if len(set(plain)) < len(plain):
            raise refuse("has a server twice")
        if urls and info.data.get("observe") == "gateway":
            raise refuse("stands beside serving.observe: gateway, which asks no server")
        return urls


class ModelSettings(Section):
    """A model that requests may name."""

    name: ModelName = Field(description="As requests have it in the field `model` of their bodies.")
    absent: Literal["wait", "fail"] = Field(
        "wait",
        description="What becomes of its requests while no server has it: they wait for it, until their "
        "deadlines, or end as MODEL_NOT_FOUND.",
    )


def _each_model_once(models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    if len(models) > MODELS_MOST:
        raise refuse(f"must be at most {MODELS_MOST} models, not {len(models)}")
    places: dict[str, int] = {}
    for place, model in enumerate(models):
        if (first := places.setdefault(model.name, place)) != place:
            raise refuse(f"names a model twice, in [{first}] and [{place}]")
    return models


Models = Annotated[tuple[ModelSettings, ...], Field(strict=False), AfterValidator(_each_model_once)]


def observes(serving: ServingSettings, models: tuple[ModelSettings, ...]) -> bool:
    """Whether it is to be known which models are served. Where not, nothing is asked and nothing waits."""
    return serving.observe != "off" and (serving.observe != "auto" or bool(models))
