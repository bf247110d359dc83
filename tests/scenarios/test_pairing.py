"""Each caller gets the answers to its own requests although dispatchers are killed."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from dispatcher.client import BatchClient, Item
from tests.scenarios.processes import POOL, Stage, World

LEASE_S = 2.0


def make_body(caller: int, number: int, random_source: random.Random) -> dict[str, Any]:
    """Return a body that the stand-in echoes after a random time, so that answers come in any order."""
    return {
        "caller": caller,
        "n": number,
        "sim": {"echo": True, "seconds": round(random_source.uniform(0.05, 0.5), 3)},
    }


async def submit_all(client: BatchClient, caller: int, count: int, method: str) -> list[dict[str, Any]]:
    """Submit requests with one method of the client. Return the answers in the order of the requests."""
    random_source = random.Random(caller)
    items = [Item(make_body(caller, n, random_source), id=f"r-{n}", deadline="30m") for n in range(count)]
    if method == "gather":
        results = await asyncio.gather(
            *(client.submit(item.body, id=item.id, deadline=item.deadline) for item in items)
        )
    elif method == "handles":
        handles = await client.enqueue_many(items)
        results = [await client.result(handle) for handle in handles]
    else:
        by_id = {result.id: result async for result in client.stream(items, max_pending=100)}
        results = [by_id[item.id] for item in items]
    return [result.raise_for_status().json() for result in results]


async def kill_dispatchers(stage: Stage, world: World, done: asyncio.Event, interval_s: float) -> int:
    """Kill and restart one dispatcher after the other while requests are in flight.

    Return the number of kills.
    """
    kills = 0
    while not done.is_set():
        if await asyncio.to_thread(world.in_flight) >= 16:
            dispatcher = stage.dispatchers[kills % len(stage.dispatchers)]
            await asyncio.to_thread(dispatcher.kill)
            await asyncio.to_thread(dispatcher.start)
            kills += 1
            wait_s = interval_s
        else:
            wait_s = 0.02
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), wait_s)
    return kills


@pytest.mark.parametrize(
    ("callers", "requests", "replicas", "interval_s"),
    [
        (4, 60, 2, 1.0),
        pytest.param(20, 1000, 3, 5.0, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
    ids=["short", "long"],
)
async def test_each_caller_gets_exactly_its_own_answers(
    stage: Stage, callers: int, requests: int, replicas: int, interval_s: float
) -> None:
    """Callers share one queue and use the same request ids, and replicas are killed meanwhile."""
    world = stage.world(slots=64, seconds=0.1)
    settings = stage.settings(world, max_sys=64, queue={"lease_s": LEASE_S}, retry={"max_attempts": 20})
    for _ in range(replicas):
        await asyncio.to_thread(stage.dispatcher, settings)
    done = asyncio.Event()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                BatchClient(stage.server.url, pool=POOL, name=f"job-{number}" if number % 2 else "")
            )
            for number in range(callers)
        ]
        kill_task = asyncio.create_task(kill_dispatchers(stage, world, done, interval_s))
        try:
            answers_by_caller = await asyncio.gather(
                *(
                    submit_all(client, number, requests, ("gather", "handles", "stream")[number % 3])
                    for number, client in enumerate(clients)
                )
            )
        finally:
            done.set()
            kills = await kill_task
        print(f"{callers} callers, {callers * requests} requests, {kills} SIGKILLs")
        assert kills
        for caller, answers in enumerate(answers_by_caller):
            assert [(answer["caller"], answer["n"]) for answer in answers] == [
                (caller, number) for number in range(requests)
            ]
        assert not any(client.ignored_count for client in clients)
