"""Check the servers that a configuration names: all at the same time, reported in a fixed order.

The checks change and consume nothing. They run in three steps, and nothing is imported or built while a time
limit runs:

    find_unreachable   open a bare connection to every address, all at once
    build_probes       import client libraries and load TLS files, only for the servers that answered
    run_probes         ask all servers at once

An unreachable server costs little time this way, because importing a client library takes longer than a
refused connection. An import also cannot use up the time limit of a probe, for example in a container that
gets a tenth of a core.

A server is blamed only for what it did while the event loop of this process was not late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from typing import TypeVar

from dispatcher.check import gateway, queue, signals
from dispatcher.check.addresses import CONNECT_S, Address, explain_all_unreachable, list_addresses
from dispatcher.check.feature_check import list_feature_checks
from dispatcher.check.finding import Finding, Findings, Probe, SlowFinding, make_known_probe
from dispatcher.common.network_errors import describe_error
from dispatcher.settings.model import Settings
from dispatcher.telemetry.loop_lag import LoopLagWatch

PROBE_TIMEOUT_S = 10.0
"""Time limit of one run of a probe, whatever it waits for."""
LAG_STEP_S = 0.05
"""Interval at which the lag of the event loop is measured."""
LAG_SHARE = 0.2
"""Share of a probe's time. A loop that was late for longer may be the reason why the probe failed."""
MIN_LAG_S = 0.2
"""Lag that is always ignored, because every time limit here is several times longer."""

T = TypeVar("T")


async def check_connections(settings: Settings, report: Callable[[Finding], None]) -> None:
    """Check the gateway, the queue, Kubernetes, the signals and the servers of features.

    `report` is called with each finding, in this order.
    """
    await run_probes(build_probes(settings, await find_unreachable(settings)), report)


async def find_unreachable(settings: Settings) -> dict[Address, str]:
    """Return the addresses that accept no connection, each with the reason."""
    urls = [
        settings.gateway.url,
        *signals.list_urls(settings),
        *chain.from_iterable(check.list_urls(settings) for check in list_feature_checks()),
        settings.tracing.endpoint,
    ]
    asked = list_addresses(urls) | queue.list_queue_addresses(settings)

    async def connect_once(address: Address) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except OSError as error:
            return f"{address[0]}:{address[1]}: {describe_error(error)}"
        writer.transport.abort()  # nothing was sent, so there is nothing to flush
        return None

    async def connect_to_all() -> list[str | None]:
        return await asyncio.gather(*(connect_once(address) for address in asked))

    async with _watch_loop_lag() as watch:
        reasons, _ = await _retry_if_behind(watch, connect_to_all, lambda told: not any(told))
    return {address: why for address, why in zip(asked, reasons, strict=True) if why is not None}


def build_probes(settings: Settings, unreachable: Mapping[Address, str]) -> dict[str, Probe]:
    """Return the probe of each part. Everything that a probe needs is imported and built here.

    The probe of an unreachable part only reports that.
    """
    probes = {
        "gateway.url": gateway.build_probe(settings, unreachable),
        "queue.url": queue.build_probe(settings, unreachable),
        "signals": signals.build_probe(settings, unreachable),
    }
    for check in list_feature_checks():
        probes |= check.build_probes(settings, unreachable)
    if settings.tracing.endpoint:
        probes["tracing.endpoint"] = _build_traces_probe(settings, unreachable)
    return probes


def _build_traces_probe(settings: Settings, unreachable: Mapping[Address, str]) -> Probe:
    """Return a probe that reports whether the endpoint accepts connections. No test span is sent."""
    why = explain_all_unreachable(list_addresses([settings.tracing.endpoint]), unreachable)
    if why is None:
        return make_known_probe(Finding("ok", "tracing.endpoint", "accepts connections"))
    return make_known_probe(
        Finding("warning", "tracing.endpoint", f"{why}: traces are lost, and nothing else")
    )


async def run_probes(probes: Mapping[str, Probe], report: Callable[[Finding], None]) -> None:
    """Run all probes at the same time, and report their findings in the order of the probes."""
    async with _watch_loop_lag() as watch, asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_run_probe(watch, *probe)) for probe in probes.items()]
        for task in started:
            for finding in await task:
                report(finding)


async def _run_probe(watch: LoopLagWatch, where: str, probe: Probe) -> Findings:
    async def run_bounded() -> Findings:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await probe()
        except TimeoutError:
            return [Finding("failed", where, f"no answer within {PROBE_TIMEOUT_S:g} s")]

    findings, behind = await _retry_if_behind(
        watch, run_bounded, lambda found: not any(map(_may_be_own_delay, found))
    )
    if not behind:
        return findings
    return [_mark_unknown(each, behind) if _may_be_own_delay(each) else each for each in findings]


def _may_be_own_delay(finding: Finding) -> bool:
    """Return True if a late event loop in this process may have caused the finding."""
    return isinstance(finding, SlowFinding) or (finding.level == "failed" and not finding.is_certain)


def _mark_unknown(finding: Finding, behind: str) -> Finding:
    what = f"not known ({finding.what}): this process gets too little CPU: {behind}"
    return Finding(finding.level, finding.where, what)


async def _retry_if_behind(
    watch: LoopLagWatch, act: Callable[[], Awaitable[T]], is_good: Callable[[T], bool]
) -> tuple[T, str]:
    """Run `act`, and run it a second time if the result is not good and the event loop was late.

    Return the result, and a description of the lag if the loop was late the second time, too. The description
    is empty if the result is good or the loop was not late.
    """
    result, behind = await _measure_lag(watch, act)
    if not is_good(result) and behind:
        result, behind = await _measure_lag(watch, act)
    return result, "" if is_good(result) else behind


async def _measure_lag(watch: LoopLagWatch, act: Callable[[], Awaitable[T]]) -> tuple[T, str]:
    """Run `act`. Return its result, and a description of the loop's lag if there was too much of it."""
    clock = asyncio.get_running_loop().time
    began_at, behind_s = clock(), watch.lag.total_lag_s
    result = await act()
    # The watch notices a lag at its next step. Without this pause a lag at the end of `act` would be missed.
    await asyncio.sleep(2 * watch.check_interval_s)
    behind_s, took_s = watch.lag.total_lag_s - behind_s, clock() - began_at
    if behind_s < max(LAG_SHARE * took_s, MIN_LAG_S):
        return result, ""
    return result, f"its event loop was behind for {behind_s:.1f} of {took_s:.1f} s; {watch.describe_cause()}"


@asynccontextmanager
async def _watch_loop_lag() -> AsyncIterator[LoopLagWatch]:
    """Measure the lag of the event loop for the duration of the block."""
    watch = LoopLagWatch(check_interval_s=LAG_STEP_S)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.watch_loop())
        yield watch
        watching.cancel()
