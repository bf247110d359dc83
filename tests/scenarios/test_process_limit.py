"""The limit holds at the gateway and is used in full, with real processes, as counted at the gateway."""

from __future__ import annotations

import time

import pytest

from tests.scenarios.processes import Stage, assert_stays_true
from tests.support import wait_until_sync

SLOTS = 32
LIMIT = 30
"""floor(32 × (1 − 0.05))"""
FILL_TIMEOUT_S = 20.0
"""Time until the limit is reached for the first time. A busy machine needs most of it to start Python."""
MAX_WINDOWS = 3
"""Number of measurements, of which one must be good enough, since a busy machine distorts means."""

short_and_long = pytest.mark.parametrize(
    "rounds", [1, pytest.param(10, marks=pytest.mark.long)], ids=["short", "long"]
)


@pytest.mark.parametrize("interval_s", [1.0, 5.0])
@short_and_long
def test_in_flight_never_exceeds_the_capacity_less_the_reserve(
    stage: Stage, interval_s: float, rounds: int
) -> None:
    world = stage.world(slots=SLOTS, seconds=0.5)
    stage.producer.submit(6000)
    dispatcher = stage.dispatcher(stage.settings(world, signals={"interval_s": interval_s}))
    wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the idle capacity to be used")
    assert_stays_true(lambda: world.in_flight() <= LIMIT + 1, 1.2 * interval_s * rounds + 2)
    observed = world.observed()["gateway"]
    assert observed["batch"]["peak"] <= LIMIT + 1
    assert observed["answers"].keys() == {"200"}
    assert dispatcher.status()["limit"] == LIMIT


@pytest.mark.long
def test_idle_capacity_is_used_whatever_the_transit_time(stage: Stage) -> None:
    """The short form runs in virtual time (test_virtual_limit).

    The gateway counts a request in flight from arrival to answer, including the transit to the pool and back.
    The dispatcher cannot avoid that a slot of the pool is empty while its answer and the next request are in
    transit: with 30 slots, requests of 1 s and a transit time of 20 ms at most 30 / 1.04 = 28.8 requests run.
    At least 0.97 of that must be reached.
    """
    world = stage.world(slots=SLOTS, seconds=1.0)
    stage.producer.submit(6000)
    stage.dispatcher(stage.settings(world))
    wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the idle capacity to be used")
    for path_s in (0.003, 0.008, 0.020):
        world.control(path_s=path_s)
        assert_stays_true(
            lambda: world.in_flight() <= LIMIT + 1,
            1.2,
            what="the limit to hold while the transit time changes",
        )
        max_in_pool = LIMIT / (1 + 2 * path_s)
        for window in range(MAX_WINDOWS):
            observed = world.observe_for(30.0)
            at_gateway, in_pool = observed["gateway"]["batch"], observed["pool"]["running"]["mean"]
            print(f"{path_s * 1000:.0f} ms, {window}: gateway {at_gateway}, pool {in_pool:.2f}")
            assert at_gateway["peak"] <= LIMIT + 1
            if at_gateway["mean"] >= 0.97 * LIMIT and in_pool >= 0.97 * max_in_pool:
                break
            message = (
                f"capacity is idle with a transit time of {path_s} s: {at_gateway}, {in_pool:.2f} in the pool"
            )
            assert window + 1 < MAX_WINDOWS, message


@short_and_long
def test_three_replicas_share_one_limit_though_one_is_killed(stage: Stage, rounds: int) -> None:
    """Requests of the killed replica leave the gateway at once, its leases when another replica notices."""
    world = stage.world(slots=SLOTS, seconds=0.5)
    producer = stage.producer
    settings = stage.settings(world, queue={"lease_s": 3})
    replicas = [stage.dispatcher(settings) for _ in range(3)]

    def all_run_requests() -> bool:
        """Submit few requests at a time until all replicas run some.

        A replica that finishes a request claims the next one, so the first replica at a full queue would get
        all.
        """
        producer.submit(2)
        return all(each.status()["running"] for each in replicas)

    wait_until_sync(all_run_requests, FILL_TIMEOUT_S, what="all replicas to run requests", every_s=0.05)
    producer.submit(6000)
    for _ in range(rounds):
        wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the idle capacity to be used")
        running = {id(each): each.status()["running"] for each in replicas}
        victim = max(replicas, key=lambda each: running[id(each)])
        victim.kill()
        killed_at = time.monotonic()
        wait_until_sync(
            lambda: not world.is_filled(LIMIT), 5, what="the requests of the killed replica to leave"
        )
        victim.start()
        wait_until_sync(lambda: world.is_filled(LIMIT), 15, what="the idle capacity to be used again")
        print(f"{list(running.values())} full again {time.monotonic() - killed_at:.1f} s after the kill")
    assert_stays_true(lambda: world.in_flight() <= LIMIT + 1, 2.0)
    producer.client.delete(producer.names.queue)  # the remaining requests are not needed
    wait_until_sync(lambda: not any(producer.count_requests().values()), 10, what="every request to end")
    observed = world.observed()["gateway"]
    assert observed["batch"]["peak"] <= LIMIT + 1
    producer.collect()
    assert producer.count_results().keys() == {"200"}
    assert not producer.find_duplicates()
    assert observed["ids"]["distinct"] == len(producer.results), "every request that was sent has its result"


@short_and_long
def test_batch_requests_make_room_for_returning_realtime_requests(stage: Stage, rounds: int) -> None:
    """The pool never has more requests than its capacity plus those that arrived since the last reading."""
    step = 20
    world = stage.world(slots=SLOTS, seconds=0.5, realtime_seconds=0.5)
    stage.producer.submit(6000)
    dispatcher = stage.dispatcher(stage.settings(world))
    for _ in range(rounds):
        wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the idle capacity to be used")
        world.control(restart=True)
        world.control(realtime=step)
        # This takes a reading, the transit time until the reading counts, and the end of running requests.
        dispatcher.wait_for(limit=LIMIT - step)
        wait_until_sync(
            lambda: world.observed()["pool"]["batch"]["now"] <= LIMIT - step,
            5,
            what="batch requests to make room",
        )
        assert world.control(restart=True)["pool"]["all"]["peak"] <= SLOTS + step
        assert_stays_true(lambda: world.in_flight() <= LIMIT - step + 1, 2.0)
        settled = world.control(realtime=0)["pool"]
        assert settled["all"]["peak"] <= SLOTS
        # The mean is tested in virtual time (test_virtual_limit), where other load cannot distort it.
        assert settled["batch"]["peak"] >= LIMIT - step, "the capacity that realtime leaves is used"
    wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the capacity to be used again")
    assert world.observed()["gateway"]["batch"]["peak"] <= LIMIT + 1
