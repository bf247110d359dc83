"""Time from a submission to the arrival of the request at the gateway, with an idle dispatcher."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.client import BatchClient
from tests.benchmarks.process_costs import make_stage
from tests.scenarios.processes import NAMES, Stage, World
from tests.support import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(300)]

REQUESTS = 200
POLL_S = 0.1
LIMIT_S = 0.015
ROUNDS = 4
"""Number of measurements, of which the best one counts, since other processes disturb them."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with make_stage(tmp_path) as stage:
        yield stage


def start_idle_dispatcher(stage: Stage) -> World:
    world = stage.world(slots=32, seconds=0.001)
    dispatcher = stage.dispatcher(stage.settings(world, queue={"poll_s": POLL_S, "lease_s": 30}))
    dispatcher.wait_for(reason="idle")
    return world


def measure_latencies(world: World, sent_at: dict[str, float]) -> list[float]:
    """Return the sorted times from submission to arrival. All processes use CLOCK_MONOTONIC."""
    wait_until_sync(lambda: len(world.log()) >= len(sent_at), 10, what="all requests to arrive")
    return sorted(
        entry.arrived_at - sent_at.pop(entry.id) for entry in reversed(world.log()) if entry.id in sent_at
    )


def compute_p99(times: list[float]) -> float:
    return times[int(len(times) * 0.99) - 1]


def measure_timer_delays() -> list[float]:
    """Return the sorted delays of short timers in this process, which show the load of the machine."""

    async def measure() -> list[float]:
        times = []
        for _ in range(REQUESTS):
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            times.append(time.monotonic() - due)
        return sorted(times)

    return asyncio.run(measure())


async def submit_with_client(stage: Stage, requests: int) -> dict[str, float]:
    """Submit requests one after the other, each after the answer to the previous one."""
    sent_at = {}
    async with BatchClient(stage.server.url, queue=NAMES.queue, results=NAMES.result_list) as client:
        for _ in range(requests):
            submitted_at = time.monotonic()
            handle = await client.enqueue(b'{"prompt":"hi"}')
            sent_at[handle.id] = submitted_at
            await client.result(handle, timeout=20)
    return sent_at


async def submit_with_zadd(stage: Stage, requests: int) -> dict[str, float]:
    """Submit requests with ZADD, which wakes no dispatcher."""
    sent_at = {}
    for _ in range(requests):
        submitted_at = time.monotonic()
        (id_,) = stage.producer.submit(1)
        sent_at[id_] = submitted_at
        stage.producer.wait_for_all([id_], 20)
    return sent_at


@pytest.mark.parametrize(
    ("submit", "requests", "within_s"),
    [
        pytest.param(submit_with_client, REQUESTS, LIMIT_S, id="python-client"),
        pytest.param(submit_with_zadd, 40, POLL_S + LIMIT_S, id="zadd"),
        pytest.param(submit_with_client, 3_000, LIMIT_S, id="python-client-long", marks=pytest.mark.long),
        pytest.param(submit_with_zadd, 600, POLL_S + LIMIT_S, id="zadd-long", marks=pytest.mark.long),
    ],
)
def test_p99_of_the_time_from_submission_to_gateway(
    stage: Stage,
    submit: Callable[[Stage, int], Coroutine[Any, Any, dict[str, float]]],
    requests: int,
    within_s: float,
) -> None:
    """Five processes handle the request in turn, and a busy machine may wake each of them late.

    That adds much at the p99 and little at the median, so the median must satisfy the same bound.
    """
    world = start_idle_dispatcher(stage)
    asyncio.run(submit(stage, 5))
    p99s, medians = [], []
    for _ in range(ROUNDS):
        delays = measure_timer_delays()
        times = measure_latencies(world, asyncio.run(submit(stage, requests)))
        p99s.append(compute_p99(times) - 5 * compute_p99(delays))
        medians.append(statistics.median(times) - 5 * statistics.median(delays))
        print(
            f"median {times[len(times) // 2] * 1000:.1f} ms, p99 {compute_p99(times) * 1000:.1f} ms, "
            f"most {times[-1] * 1000:.1f} ms; timers of the machine {statistics.median(delays) * 1000:.1f}, "
            f"p99 {compute_p99(delays) * 1000:.1f} ms"
        )
        if compute_p99(times) <= within_s:
            return
    assert min(p99s) <= within_s
    assert min(medians) <= within_s
