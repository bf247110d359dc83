"""Wake-ups: at once for producers that publish, within poll_s for others."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.queue.contract import DeadLetter
from dispatcher.requests.submission import Submission
from tests.conformance.worlds import NOW, World, answer, claim, member, waits


async def test_request_of_a_foreign_producer_is_found_by_polling(world: World) -> None:
    owner = world.owner()
    assert await waits(owner, 0.5)
    await world.zadd(1, b"by ZADD alone")
    async with asyncio.timeout(10):
        await owner.wait_for_work()
    assert len(await claim(owner)) == 1


async def test_wake_up_reaches_every_owner(world: World) -> None:
    owners = [world.owner(f"owner-{number}") for number in range(3)]
    for owner in owners:
        assert await waits(owner, 0.3)
    waiting = [asyncio.ensure_future(owner.wait_for_work()) for owner in owners]
    await world.queue_admin.submit([Submission(b"x", 1)])
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)


async def test_wake_up_between_two_waits_is_not_missed(world: World) -> None:
    owner = world.owner()
    assert await waits(owner, 0.3)
    await world.queue_admin.submit([Submission(b"x", 1)])
    await claim(world.owner("owner-2"))
    async with asyncio.timeout(10):
        await owner.wait_for_work()


async def test_submission_of_our_client_wakes_owners_without_a_poll(world: World) -> None:
    owner = world.owner(poll_s=600)
    assert await waits(owner, 0.3)
    for number in range(20):
        waiting = asyncio.ensure_future(owner.wait_for_work())
        await asyncio.sleep(0)
        await world.queue_admin.submit([Submission(b"%d" % number, 1)])
        async with asyncio.timeout(60):
            await waiting
        await claim(owner)


@pytest.mark.server
async def test_requeued_request_wakes_an_owner_without_a_poll(world: World) -> None:
    owner = world.owner(poll_s=600)
    await world.zadd(NOW - 5, member("r-1"))
    [lease] = await claim(owner)
    await owner.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    assert await waits(owner, 0.3)
    waiting = asyncio.ensure_future(owner.wait_for_work())
    await asyncio.sleep(0)
    assert await world.queue_admin.requeue_dead([lease.entry_id], NOW + 50_000) == 1
    async with asyncio.timeout(60):
        await waiting
