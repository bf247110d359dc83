"""From a submission to the request's arrival at the gateway, through a dispatcher with nothing else to do."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.client import BatchClient
from tests.benchmarks.stages import stage_in
from tests.scenarios.processes import NAMES, Stage, World
from tests.support import wait_until_sync

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

REQUESTS = 200
POLL_S = 0.1
LIMIT_S = 0.015
TRIES = 4
"""The best counts: what else runs on the machine is not what is measured."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with stage_in(tmp_path) as made:
        yield made


def quiet(stage: Stage) -> World:
    world = stage.world(slots=32, seconds=0.001)
    one = stage.dispatcher(stage.settings(world, queue={"poll_s": POLL_S, "lease_s": 30}))
    one.wait_for(reason="idle")
    return world


def arrivals(world: World, sent_at: dict[str, float]) -> list[float]:
    """From submission to arrival at the gateway, ascending. The clocks are one: CLOCK_MONOTONIC."""
    wait_until_sync(lambda: len(world.log()) >= len(sent_at), 10, what="all to arrive")
    return sorted(
        entry.arrived_at - sent_at.pop(entry.id) for entry in reversed(world.log()) if entry.id in sent_at
    )


def p99(times: list[float]) -> float:
    return times[int(len(times) * 0.99) - 1]


def scheduling() -> list[float]:
    """How late a short timer of this process is: what the machine alone adds, just now; ascending."""

    async def late() -> list[float]:
        times = []
        for _ in range(REQUESTS):
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            times.append(time.monotonic() - due)
        return sorted(times)

    return asyncio.run(late())


async def by_our_client(stage: Stage, requests: int) -> dict[str, float]:
    """One after the other, each submitted when the one before was answered."""
    sent_at = {}
    async with BatchClient(stage.server.url, queue=NAMES.queue, results=NAMES.result_list) as client:
        for _ in range(requests):
            before = time.monotonic()
            handle = await client.enqueue(b'{"prompt":"hi"}')
            sent_at[handle.id] = before
            await client.result(handle, timeout=20)
    return sent_at


async def by_zadd(stage: Stage, requests: int) -> dict[str, float]:
    """A foreign producer, which wakes nobody."""
    sent_at = {}
    for _ in range(requests):
        before = time.monotonic()
        (id_,) = stage.producer.submit(1)
        sent_at[id_] = before
        stage.producer.wait_for_all([id_], 20)
    return sent_at


@pytest.mark.parametrize(
    ("produce", "requests", "within_s"),
    [
        pytest.param(by_our_client, REQUESTS, LIMIT_S, id="our-client"),
        pytest.param(by_zadd, 40, POLL_S + LIMIT_S, id="foreign-producer"),
        pytest.param(by_our_client, 3_000, LIMIT_S, id="our-client-long", marks=pytest.mark.long),
        pytest.param(by_zadd, 600, POLL_S + LIMIT_S, id="foreign-producer-long", marks=pytest.mark.long),
    ],
)
def test_p99_from_submission_to_the_gateway(
    stage: Stage,
    produce: Callable[[Stage, int], Coroutine[Any, Any, dict[str, float]]],
    requests: int,
    within_s: float,
) -> None:
    """Processes pass the request on five times; a machine that wakes each late may be late five times. That
    is much at its p99 when it is busy, and little at its median: so the median is held to the same."""
    world = quiet(stage)
    asyncio.run(produce(stage, 5))
    p99s, medians = [], []
    for _ in range(TRIES):
        late = scheduling()
        times = arrivals(world, asyncio.run(produce(stage, requests)))
        p99s.append(p99(times) - 5 * p99(late))
        medians.append(statistics.median(times) - 5 * statistics.median(late))
        print(
            f"median {times[len(times) // 2] * 1000:.1f} ms, p99 {p99(times) * 1000:.1f} ms, "
            f"most {times[-1] * 1000:.1f} ms; the machine's own {statistics.median(late) * 1000:.1f}, "
            f"p99 {p99(late) * 1000:.1f} ms"
        )
        if p99(times) <= within_s:
            return
    assert min(p99s) <= within_s
    assert min(medians) <= within_s
