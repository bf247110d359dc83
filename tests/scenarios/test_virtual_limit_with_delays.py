"""The limit stays within the idle capacity that readings prove, also if event loop, readings or queue calls
are late.

Realtime requests take 20 of 32 slots, so that batch requests may take 10. A reading does not show whose
requests it counts. If a batch request were wrongly assumed to be in a reading after it has left the pool, one
request too many would be sent.
"""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

EXPECTED_LIMIT = 10
DURATION_S = 90.0
"""Long enough for leases of a killed dispatcher to expire, since slow calls make sweeps rare."""
DELAYS = [0.005, 0.05, 0.2, 0.5, 2.0]
room_for_ten = scenario(realtime=[(0.0, 1e6)] * 20)


async def measure_peak_in_pool(stage: Stage) -> int:
    """Submit more requests than fit, and kill and restart a dispatcher halfway.

    Return the largest number of batch requests in the pool at once.
    """
    await stage.submit(3000)
    end_at, kill_at, peak = stage.now + DURATION_S, stage.now + DURATION_S / 2, 0
    while stage.now < end_at:
        await asyncio.sleep(0.02)
        if stage.now >= kill_at:
            kill_at = end_at + 1
            stage.kill(0)
            stage.start(0)
        peak = max(peak, stage.in_flight)
    return peak


@pytest.mark.parametrize("lag_s", DELAYS)
@room_for_ten
async def test_late_readings_do_not_raise_the_limit(stage: Stage, lag_s: float) -> None:
    assert await measure_peak_in_pool(stage) == EXPECTED_LIMIT


@pytest.mark.parametrize(("answer_s", "loop_delay_s"), [(delay_s, delay_s) for delay_s in DELAYS])
@room_for_ten
async def test_late_answers_and_a_late_event_loop_do_not_raise_the_limit(
    stage: Stage, answer_s: float, loop_delay_s: float
) -> None:
    assert await measure_peak_in_pool(stage) == EXPECTED_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("call_s", DELAYS)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@room_for_ten
async def test_slow_queue_calls_do_not_raise_the_limit(stage: Stage, replicas: int, call_s: float) -> None:
    assert await measure_peak_in_pool(stage) == EXPECTED_LIMIT


def get_units(request: Request) -> int:
    return 4 if request.id.startswith("four") else 1


@scenario(realtime=[(0.0, 1e6)] * 20, weigh_request=get_units)
async def test_calls_of_several_items_do_not_raise_the_limit_of_a_pool_that_counts_calls(
    stage: Stage,
) -> None:
    """Calls of four items are followed by single requests. The readings count each call once."""
    await stage.submit(400, "four")
    await asyncio.sleep(15)
    assert stage.in_flight > 0
    await stage.submit(3000, deadline_s=1e5)  # an earlier deadline, so they are claimed first
    end_at, peak = stage.now + DURATION_S, 0
    while stage.now < end_at:
        await asyncio.sleep(0.02)
        peak = max(peak, stage.in_flight)
    assert peak == EXPECTED_LIMIT


@scenario(realtime=[(0.0, 1e6)] * 20, weigh_request=get_units)
async def test_realtime_requests_are_counted_correctly_beside_calls_of_several_items(stage: Stage) -> None:
    await stage.submit(400, "four")
    await asyncio.sleep(20)
    limiter = stage.alive[0].limiter
    assert limiter.in_flight > stage.in_flight
    assert limiter.realtime_requests == (20.0, 0.0)
    units, calls = limiter.count_units_as_calls(stage.now) or (0, 0)
    assert (units, calls) == (4 * stage.in_flight, stage.in_flight)
