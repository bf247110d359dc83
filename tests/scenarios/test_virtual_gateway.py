"""A gateway that is away costs no request an attempt, is knocked at by one, and is used again at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from dispatcher.core.gateway.intermediary_errors import FREE_CHARGES
from dispatcher.core.gateway.outcome import (
    Delivered,
    Failed,
    Outcome,
    RetryPolicy,
    Unreachable,
    classify_answer,
)
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.request import Request
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
        return classify_answer(500, {}, b"", 0.0)

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
    print(f"{len(counted)} bare answers, {len(stage.sent(AWAY_AT + 5, BACK_AT))} probes in 55 s")
    assert (len(counted) > 0) == (kind == "500")
    burnt = [each.failed_attempts for each in stage.store.queue.entries.values()]
    assert not any(burnt), "no attempt burnt, not even before it was recognised"
    assert at_once(stage, AWAY_AT + 3, BACK_AT) == 1, "one probe at a time over all replicas"
    probes = len(stage.sent(AWAY_AT + 5, BACK_AT))
    most = 300 if kind == "500" else 60
    assert 20 <= probes <= most * replicas, "about one in a second for each replica; five where others wait"
    resumed_s = await stage.until(lambda: stage.in_flight > 5, 3.0, "work to resume")
    print(f"resumed {resumed_s:.2f} s after its return")
    await asyncio.sleep(5)
    assert stage.in_flight >= stage.setting.max_limit - 2
    assert stage.peak <= stage.setting.max_limit + 1
    assert set(stage.statuses()) == {200}


@pytest.mark.parametrize("dead_of_three", [1, 2])
@scenario()
async def test_dead_endpoint_among_others_is_no_gateway_that_is_away(
    stage: Stage, dead_of_three: int
) -> None:
    """Envoy answers 503 by itself for what the picker goes on sending there, within milliseconds."""
    rand = random.Random(dead_of_three)

    async def fault(request: Request) -> Outcome | None:
        if not 10.0 <= stage.now < 20.0 or rand.random() * 3 >= dead_of_three:
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return classify_answer(503, {}, b"upstream connect error or disconnect/reset before headers", 0.0)

    stage.fault = fault
    await stage.submit(3000)
    await asyncio.sleep(9.99)
    shut_s, before = 0.0, stage.answered
    while stage.now < 20.0:
        await asyncio.sleep(0.01)
        shut_s += 0.01 * (stage.reasons() != {Reason.FULL} and stage.in_flight < stage.setting.max_limit / 2)
    bounced = [t for t in stage.tries if isinstance(t.outcome, Failed)]
    print(f"{len(bounced)} bounced, {stage.answered - before} answered, half empty for {shut_s:.2f} s")
    assert len(bounced) > 50, "the world must bounce for this to show anything"
    assert shut_s <= 0.6
    assert stage.answered - before >= 0.9 * before
    await asyncio.sleep(20)
    assert set(stage.statuses()) == {200}
    assert {
        held.lease.failed_attempts for replica in stage.alive for held in replica.dispatcher._in_flight
    } == {0}


@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5))
async def test_request_that_is_always_answered_like_that_ends_by_itself(stage: Stage) -> None:
    """While others get through, its own answers are its own fault in the end."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("poison"):
            return None
        await asyncio.sleep(2 * stage.setting.way_s)
        return classify_answer(503, {}, b"upstream connect error", 0.0)

    stage.fault = fault
    await stage.submit(1, "poison")
    await stage.submit(1500)
    await stage.until(lambda: 503 in stage.statuses(), 20)
    assert stage.statuses()[200] < 1500, "there were others all the time"
    tries = len([t for t in stage.tries if t.id.startswith("poison")])
    assert FREE_CHARGES + 8 < tries <= 2 * (FREE_CHARGES + 8), "not every try is followed by another's answer"


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(outages=[(5.0, 8.0)])
async def test_probe_that_stays_connected_for_two_seconds_reopens(stage: Stage, replicas: int) -> None:
    """The first request after the outage takes 20 s: nobody waits for its answer, no other replica either."""
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
    everybody = {one.replica for one in stage.sent(0.0, 5.0)}
    assert len(everybody) == replicas
    await stage.until(lambda: {one.replica for one in stage.sent(probed_at + 0.1)} == everybody, 5, "all")
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
    assert stage.peak <= stage.setting.max_limit + 1
    assert not [t for t in stage.tries if isinstance(t.outcome, Unreachable)]
    await stage.until_answered(400)
    assert len([t for t in stage.tries if t.id.startswith("breaker")]) == 8, "retry.max_attempts"
    assert stage.statuses() == {200: 600, "RETRIES_EXHAUSTED": 1}
    assert (await stage.store.count_requests()).dead == 1
