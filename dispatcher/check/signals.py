"""Check Kubernetes and the signals. The sources use the picker's addresses that Kubernetes knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from dispatcher.check import kubernetes
from dispatcher.check.addresses import Address, explain_all_unreachable, list_addresses
from dispatcher.check.finding import Finding, Findings, Probe, make_known_probe
from dispatcher.settings.model import Settings
from dispatcher.settings.values import SecretUrl
from dispatcher.signals.kubernetes.cluster import ClusterAccess

_WHERE = "signals.epp.urls, signals.epp.service, signals.prometheus.url or signals.vllm"


def list_urls(settings: Settings) -> list[SecretUrl]:
    """Return the URLs that the settings have for the signals."""
    signals = settings.signals
    if signals.source == "fixed":
        return []
    if signals.vllm:
        return [*signals.vllm.urls]
    through = signals.source == "prometheus" or (signals.source == "auto" and signals.prometheus.url)
    direct = signals.epp.urls if signals.source != "prometheus" else ()
    return [*direct, *([signals.prometheus.url] if through else [])]


def build_probe(settings: Settings, unreachable: Mapping[Address, str]) -> Probe:
    """Return the probe that asks Kubernetes, if there is a cluster, and then each source.

    Unreachable servers are not asked.
    """
    signals, given = settings.signals, list_urls(settings)
    if signals.source == "fixed":
        limit = settings.budget.max_in_flight
        what = f"nothing is measured: up to {limit} requests are in flight whatever other users send"
        return make_known_probe(Finding("warning", "signals.source", what))
    direct, watched = signals.scrape_settings, bool(ClusterAccess()) and signals.watches_pool
    by_watch = direct is not None and not direct.urls and not direct.service
    if by_watch and not watched and not given:
        what = "nothing says where the endpoint picker is: no URL, no service, no Kubernetes to ask"
        return make_known_probe(Finding("failed", "signals", what, _WHERE))
    # With a service name the addresses are not known here, because the source resolves the name itself.
    why = (
        explain_all_unreachable(list_addresses(given), unreachable)
        if given and not (direct and direct.service)
        else None
    )
    look_around = kubernetes.build_lookup(settings) if watched else None
    ask_sources = _build_source_check(settings) if why is None or (by_watch and watched) else None

    async def check_signals() -> Findings:
        findings, replicas = await look_around() if look_around is not None else ([], None)
        if by_watch and replicas is None and not given:
            what = "nothing says where the endpoint picker is: no URL, no service, and Kubernetes does not"
            return [*findings, Finding("failed", "signals", what, _WHERE)]
        if ask_sources is None or (why is not None and replicas is None):
            return [*findings, Finding("failed", "signals", why or "", _WHERE, is_certain=True)]
        return [*findings, *await ask_sources(replicas)]

    return check_signals


def _build_source_check(settings: Settings) -> Callable[[tuple[str, ...] | None], Awaitable[Findings]]:
    """Return a function that polls the sources, given the endpoint picker's addresses from Kubernetes."""
    from dispatcher.check import readings
    from dispatcher.signals.sources import build_sources

    try:
        built = build_sources(settings)
    except OSError as error:
        where = "signals.vllm.tls" if settings.signals.vllm else "signals.epp.tls"
        refused = Finding("failed", where, f"cannot be used: {error}")

        async def report_tls_problem(_: tuple[str, ...] | None) -> Findings:
            return [refused]

        return report_tls_problem

    async def ask_built_sources(replicas: tuple[str, ...] | None) -> Findings:
        return await readings.check_sources(settings, built, replicas)

    return ask_built_sources
