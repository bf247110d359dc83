"""Build the signal sources that the settings ask for."""

from __future__ import annotations

from pathlib import Path

from dispatcher.settings.model import Settings
from dispatcher.settings.tls import TlsSettings
from dispatcher.signals.epp.source import SERVICE_ACCOUNT_TOKEN, EppSource
from dispatcher.signals.fixed import FixedSource
from dispatcher.signals.model_servers import ModelServersSource
from dispatcher.signals.poller import SignalSource
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.scrape import Targets

TIMEOUT_SHARE = 0.9
"""Time limit of a poll as a share of the interval, or of 1 s if the interval is shorter. A time limit that is
longer than the interval does no harm, because a poll never starts before the previous one has ended."""


def build_sources(settings: Settings) -> tuple[SignalSource, ...]:
    """Return the sources of `signals.source`, the preferred one first. There is at least one.

    With `auto`, the model servers are the source if the settings have their addresses. Otherwise it is the
    direct scrape of the endpoint picker, with Prometheus as fallback if it has a URL.
    """
    chosen = settings.signals.source
    timeout_s = TIMEOUT_SHARE * max(settings.signals.interval_s, 1.0)
    if chosen == "fixed":
        return (FixedSource(),)
    if settings.signals.vllm:
        return (_build_servers_source(settings, timeout_s),)
    built: list[SignalSource] = []
    if chosen != "prometheus":
        built.append(_build_epp_source(settings, timeout_s))
    if chosen == "prometheus" or (chosen == "auto" and settings.signals.prometheus.url):
        built.append(_build_prometheus_source(settings, timeout_s))
    return tuple(built)


def _build_epp_source(settings: Settings, timeout_s: float) -> EppSource:
    epp = settings.signals.epp
    # An endpoint picker asks for a bearer token by default, and accepts that of the pod's service account.
    token_file = epp.token_file
    if not token_file and Path(SERVICE_ACCOUNT_TOKEN).exists():
        token_file = SERVICE_ACCOUNT_TOKEN
    targets = Targets(
        urls=tuple(url.reveal() for url in epp.urls),
        service=epp.service,
        namespace=settings.pool.namespace,
        port=epp.port,
        is_secure=epp.tls != TlsSettings(),
    )
    tls = epp.tls.build_context() if epp.tls != TlsSettings() else None
    return EppSource(
        settings.pool.name,
        targets,
        timeout_s=timeout_s,
        token_file=token_file,
        tls=tls,
        has_objective=bool(settings.gateway.objective),
    )


def _build_servers_source(settings: Settings, timeout_s: float) -> ModelServersSource:
    servers = settings.signals.vllm
    is_secure = servers.tls != TlsSettings()
    targets = Targets(
        urls=tuple(url.reveal() for url in servers.urls),
        service=servers.service,
        namespace=settings.pool.namespace,
        port=servers.port,
        is_secure=is_secure,
    )
    tls = servers.tls.build_context() if is_secure else None
    return ModelServersSource(targets, timeout_s=timeout_s, token_file=servers.token_file, tls=tls)


def _build_prometheus_source(settings: Settings, timeout_s: float) -> PrometheusSource:
    prometheus = settings.signals.prometheus
    access = PrometheusAddress(
        url=prometheus.url.reveal(),
        token_file=prometheus.token_file,
        headers=prometheus.headers,
        ca_file=prometheus.tls.ca_file,
        cert_file=prometheus.tls.cert_file,
        key_file=prometheus.tls.key_file,
        insecure_skip_verify=prometheus.tls.insecure_skip_verify,
    )
    return PrometheusSource(
        access,
        settings.pool.name,
        settings.pool.namespace,
        timeout_s=timeout_s,
        max_age_s=settings.signals.max_age_for("prometheus"),
        queries={str(name): query for name, query in prometheus.queries.items()},
        has_objective=bool(settings.gateway.objective),
    )
