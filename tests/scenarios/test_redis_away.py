"""Redis away for a while: what runs is answered in the end, once, and nobody exits over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.scenarios.processes import Dispatcher, Stage, World, hold
from tests.support import wait_until_sync

SLOTS = 32
LIMIT = 30
FULL_S = 20.0
BACK_S = 10.0
"""A try that hangs, a pause, and lease_s/3 in which nobody may be taken for dead."""


@contextmanager
def frozen(stage: Stage) -> Iterator[None]:
    """It answers nobody, and what was sent meanwhile is done when it wakes up."""
    with stage.server.frozen():
        yield


@contextmanager
def killed(stage: Stage) -> Iterator[None]:
    """Connections are refused; it comes back with its append-only file."""
    stage.server.kill()
    yield
    stage.server.start()


away = pytest.mark.parametrize("away", [frozen, killed], ids=["frozen", "killed"])
for_long = pytest.mark.parametrize(
    "away_s", [6.0, pytest.param(20.0, marks=pytest.mark.long)], ids=["short", "long"]
)


@away
@for_long
def test_running_requests_are_answered_once_after_its_return(
    own_stage: Stage, away: Callable[[Stage], AbstractContextManager[None]], away_s: float
) -> None:
    """Away for longer than a lease of 5 s: the leases have run out by then, and still are their owner's."""
    world = own_stage.world(slots=SLOTS, seconds=1.0)
    producer = own_stage.producer
    producer.submit(120)
    one = own_stage.dispatcher(own_stage.settings(world))
    wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the pool to be full")
    with away(own_stage):
        gone_at = time.monotonic()
        wait_until_sync(lambda: world.in_flight() == 0, 10, what="what runs to end")
        sent = len(world.log())
        noticed(one)
        until = gone_at + away_s
        hold(lambda: calm(one, world, sent), max(0.5, until - time.monotonic()), what="a calm outage")
    back_at = time.monotonic()
    answered = {entry.id for entry in world.log() if entry.status == 200}
    producer.wait_for_all(answered, BACK_S)
    print(f"{len(answered)} results {time.monotonic() - back_at:.1f} s after a return from {away_s:g} s")
    producer.wait_for_all(timeout_s=30)
    assert producer.answers() == {"200": 120}
    assert not producer.twice()
    assert not producer.unaccounted()
    assert world.observed()["gateway"]["ids"]["arrived_again"] == 0, "what was answered did not run again"
    wait_until_sync(lambda: one.claim_probe("/readyz")[0] == 200, 5, what="it to be ready again")
    assert [event["event"] for event in one.events() if event["event"].startswith("queue-")] == [
        "queue-unreachable",
        "queue-reachable",
    ]


def noticed(one: Dispatcher) -> None:
    wait_until_sync(lambda: one.status()["reason"] == "queue-unreachable", 10, what="it to notice")


def calm(one: Dispatcher, world: World, sent: int) -> bool:
    """It lives, says why it is not ready, and sends nothing."""
    live, ready = one.claim_probe("/livez"), one.claim_probe("/readyz")
    return (
        one.child.poll() is None
        and live == (200, "ok")
        and ready[0] == 503
        and ready[1].startswith("queue: Redis")
        and one.status()["queue_problem"] in ready[1]
        and len(world.log()) == sent
    )


def test_a_dispatcher_that_starts_before_its_redis_waits_for_it(own_stage: Stage) -> None:
    world = own_stage.world(slots=SLOTS, seconds=0.05)
    own_stage.producer.submit(50)
    own_stage.server.kill()
    one = own_stage.dispatcher(own_stage.settings(world))
    noticed(one)
    assert one.claim_probe("/livez")[0] == 200
    assert one.claim_probe("/readyz")[0] == 503
    own_stage.server.start()
    own_stage.producer.wait_for_all(timeout_s=15)
    assert own_stage.producer.answers() == {"200": 50}
    assert not own_stage.producer.twice()
