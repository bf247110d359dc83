"""The settings of single models: whether their requests wait, which versions they have, how those warm up."""

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
"""Named in the settings."""
VERSIONS_MOST = 100
"""Named in one setting: of those that are asked for, that have labels, or weights."""
VERSION_GROUP = "version"
"""The group of a pattern whose text is a version's label."""

_VERSION_KEYS = ("policy", "labels", "transition", "pin", "weights")
_ALWAYS_SHOWN = ("name", "absent")


def model_name(name: str) -> str:
    """A name that servers may list, or the error."""
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
    """A version or a label, held to what holds for names of models; a sentence says where it stands."""
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
    if total > 1 + 1e-9:
        raise refuse(f"must not sum up to more than 1, not {total:g}: versions not named share what is left")
    return weights


def _expression(pattern: str) -> str:
    if pattern and (why := fault_of(pattern)) is not None:
        raise refuse(why)
    return pattern


class ModelSettings(Section):
    """A model that requests may name; with `match` one that has versions."""

    name: ModelName = Field(description="As requests have it in the field `model` of their bodies.")
    absent: Literal["wait", "fail"] = Field(
        "wait",
        description="What becomes of its requests while no server has it: they wait for it, until their "
        "deadlines, or end as MODEL_NOT_FOUND.",
    )
    match: Annotated[Text, AfterValidator(_expression)] = Field(
        "",
        description="Regular expression that the whole names of its versions match, as servers list them, "
        "such as `qwen-v(?P<version>[0-9]+)`: requests for `name` are sent to one of those "
        "([models.md](models.md#versions)). The group `version` is what a version is called; without it, its "
        "whole name. Empty: the model has no versions.",
    )
    policy: VersionsPolicy = Field(
        VersionPolicy(),
        description="Which versions are used: the newest (or the n newest), all, these, or the one that goes "
        "by a label.",
    )
    labels: Annotated[dict[Text, Text], AfterValidator(_each_a_version)] = Field(
        default_factory=dict,
        description='Names for versions, such as `{stable: "2"}`. One that is set by `models label` wins.',
    )
    transition: Literal["availability", "resource"] = Field(
        "availability",
        description="`availability`: the old version is used until the new one is warm. `resource`: nothing "
        "is sent to the new one before all that is under way to the old one has ended.",
    )
    pin: Literal["request", "sequence", "job"] = Field(
        "request",
        description="What stays with one version for as long as that is open: nothing (`request`), a "
        "sequence, or a job: requests with the same label `job`, or `file` where they have none.",
    )
    weights: Annotated[dict[Text, float], AfterValidator(_shares)] = Field(
        default_factory=dict,
        description="Shares of versions, such as `{v3: 0.05}`; those that are open and not named share the "
        "rest equally.",
    )
    warmup: Text = Field(
        "",
        description="File with requests that are sent to each server that has a version newly, before any "
        "other is ([models.md](models.md#warm-up)). Empty: none.",
    )
    warmup_required: bool = Field(
        False,
        description="Whether a server on which they fail is left alone, and they are tried again. Else it is "
        "taken for warm.",
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
        """What is at its default goes without saying: there may be a thousand of these."""
        told: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in told.items()
            if name in _ALWAYS_SHOWN or getattr(self, name) != _DEFAULTS.get(name)
        }

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """What the names of its versions match in full; None: it has none but itself."""
        return re.compile(self.match) if self.match else None

    @property
    def is_family(self) -> bool:
        """It has versions, or a warm-up."""
        return bool(self.match or self.warmup)


_DEFAULTS: dict[str | None, Any] = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in ModelSettings.model_fields.items()
    if not info.is_required()
}


def _plain(version: str, match: str) -> str:
    """The label that a version is meant by: it may be written in full, or with a v before it."""
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
