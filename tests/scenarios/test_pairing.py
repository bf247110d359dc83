"""Each caller has exactly its own answers, whatever is killed between it and the pool."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest

from dispatcher.client import BatchClient, Item
from tests.scenarios.processes import POOL, Stage, World

LEASE_S = 2.0


def body(caller: int, number: int, chance: random.Random) -> dict[str, Any]:
    """The stand-in answers with this very body, after any time: so in any order."""
    return {
        "caller": caller,
        "n": number,
        "sim": {"echo": True, "seconds": round(chance.uniform(0.05, 0.5), 3)},
    }


async def call(client: BatchClient, caller: int, count: int, how: str) -> list[dict[str, Any]]:
    """Submit so many in one of the ways that there are; the answers in the order of the requests."""
    chance = random.Random(caller)
    items = [Item(body(caller, n, chance), id=f"r-{n}", deadline="30m") for n in range(count)]
    if how == "gather":
        results = await asyncio.gather(
            *(client.submit(item.body, id=item.id, deadline=item.deadline) for item in items)
        )
    elif how == "handles":
        handles = await client.enqueue_many(items)
        results = [await client.result(handle) for handle in handles]
    else:
        by_id = {result.id: result async for result in client.stream(items, max_pending=100)}
        results = [by_id[item.id] for item in items]
    return [result.raise_for_status().json() for result in results]


async def kill_now_and_then(stage: Stage, world: World, until: asyncio.Event, every_s: float) -> int:
    """SIGKILL one after the other with requests in flight, and start it again; how often."""
    kills = 0
    while not until.is_set():
        if await asyncio.to_thread(world.in_flight) >= 16:
            one = stage.dispatchers[kills % len(stage.dispatchers)]
            await asyncio.to_thread(one.kill)
            await asyncio.to_thread(one.start)
            kills += 1
            wait_s = every_s
        else:
            wait_s = 0.02
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), wait_s)
    return kills


@pytest.mark.parametrize(
    ("callers", "requests", "replicas", "every_s"),
    [
        (4, 60, 2, 1.0),
        pytest.param(20, 1000, 3, 5.0, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
    ids=["short", "long"],
)
async def test_each_caller_has_exactly_its_own_answers(
    stage: Stage, callers: int, requests: int, replicas: int, every_s: float
) -> None:
    """Callers of one queue, who even give the same ids; replicas that are killed meanwhile."""
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
        killing = asyncio.create_task(kill_now_and_then(stage, world, done, every_s))
        try:
            found = await asyncio.gather(
                *(
                    call(client, number, requests, ("gather", "handles", "stream")[number % 3])
                    for number, client in enumerate(clients)
                )
            )
        finally:
            done.set()
            kills = await killing
        print(f"{callers} callers, {callers * requests} requests, {kills} SIGKILLs")
        assert kills
        for caller, answers in enumerate(found):
            assert [(answer["caller"], answer["n"]) for answer in answers] == [
                (caller, number) for number in range(requests)
            ]
        assert not any(client.ignored_count for client in clients)
