"""Settings of single models: whether requests wait for them, their versions, and their warm-up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.settings.expression import fault_of
from dispatcher.settings.section import Section
from dispatcher.settings.values import Spelled, Text, refuse
from dispatcher.settings.yaml_source import nearest

MODELS_MOST = 1000
"""Largest number of models in the settings."""
VERSIONS_MOST = 100
"""Largest number of versions in one setting (`policy`, `labels` or `weights`)."""
VERSION_GROUP = "version"
"""Group of the pattern that matches the label of a version."""

_VERSION_KEYS = ("policy", "labels", "transition", "pin", "weights")
_ALWAYS_SHOWN = ("name", "absent")


def model_name(name: str) -> str:
    """Return the name of a model if it is valid. Raises PydanticCustomError otherwise."""
    if not name or name != name.strip():
        raise refuse("must not be empty, nor have blanks at its ends")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise refuse("is not valid Unicode") from None
    if size > MODEL_BYTES:
        raise refuse(f"must not be longer than {MODEL_BYTES} bytes")
    return name


ModelName = Annotated[Text, AfterValidator(model_name)]


_POLICIES = 'latest, all, {latest: 2}, {specific: ["2"]} or {label: stable}'


def _policy(given: object) -> VersionPolicy:
    match given:
        case VersionPolicy():
            return given
        case None | "latest":
            return VersionPolicy()
        case "all":
            return VersionPolicy(everything=True)
        case {"latest": latest, **others} if not others:
            # In Python a bool is an int, too.
            if isinstance(latest, bool) or not isinstance(latest, int) or latest < 1:
                raise refuse("latest: must be a whole number, at least 1")
            return VersionPolicy(latest=latest)
        case {"specific": specific, **others} if not others:
            return VersionPolicy(specific=_specific(specific))
        case {"label": label, **others} if not others:
            if not isinstance(label, str):
                raise refuse("label: a text is expected: put it in quotes")
            return VersionPolicy(label=_name_in("label", label))
        case str():
            raise refuse(f"must be {_POLICIES}{nearest(given, ('latest', 'all'))}")
        case {**several} if len(several) > 1:
            raise refuse(f"must be one of {_POLICIES}, not several")
    raise refuse(f"must be {_POLICIES}")


def _specific(given: object) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise refuse('specific: must be a list of at least one version, such as ["2", "3"]')
    if len(given) > VERSIONS_MOST:
        raise refuse(f"specific: must be at most {VERSIONS_MOST} versions, not {len(given)}")
    if not all(isinstance(each, str) for each in given):
        raise refuse('specific: a version is a text: put it in quotes, as in ["2"]')
    return tuple(_name_in("specific", each) for each in given)


def _name_in(where: str, name: str) -> str:
    """Return the name of a version or label if it is valid as the name of a model.

    Raises PydanticCustomError otherwise. Its message begins with `where`.
    """
    if any(ord(each) < 32 or ord(each) == 127 for each in name):
        raise refuse(f"{where}: must not hold line breaks or other control characters")
    try:
        return model_name(name)
    except ValueError as error:
        raise refuse(f"{where}: {error}") from None


_VERSION_SCHEMA = {"type": "string", "minLength": 1}
_POLICY_SCHEMA = {
    "oneOf": [
        {"enum": ["latest", "all"]},
        {
            "type": "object",
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
            "properties": {
                "latest": {"type": "integer", "minimum": 1},
                "specific": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": VERSIONS_MOST,
                    "items": _VERSION_SCHEMA,
                },
                "label": _VERSION_SCHEMA,
            },
        },
    ]
}
VersionsPolicy = Annotated[
    InstanceOf[VersionPolicy],
    BeforeValidator(_policy),
    PlainSerializer(VersionPolicy.written),
    Spelled("`latest`, `all`, `{latest: n}`, `{specific: […]}` or `{label: …}`", _POLICY_SCHEMA),
]


def _each_a_version(texts: Mapping[str, str]) -> Mapping[str, str]:
    if len(texts) > VERSIONS_MOST:
        raise refuse(f"must be at most {VERSIONS_MOST} labels, not {len(texts)}")
    for label, version in texts.items():
        _name_in(f"{label[:60]!r}" if label.strip() else "a label", label)
        _name_in(label, version)
    return texts


def _shares(weights: Mapping[str, float]) -> Mapping[str, float]:
    if len(weights) > VERSIONS_MOST:
        raise refuse(f"must be at most {VERSIONS_MOST} versions, not {len(weights)}")
    for version, share in weights.items():
        _name_in(f"{version[:60]!r}" if version.strip() else "a version", version)
        if not 0 <= share <= 1:
            hint = f" ({share:g}% is {share / 100:g})" if 1 < share <= 100 else ""
            raise refuse(f"{version}: must be a share between 0 and 1, not {share:g}{hint}")
    total = sum(weights.values())
    if total > 1 + 1e-9:  # shares such as 0.1 and 0.2 have rounding errors
        raise refuse(f"must not sum up to more than 1, not {total:g}: versions not named share what is left")
    return weights


def _expression(pattern: str) -> str:
    if pattern and (why := fault_of(pattern)) is not None:
        raise refuse(why)
    return pattern


class ModelSettings(Section):
    """Settings of a model. With `match` the model has versions."""

    name: ModelName = Field(
        description="Name of the model, as requests have it in the field `model` of their bodies."
    )
    absent: Literal["wait", "fail"] = Field(
        "wait",
        description="What happens to requests for the model while no server has it. `wait`: they wait for "
        "it, until their deadlines. `fail`: they fail with MODEL_NOT_FOUND.",
    )
    match: Annotated[Text, AfterValidator(_expression)] = Field(
        "",
        description="Regular expression that matches the whole names of the versions, as servers list them, "
        "such as `qwen-v(?P<version>[0-9]+)`. Requests for `name` are sent to one of the versions "
        "([models.md](models.md#versions)). The group `version` matches the label of a version. Without it, "
        "the label is the whole name. If empty, the model has no versions.",
    )
    policy: VersionsPolicy = Field(
        VersionPolicy(),
        description="Which versions are used: the newest one, the n newest ones, all, the listed ones, or "
        "the one with a label.",
    )
    labels: Annotated[dict[Text, Text], AfterValidator(_each_a_version)] = Field(
        default_factory=dict,
        description='Labels for versions, such as `{stable: "2"}`. A label that is set by `models label` has '
        "precedence.",
    )
    transition: Literal["availability", "resource"] = Field(
        "availability",
        description="`availability`: the old version is used until the new one is warm. `resource`: the new "
        "version gets no requests until all requests to the old one have ended.",
    )
    pin: Literal["request", "sequence", "job"] = Field(
        "request",
        description="What stays with one version as long as that version is in use. `request`: nothing. "
        "`sequence`: the requests of a sequence. `job`: requests with the same label `job`, or the same "
        "label `file` if they have no label `job`.",
    )
    weights: Annotated[dict[Text, float], AfterValidator(_shares)] = Field(
        default_factory=dict,
        description="Shares of the requests by version, such as `{v3: 0.05}`. Versions that are in use and "
        "not named share the rest equally.",
    )
    warmup: Text = Field(
        "",
        description="File with requests that are sent to each server that has started to serve a version, "
        "before any other request ([models.md](models.md#warm-up)). If empty, there is no warm-up.",
    )
    warmup_required: bool = Field(
        False,
        description="If true, a server on which the warm-up fails gets no requests, and the warm-up is tried "
        "again. If false, such a server is considered warm.",
    )

    @field_validator(*_VERSION_KEYS)
    @classmethod
    def _of_versions(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("match") == "" and value != _DEFAULTS[info.field_name]:
            raise refuse("needs match, which says what the names of the versions look like")
        return value

    @field_validator("weights")
    @classmethod
    def _each_version_once(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        seen: dict[str, str] = {}
        for version in weights:
            plain = _plain(version, info.data.get("match", ""))
            if (first := seen.setdefault(plain, version)) != version:
                raise refuse(f"names a version twice, as {first} and {version}")
        return weights

    @field_validator("warmup_required")
    @classmethod
    def _of_a_warmup(cls, required: bool, info: ValidationInfo) -> bool:
        if required and info.data.get("warmup") == "":
            raise refuse("needs warmup, the file with the requests")
        return required

    @model_serializer(mode="wrap")
    def _brief(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys with default values, because there may be a thousand models."""
        told: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in told.items()
            if name in _ALWAYS_SHOWN or getattr(self, name) != _DEFAULTS.get(name)
        }

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """Pattern of the names of the versions, or `None` if the model has no versions."""
        return re.compile(self.match) if self.match else None

    @property
    def is_family(self) -> bool:
        """True if the model has versions or a warm-up."""
        return bool(self.match or self.warmup)


_DEFAULTS: dict[str | None, Any] = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in ModelSettings.model_fields.items()
    if not info.is_required()
}


def _plain(version: str, match: str) -> str:
    """Return the label of a version that is written as its full name, as its label, or with a leading v."""
    found = re.fullmatch(match, version) if match else None
    if found is not None:
        return found.groupdict().get(VERSION_GROUP) or version
    return version.removeprefix("v")


def _each_model_once(models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    if len(models) > MODELS_MOST:
        raise refuse(f"must be at most {MODELS_MOST} models, not {len(models)}")
    places: dict[str, int] = {}
    for place, model in enumerate(models):
        if (first := places.setdefault(model.name, place)) != place:
            raise refuse(f"names a model twice, in [{first}] and [{place}]")
    return models


Models = Annotated[tuple[ModelSettings, ...], Field(strict=False), AfterValidator(_each_model_once)]
