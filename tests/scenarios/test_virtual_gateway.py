"""A gateway that is away costs no request an attempt, is knocked at by one, and is used again at once."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.core.budget import Reason
from dispatcher.core.outcome import Delivered, Failed, Outcome, Unreachable, classify
from dispatcher.core.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

AWAY_AT, BACK_AT = 10.3, 70.3
BLACKHOLE_S = 1.5
"""The forwarder's connect time-out."""


def blackhole(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if not AWAY_AT <= stage.now < BACK_AT:
            return None
        await asyncio.sleep(BLACKHOLE_S)
        return Unreachable("connect time-out")

    stage.fault = fault


def empty_500s(stage: Stage) -> None:
    """Envoy is there, its endpoint picker is not: what runs goes on."""

    async def fault(request: Request) -> Outcome | None:
        if not AWAY_AT <= stage.now < BACK_AT:
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return classify(500, {}, b"", 0.0)

    stage.fault = fault


def at_once(stage: Stage, since: float, until: float) -> int:
    """The most tries under way at one moment, of those that began in that time."""
    tries = stage.sent(since, until)
    return max((sum(o.began_at <= t.began_at < o.ended_at for o in tries) for t in tries), default=0)


KINDS = {"blackhole": blackhole, "500": empty_500s}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    ("kind", "outages"), [("refused", [(AWAY_AT, BACK_AT)]), ("blackhole", []), ("500", [])]
)
@scenario()
async def test_gateway_away_for_a_minute_burns_nothing(
    stage: Stage, replicas: int, kind: str, outages: list[tuple[float, float]]
) -> None:
    if kind in KINDS:
        KINDS[kind](stage)
    await stage.submit(3000)
    await asyncio.sleep(AWAY_AT + 5)
    assert stage.reasons() == {Reason.GATEWAY_UNREACHABLE}
    await asyncio.sleep(BACK_AT - stage.now)
    assert set(stage.statuses()) == {200}, "no terminal result"
    counted = [t for t in stage.tries if isinstance(t.outcome, Failed)]
    burnt = len(counted) if kind != "500" else (await stage.store.counts()).delayed
    print(f"{burnt} attempts burnt, {len(stage.sent(AWAY_AT + 5, BACK_AT))} probes in 55 s")
    assert burnt <= 2, "attempts before it was recognised"
    assert at_once(stage, AWAY_AT + 3, BACK_AT) == 1, "one probe at a time over all replicas"
    probes = len(stage.sent(AWAY_AT + 5, BACK_AT))
    assert 20 <= probes <= 60 * replicas, "about one in a second for each replica"
    resumed_s = await stage.until(lambda: stage.in_flight > 5, 3.0, "work to resume")
    print(f"resumed {resumed_s:.2f} s after its return")
    await asyncio.sleep(5)
    assert stage.in_flight >= stage.setting.most - 2
    assert stage.peak <= stage.setting.most + 1
    assert set(stage.statuses()) == {200}


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(outages=[(5.0, 8.0)])
async def test_probe_that_stays_connected_for_two_seconds_reopens(stage: Stage, replicas: int) -> None:
    """The first request after the outage takes 20 s: nobody waits for its answer."""
    slow: list[str] = []

    async def fault(request: Request) -> Outcome | None:
        if stage.now < 8.0:
            return None
        if not slow:
            slow.append(request.id)
        if request.id != slow[0]:
            return None
        stage.held_open[request.id] = stage.now
        await asyncio.sleep(20)
        return Delivered(200, b"late")

    stage.fault = fault
    await stage.submit(2000)
    await asyncio.sleep(8.0 - stage.now)
    await stage.until(lambda: slow, 2.5, "a probe")
    probed_at = stage.now
    await asyncio.sleep(1.9)
    assert len(stage.sent(probed_at)) <= 1
    await stage.until(lambda: len(stage.sent(probed_at)) > 10, 1.5, "to reopen after 2 s connected")
    await asyncio.sleep(25)
    assert set(stage.statuses()) == {200}


@scenario()
async def test_request_that_breaks_its_connection_stops_nobody_but_itself(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("breaker"):
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return Failed("the connection was reset before an answer")

    stage.fault = fault
    await stage.submit(1, "breaker")
    await stage.submit(600)
    await stage.until(lambda: stage.answered >= 600, 30)
    assert stage.statuses() == {200: 600}
    assert stage.peak <= stage.setting.most + 1
    assert not [t for t in stage.tries if isinstance(t.outcome, Unreachable)]
    await stage.until_answered(400)
    assert len([t for t in stage.tries if t.id.startswith("breaker")]) == 8, "retry.max_attempts"
    assert stage.statuses() == {200: 600, "RETRIES_EXHAUSTED": 1}
    assert (await stage.store.counts()).dead == 1
