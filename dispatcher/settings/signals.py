"""The settings of the signals: how it is known how full the pool is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_serializer, field_validator

from dispatcher.settings.section import Section
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import Headers, HttpUrl, SecretUrl, Text, mask_headers, refuse

Source = Literal["epp", "prometheus", "vllm", "fixed"]
MAX_AGE_S: dict[Source, float] = {"epp": 10.0, "prometheus": 60.0, "vllm": 10.0, "fixed": 10.0}


class PrometheusSettings(Section):
    """Signals read through a Prometheus server, or what speaks its API (Thanos, Mimir)."""

    url: HttpUrl = Field(SecretUrl(""), description="Base URL of the server. Empty: not used.")
    token_file: Text = Field("", description="File with a bearer token, read again for each query.")
    headers: Headers = Field(
        default_factory=dict, repr=False, description="Headers of each query, for example a tenant's name."
    )
    tls: TlsSettings = Field(TlsSettings(), description="For `https`.")
    queries: dict[Literal["saturation", "queued", "capacity", "ttft", "tpot"], Text] = Field(
        default_factory=dict,
        description="Own PromQL in place of the known series: `saturation` (a fraction), `queued` and "
        "`capacity` (requests); `ttft` and `tpot` (increases of histogram buckets, by `le`), which are only "
        "shown.",
    )

    @field_serializer("headers")
    def _masked(self, headers: dict[str, str]) -> dict[str, str]:
        return mask_headers(headers)


class EppSettings(Section):
    """Signals scraped from the endpoint picker itself.

    With neither `urls` nor `service` its replicas are found through the InferencePool. Those that are found
    are asked over https where anything of `tls` is set, over plain http else.
    """

    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (), description="Whole URLs, one per EPP replica; without a path: `/metrics`."
    )
    service: Text = Field("", description="Name of a Service whose endpoints are the EPP's replicas.")
    port: int = Field(9090, ge=1, le=65535, description="Metrics port of the replicas that are found.")
    token_file: Text = Field(
        "",
        description="File with a bearer token, read again for each scrape. Empty: the service account's, if"
        " any.",
    )
    tls: TlsSettings = TlsSettings()


class VllmSettings(Section):
    """Signals scraped from the model servers themselves, where there is no endpoint picker.

    vLLM, SGLang and TensorRT-LLM are read. Give one of `urls` and `service`.
    """

    urls: Annotated[tuple[HttpUrl, ...], Field(strict=False)] = Field(
        (), description="Whole URLs, one per model server; without a path: `/metrics`."
    )
    service: Text = Field("", description="DNS name of a headless Service: each address is a model server.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the servers that are found by `service`.")
    token_file: Text = Field("", description="File with a bearer token, read again for each scrape.")
    tls: TlsSettings = Field(
        TlsSettings(), description="Anything set: what `service` finds is asked by https."
    )

    def __bool__(self) -> bool:
        return bool(self.urls or self.service)

    @field_validator("urls")
    @classmethod
    def _each_once(cls, urls: tuple[SecretUrl, ...]) -> tuple[SecretUrl, ...]:
        plain = [each.reveal().rstrip("/").removesuffix("/metrics") for each in urls]
        if len(set(plain)) < len(plain):
            raise refuse("has a server twice: its capacity would count twice")
        return urls

    @field_validator("service")
    @classmethod
    def _one_of_both(cls, service: str, info: ValidationInfo) -> str:
        if service and info.data.get("urls"):
            raise refuse("stands beside urls: give one of them")
        return service


class SignalsSettings(Section):
    """How it is known how full the pool is."""

    source: Literal["auto", "prometheus", "epp", "vllm", "fixed"] = Field(
        "auto",
        description="`epp`: direct scrape of the endpoint picker. `prometheus`. `vllm`: the model servers "
        "themselves. `auto`: `vllm` where `signals.vllm` says where they are, else `epp` with Prometheus as "
        "its stand-in. `fixed`: nothing is read, and `budget.max_in_flight`, which is required then, is the "
        "limit, with nothing else of `budget` but `overload_backoff`: it does not follow other users' load.",
    )
    interval_s: float = Field(1.0, ge=0.05, le=3600, description="Seconds between readings.")
    max_age_s: float | None = Field(
        None,
        gt=0,
        description="A sample older than this many seconds closes the gate. At least two intervals. null: "
        "10 for direct scrape, 60 through Prometheus.",
    )
    use: Literal["auto", "saturation", "requests", "both"] = Field(
        "auto",
        description="`saturation`: the EPP's pool saturation and queue. `requests`: running and waiting "
        "requests, counted. `both`: the smaller limit wins. `auto`: both, unless the EPP's pages show "
        "that its saturation counts requests; then saturation alone. The default detector can read near 0 "
        "while every slot is taken: `saturation` alone suits the concurrency detector only. With `source: "
        "fixed` only `auto`.",
    )
    prometheus: PrometheusSettings = PrometheusSettings()
    epp: EppSettings = EppSettings()
    vllm: VllmSettings = VllmSettings()

    @field_validator("max_age_s")
    @classmethod
    def _two_intervals(cls, max_age_s: float | None, info: ValidationInfo) -> float | None:
        interval_s = info.data.get("interval_s", 0.0)
        if max_age_s is not None and max_age_s < 2 * interval_s:
            raise refuse(
                f"must be at least two intervals ({2 * interval_s:g} s), or every other reading is stale"
            )
        return max_age_s

    @field_validator("use")
    @classmethod
    def _measured(cls, use: str, info: ValidationInfo) -> str:
        if info.data.get("source") == "fixed" and use != "auto":
            raise refuse(f"is {use}, and signals.source is fixed, which measures nothing: it must be auto")
        return use

    @field_validator("prometheus")
    @classmethod
    def _reachable(cls, prometheus: PrometheusSettings, info: ValidationInfo) -> PrometheusSettings:
        if info.data.get("source") == "prometheus" and not prometheus.url:
            raise refuse("url is required when signals.source is prometheus")
        return prometheus

    @field_validator("vllm")
    @classmethod
    def _alone(cls, vllm: VllmSettings, info: ValidationInfo) -> VllmSettings:
        source, use, epp = (info.data.get(name) for name in ("source", "use", "epp"))
        if source == "vllm" and not vllm:
            raise refuse("urls or service is required when signals.source is vllm")
        if not vllm:
            return vllm
        if source in ("epp", "prometheus", "fixed"):
            raise refuse(
                f"says where model servers are, and signals.source is {source}: it must be vllm or auto"
            )
        if isinstance(epp, EppSettings) and (epp.urls or epp.service):
            raise refuse("stands beside signals.epp: a pool with an endpoint picker is read there")
        if use in ("saturation", "both"):
            raise refuse(f"shows requests alone, and signals.use is {use}: it must be requests or auto")
        return vllm

    @property
    def preferred(self) -> Source:
        """The source that is followed while it can be read."""
        if self.source in ("prometheus", "fixed"):
            return self.source
        return "vllm" if self.vllm else "epp"

    @property
    def watches_pool(self) -> bool:
        """Whether the InferencePool is watched in Kubernetes.

        Model servers that the settings name, and a server behind a fixed limit, are in no InferencePool, and
        a pool that does not exist would close the gate.
        """
        return not self.vllm and self.source != "fixed"

    @property
    def direct(self) -> EppSettings | VllmSettings | None:
        """Settings of the pages that are scraped. `None` if Prometheus alone is asked, or nobody."""
        if self.source in ("prometheus", "fixed"):
            return None
        return self.vllm or self.epp

    def max_age_for(self, source: Source) -> float:
        """Seconds after which a sample from this source is not acted upon."""
        if self.max_age_s is not None:
            return self.max_age_s
        return max(MAX_AGE_S[source], 2 * self.interval_s)
