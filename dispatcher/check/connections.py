"""What `check` finds behind the addresses of a configuration: all tried at the same time, told in order.

Nothing is changed or consumed, and what is not there costs no time: a client library takes longer to import
than a connection to be refused. Nor does what is imported cost anybody else time, in a container that gets a
tenth of a core, say. Hence three steps, and while a time limit runs nothing is imported or built:

    reach     a bare connection to every address, all at once
    prepare   for what answered, one after the other: client libraries, TLS
    ask       all at once

A peer is blamed only for what it did while our own event loop kept pace.
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
"""No try of a probe takes longer, whatever it waits for."""
STEP_S = 0.05
BEHIND_SHARE = 0.2
"""A loop that was behind for so much of a probe's time may be why it failed."""
BEHIND_LEAST_S = 0.2
"""Less makes nothing late: every time limit here is several times longer."""

T = TypeVar("T")


async def connections(settings: Settings, tell: Callable[[Finding], None]) -> None:
    """Try the gateway, the queue, Kubernetes, the signals and `serving.urls`; each is told once those before
    it are."""
    await ask(prepare(settings, await reach(settings)), tell)


async def reach(settings: Settings) -> dict[Address, str]:
    """The addresses that accept no connection, each with what is wrong."""
    urls = [settings.gateway.url, *signals.urls(settings), *serving.urls(settings), settings.tracing.endpoint]
    asked = addresses(urls) | queue.asked(settings)

    async def one(address: Address) -> str | None:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(*address)
        except OSError as error:
            return f"{address[0]}:{address[1]}: {words(error)}"
        writer.transport.abort()
        return None

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(one(address) for address in asked))

    async with _watched() as watch:
        told, _ = await _fairly(watch, all_of_them, lambda told: not any(told))
    return {address: why for address, why in zip(asked, told, strict=True) if why is not None}


def prepare(settings: Settings, away: Mapping[Address, str]) -> dict[str, Probe]:
    """The probe of each part, with all that it needs imported and built; what is `away` needs nothing."""
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
    """Whether the endpoint is there; no span is made up to try it."""
    why = all_away(addresses([settings.tracing.endpoint]), away)
    if why is None:
        return known(Finding("ok", "tracing.endpoint", "accepts connections"))
    return known(Finding("warning", "tracing.endpoint", f"{why}: traces are lost, and nothing else"))


async def ask(probes: Mapping[str, Probe], tell: Callable[[Finding], None]) -> None:
    """Run the probes, all at the same time, and tell what each found, in their order."""
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
    """Whether it may be our own loop that was late."""
    return isinstance(finding, Slow) or (finding.level == "failed" and not finding.certain)


def _unknown(finding: Finding, behind: str) -> Finding:
    what = f"not known ({finding.what}): this process gets too little CPU: {behind}"
    return Finding(finding.level, finding.where, what)


async def _fairly(
    watch: PaceWatch, act: Callable[[], Awaitable[T]], good: Callable[[T], bool]
) -> tuple[T, str]:
    """What the act comes to; once more where that is not good, and our own loop may be why.

    And in words how far the loop was behind, where it was the second time too; else nothing.
    """
    found, behind = await _timed(watch, act)
    if not good(found) and behind:
        found, behind = await _timed(watch, act)
    return found, "" if good(found) else behind


async def _timed(watch: PaceWatch, act: Callable[[], Awaitable[T]]) -> tuple[T, str]:
    """What the act comes to, and how far the loop was behind meanwhile, where that is too far."""
    clock = asyncio.get_running_loop().time
    began_at, behind_s = clock(), watch.pace.behind_s
    found = await act()
    await asyncio.sleep(2 * watch.step_s)  # what is late now is counted by then
    behind_s, took_s = watch.pace.behind_s - behind_s, clock() - began_at
    if behind_s < max(BEHIND_SHARE * took_s, BEHIND_LEAST_S):
        return found, ""
    return found, f"its event loop was behind for {behind_s:.1f} of {took_s:.1f} s; {watch.cause()}"


@asynccontextmanager
async def _watched() -> AsyncIterator[PaceWatch]:
    """A watch on the loop's pace for the length of the block."""
    watch = PaceWatch(step_s=STEP_S)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch.run())
        yield watch
        watching.cancel()
