"""What a claim passes over costs it nothing, however many wait in a lane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

import dispatcher.queue
from dispatcher.core.lanes import Lane
from dispatcher.core.located import OF_LANE
from tests.queue.made import NAMES, OwnerAndDesk, claim, queues, submission
from tests.queue.servers import Server

PASSED = 600
OTHERS = 20


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndDesk]:
    async with queues(any_server.url, "a") as (one,):
        yield one


async def commands(queue: OwnerAndDesk, client: redis.asyncio.Redis, room: int) -> tuple[int, list[float]]:
    """How many commands one claim runs on the server, those of its script too, and the scores it leased."""
    await client.config_resetstat()
    claimed = await claim(queue, 5, 5_000, lanes={Lane.SUSPECTS: room})
    stats = await client.info("commandstats")
    return sum(told["calls"] for told in stats.values()), [lease.score for lease in claimed.leases]


async def test_a_claim_costs_the_same_whatever_it_passes_over(
    queue: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission(f"others-{number}", 4_000_000_000) for number in range(OTHERS)])
    alone = [await commands(queue, client, room) for room in (0, 0)]
    await queue.submit([submission(f"passed-{number:04}", 3_000_000_000) for number in range(PASSED)])
    for _ in range(2):  # their owner dies twice
        held = []
        while leases := (await claim(queue, 256, 5_000, lanes={Lane.SUSPECTS: PASSED})).leases:
            held += [lease.entry for lease in leases if lease.score < 4_000_000_000]
        names = {f"{entry}:a": 0 for entry in held}
        assert await client.zadd(f"{NAMES.prefix}:leases", names, xx=True, ch=True) == PASSED
        while (await queue.sweep()).reclaimed:
            pass
    assert await client.zcard(f"{NAMES.prefix}:suspects") == PASSED
    await queue.submit([submission(f"more-{number}", 4_000_000_001) for number in range(OTHERS)])
    passing = [await commands(queue, client, room) for room in (0, 0)]
    assert [scores for _, scores in passing] == [[4_000_000_001.0] * 5] * 2
    # One count more: whether what waits in returned comes before what is pending.
    assert max(count for count, _ in passing) <= max(count for count, _ in alone) + 1
    _, scores = await commands(queue, client, 3)
    assert scores == [3_000_000_000.0] * 3 + [4_000_000_001.0] * 2


def test_a_lane_is_named_in_the_tables_alone() -> None:
    """Whatever else looks at lanes goes through these, so that a new lane needs no change there."""
    assert set(OF_LANE) == set(Lane)
    room = Path(dispatcher.queue.__file__).parent
    named = {
        file.name
        for file in (*room.rglob("*.lua"), *room.rglob("*.py"))
        for text in (file.read_text(),)
        if "SUSPECTS" in text or "Whereabouts.SUSPECT" in text or "'S'" in text
    }
    assert named == {"common.lua", "keys.py"}
