"""Kubernetes and the signals: what the first finds is where the second looks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from dispatcher.check import kubernetes
from dispatcher.check.addresses import Address, addresses, all_away
from dispatcher.check.finding import Finding, Findings, Probe, known
from dispatcher.settings import SecretUrl, Settings
from dispatcher.signals.kubernetes.cluster import ClusterAccess

_WHERE = "signals.epp.urls, signals.epp.service, signals.prometheus.url or signals.vllm"


def urls(settings: Settings) -> list[SecretUrl]:
    """The addresses that the settings give for the signals."""
    signals = settings.signals
    if signals.source == "fixed":
        return []
    if signals.vllm:
        return [*signals.vllm.urls]
    through = signals.source == "prometheus" or (signals.source == "auto" and signals.prometheus.url)
    direct = signals.epp.urls if signals.source != "prometheus" else ()
    return [*direct, *([signals.prometheus.url] if through else [])]


def probe(settings: Settings, away: Mapping[Address, str]) -> Probe:
    """What asks Kubernetes, where there is one, and then each source; nothing that is `away`."""
    signals, given = settings.signals, urls(settings)
    if signals.source == "fixed":
        limit = settings.budget.max_in_flight
        what = f"nothing is measured: up to {limit} requests are in flight whatever other users send"
        return known(Finding("warning", "signals.source", what))
    direct, watched = signals.direct, bool(ClusterAccess()) and signals.watches_pool
    by_watch = direct is not None and not direct.urls and not direct.service
    if by_watch and not watched and not given:
        what = "nothing says where the endpoint picker is: no URL, no service, no Kubernetes to ask"
        return known(Finding("failed", "signals", what, _WHERE))
    # A service's name is the source's own to resolve.
    why = all_away(addresses(given), away) if given and not (direct and direct.service) else None
    look_around = kubernetes.look_around(settings) if watched else None
    ask_sources = _sources(settings) if why is None or (by_watch and watched) else None

    async def asked() -> Findings:
        findings, replicas = await look_around() if look_around is not None else ([], None)
        if by_watch and replicas is None and not given:
            what = "nothing says where the endpoint picker is: no URL, no service, and Kubernetes does not"
            return [*findings, Finding("failed", "signals", what, _WHERE)]
        if ask_sources is None or (why is not None and replicas is None):
            return [*findings, Finding("failed", "signals", why or "", _WHERE, certain=True)]
        return [*findings, *await ask_sources(replicas)]

    return asked


def _sources(settings: Settings) -> Callable[[tuple[str, ...] | None], Awaitable[Findings]]:
    """What asks the sources, given what Kubernetes says of the endpoint picker."""
    from dispatcher.check import readings
    from dispatcher.signals.sources import sources

    try:
        made = sources(settings)
    except OSError as error:
        where = "signals.vllm.tls" if settings.signals.vllm else "signals.epp.tls"
        refused = Finding("failed", where, f"cannot be used: {error}")

        async def refuse(_: tuple[str, ...] | None) -> Findings:
            return [refused]

        return refuse

    async def asked(replicas: tuple[str, ...] | None) -> Findings:
        return await readings.ask(settings, made, replicas)

    return asked
