"""Settings of the signals, which show how full the pool is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator

from dispatcher.settings.section import Section
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import Headers, HttpUrl, SecretUrl, Text, mask_headers, setting_error

Source = Literal["epp", "prometheus", "vllm", "fixed"]
DEFAULT_MAX_AGE_S: dict[Source, float] = {"epp": 10.0, "prometheus": 60.0, "vllm": 10.0, "fixed": 10.0}


class PrometheusSettings(Section):
    """Signals from a Prometheus server, or from a server with the same API (Thanos, Mimir)."""

    url: HttpUrl = Field(
        SecretUrl(""), description="Base URL of the server. If empty, Prometheus is not used."
    )
    token_file: Text = Field("", description="File with a bearer token, which is read again for each query.")
    headers: Headers = Field(
        default_factory=dict,
        repr=False,
        description="Headers that are sent with each query, for example with the name of a tenant.",
    )
    tls: TlsSettings = Field(TlsSettings(), description="TLS settings for `https`.")
    queries: dict[Literal["saturation", "queued", "capacity", "ttft", "tpot"], Text] = Field(
        default_factory=dict,
        description="PromQL that replaces the built-in queries: `saturation` (a fraction), `queued` and "
        "`capacity` (numbers of requests). `ttft` and `tpot` (increases of histogram buckets by `le`) are "
        "only shown.",
    )

    @field_serializer("headers")
    def _mask_header_values(self, headers: dict[str, str]) -> dict[str, str]:
        return mask_headers(headers)


class EppSettings(Section):
    """Signals that are scraped from the endpoint picker (EPP) itself.

    Without `urls` and `service`, the replicas of the EPP are found through the InferencePool. Replicas that
    are found are scraped over https if any key of `tls` is set, and over http otherwise.
    """

    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (), description="Complete URLs, one per EPP replica. Without a path, `/metrics` is used."
    )
    service: Text = Field("", description="Name of a Service whose endpoints are the replicas of the EPP.")
    port: int = Field(
        9090,
        ge=1,
        le=65535,
        description="Metrics port of replicas that are found through `service` or the InferencePool.",
    )
    token_file: Text = Field(
        "",
        description="File with a bearer token, which is read again for each scrape. If empty, the token of "
        "the service account is used, if there is one.",
    )
    tls: TlsSettings = Field(
        TlsSettings(),
        description="TLS settings. If any is set, replicas that are found are scraped over https.",
    )


class VllmSettings(Section):
    """Signals that are scraped from the model servers themselves, for pools without an endpoint picker.

    The servers can be vLLM, SGLang and TensorRT-LLM. Set either `urls` or `service`.
    """

    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (), description="Complete URLs, one per model server. Without a path, `/metrics` is used."
    )
    service: Text = Field(
        "", description="DNS name of a headless Service. Each of its addresses is a model server."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port of servers that are found through `service`.")
    token_file: Text = Field("", description="File with a bearer token, which is read again for each scrape.")
    tls: TlsSettings = Field(
        TlsSettings(),
        description="TLS settings. If any is set, servers that are found through `service` are scraped over "
        "https.",
    )

    def __bool__(self) -> bool:
        return bool(self.urls or self.service)

    @field_validator("urls")
    @classmethod
    def _check_urls_unique(cls, urls: tuple[SecretUrl, ...]) -> tuple[SecretUrl, ...]:
        # The default path may be given or left out: both URLs are the same server.
        plain = [each.reveal().rstrip("/").removesuffix("/metrics") for each in urls]
        if len(set(plain)) < len(plain):
            raise setting_error("has a server twice: its capacity would count twice")
        return urls

    @field_validator("service")
    @classmethod
    def _check_urls_or_service(cls, service: str, info: ValidationInfo) -> str:
        if service and info.data.get("urls"):
            raise setting_error("stands beside urls: give one of them")
        return service


class SignalsSettings(Section):
    """Signals that show how full the pool is."""

    source: Literal["auto", "prometheus", "epp", "vllm", "fixed"] = Field(
        "auto",
        description="Source of the signals. `epp`: the endpoint picker, which is scraped directly. "
        "`prometheus`: a Prometheus server. `vllm`: the model servers, which are scraped directly. `auto`: "
        "`vllm` if `signals.vllm` names the servers, otherwise `epp` with Prometheus as its fallback. "
        "`fixed`: nothing is read, and the limit is `budget.max_in_flight`, which is then required. A fixed "
        "limit does not follow the load of other users, and `overload_backoff` is the only other key of "
        "`budget` that applies.",
    )
    interval_s: float = Field(1.0, ge=0.05, le=3600, description="Seconds between readings.")
    max_age_s: float | None = Field(
        None,
        gt=0,
        description="Largest age of a sample in seconds. If the newest sample is older, the gate closes. At "
        "least two intervals. If null, 10 for direct scrapes, and 60 through Prometheus.",
    )
    use: Literal["auto", "saturation", "requests", "both"] = Field(
        "auto",
        description="Signals that the limit is based on. `saturation`: saturation and queue of the pool, as "
        "the EPP reports them. `requests`: numbers of running and waiting requests. `both`: the smaller "
        "limit of the two. `auto`: `both`, or `saturation` if the EPP's metrics pages show that its "
        "saturation counts requests. `saturation` alone suits only the concurrency detector: the default "
        "detector can report nearly 0 while all slots are taken. With `source: fixed`, only `auto` is "
        "allowed.",
    )
    prometheus: PrometheusSettings = PrometheusSettings()
    epp: EppSettings = EppSettings()
    vllm: VllmSettings = VllmSettings()

    @field_validator("max_age_s")
    @classmethod
    def _check_max_age(cls, max_age_s: float | None, info: ValidationInfo) -> float | None:
        interval_s = info.data.get("interval_s", 0.0)
        if max_age_s is not None and max_age_s < 2 * interval_s:
            raise setting_error(
                f"must be at least two intervals ({2 * interval_s:g} s), or every other reading is stale"
            )
        return max_age_s

    @field_validator("use")
    @classmethod
    def _check_use(cls, use: str, info: ValidationInfo) -> str:
        if info.data.get("source") == "fixed" and use != "auto":
            raise setting_error(
                f"is {use}, and signals.source is fixed, which measures nothing: it must be auto"
            )
        return use

    @field_validator("prometheus")
    @classmethod
    def _check_prometheus_url(
        cls, prometheus: PrometheusSettings, info: ValidationInfo
    ) -> PrometheusSettings:
        if info.data.get("source") == "prometheus" and not prometheus.url:
            raise setting_error("url is required when signals.source is prometheus")
        return prometheus

    @field_validator("vllm")
    @classmethod
    def _check_vllm(cls, vllm: VllmSettings, info: ValidationInfo) -> VllmSettings:
        source, use, epp = (info.data.get(name) for name in ("source", "use", "epp"))
        if source == "vllm" and not vllm:
            raise setting_error("urls or service is required when signals.source is vllm")
        if not vllm:
            return vllm
        if source in ("epp", "prometheus", "fixed"):
            raise setting_error(
                f"says where model servers are, and signals.source is {source}: it must be vllm or auto"
            )
        if isinstance(epp, EppSettings) and (epp.urls or epp.service):
            raise setting_error("stands beside signals.epp: a pool with an endpoint picker is read there")
        if use in ("saturation", "both"):
            raise setting_error(
                f"shows requests alone, and signals.use is {use}: it must be requests or auto"
            )
        return vllm

    @property
    def preferred_source(self) -> Source:
        """Source that is used as long as it can be read."""
        if self.source in ("prometheus", "fixed"):
            return self.source
        return "vllm" if self.vllm else "epp"

    @property
    def watches_pool(self) -> bool:
        """True if the InferencePool is watched in Kubernetes.

        With `signals.vllm`, or with a fixed limit, there is no InferencePool. A watch of a pool that does not
        exist would close the gate.
        """
        return not self.vllm and self.source != "fixed"

    @property
    def scrape_settings(self) -> EppSettings | VllmSettings | None:
        """Settings of the metrics pages that are scraped directly, or `None` if no page is."""
        if self.source in ("prometheus", "fixed"):
            return None
        return self.vllm or self.epp

    def max_age_for(self, source: Source) -> float:
        """Return the age in seconds above which a sample from this source is not used."""
        if self.max_age_s is not None:
            return self.max_age_s
        return max(DEFAULT_MAX_AGE_S[source], 2 * self.interval_s)
