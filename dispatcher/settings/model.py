"""All settings with their meaning, unit, default and allowed values.

docs/reference/configuration.md is generated from the descriptions. Settings are frozen: a reload makes a new
object.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import (
    Field,
    ValidationInfo,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dispatcher.features import import_modules
from dispatcher.limit.budget import Policy
from dispatcher.settings.queue import QueueSettings, with_derived_names
from dispatcher.settings.section import Section
from dispatcher.settings.signals import SignalsSettings, Source
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import (
    CONTROL_HEADERS,
    AutoNumber,
    Headers,
    HeaderValue,
    HttpUrl,
    Label,
    SecretUrl,
    Text,
    UrlPath,
    mask_headers,
    setting_error,
)
from dispatcher.settings.yaml_source import Node, TreeSource

S = TypeVar("S", bound=Section)


class PoolSettings(Section):
    """The InferencePool to which this dispatcher sends requests. Each pool needs its own dispatcher."""

    name: Label = Field(
        "default",
        description="Name of the InferencePool. It selects the metrics of the pool, and is part of the name "
        "of the queue.",
    )
    namespace: Label = Field("default", description="Namespace of the InferencePool.")


class GatewaySettings(Section):
    """The inference gateway to which requests are forwarded."""

    url: HttpUrl = Field(
        description="URL of the gateway: scheme, host, port and, if needed, a prefix for all paths."
    )
    path: UrlPath = Field("/v1/completions", description="Path of requests that do not name one.")
    allowed_paths: Annotated[tuple[UrlPath, ...], Field(strict=False)] = Field(
        ("/v1/*",),
        description="Paths that a request may name; `*` matches any characters. A request can never name "
        "another host.",
    )
    allowed_headers: Annotated[tuple[Text, ...] | None, Field(strict=False)] = Field(
        None,
        description="Patterns of the request headers that are passed on; `*` matches any characters. Some "
        "headers are never passed on. If null, further headers are left out "
        "(docs/reference/forwarding.md), which can "
        "be allowed by naming them here. `[]` passes on no headers.",
    )
    objective: HeaderValue = Field(
        "",
        description="InferenceObjective that is sent with every request. It is the only way to set a "
        "priority in the endpoint picker, so name one with a negative priority. If empty, none is sent, and "
        "batch requests compete with all requests of priority 0.",
    )
    body_priority: int | None = Field(
        None,
        ge=-100_000,
        le=100_000,
        description="Priority of batch requests in the model servers (docs/how-to/install.md): the field "
        "`priority` of each JSON object that is sent as a body. For vLLM, a positive number lets realtime "
        "requests go first. If null, bodies are sent as they are.",
    )
    fairness_from: Text = Field(
        "userid",
        description="Metadata attribute of a request whose value is sent as the fairness id. If empty, no "
        "fairness id is sent.",
    )
    headers: Headers = Field(
        default_factory=dict,
        repr=False,
        description="Headers that are sent with every request, for example `Host`. The values of headers "
        "whose names look like credentials are not shown.",
    )
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="Longest time of one attempt, in seconds. The deadline of the request also limits it.",
    )
    max_response_bytes: int = Field(
        33_554_432,
        ge=1,
        description="Largest answer that is kept, in bytes. A request with a longer answer fails with "
        "TOO_LARGE.",
    )
    max_buffered_bytes: int = Field(
        67_108_864,
        ge=1,
        description="Largest total size of the answers that are held until their results are written, in "
        "bytes. Beyond it, reading of answers pauses. At least `max_response_bytes`, so that one answer can "
        "always be read.",
    )
    inference_ttl_s: float | None = Field(
        None,
        ge=0.001,
        le=86_400,
        description="Seconds for which a request may wait in the endpoint picker (header "
        "`x-llm-d-inference-ttl`), but no longer than the time limit of the request. If null, the header is "
        "not sent, and the limit of the picker applies.",
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token, which is read again when it is replaced. If empty, no "
        "Authorization header is sent.",
    )
    tls: TlsSettings = Field(TlsSettings(), description="TLS settings for `https`.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: SecretUrl) -> SecretUrl:
        if not value:
            raise setting_error("is required: the URL of the inference gateway")
        if any(mark in value.reveal() for mark in "?#"):
            raise setting_error("must not hold a query or a fragment")
        return value

    @field_validator("headers")
    @classmethod
    def _check_header_names(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if (instead := CONTROL_HEADERS.get(name.lower())) is not None:
                raise setting_error(f"{name} cannot be set here: {instead}")
        return headers

    @field_validator("max_buffered_bytes")
    @classmethod
    def _check_buffered_bytes(cls, max_buffered_bytes: int, info: ValidationInfo) -> int:
        # `info.data` has only fields that are declared above this one, and only if they are valid.
        if max_buffered_bytes < info.data.get("max_response_bytes", 0):
            raise setting_error("must not be below max_response_bytes: the largest answer could not be read")
        return max_buffered_bytes

    @field_validator("token_file")
    @classmethod
    def _check_one_authorization(cls, token_file: str, info: ValidationInfo) -> str:
        if token_file and any(name.lower() == "authorization" for name in info.data.get("headers", ())):
            raise setting_error("the Authorization header is set in gateway.headers already")
        return token_file

    @field_serializer("headers")
    def _mask_header_values(self, headers: dict[str, str]) -> dict[str, str]:
        return mask_headers(headers)


class BudgetSettings(Section):
    """Share of the pool's free capacity that batch requests may use."""

    reserve: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="B: share of the pool's capacity that batch requests never use. A larger reserve means "
        "less impact on realtime users.",
    )
    upper: float | None = Field(
        None,
        gt=0,
        le=1,
        description="u: largest budget D that is believed; a larger one closes the gate as implausible. If "
        "null, 1 − reserve, the budget of an idle pool. It cannot be less, because an idle pool would then "
        "never be believed.",
    )
    max_sys: float | None = Field(
        None,
        gt=0,
        description="Capacity of the pool in requests. If null, the number of ready endpoints × "
        "`per_endpoint`.",
    )
    per_endpoint: AutoNumber = Field(
        None,
        gt=0,
        description="Number of requests that one endpoint runs at once, which is the limit of the model "
        "server. `auto`: the EPP's `maxConcurrency` or the model server's own limit, if their metrics pages "
        "show it. Otherwise the number is searched for, starting at `initial_per_endpoint`.",
    )
    initial_per_endpoint: float = Field(
        8,
        gt=0,
        le=1000,
        description="Number of requests per endpoint at which the search for an unknown capacity starts. The "
        "estimate grows only while readings show that no requests wait.",
    )
    capacity: Literal["configured", "learn"] = Field(
        "configured",
        description="`configured`: the capacity that the settings or the metrics pages name is never "
        "exceeded. `learn`: the search for the capacity starts there, and finds a larger or a smaller one.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        description="Hard limit for the number of batch requests in flight, whatever the readings say.",
    )
    overload_backoff: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="β: smallest share of the assumed capacity that is left after the gateway rejects a "
        "request for lack of capacity.",
    )

    @field_validator("upper")
    @classmethod
    def _check_upper(cls, upper: float | None, info: ValidationInfo) -> float | None:
        room = 1.0 - info.data.get("reserve", 1.0)
        # The tolerance allows for rounding errors of 1 − reserve.
        if upper is not None and upper < room - 1e-9:
            raise setting_error(
                f"must not be below 1 − reserve ({room:g}): an idle pool would never be believed"
            )
        return upper


class RetrySettings(Section):
    """Retries of requests whose attempts fail."""

    base_s: float = Field(
        2.0,
        gt=0,
        le=3600,
        description="First pause before a retry, in seconds. Each further pause is up to twice as long.",
    )
    max_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Longest pause before a retry, in seconds, and longest Retry-After that is followed.",
    )
    max_attempts: int = Field(
        8,
        ge=1,
        description="Number of failed attempts after which a request is moved to the dead-letter set.",
    )

    @field_validator("max_s")
    @classmethod
    def _check_max_s(cls, max_s: float, info: ValidationInfo) -> float:
        if max_s < info.data.get("base_s", 0.0):
            raise setting_error("must not be below retry.base_s")
        return max_s


class ShutdownSettings(Section):
    """Shutdown of the process."""

    drain_s: float = Field(
        120.0,
        ge=0,
        description="Seconds for which running requests may finish after SIGTERM. The remaining requests "
        "then return to their places in the queue. Keep it below the pod's terminationGracePeriodSeconds.",
    )


class AdminSettings(Section):
    """The port for health, metrics, status and the live page."""

    host: Text = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. In a pod use `0.0.0.0`, because probes and scrapes come from "
        "outside (the chart sets it). Elsewhere use another address only with `admin.token_file`.",
    )
    port: int = Field(
        8080,
        ge=0,
        le=65535,
        description="Port to listen on. With 0, any free port, which is logged at the start.",
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token that /metrics, /status and /events require. It is read again "
        "at each request. The probes need no token, and neither does the page at `/`, which asks for it. If "
        "empty, no token is required.",
    )
    allowed_hosts: Annotated[tuple[Text, ...], Field(strict=False)] = Field(
        (),
        description="Names by which the port is reached, besides IP addresses, names without a dot, the "
        "host name, and names that end in `.svc`, `.local`, `.internal`, `.localhost` or `.test`; `*` "
        "matches any characters. Requests with another name in their Host header are refused if "
        "admin.token_file is empty, because a page of a stranger could send them (DNS rebinding).",
    )


class LogSettings(Section):
    """Logging to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="Format of the log. `auto`: `console` on a terminal, `json` otherwise."
    )


class TracingSettings(Section):
    """OpenTelemetry traces. They need the `otel` extra."""

    endpoint: HttpUrl = Field(
        SecretUrl(""),
        description="OTLP/HTTP endpoint. Without a path, `/v1/traces` is used. If empty, there are no "
        "traces.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of the requests whose producers do not decide it.",
    )


class _FirstSections(Section, BaseSettings):
    # pydantic merges the configuration of both base classes. A class that only `Settings` inherits from needs
    # no validator of its own, which is slow to build.
    model_config: ClassVar[SettingsConfigDict] = {"defer_build": True}

    pool: PoolSettings = PoolSettings()
    gateway: GatewaySettings
    queue: QueueSettings = QueueSettings()
    signals: SignalsSettings = SignalsSettings()
    budget: BudgetSettings = BudgetSettings()


if TYPE_CHECKING:
    _FeatureSections = _FirstSections
else:
    # pydantic takes the fields of the last base class first.
    _modules = sorted(import_modules("settings").values(), key=attrgetter("PLACE"), reverse=True)
    _bases = (*(module.Sections for module in _modules), _FirstSections)
    _FeatureSections = create_model("_FeatureSections", __base__=_bases)


class Settings(_FeatureSections):
    """Complete configuration of one dispatcher: the sections of the kernel and those of the features."""

    model_config: ClassVar[SettingsConfigDict] = {"defer_build": False}

    retry: RetrySettings = RetrySettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    @field_validator("budget")
    @classmethod
    def _check_fixed_limit(cls, budget: BudgetSettings, info: ValidationInfo) -> BudgetSettings:
        signals = info.data.get("signals", SignalsSettings())
        if signals.source == "fixed" and budget.max_in_flight is None:
            raise setting_error("max_in_flight is required when signals.source is fixed: it is the limit")
        return budget

    @property
    def reserved_headers(self) -> Mapping[str, str]:
        sections = [(section, value) for section, value in self if isinstance(value, Section)]
        return {
            f"{section}.{key}": name
            for section, value in sections
            for key, name in value.reserved_headers.items()
        }

    @property
    def endpoints_header(self) -> str:
        headers = (value.endpoints_header for _, value in self if isinstance(value, Section))
        return next(filter(None, headers), "")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources of settings: arguments, then the tree of file and environment, and nothing else.

        The tree already contains the checked variables of the environment. The other sources of
        pydantic-settings would also read a variable `GATEWAY`, a `.env` in the working directory, or a
        directory of secrets, which are not meant for the dispatcher.
        """
        return init_settings, TreeSource(settings_cls)

    @classmethod
    def from_tree(cls, tree: Node) -> Self:
        """Return the settings for a tree of file and environment. Raises ValidationError."""
        with TreeSource.use_tree(tree):
            return cls()

    @model_validator(mode="after")
    def _derive_queue_names(self) -> Self:
        # The model is frozen. Nothing else has a reference to the object yet, so this change is safe.
        object.__setattr__(self, "queue", with_derived_names(self.queue, self.pool.name))
        return self

    def get_section(self, kind: type[S]) -> S:
        """Return the section of a feature by its class, or the settings themselves as its `Sections`."""
        return self if isinstance(self, kind) else next(value for _, value in self if isinstance(value, kind))

    def limit_policy(self, source: Source | None = None) -> Policy:
        """Return the policy of the limiter for readings from `source`, by default the preferred source."""
        source = source or self.signals.preferred_source
        budget = self.budget
        # With a fixed limit the capacity of the pool is unknown, so shares of it have no meaning.
        fixed = source == "fixed"
        return Policy(
            reserve=0.0 if fixed else budget.reserve,
            max_budget=None if fixed else budget.upper,
            max_sys=budget.max_in_flight if fixed else budget.max_sys,
            per_endpoint=budget.per_endpoint,
            initial_per_endpoint=budget.initial_per_endpoint,
            learns_capacity=budget.capacity == "learn" and not fixed,
            max_in_flight=budget.max_in_flight,
            overload_backoff=budget.overload_backoff,
            max_age_s=self.signals.max_age_for(source),
            retry_after_max_s=self.retry.max_s,
            orphan_timeout_s=self.queue.lease_s,
        )
