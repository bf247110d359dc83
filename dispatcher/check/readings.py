"""Report what the sources of the signals show: series, values, ages, and the budget that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dispatcher.check.finding import Finding, Findings
from dispatcher.limit.budget import Policy, Reading, Reason, compute_budget
from dispatcher.limit.picker_inference import find_fitting_k
from dispatcher.limit.poll import ReadFailure
from dispatcher.limit.small_capacity import count_running_without_waiting, exceeds_capacity
from dispatcher.settings.model import Settings
from dispatcher.signals.epp import in_flight_load
from dispatcher.signals.epp.series import Family, PoolView
from dispatcher.signals.poller import SignalSource
from dispatcher.signals.readings import PollReadings, count_batch_requests, derive_readings


async def check_sources(
    settings: Settings, sources: Sequence[SignalSource], epp_addresses: tuple[str, ...] | None = None
) -> Findings:
    """Poll every source once and report what it shows.

    `epp_addresses` are the addresses of the endpoint picker's pods. `None` if the Kubernetes watch does not
    know them.
    """
    findings: Findings = []
    for source in sources:
        source.set_replicas(epp_addresses)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result = await source.poll()
        finally:
            await source.close()
        now = loop.time()
        name = f"signals.{source.name}"
        if isinstance(result, ReadFailure):
            findings.append(Finding("failed", name, result.why, result.hint))
            continue
        replicas = (
            _format_count(int(result[0].raw["servers"]), "model server") if source.name == "vllm" else ""
        )
        replicas = replicas or f"{_format_count(len(result), 'replica')} of the endpoint picker"
        findings.append(Finding("ok", name, f"{replicas}, read in {(now - began) * 1000:.0f} ms"))
        for number, view in enumerate(result):
            part = name if len(result) == 1 else f"{name}[{number}]"
            findings += _report_series(part, view, now)
            if source.name == "epp":
                findings.append(_report_load(part, view, has_objective=bool(settings.gateway.objective)))
        policy = settings.limit_policy(source.name)
        poll_readings = derive_readings(result, settings.signals.use, policy, source.name)
        findings += _report_readings(name, poll_readings, policy, now)
        findings += _report_small_capacity(name, poll_readings)
        if policy.max_sys is None:
            findings += _report_per_endpoint(result, policy.per_endpoint, poll_readings)
    return findings


def _report_per_endpoint(
    views: Sequence[PoolView], configured: float | None, poll_readings: PollReadings
) -> Findings:
    """Report where the number of requests per endpoint comes from.

    One sample gives only a hint. A running dispatcher confirms it with further samples.
    """
    each, source = poll_readings.per_endpoint, poll_readings.per_endpoint_source
    name, hint = "budget.per_endpoint", "the model server's own limit on concurrent sequences"
    # A page without requests in flight fits every number.
    fits = {
        find_fitting_k(page)
        for view in views
        if (page := view.picker_page) is not None and page.in_flight > 0
    }
    k = fits.pop() if len(fits) == 1 else None
    suggested = f"the picker's page suggests {k} requests per endpoint; not proven yet"
    match source:
        case "setting" if k is not None and configured != k:
            return [Finding("warning", name, f"{configured:g}, but {suggested}", f"{hint}; or auto")]
        case "server":
            return [Finding("ok", name, f"auto: {each:g}, by the model servers' own pages")]
        case "suggestion":
            return [Finding("ok", name, f"auto: {suggested}")]
        case "search":
            what = f"auto: not known, so it is searched for, starting at {each:g} requests per endpoint"
            hint = f"{hint}; `check --probe` measures what the pool runs at once"
            return [Finding("warning", name, what, hint)]
        case _:
            return []


def _report_series(part: str, view: PoolView, now: float) -> Findings:
    """Report every series that was found, with its value and age, and the missing ones."""
    if (
        view.has_current_averages
    ):  # the sums over the pages of the model servers, which are no series of a picker
        age_s = max(0.0, now - view.closed_at)
        values = ", ".join(f"{what} {value:g}" for what, value in view.raw.items())
        return [Finding("ok", part, f"{values}, {age_s:.1f} s old")]
    shown = {family: [name for name in view.raw if name in family.value] for family in Family}
    age_s = max(0.0, now - view.closed_at)
    found = [
        Finding("ok", f"{part} {name}", f"{view.raw[name]:g}, {age_s:.1f} s old")
        for names in shown.values()
        for name in names
    ]
    own = [
        Finding("ok", f"{part} {name}", f"{value:g}")
        for name, value in view.raw.items()
        if name.startswith("queries.")
    ]
    if (
        view.utilization_detectors
    ):  # the label names the detector; the value of the series says nothing about it
        names = ", ".join(sorted(filter(None, view.utilization_detectors))) or "(without a name)"
        what = f"utilization detector {names}: its saturation is no count"
        found.append(Finding("ok", f"{part} {Family.STALE.value[0]}", what))
    absent = [
        Finding("ok", f"{part} {family.value[0]}", f"not there: {_MISSING_REASONS[family]}")
        for family, names in shown.items()
        if not names and family in _MISSING_REASONS
    ]
    shown_latencies = [
        Finding(
            "ok", f"{part} latencies", values.why_not or f"{values.series_name}, of {_SCOPES[values.scope]}"
        )
        for values in (view.histograms,)
        if values is not None
    ]
    return found + own + absent + shown_latencies


def _report_load(part: str, view: PoolView, *, has_objective: bool) -> Finding:
    """Report whether the picker shows batch requests apart from realtime requests, and by which series."""
    where, load = f"{part} {in_flight_load.NAME}", view.load
    batch, problem = count_batch_requests([view])
    if problem:
        return Finding("warning", where, f"not used: {problem}", "the inflight-load-producer of the picker")
    if load is not None:
        what = (
            f"{load.requests:g} requests, {load.batch or 0.0:g} of them with a negative priority, "
            f"by {load.producer}"
        )
    elif batch is not None:
        what = "not there, and not needed: the running requests are shown by priority"
    else:
        what = "not there: the picker has no inflight-load-producer, which shows batch requests apart"
    if batch is not None and not has_objective:
        what += "; batch requests have no priority of their own (gateway.objective)"
    return Finding("ok", where, what)


_SCOPES = {"realtime": "realtime alone", "all": "all requests"}

_MISSING_REASONS = {
    Family.SATURATION: "flow control is off, or a saturation query of your own stands for it",
    Family.QUEUED: "nothing waits in the endpoint picker, or flow control is off",
    Family.RUNNING: "an endpoint picker older than GIE 1.5, or one that has just started",
    Family.READY: "budget.max_sys has to say the capacity",
    Family.IN_FLIGHT: "no request has passed the endpoint picker since it started",
}


def _report_readings(name: str, poll_readings: PollReadings, policy: Policy, now: float) -> Findings:
    """Report the signals in use, each with its budget, and the signals that cannot be read."""
    findings = [_report_budget(name, reading, policy) for reading in poll_readings.readings]
    for unread in poll_readings.unread:
        signal = f"{name} {unread.signal}" if unread.signal is not None else f"{name} {unread.reason}"
        findings.append(Finding("failed", signal, unread.why, unread.hint))
    oldest = min((reading.closed_at for reading in poll_readings.readings), default=now)
    if now - oldest > policy.max_age_s:
        why = f"the sample is {now - oldest:.1f} s old, more than {policy.max_age_s:g} s"
        findings.append(Finding("failed", f"{name} {Reason.STALE}", why, "signals.max_age_s"))
    return findings


def _report_budget(name: str, reading: Reading, policy: Policy) -> Finding:
    budget = compute_budget(reading, policy)
    detail = (
        f"F_SYS {reading.f_sys:.3f} + F_EPP {reading.f_epp:.3f} + reserve {policy.reserve:g} of "
        f"{reading.max_sys:g} requests"
    )
    if budget.fault is not None:
        hint = "budget.per_endpoint, budget.max_sys" if budget.fault is Reason.IMPLAUSIBLE else ""
        return Finding("failed", f"{name} {reading.signal}", f"{detail}: {budget.fault_detail}", hint)
    room = f"room for {budget.headroom} more" if budget.headroom > 0 else "no room now"
    return Finding("ok", f"{name} {reading.signal}", f"{detail}: D {budget.d:.3f}, {room}")


def _report_small_capacity(name: str, poll_readings: PollReadings) -> Findings:
    """Report a capacity below the number of requests that run while none waits. A running dispatcher looks
    for minutes, and explains it in its status."""
    for reading in poll_readings.readings:
        running = count_running_without_waiting(reading)
        if reading.is_capacity_known and running is not None and exceeds_capacity(running, reading.max_sys):
            what = f"{running:g} requests run and none waits, more than the capacity of {reading.max_sys:g}"
            hint = "raise budget.per_endpoint or budget.max_sys, or set budget.capacity to learn"
            return [Finding("warning", f"{name} capacity", what, hint)]
    return []


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
