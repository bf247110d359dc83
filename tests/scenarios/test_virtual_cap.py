"""The cap: what is in flight never passes what a reading proved, whoever dies and whatever the path adds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.core.limit.load_ledger import DELTA_S
from tests.scenarios.virtual_stage import Stage, perform, scenario

SCRAPE_S = pytest.mark.parametrize("scrape_s", [1.0, 5.0])
REPLICAS = pytest.mark.parametrize("replicas", [1, 3])


@SCRAPE_S
@REPLICAS
@pytest.mark.parametrize("way_s", [0.003, 0.008, DELTA_S])
@scenario()
async def test_cap_holds_and_is_used_whatever_the_path_adds(
    stage: Stage, replicas: int, way_s: float, scrape_s: float
) -> None:
    await stage.submit(2000)
    await asyncio.sleep(5 * scrape_s)
    mean = await stage.mean_over(20)
    assert stage.peak <= stage.setting.max_limit + 1
    # Requests take 0.97 s in a pool so full. A slot is empty while an answer travels back and the next
    # request comes, and for 2 ms more where answers are gathered: with 20 ms each way that alone is 4 %.
    busy = 0.97 / (0.97 + 2 * way_s + 0.002)
    assert mean >= min(0.97, 0.985 * busy) * stage.setting.max_limit


@SCRAPE_S
@scenario(replicas=3, lease_s=10.0)
async def test_killed_and_restarted_replica_never_lifts_the_peak(stage: Stage, scrape_s: float) -> None:
    await stage.submit(3000)
    await asyncio.sleep(10)
    before = stage.in_flight
    busiest = max(range(3), key=lambda i: stage.alive[i].dispatcher.running_count)
    stage.kill(busiest)
    await asyncio.sleep(0.001)
    assert stage.in_flight < before, "its requests leave the gateway at once"
    await asyncio.sleep(3)
    stage.start(busiest)
    await asyncio.sleep(2 * scrape_s + 15)  # its leases were taken back meanwhile
    assert stage.peak <= stage.setting.max_limit + 1
    mean = await stage.mean_over(10)
    assert mean >= 0.95 * stage.setting.max_limit
    assert stage.peak <= stage.setting.max_limit + 1


REALTIME_AT, REALTIME_S = 20.0, 25.0


@SCRAPE_S
@REPLICAS
@scenario(realtime=[(REALTIME_AT, REALTIME_S / 2)] * 20)
async def test_realtime_that_comes_is_given_way_to_and_what_it_leaves_is_taken(
    stage: Stage, replicas: int, scrape_s: float
) -> None:
    """0 → 20 → 0. It comes all at once, so nobody can know before the next reading."""
    await stage.submit(5000)
    await asyncio.sleep(REALTIME_AT - 0.5)
    stage.restart_peak()
    await asyncio.sleep(0.6 + 2 * scrape_s + 2)
    assert stage.peak <= stage.setting.max_limit + 1 + 20
    stage.restart_peak()
    state = stage.world.observe_pool()
    assert state.realtime_running == 20
    while_there = await stage.mean_over(8)
    assert stage.peak <= stage.setting.max_limit + 1
    assert while_there >= 0.93 * stage.setting.max_limit
    await stage.until(lambda: stage.world.observe_pool().realtime_running == 0, 40)
    back_s = await stage.until(lambda: stage.in_flight >= stage.setting.max_limit - 1, 5 * scrape_s + 1)
    print(f"the room is used again {back_s:.2f} s after realtime left")
    stage.restart_peak()
    mean = await stage.mean_over(10)
    assert stage.peak <= stage.setting.max_limit + 1
    assert mean >= 0.95 * stage.setting.max_limit


@SCRAPE_S
@REPLICAS
@scenario()
async def test_changed_reserve_holds_at_once_and_is_used_to_the_full(
    stage: Stage, replicas: int, scrape_s: float
) -> None:
    await stage.submit(4000)
    await asyncio.sleep(2 * scrape_s + 3)
    thrifty = replace(stage.setting.policy, reserve=0.5)
    for each in stage.alive:
        each.limiter.set_policy(thrifty, stage.now)
        each.dispatcher.wake_up()
    await asyncio.sleep(scrape_s + 2)  # what was running ends
    stage.restart_peak()
    assert await stage.mean_over(10) >= 0.95 * 16
    assert stage.peak <= 16 + 1


steps = st.lists(
    st.tuples(st.sampled_from(["kill", "start", "wait", "submit"]), st.floats(0.05, 4.0)),
    min_size=3,
    max_size=15,
)


@settings(max_examples=25)
@given(steps=steps, scrape_s=st.sampled_from([0.7, 1.0, 5.0]), way_s=st.floats(0.0, DELTA_S))
def test_no_order_of_deaths_and_births_lifts_the_peak_or_loses_a_request(
    steps: list[tuple[str, float]], scrape_s: float, way_s: float
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.submit(100)
        for which, (step, wait_s) in enumerate(steps):
            dead = [i for i, replica in enumerate(stage.replicas) if replica is None]
            alive = [i for i, replica in enumerate(stage.replicas) if replica is not None]
            match step:
                case "kill" if alive:
                    stage.kill(alive[which % len(alive)])
                case "start" if dead:
                    stage.start(dead[which % len(dead)])
                case "submit":
                    await stage.submit(40)
                case _:
                    pass
            await asyncio.sleep(wait_s)
            assert stage.peak <= stage.setting.max_limit + 1
        for i, replica in enumerate(stage.replicas):
            if replica is None:
                stage.start(i)
        await stage.until_answered(200)
        assert stage.peak <= stage.setting.max_limit + 1
        assert set(stage.statuses()) == {200}, "nobody pays for the deaths of others"

    perform(scene, replicas=3, lease_s=3.0, scrape_s=scrape_s, way_s=way_s)
