"""The limit stays within the room that readings prove, however late event loop, readings and queue calls are.

Realtime takes 20 of 32 slots, so that batch work may take 10. A reading does not show whose requests it
counted. If one of ours was wrongly taken to be in a reading after it had left the pool, one too many would be
sent.
"""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.core.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

ROOM = 10
SECONDS = 90.0
"""Slow calls make sweeps so rare that only the end of its leases shows that a dispatcher died."""
DELAYS = [0.005, 0.05, 0.2, 0.5, 2.0]
ROOM_FOR_TEN = scenario(realtime=[(0.0, 1e6)] * 20)


async def most_in_the_pool(stage: Stage) -> int:
    """Submit more work than fits, and let a dispatcher die halfway and come back. Return the largest number
    of our requests in the pool at once."""
    await stage.submit(3000)
    ends_at, dies_at, most = stage.now + SECONDS, stage.now + SECONDS / 2, 0
    while stage.now < ends_at:
        await asyncio.sleep(0.02)
        if stage.now >= dies_at:
            dies_at = ends_at + 1
            stage.kill(0)
            stage.start(0)
        most = max(most, stage.in_flight)
    return most


@pytest.mark.parametrize("lag_s", DELAYS)
@ROOM_FOR_TEN
async def test_late_readings_lift_no_limit(stage: Stage, lag_s: float) -> None:
    assert await most_in_the_pool(stage) == ROOM


@pytest.mark.parametrize(("answer_s", "late_s"), [(delay_s, delay_s) for delay_s in DELAYS])
@ROOM_FOR_TEN
async def test_answers_that_a_late_event_loop_sees_late_lift_no_limit(
    stage: Stage, answer_s: float, late_s: float
) -> None:
    assert await most_in_the_pool(stage) == ROOM


@pytest.mark.parametrize("call_s", DELAYS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@ROOM_FOR_TEN
async def test_slow_calls_to_the_queue_lift_no_limit(stage: Stage, replicas: int, call_s: float) -> None:
    assert await most_in_the_pool(stage) == ROOM


def of_four(request: Request) -> int:
    return 4 if request.id.startswith("four") else 1


@scenario(realtime=[(0.0, 1e6)] * 20, weigh_request=of_four)
async def test_calls_of_several_items_lift_no_limit_where_the_pool_counts_calls(stage: Stage) -> None:
    """Calls of four items are followed by single requests. The readings count each call once."""
    await stage.submit(400, "four")
    await asyncio.sleep(15)
    assert stage.in_flight > 0
    await stage.submit(3000, deadline_s=1e5)  # sooner, so they go first
    ends_at, most = stage.now + SECONDS, 0
    while stage.now < ends_at:
        await asyncio.sleep(0.02)
        most = max(most, stage.in_flight)
    assert most == ROOM


@scenario(realtime=[(0.0, 1e6)] * 20, weigh_request=of_four)
async def test_realtime_is_shown_beside_calls_of_several_items(stage: Stage) -> None:
    await stage.submit(400, "four")
    await asyncio.sleep(20)
    limiter = stage.alive[0].limiter
    assert limiter.in_flight > stage.in_flight
    assert limiter.realtime_requests == (20.0, 0.0)
    units, calls = limiter.count_units_as_calls(stage.now) or (0, 0)
    assert (units, calls) == (4 * stage.in_flight, stage.in_flight)
