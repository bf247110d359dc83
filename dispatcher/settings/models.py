"""Settings of single models: whether requests wait for them, their versions, and their warm-up."""

from __future__ import annotations

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

from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.settings.section import Section
from dispatcher.settings.values import Text, ValueNotation, setting_error
from dispatcher.settings.yaml_source import suggest_nearest

MAX_MODELS = 1000
"""Largest number of models in the settings."""
MAX_VERSIONS = 100
"""Largest number of versions in one setting (`policy`, `labels` or `weights`)."""

_VERSION_KEYS = ("policy", "labels", "transition", "pin", "weights")
_ALWAYS_SHOWN = ("name", "when_not_served")


def check_model_name(name: str) -> str:
    """Return the name of a model if it is valid. Raises PydanticCustomError otherwise."""
    if not name or name != name.strip():
        raise setting_error("must not be empty, nor have blanks at its ends")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise setting_error("is not valid Unicode") from None
    if size > MAX_MODEL_NAME_BYTES:
        raise setting_error(f"must not be longer than {MAX_MODEL_NAME_BYTES} bytes")
    return name


ModelName = Annotated[Text, AfterValidator(check_model_name)]


_POLICY_FORMS = 'latest, all, {latest: 2}, {specific: ["2"]} or {label: stable}'


def _parse_policy(given: object) -> VersionPolicy:
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
                raise setting_error("latest: must be a whole number, at least 1")
            return VersionPolicy(latest=latest)
        case {"specific": specific, **others} if not others:
            return VersionPolicy(specific=_parse_specific(specific))
        case {"label": label, **others} if not others:
            if not isinstance(label, str):
                raise setting_error("label: a text is expected: put it in quotes")
            return VersionPolicy(label=_check_name_at("label", label))
        case str():
            raise setting_error(f"must be {_POLICY_FORMS}{suggest_nearest(given, ('latest', 'all'))}")
        case {**several} if len(several) > 1:
            raise setting_error(f"must be one of {_POLICY_FORMS}, not several")
    raise setting_error(f"must be {_POLICY_FORMS}")


def _parse_specific(given: object) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise setting_error('specific: must be a list of at least one version, such as ["2", "3"]')
    if len(given) > MAX_VERSIONS:
        raise setting_error(f"specific: must be at most {MAX_VERSIONS} versions, not {len(given)}")
    if not all(isinstance(each, str) for each in given):
        raise setting_error('specific: a version is a text: put it in quotes, as in ["2"]')
    return tuple(_check_name_at("specific", each) for each in given)


def _check_name_at(where: str, name: str) -> str:
    """Return the name of a version or label if it is valid as the name of a model.

    Raises PydanticCustomError otherwise. Its message begins with `where`.
    """
    if any(ord(each) < 32 or ord(each) == 127 for each in name):
        raise setting_error(f"{where}: must not hold line breaks or other control characters")
    try:
        return check_model_name(name)
    except ValueError as error:
        raise setting_error(f"{where}: {error}") from None


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
                    "maxItems": MAX_VERSIONS,
                    "items": _VERSION_SCHEMA,
                },
                "label": _VERSION_SCHEMA,
            },
        },
    ]
}
VersionsPolicy = Annotated[
    InstanceOf[VersionPolicy],
    BeforeValidator(_parse_policy),
    PlainSerializer(VersionPolicy.to_setting),
    ValueNotation("`latest`, `all`, `{latest: n}`, `{specific: […]}` or `{label: …}`", _POLICY_SCHEMA),
]


def _check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    if len(labels) > MAX_VERSIONS:
        raise setting_error(f"must be at most {MAX_VERSIONS} labels, not {len(labels)}")
    for label, version in labels.items():
        _check_name_at(f"{label[:60]!r}" if label.strip() else "a label", label)
        _check_name_at(label, version)
    return labels


def _check_weights(weights: Mapping[str, float]) -> Mapping[str, float]:
    if len(weights) > MAX_VERSIONS:
        raise setting_error(f"must be at most {MAX_VERSIONS} versions, not {len(weights)}")
    for version, share in weights.items():
        _check_name_at(f"{version[:60]!r}" if version.strip() else "a version", version)
        if not 0 <= share <= 1:
            hint = f" ({share:g}% is {share / 100:g})" if 1 < share <= 100 else ""
            raise setting_error(f"{version}: must be a share between 0 and 1, not {share:g}{hint}")
    total = sum(weights.values())
    if total > 1 + 1e-9:  # shares such as 0.1 and 0.2 have rounding errors
        raise setting_error(
            f"must not sum up to more than 1, not {total:g}: versions not named share what is left"
        )
    return weights


def _check_template(text: str) -> str:
    if text:
        check_model_name(text)
        try:
            VersionTemplate.parse(text)
        except ValueError as error:
            raise setting_error(str(error)) from None
    return text


class ModelSettings(Section):
    """Settings of a model. With `match` the model has versions."""

    name: ModelName = Field(
        description="Name of the model, as requests have it in the field `model` of their bodies."
    )
    when_not_served: Literal["wait", "fail"] = Field(
        "wait",
        description="What happens to requests for the model while no server has it. `wait`: they wait for "
        "it, until their deadlines. `fail`: they fail with MODEL_NOT_FOUND.",
    )
    match: Annotated[Text, AfterValidator(_check_template)] = Field(
        "",
        description="Template for the names of the versions, as servers list them, such as "
        "`qwen-v{version}`. It contains `{version}` once; all other text is literal. A version consists of "
        "letters, digits, `.`, `_` and `-`. Requests for `name` are sent to one of the versions "
        "([models.md](models.md#versions)). If empty, the model has no versions.",
    )
    policy: VersionsPolicy = Field(
        VersionPolicy(),
        description="Which versions are used: the newest one, the n newest ones, all, the listed ones, or "
        "the one with a label.",
    )
    labels: Annotated[dict[Text, Text], AfterValidator(_check_labels)] = Field(
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
    weights: Annotated[dict[Text, float], AfterValidator(_check_weights)] = Field(
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
    def _check_needs_match(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("match") == "" and value != _DEFAULTS[info.field_name]:
            raise setting_error("needs match, which says what the names of the versions look like")
        return value

    @field_validator("weights")
    @classmethod
    def _check_versions_unique(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        known_versions: dict[str, str] = {}
        for version in weights:
            plain = _version_label(version, info.data.get("match", ""))
            if (first := known_versions.setdefault(plain, version)) != version:
                raise setting_error(f"names a version twice, as {first} and {version}")
        return weights

    @field_validator("warmup_required")
    @classmethod
    def _check_needs_warmup(cls, required: bool, info: ValidationInfo) -> bool:
        if required and info.data.get("warmup") == "":
            raise setting_error("needs warmup, the file with the requests")
        return required

    @model_serializer(mode="wrap")
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys with default values, because there may be a thousand models."""
        values: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in values.items()
            if name in _ALWAYS_SHOWN or getattr(self, name) != _DEFAULTS.get(name)
        }

    @property
    def version_template(self) -> VersionTemplate | None:
        """Template for the names of the versions, or `None` if the model has no versions."""
        return VersionTemplate.parse(self.match) if self.match else None

    @property
    def is_family(self) -> bool:
        """True if the model has versions or a warm-up."""
        return bool(self.match or self.warmup)


_DEFAULTS: dict[str | None, Any] = {
    name: info.get_default(call_default_factory=True, validated_data={})
    for name, info in ModelSettings.model_fields.items()
    if not info.is_required()
}


def _version_label(version: str, match: str) -> str:
    """Return the label of a version that is written as its full name, as its label, or with a leading v."""
    label = VersionTemplate.parse(match).extract_version(version) if match else None
    return label or version.removeprefix("v")


def _check_models_unique(models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    if len(models) > MAX_MODELS:
        raise setting_error(f"must be at most {MAX_MODELS} models, not {len(models)}")
    places: dict[str, int] = {}
    for place, model in enumerate(models):
        if (first := places.setdefault(model.name, place)) != place:
            raise setting_error(f"names a model twice, in [{first}] and [{place}]")
    return models


Models = Annotated[tuple[ModelSettings, ...], Field(strict=False), AfterValidator(_check_models_unique)]
