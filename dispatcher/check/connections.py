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
from typing import TypeVar

from dispatcher.check import gateway, queue, serving, signals
from dispatcher.check.addresses import CONNECT_S, Address, addresses, all_away
from dispatcher.check.finding import Finding, Findings, Probe, Slow, known
from dispatcher.ports.network_errors import words
from dispatcher.settings import Settings
from dispatcher.telemetry.loop_lag import PaceWatch

WHOLE_S = 10.0
"""Time limit of one run of a probe, whatever it waits for."""
STEP_S = 0.05
"""Interval at which the lag of the event loop is measured."""
BEHIND_SHARE = 0.2
"""Share of a probe's time. A loop that was late for longer may be the reason why the probe failed."""
BEHIND_LEAST_S = 0.2
"""Lag that is always ignored, because every time limit here is several times longer."""

T = TypeVar("T")


async def connections(settings: Settings, tell: Callable[[Finding], None]) -> None:
    """Check the gateway, the queue, Kubernetes, the signals and `serving.urls`.

    `report` is called with each finding, in this order.
    """
    await ask(prepare(settings, await reach(settings)), tell)


async def reach(settings: Settings) -> dict[Address, str]:
    """Return the addresses that accept no connection, each with the reason."""
    urls = [settings.gateway.url, *signals.urls(settings), *serving.urls(settings), settings.tracing.endpoint]
    asked = addresses(urls) | queue.asked(settings)

    async def one(address: Address) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except OSError as error:
            return f"{address[0]}:{address[1]}: {words(error)}"
        writer.transport.abort()  # nothing was sent, so there is nothing to flush
        return None

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(one(address) for address in asked))

    async with _watched() as watch:
        told, _ = await _fairly(watch, all_of_them, lambda told: not any(told))
    return {address: why for address, why in zip(asked, told, strict=True) if why is not None}


def prepare(settings: Settings, away: Mapping[Address, str]) -> dict[str, Probe]:
    """Return the probe of each part. Everything that a probe needs is imported and built here.

    The probe of an unreachable part only reports that.
    """
    probes = {
        "gateway.url": gateway.probe(settings, away),
        "queue.url": queue.probe(settings, away),
        "signals": signals.probe(settings, away),
    }
    if serving.urls(settings):
        probes["serving.urls"] = serving.probe(settings, away)
    if settings.tracing.endpoint:
        probes["tracing.endpoint"] = _traces(settings, away)
    return probes


def _traces(settings: Settings, away: Mapping[Address, str]) -> Probe:
    """Return a probe that reports whether the endpoint accepts connections. No test span is sent."""
    why = all_away(addresses([settings.tracing.endpoint]), away)
    if why is None:
        return known(Finding("ok", "tracing.endpoint", "accepts connections"))
    return known(Finding("warning", "tracing.endpoint", f"{why}: traces are lost, and nothing else"))


async def ask(probes: Mapping[str, Probe], tell: Callable[[Finding], None]) -> None:
    """Run all probes at the same time, and report their findings in the order of the probes."""
    async with _watched() as watch, asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(_judged_fairly(watch, *probe)) for probe in probes.items()]
        for task in started:
            for finding in await task:
                tell(finding)


async def _judged_fairly(watch: PaceWatch, where: str, probe: Probe) -> Findings:
    async def bounded() -> Findings:
        try:
            async with asyncio.timeout(WHOLE_S):
                return await probe()
        except TimeoutError:
            return [Finding("failed", where, f"no answer within {WHOLE_S:g} s")]

    findings, behind = await _fairly(watch, bounded, lambda found: not any(map(_blames, found)))
    if not behind:
        return findings
    return [_unknown(each, behind) if _blames(each) else each for each in findings]


def _blames(finding: Finding) -> bool:
    """Return True if a late event loop in this process may have caused the finding."""
    return isinstance(finding, Slow) or (finding.level == "failed" and not finding.certain)


def _unknown(finding: Finding, behind: str) -> Finding:
    what = f"not known ({finding.what}): this process gets too little CPU: {behind}"
    return Finding(finding.level, finding.where, what)


async def _fairly(
    watch: PaceWatch, act: Callable[[], Awaitable[T]], good: Callable[[T], bool]
) -> tuple[T, str]:
    """Run `act`, and run it a second time if the result is not good and the event loop was late.

    Return the result, and a description of the lag if the loop was late the second time, too. The description
    is empty if the result is good or the loop was not late.
    """
    found, behind = await _timed(watch, act)
    if not good(found) and behind:
        found, behind = await _timed(watch, act)
    return found, "" if good(found) else behind


async def _timed(watch: PaceWatch, act: Callable[[], Awaitable[T]]) -> tuple[T, str]:
    """Run `act`. Return its result, and a description of the loop's lag if there was too much of it."""
    clock = asyncio.get_running_loop().time
    began_at, behind_s = clock(), watch.pace.behind_s
    found = await act()
    # The watch notices a lag at its next step. Without this pause a lag at the end of `act` would be missed.
    await asyncio.sleep(2 * watch.step_s)
    behind_s, took_s = watch.pace.behind_s - behind_s, clock() - began_at
    if behind_s < max(BEHIND_SHARE * took_s, BEHIND_LEAST_S):
        return found, ""
    return found, f"its event loop was behind for {behind_s:.1f} of {took_s:.1f} s; {watch.cause()}"


@asynccontextmanager
async def _watched() -> AsyncIterator[PaceWatch]:
    """Measure the lag of the event loop for the duration of the block."""
    watch = PaceWatch(step_s=STEP_S)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        yield watch
        watching.cancel()
