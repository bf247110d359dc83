"""Settings of models: whether requests wait for them, their versions and warm-ups, and how served models are
observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

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
from dispatcher.requests.headers import normalize_name
from dispatcher.settings.section import Section
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import (
    HttpUrl,
    ModelName,
    SecretUrl,
    Text,
    ValueNotation,
    check_model_name,
    check_own_header,
    setting_error,
)
from dispatcher.settings.yaml_source import suggest_nearest

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings

MAX_MODELS = 1000
"""Largest number of models in the settings."""
MAX_VERSIONS = 100
"""Largest number of versions in one setting (`policy`, `labels` or `weights`)."""

Observe = Literal["auto", "off", "gateway", "endpoints"]
LIST_PATH = "/v1/models"
_METRICS_PATH, _TENSORRT_PREFIX = "/metrics", "/prometheus"
"""Path of a metrics page, and the prefix of that path for TensorRT-LLM."""

_VERSION_KEYS = ("policy", "labels", "transition", "pin", "weights")
_ALWAYS_SHOWN = ("name", "when_not_served")


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

    @property
    def endpoints_header(self) -> str:
        return self.subset_header


class Sections(Section, defer_build=True):
    """The sections of models."""

    serving: ServingSettings = ServingSettings()
    models: Models = Field(
        (),
        description=f"Models, at most {MAX_MODELS:,}, for which requests wait while the pool does not serve "
        "them. Requests for other models that were never served are sent unchanged. With `match`, requests "
        "are sent to a version of the model.",
    )

    @field_validator("serving")
    @classmethod
    def _check_subset_header(cls, serving: ServingSettings, info: ValidationInfo) -> ServingSettings:
        header, gateway = normalize_name(serving.subset_header), info.data.get("gateway")
        taken: dict[str, str] = {}
        if gateway is not None:
            taken |= dict.fromkeys(map(normalize_name, gateway.headers), "gateway.headers")
        for section, values in info.data.items():
            if isinstance(values, Section):
                taken |= {
                    normalize_name(name): f"{section}.{key}" for key, name in values.reserved_headers.items()
                }
        if header and header in taken:
            raise setting_error(f"subset_header: {taken[header]} has that header already")
        return serving

    @field_validator("models")
    @classmethod
    def _check_versions_observed(
        cls, models: tuple[ModelSettings, ...], info: ValidationInfo
    ) -> tuple[ModelSettings, ...]:
        serving = info.data.get("serving")
        if isinstance(serving, ServingSettings) and serving.observe == "off":
            for place, model in enumerate(models):
                if model.is_family:
                    key = "match" if model.match else "warmup"
                    raise setting_error(
                        f"[{place}].{key} needs to see what is served, and serving.observe is off"
                    )
        return models


PLACE = 4
PATHS_IN_LISTS = (("models", "warmup"),)


def get_models(settings: Settings) -> tuple[ModelSettings, ...]:
    return settings.get_section(Sections).models


def is_observing_models(settings: Settings) -> bool:
    """Return whether models are observed. If not, no server is asked, and no request waits for a model."""
    observe = settings.get_section(ServingSettings).observe
    return observe != "off" and (observe != "auto" or bool(get_models(settings)))


def find_serving(settings: Settings) -> ServingSettings:
    """Return the section `serving`. If it names no servers, use those of `signals.vllm`, with their token and
    TLS settings.

    They are not used if the gateway is asked for the models, if warm-ups go through the gateway and cannot
    name a server, or if the path of a metrics page does not tell where the server takes requests.
    """
    vllm, serving = settings.signals.vllm, settings.get_section(ServingSettings)
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
