"""Every setting: what it is for, its unit, its default, and what is refused.

docs/configuration.md is made of this. Frozen: settings in use never change, a reload makes new ones.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from dispatcher.core.limit.budget import Policy
from dispatcher.core.requests.headers import plain
from dispatcher.settings.batching import BatchingSettings
from dispatcher.settings.models import MODELS_MOST, Models, ModelSettings
from dispatcher.settings.queue import QueueSettings, named
from dispatcher.settings.section import Section
from dispatcher.settings.sequences import SequenceSettings
from dispatcher.settings.serving import ServingSettings, observes, with_servers_of
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
    refuse,
)
from dispatcher.settings.yaml_source import Node, TreeSource


class PoolSettings(Section):
    """The InferencePool that this dispatcher fills. One dispatcher runs per pool."""

    name: Label = Field(
        "default", description="Name of the InferencePool. It selects the pool's series and names the queue."
    )
    namespace: Label = Field("default", description="Namespace of the InferencePool.")


class GatewaySettings(Section):
    """The inference gateway that requests are forwarded to."""

    url: HttpUrl = Field(
        description="Where requests go: scheme, host, port and, if need be, a prefix of every path."
    )
    path: UrlPath = Field("/v1/completions", description="Path of a request that names none.")
    allowed_paths: Annotated[tuple[UrlPath, ...], Field(strict=False)] = Field(
        ("/v1/*",),
        description="Paths that a request may name; `*` stands for any characters. Never another host.",
    )
    allowed_headers: Annotated[tuple[Text, ...] | None, Field(strict=False)] = Field(
        None,
        description="Patterns of a request's own headers that are passed on; `*` stands for any characters. "
        "Some never are, and null leaves out more (docs/forwarding.md), which can be named here. `[]`: none.",
    )
    objective: HeaderValue = Field(
        "",
        description="InferenceObjective sent with every request: the only way to a priority, so name one "
        "with a negative priority. Empty: none is sent, and batch work competes with everything"
        " of priority 0.",
    )
    fairness_from: Text = Field(
        "userid",
        description="Metadata attribute of a request that is sent as the fairness id. Empty: none is sent.",
    )
    headers: Headers = Field(
        default_factory=dict,
        repr=False,
        description="Headers sent with every request, for example `Host`. Values of names that sound like "
        "credentials are not shown.",
    )
    timeout_s: float = Field(
        300.0, gt=0, description="Seconds a try may take; the request's deadline bounds it too."
    )
    max_response_bytes: int = Field(
        33_554_432, ge=1, description="Bytes of an answer that are kept; a longer one ends as TOO_LARGE."
    )
    max_buffered_bytes: int = Field(
        67_108_864,
        ge=1,
        description="Bytes of answers that all tries together hold until their results are written; beyond "
        "it reading pauses. At least `max_response_bytes`, of which one answer may always be read.",
    )
    inference_ttl_s: float | None = Field(
        None,
        ge=0.001,
        le=86_400,
        description="Seconds a request may wait in the endpoint picker, and never longer than its own time "
        "limit (header `x-llm-d-inference-ttl`). null: not sent, the picker's own limit holds.",
    )
    token_file: Text = Field(
        "", description="File with a bearer token, read again as it rotates. Empty: no Authorization header."
    )
    tls: TlsSettings = Field(TlsSettings(), description="For `https`.")

    @field_validator("url")
    @classmethod
    def _plain(cls, value: SecretUrl) -> SecretUrl:
        if not value:
            raise refuse("is required: the URL of the inference gateway")
        if any(mark in value.reveal() for mark in "?#"):
            raise refuse("must not hold a query or a fragment")
        return value

    @field_validator("headers")
    @classmethod
    def _not_ours(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if (instead := CONTROL_HEADERS.get(name.lower())) is not None:
                raise refuse(f"{name} cannot be set here: {instead}")
        return headers

    @field_validator("max_buffered_bytes")
    @classmethod
    def _holds_the_largest(cls, most: int, info: ValidationInfo) -> int:
        if most < info.data.get("max_response_bytes", 0):
            raise refuse("must not be below max_response_bytes: the largest answer could not be read")
        return most

    @field_validator("token_file")
    @classmethod
    def _one_authorization(cls, token_file: str, info: ValidationInfo) -> str:
        if token_file and any(name.lower() == "authorization" for name in info.data.get("headers", ())):
            raise refuse("the Authorization header is set in gateway.headers already")
        return token_file

    @field_serializer("headers")
    def _masked(self, headers: dict[str, str]) -> dict[str, str]:
        return mask_headers(headers)


class BudgetSettings(Section):
    """How much of the pool's slack batch work takes."""

    reserve: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="B: share of the pool that batch work never takes, the price to realtime users.",
    )
    upper: float | None = Field(
        None,
        gt=0,
        le=1,
        description="u: a budget D above it is not believed. null: 1 − reserve, the room of an idle pool.",
    )
    max_sys: float | None = Field(
        None, gt=0, description="Capacity of the pool in requests. null: ready endpoints × `per_endpoint`."
    )
    per_endpoint: AutoNumber = Field(
        None,
        gt=0,
        description="Requests that one endpoint runs at once: the model server's limit. `auto`: the EPP's "
        "`maxConcurrency` or the model server's own limit where their pages show it; otherwise it is "
        "searched for, starting at `initial_per_endpoint`.",
    )
    initial_per_endpoint: float = Field(
        8,
        gt=0,
        le=1000,
        description="Where nobody names the capacity: requests per endpoint with which the search for it "
        "starts. The estimate grows only while readings show that nobody waits.",
    )
    max_in_flight: int | None = Field(
        None, ge=1, description="Hard cap on our requests in flight, whatever the readings say."
    )
    overload_backoff: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="β: one refusal for lack of capacity leaves at least this share of what was taken "
        "for the capacity.",
    )

    @field_validator("upper")
    @classmethod
    def _room_of_an_idle_pool(cls, upper: float | None, info: ValidationInfo) -> float | None:
        room = 1.0 - info.data.get("reserve", 1.0)
        if upper is not None and upper < room - 1e-9:
            raise refuse(f"must not be below 1 − reserve ({room:g}): an idle pool would never be believed")
        return upper


class RetrySettings(Section):
    """What happens to requests whose tries fail."""

    base_s: float = Field(
        2.0, gt=0, le=3600, description="Seconds of the first pause; each further one is up to twice as long."
    )
    max_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="Longest pause in seconds, and the longest Retry-After that is kept to.",
    )
    max_attempts: int = Field(8, ge=1, description="Failed tries after which a request is dead.")
    max_deliveries: int = Field(
        5,
        ge=1,
        description="Dispatchers that may die with a suspect request before it is dead. Fewer than 5 may "
        "blame one that only stood beside the deadly one (docs/decisions/0004).",
    )

    @field_validator("max_s")
    @classmethod
    def _not_below_base(cls, max_s: float, info: ValidationInfo) -> float:
        if max_s < info.data.get("base_s", 0.0):
            raise refuse("must not be below retry.base_s")
        return max_s


class ShutdownSettings(Section):
    """How the process ends."""

    drain_s: float = Field(
        120.0,
        ge=0,
        description="Seconds that running requests have to finish after SIGTERM; the rest goes back to its "
        "place. Keep it below the pod's terminationGracePeriodSeconds.",
    )


class AdminSettings(Section):
    """The port with health, metrics, status and the live page."""

    host: Text = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. In a pod `0.0.0.0`, for probes and scrapes come from outside (the "
        "chart says so); elsewhere with `admin.token_file` alone.",
    )
    port: int = Field(
        8080, ge=0, le=65535, description="Port to listen on. 0: any free one, logged at the start."
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token that /metrics, /status and /events ask for, read again at each "
        "request; the probes stay open, and the page at `/`, which asks for it. Empty: none.",
    )


class LogSettings(Section):
    """Logging, to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least level that is logged."
    )
    format: Literal["auto", "console", "json"] = Field(
        "auto", description="`auto`: console on a terminal, JSON otherwise."
    )


class TracingSettings(Section):
    """OpenTelemetry traces; needs the `otel` extra."""

    endpoint: HttpUrl = Field(
        SecretUrl(""),
        description="OTLP/HTTP endpoint; without a path: `/v1/traces`. Empty: no traces.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose producers do not decide it.",
    )


class Settings(Section, BaseSettings):
    """The whole configuration of one dispatcher."""

    model_config: ClassVar[SettingsConfigDict] = {}  # a section's, with the library's own beside it

    pool: PoolSettings = PoolSettings()
    gateway: GatewaySettings
    queue: QueueSettings = QueueSettings()
    signals: SignalsSettings = SignalsSettings()
    budget: BudgetSettings = BudgetSettings()
    batching: BatchingSettings = BatchingSettings()
    sequences: SequenceSettings = SequenceSettings()
    serving: ServingSettings = ServingSettings()
    models: Models = Field(
        (),
        description="Models that requests wait for while the pool does not serve them, at most "
        f"{MODELS_MOST:,}; those of others that were never served are sent as they are. With `match` "
        "they are sent to a version of theirs.",
    )
    retry: RetrySettings = RetrySettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    @field_validator("budget")
    @classmethod
    def _limited(cls, budget: BudgetSettings, info: ValidationInfo) -> BudgetSettings:
        signals = info.data.get("signals", SignalsSettings())
        if signals.source == "fixed" and budget.max_in_flight is None:
            raise refuse("max_in_flight is required when signals.source is fixed: it is the limit")
        return budget

    @field_validator("serving")
    @classmethod
    def _no_header_twice(cls, serving: ServingSettings, info: ValidationInfo) -> ServingSettings:
        header, said = plain(serving.subset_header), info.data
        sequences, gateway = said.get("sequences"), said.get("gateway")
        taken: dict[str, str] = {}
        if isinstance(gateway, GatewaySettings):
            taken |= dict.fromkeys(map(plain, gateway.headers), "gateway.headers")
        if isinstance(sequences, SequenceSettings):
            taken[plain(sequences.header)] = "sequences.header"
            taken[plain(sequences.session_id_header)] = "sequences.session_id_header"
        if header and header in taken:
            raise refuse(f"subset_header: {taken[header]} has that header already")
        return serving

    @field_validator("models")
    @classmethod
    def _versions_are_seen(cls, models: tuple[ModelSettings, ...], info: ValidationInfo) -> Any:
        serving = info.data.get("serving")
        if isinstance(serving, ServingSettings) and serving.observe == "off":
            for place, model in enumerate(models):
                if model.is_family:
                    what = "match" if model.match else "warmup"
                    raise refuse(f"[{place}].{what} needs to see what is served, and serving.observe is off")
        return models

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given outright, else our tree of file and environment, and nothing else.

        The environment is in the tree already, with its mistakes found; a variable `GATEWAY`, a `.env` that
        happens to lie in the working directory, or a directory of secrets is not meant for us.
        """
        return init_settings, TreeSource(settings_cls)

    @classmethod
    def of(cls, tree: Node) -> Self:
        """The settings that a tree of file and environment comes to; raises ValidationError."""
        with TreeSource.reading(tree):
            return cls()

    @model_validator(mode="after")
    def _name_the_queue(self) -> Self:
        # Once, before anybody else sees the object: frozen from here on.
        object.__setattr__(self, "queue", named(self.queue, self.pool.name))
        return self

    @property
    def observes_models(self) -> bool:
        """Whether it is to be known which models the pool serves."""
        return observes(self.serving, self.models)

    @property
    def asks(self) -> ServingSettings:
        """`serving`, with the servers that `signals.vllm` names where it names none."""
        return with_servers_of(self.signals.vllm, self.serving)

    def policy(self, source: Source | None = None) -> Policy:
        """What the limiter needs, for readings from `source` (None: the configured one; `auto`: direct)."""
        source = source or self.signals.preferred
        budget = self.budget
        # Without readings nothing is known of the pool, so shares of its capacity mean nothing.
        fixed = source == "fixed"
        return Policy(
            reserve=0.0 if fixed else budget.reserve,
            upper=None if fixed else budget.upper,
            max_sys=budget.max_in_flight if fixed else budget.max_sys,
            per_endpoint=budget.per_endpoint,
            initial_per_endpoint=budget.initial_per_endpoint,
            max_in_flight=budget.max_in_flight,
            overload_backoff=budget.overload_backoff,
            max_age_s=self.signals.max_age_for(source),
            retry_after_max_s=self.retry.max_s,
            stray_s=self.queue.lease_s,
        )
