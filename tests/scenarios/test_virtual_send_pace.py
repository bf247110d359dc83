"""Requests that start together are spread over the endpoints of a picker that knows them by its last
scrape."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scenarios.virtual_stage import Stage, run_scenario, scenario

FIRST_BURSTS = ((0.01, 6), (0.06, 5), (0.11, 3))
"""Realtime requests that arrive together within one scrape of the picker, which all go to one server."""
UNEVEN = [(at, 600.0) for at, count in FIRST_BURSTS for _ in range(count)]
SLOTS = {"slots": 48, "pods": 3, "scorer_scrape_s": 0.05, "realtime": UNEVEN, "work_s": 5.0}


async def watch_spread(stage: Stage, seconds: float) -> tuple[int, list[int]]:
    """Return the largest number of requests that waited in the next seconds, and the load of each server."""
    most_waiting = 0
    for _ in range(round(seconds / 0.01)):
        await asyncio.sleep(0.01)
        stage.transport.advance_world()
        most_waiting = max(most_waiting, stage.world.observe_pool().waiting)
    return most_waiting, stage.world.pod_loads


async def check_spread(stage: Stage, seconds: float = 2.0) -> None:
    most_waiting, loads = await watch_spread(stage, seconds)
    assert most_waiting == 0, loads
    even = sum(loads) / len(loads)
    assert max(abs(load - even) for load in loads) <= 2, loads
    assert [replica.limiter.capacity_estimate.ceiling for replica in stage.alive] == [None] * len(stage.alive)


@scenario(**SLOTS)
async def test_requests_that_arrive_together_are_spread_over_the_servers(stage: Stage) -> None:
    await asyncio.sleep(1.5)
    stage.transport.advance_world()
    assert sorted(stage.world.pod_loads) == [3, 5, 6], "the test proves nothing otherwise"
    await stage.submit(28)
    await check_spread(stage)
    assert sum(stage.world.pod_loads) == 42


@scenario(**SLOTS)
async def test_requests_that_waited_for_the_end_of_a_pause_are_spread(stage: Stage) -> None:
    await stage.store.pause("operator", "maintenance")
    await stage.submit(28)
    await asyncio.sleep(3.5)
    await stage.store.resume()
    await check_spread(stage)
    assert sum(stage.world.pod_loads) == 42


@scenario(**SLOTS)
async def test_requests_are_spread_after_a_restart(stage: Stage) -> None:
    stage.kill(0)
    await stage.submit(28)
    await asyncio.sleep(3.5)
    stage.start(0)
    await check_spread(stage, 3.0)
    assert sum(stage.world.pod_loads) == 42


@scenario(**SLOTS, replicas=2)
async def test_requests_of_two_dispatchers_are_spread(stage: Stage) -> None:
    await asyncio.sleep(1.7)
    await stage.submit(28)
    await check_spread(stage)
    assert sum(stage.world.pod_loads) == 42


@scenario(**{**SLOTS, "work_s": 2.0})
async def test_requests_that_end_together_are_replaced_without_a_rush(stage: Stage) -> None:
    await asyncio.sleep(1.5)
    await stage.submit(300)
    most_waiting, _ = await watch_spread(stage, 20.0)
    assert most_waiting <= 2


def count_answers(**setting: Any) -> int:
    """Return the number of requests that a full pool answers in 3 s, after 4 s."""
    counts: list[int] = []

    async def fill_pool(stage: Stage) -> None:
        await stage.submit(round(9 * stage.setting.slots / stage.setting.work_s))
        await asyncio.sleep(4.0)
        before = stage.answered_count
        await asyncio.sleep(3.0)
        counts.append(stage.answered_count - before)

    run_scenario(fill_pool, scrape_s=0.5, **setting)
    return counts[0]


@pytest.mark.parametrize(("slots", "pods", "work_s"), [(48, 3, 0.05), (48, 3, 1.0), (1000, 250, 1.0)])
def test_pace_does_not_slow_down_a_full_pool(slots: int, pods: int, work_s: float) -> None:
    unpaced = count_answers(slots=slots, work_s=work_s)
    assert count_answers(slots=slots, work_s=work_s, pods=pods) >= 0.99 * unpaced
