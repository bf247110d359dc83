"""The sources that the settings ask for, and what `batch-dispatcher check` finds when it tries each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dispatcher.core.budget import Policy, Reading, Reason, assess
from dispatcher.core.counting import ASSUMED, fitting
from dispatcher.core.poll import Unread
from dispatcher.settings import Settings, Tls
from dispatcher.signals.epp import SERVICE_ACCOUNT_TOKEN, EppSource, Targets
from dispatcher.signals.poller import Source
from dispatcher.signals.prometheus import Access, PrometheusSource
from dispatcher.signals.series import Family, Verdict, View, judge

TIMEOUT_SHARE = 0.9
"""Of the interval; of a second where the interval is shorter, for a poll is never begun before its
predecessor has ended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried: what came of it, and what mends it."""

    name: str
    ok: bool
    detail: str
    hint: str = ""
    doubtful: bool = False
    """It works, but is seldom meant so."""


def sources(settings: Settings) -> tuple[Source, ...]:
    """The sources of `signals.source`, the preferred one first; never none.

    `auto`: the direct scrape, and Prometheus as its stand-in where it has a URL.
    """
    chosen = settings.signals.source
    timeout_s = TIMEOUT_SHARE * max(settings.signals.interval_s, 1.0)
    made: list[Source] = []
    if chosen != "prometheus":
        made.append(_epp(settings, timeout_s))
    if chosen == "prometheus" or (chosen == "auto" and settings.signals.prometheus.url):
        made.append(_prometheus(settings, timeout_s))
    return tuple(made)


def _epp(settings: Settings, timeout_s: float) -> EppSource:
    epp = settings.signals.epp
    token_file = epp.token_file
    if not token_file and Path(SERVICE_ACCOUNT_TOKEN).exists():
        token_file = SERVICE_ACCOUNT_TOKEN
    targets = Targets(
        urls=tuple(url.reveal() for url in epp.urls),
        service=epp.service,
        namespace=settings.pool.namespace,
        port=epp.port,
        secure=epp.tls != Tls(),
    )
    tls = epp.tls.context() if epp.tls != Tls() else None
    return EppSource(
        settings.pool.name,
        targets,
        timeout_s=timeout_s,
        token_file=token_file,
        tls=tls,
        marked=bool(settings.gateway.objective),
    )


def _prometheus(settings: Settings, timeout_s: float) -> PrometheusSource:
    prometheus = settings.signals.prometheus
    access = Access(
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
        marked=bool(settings.gateway.objective),
    )


async def probe(
    settings: Settings, epp_addresses: tuple[str, ...] | None = None, made: Sequence[Source] = ()
) -> list[Finding]:
    """Ask every source once and say what it shows: series, values, ages, and the budget that follows.

    `epp_addresses`: the EPP's pods, where the Kubernetes watch knows them. `made`: the sources of these
    settings, where they exist already; making them takes imports.
    """
    findings: list[Finding] = []
    for source in made or sources(settings):
        source.discovered(epp_addresses)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            seen = await source.poll()
        finally:
            await source.close()
        now = loop.time()
        name = f"signals.{source.name}"
        if isinstance(seen, Unread):
            findings.append(Finding(name, False, seen.why, seen.hint))
            continue
        detail = (
            f"{_count(len(seen), 'replica')} of the endpoint picker, read in {(now - began) * 1000:.0f} ms"
        )
        findings.append(Finding(name, True, detail))
        for number, view in enumerate(seen):
            part = name if len(seen) == 1 else f"{name}[{number}]"
            findings += _series(part, view, now)
        policy = settings.policy(source.name)
        verdict = judge(seen, settings.signals.use, policy, source.name)
        findings += _verdict(name, verdict, policy, now)
        if policy.max_sys is None:
            findings += _per_endpoint(seen, policy.per_endpoint, verdict)
    return findings


def _per_endpoint(views: Sequence[View], wanted: float | None, verdict: Verdict) -> list[Finding]:
    """What one sample says of `budget.per_endpoint`: a hint, which a running dispatcher makes sure of."""
    assumed, guess = verdict.per_endpoint or ASSUMED, verdict.per_endpoint_from
    name, hint = "budget.per_endpoint", "the model server's own limit on concurrent sequences"
    fits = {fitting(page) for view in views if (page := view.page) is not None and page.in_flight > 0}
    k = fits.pop() if len(fits) == 1 else None
    suggested = f"the picker's page suggests {k} requests per endpoint; not proven yet"
    if k is not None and wanted is None:
        until = "" if k == assumed else f", and {assumed:g} are assumed until it is"
        return [Finding(name, True, f"auto: {suggested}{until}")]
    if k is not None and wanted != k:
        return [Finding(name, True, f"{wanted:g}, but {suggested}", f"{hint}; or auto", doubtful=True)]
    if wanted is None and guess == "unseen":
        what = f"auto: {assumed:g} is assumed until the picker's page shows requests; not learned yet"
        return [Finding(name, True, what, hint, doubtful=True)]
    if wanted is None:
        what = f"auto, and this page does not suggest what an endpoint runs: {assumed:g} is assumed"
        return [Finding(name, True, what, hint, doubtful=True)]
    return []


def _series(part: str, view: View, now: float) -> list[Finding]:
    """Every series that was found with its value and age, and those that were not."""
    shown = {family: [name for name in view.raw if name in family.value] for family in Family}
    age_s = max(0.0, now - view.closed_at)
    found = [
        Finding(f"{part} {name}", True, f"{view.raw[name]:g}, {age_s:.1f} s old")
        for names in shown.values()
        for name in names
    ]
    own = [
        Finding(f"{part} {name}", True, f"{value:g}")
        for name, value in view.raw.items()
        if name.startswith("queries.")
    ]
    if view.utilization:  # a label tells it; the series' value says nothing
        names = ", ".join(sorted(filter(None, view.utilization))) or "(without a name)"
        what = f"utilization detector {names}: its saturation is no count"
        found.append(Finding(f"{part} {Family.STALE.value[0]}", True, what))
    absent = [
        Finding(f"{part} {family.value[0]}", True, f"not there: {_ABSENT[family]}")
        for family, names in shown.items()
        if not names and family in _ABSENT
    ]
    shown_latencies = [
        Finding(f"{part} latencies", True, told.why_not or f"{told.name}, of {_OF[told.of]}")
        for told in (view.histograms,)
        if told is not None
    ]
    return found + own + absent + shown_latencies


_OF = {"realtime": "realtime alone", "all": "all requests"}

_ABSENT = {
    Family.SATURATION: "flow control is off, or a saturation query of your own stands for it",
    Family.QUEUED: "nothing waits in the endpoint picker, or flow control is off",
    Family.RUNNING: "an endpoint picker older than GIE 1.5, or one that has just started",
    Family.READY: "budget.max_sys has to say the capacity",
    Family.IN_FLIGHT: "no request has passed the endpoint picker since it started",
}


def _verdict(name: str, verdict: Verdict, policy: Policy, now: float) -> list[Finding]:
    """The signals that count, with the budget of each, and those that cannot be read."""
    findings = [_budget(name, reading, policy) for reading in verdict.readings]
    for unread in verdict.unread:
        signal = f"{name} {unread.signal}" if unread.signal is not None else f"{name} {unread.reason}"
        findings.append(Finding(signal, False, unread.why, unread.hint))
    oldest = min((reading.closed_at for reading in verdict.readings), default=now)
    if now - oldest > policy.max_age_s:
        why = f"the sample is {now - oldest:.1f} s old, more than {policy.max_age_s:g} s"
        findings.append(Finding(f"{name} {Reason.STALE}", False, why, "signals.max_age_s"))
    return findings


def _budget(name: str, reading: Reading, policy: Policy) -> Finding:
    budget = assess(reading, policy)
    detail = (
        f"F_SYS {reading.f_sys:.3f} + F_EPP {reading.f_epp:.3f} + reserve {policy.reserve:g} of "
        f"{reading.max_sys:g} requests"
    )
    if budget.fault is not None:
        hint = "budget.per_endpoint, budget.max_sys" if budget.fault is Reason.IMPLAUSIBLE else ""
        return Finding(f"{name} {reading.signal}", False, f"{detail}: {budget.because}", hint)
    room = f"room for {budget.headroom} more" if budget.headroom > 0 else "no room now"
    return Finding(f"{name} {reading.signal}", True, f"{detail}: D {budget.d:.3f}, {room}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
