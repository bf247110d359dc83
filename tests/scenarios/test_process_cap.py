"""The cap holds at the gateway, and what it leaves is used: real processes, judged by who counts there."""

from __future__ import annotations

import time

import pytest

from tests.scenarios.processes import Stage, hold
from tests.support import wait_until_sync

SLOTS = 32
LIMIT = 30
"""floor(32 × (1 − 0.05))"""
FULL_S = 20.0
"""Until the limit is reached first; a busy machine needs most of it to start Python."""
WINDOWS = 3
"""A busy machine spoils a mean: it is looked at so often, and once it must be right."""

short_and_long = pytest.mark.parametrize(
    "stretch", [1, pytest.param(10, marks=pytest.mark.long)], ids=["short", "long"]
)


@pytest.mark.parametrize("interval_s", [1.0, 5.0])
@short_and_long
def test_in_flight_never_passes_what_the_reserve_leaves(
    stage: Stage, interval_s: float, stretch: int
) -> None:
    world = stage.world(slots=SLOTS, seconds=0.5)
    stage.producer.submit(6000)
    one = stage.dispatcher(stage.settings(world, signals={"interval_s": interval_s}))
    wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the slack to be filled")
    hold(lambda: world.in_flight() <= LIMIT + 1, 1.2 * interval_s * stretch + 2)
    seen = world.observed()["gateway"]
    assert seen["batch"]["peak"] <= LIMIT + 1
    assert seen["answers"].keys() == {"200"}
    assert one.status()["limit"] == LIMIT


@pytest.mark.long
def test_the_slack_is_used_however_long_the_way(stage: Stage) -> None:
    """Its short form is in virtual time (test_virtual_cap).

    In flight counts at the gateway from arrival to answer, the way to the pool and back included.

    What the dispatcher cannot do anything about is the time in which a slot of the pool is empty while its
    answer and the next request travel: of 30 slots and requests of 1 s, a way of 20 ms leaves at most
    30 / 1.04 = 28.8 running. It is held to 0.97 of that, too.
    """
    world = stage.world(slots=SLOTS, seconds=1.0)
    stage.producer.submit(6000)
    stage.dispatcher(stage.settings(world))
    wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the slack to be filled")
    for path_s in (0.003, 0.008, 0.020):
        world.control(path_s=path_s)
        hold(lambda: world.in_flight() <= LIMIT + 1, 1.2, what="the cap, while the way changes")
        in_pool_most = LIMIT / (1 + 2 * path_s)
        for window in range(WINDOWS):
            seen = world.mean_in_flight(30.0)
            at_gateway, in_pool = seen["gateway"]["batch"], seen["pool"]["running"]["mean"]
            print(f"{path_s * 1000:.0f} ms, {window}: gateway {at_gateway}, pool {in_pool:.2f}")
            assert at_gateway["peak"] <= LIMIT + 1
            if at_gateway["mean"] >= 0.97 * LIMIT and in_pool >= 0.97 * in_pool_most:
                break
            idle = f"the slack lies idle with a way of {path_s} s: {at_gateway}, {in_pool:.2f} in the pool"
            assert window + 1 < WINDOWS, idle


@short_and_long
def test_three_replicas_share_one_limit_though_one_is_killed(stage: Stage, stretch: int) -> None:
    """The killed one's requests leave the gateway at once, its leases as soon as another sees it gone."""
    world = stage.world(slots=SLOTS, seconds=0.5)
    producer = stage.producer
    settings = stage.settings(world, queue={"lease_s": 3})
    replicas = [stage.dispatcher(settings) for _ in range(3)]

    def all_take_part() -> bool:
        """Each finished request is replaced by who ran it: who comes first to a full queue has it all. So
        the work comes in drops until everybody runs some."""
        producer.submit(2)
        return all(each.status()["running"] for each in replicas)

    wait_until_sync(all_take_part, FULL_S, what="all replicas to take part", every_s=0.05)
    producer.submit(6000)
    for _ in range(stretch):
        wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the slack to be filled")
        shares = {id(each): each.status()["running"] for each in replicas}
        victim = max(replicas, key=lambda each: shares[id(each)])
        victim.kill()
        died_at = time.monotonic()
        wait_until_sync(lambda: world.in_flight() < LIMIT, 5, what="the dead one's requests to leave")
        victim.start()
        wait_until_sync(lambda: world.in_flight() >= LIMIT, 15, what="the slack to be filled again")
        print(f"{list(shares.values())} full again {time.monotonic() - died_at:.1f} s after the kill")
    hold(lambda: world.in_flight() <= LIMIT + 1, 2.0)
    producer.client.delete(producer.names.queue)  # what is left would only take time
    wait_until_sync(lambda: not any(producer.count_requests().values()), 10, what="every request to end")
    seen = world.observed()["gateway"]
    assert seen["batch"]["peak"] <= LIMIT + 1
    producer.collect()
    assert producer.answers().keys() == {"200"}
    assert not producer.twice()
    assert seen["ids"]["distinct"] == len(producer.results), "every request that was sent has its result"


@short_and_long
def test_realtime_that_comes_back_is_made_room_for(stage: Stage, stretch: int) -> None:
    """The system never holds more than its capacity and what came within one reading: the step itself."""
    step = 20
    world = stage.world(slots=SLOTS, seconds=0.5, realtime_seconds=0.5)
    stage.producer.submit(6000)
    one = stage.dispatcher(stage.settings(world))
    for _ in range(stretch):
        wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the slack to be filled")
        world.control(restart=True)
        world.control(realtime=step)
        # A reading that shows it, δ until it counts, and the time of one request to leave.
        one.wait_for(limit=LIMIT - step)
        wait_until_sync(
            lambda: world.observed()["pool"]["batch"]["now"] <= LIMIT - step, 5, what="batch to make room"
        )
        assert world.control(restart=True)["pool"]["all"]["peak"] <= SLOTS + step
        hold(lambda: world.in_flight() <= LIMIT - step + 1, 2.0)
        settled = world.control(realtime=0)["pool"]
        assert settled["all"]["peak"] <= SLOTS
        # All of it. How steadily is held in virtual time (test_virtual_cap), where no neighbour spoils it.
        assert settled["batch"]["peak"] >= LIMIT - step, "what realtime leaves is used"
    wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the room to be used again")
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
