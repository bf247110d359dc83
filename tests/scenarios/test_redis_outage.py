"""During an outage of Redis no dispatcher exits, and running requests are answered exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import wait_until_sync

SLOTS = 32
LIMIT = 30
FILL_TIMEOUT_S = 20.0
RESUME_TIMEOUT_S = 10.0
"""Time for a hanging attempt, a pause, and lease_s/3 in which no dispatcher may be presumed dead."""


@contextmanager
def freeze_redis(stage: Stage) -> Iterator[None]:
    """Freeze Redis. Commands sent meanwhile are executed when it continues."""
    with stage.server.frozen():
        yield


@contextmanager
def kill_redis(stage: Stage) -> Iterator[None]:
    """Kill Redis, and restart it with its append-only file."""
    stage.server.kill()
    yield
    stage.server.start()


outage = pytest.mark.parametrize("outage", [freeze_redis, kill_redis], ids=["frozen", "killed"])
short_and_long = pytest.mark.parametrize(
    "outage_s", [6.0, pytest.param(20.0, marks=pytest.mark.long)], ids=["short", "long"]
)


@outage
@short_and_long
def test_running_requests_are_answered_once_after_an_outage_of_redis(
    own_stage: Stage, outage: Callable[[Stage], AbstractContextManager[None]], outage_s: float
) -> None:
    """The outage is longer than a lease of 5 s. The expired leases still belong to their owner afterwards."""
    world = own_stage.world(slots=SLOTS, seconds=1.0)
    producer = own_stage.producer
    producer.submit(120)
    dispatcher = own_stage.dispatcher(own_stage.settings(world))
    wait_until_sync(lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the pool to be full")
    with outage(own_stage):
        lost_at = time.monotonic()
        wait_until_sync(lambda: world.in_flight() == 0, 10, what="running requests to end")
        sent_count = len(world.log())
        wait_until_noticed(dispatcher)
        end_at = max(lost_at + outage_s, time.monotonic() + 0.5)
        while time.monotonic() < end_at:
            assert_waits_for_redis(dispatcher, world, sent_count)
            time.sleep(0.02)
    restored_at = time.monotonic()
    answered = {entry.id for entry in world.log() if entry.status == 200}
    producer.wait_for_all(answered, RESUME_TIMEOUT_S)
    print(f"{len(answered)} results {time.monotonic() - restored_at:.1f} s after an outage of {outage_s:g} s")
    producer.wait_for_all(timeout_s=30)
    assert producer.count_results() == {"200": 120}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    assert world.observed()["gateway"]["ids"]["arrived_again"] == 0, "answered requests did not run again"
    wait_until_sync(
        lambda: dispatcher.get_probe("/readyz")[0] == 200, 5, what="the dispatcher to be ready again"
    )
    assert [event["event"] for event in dispatcher.events() if event["event"].startswith("queue-")] == [
        "queue-unreachable",
        "queue-reachable",
    ]


def wait_until_noticed(dispatcher: Dispatcher) -> None:
    wait_until_sync(
        lambda: dispatcher.status()["reason"] == "queue-unreachable", 10, what="the dispatcher to notice"
    )


def assert_waits_for_redis(dispatcher: Dispatcher, world: World, sent_count: int) -> None:
    """Assert that the dispatcher is alive, reports why it is not ready, and sends nothing."""
    assert dispatcher.child.poll() is None
    assert dispatcher.get_probe("/livez") == (200, "ok")
    code, why = dispatcher.get_probe("/readyz")
    assert code == 503
    assert why.startswith("queue: Redis")
    # Each failed call may change the sentence, so that of the status may be newer than that of the probe.
    assert dispatcher.status()["queue_problem"].startswith("Redis")
    assert len(world.log()) == sent_count


def test_dispatcher_that_starts_before_redis_waits_for_it(own_stage: Stage) -> None:
    world = own_stage.world(slots=SLOTS, seconds=0.05)
    own_stage.producer.submit(50)
    own_stage.server.kill()
    dispatcher = own_stage.dispatcher(own_stage.settings(world))
    wait_until_noticed(dispatcher)
    assert dispatcher.get_probe("/livez")[0] == 200
    assert dispatcher.get_probe("/readyz")[0] == 503
    own_stage.server.start()
    own_stage.producer.wait_for_all(timeout_s=15)
    assert own_stage.producer.count_results() == {"200": 50}
    assert not own_stage.producer.find_duplicates()
