"""Wake-ups: milliseconds for producers who publish, poll_s for those who do not, none missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from dispatcher.ports import QueueUnavailableError, Release
from dispatcher.queue.redis.owner import RedisQueue
from tests.queue.known import assert_only_known_keys
from tests.queue.made import NAMES, OwnerAndDesk, claim, claim_one, member, queues, submission
from tests.queue.servers import Server, server
from tests.support import wait_until

NEVER_S = 30.0
"""A poll that cannot be what woke us within a test."""


@pytest.fixture
async def hearing(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndDesk]:
    async with queues(any_server.url, "a", poll_s=NEVER_S) as (one,):
        yield one
    await assert_only_known_keys(client, NAMES)


async def subscribed(queue: RedisQueue, client: redis.asyncio.Redis) -> asyncio.Task[None]:
    """Wait for work in a task that is known to listen."""
    waiting = asyncio.create_task(queue.wait_for_work())

    async def listens() -> bool:
        return (await client.pubsub_numsub(NAMES.wake_channel))[0][1] == 1

    await wait_until(listens)
    return waiting


async def woken_within(waiting: asyncio.Task[None], timeout_s: float = 5.0) -> None:
    await asyncio.wait_for(waiting, timeout_s)


async def test_our_submission_wakes_at_once(hearing: OwnerAndDesk, client: redis.asyncio.Redis) -> None:
    waiting = await subscribed(hearing, client)
    await hearing.submit([submission("r-1")])
    await woken_within(waiting)


@pytest.mark.parametrize("act", ["cancel", "pause", "resume", "requeue"])
async def test_what_operators_do_wakes_too(
    hearing: OwnerAndDesk, client: redis.asyncio.Redis, act: str
) -> None:
    """A cancel cuts what is in flight; a pause shows; a resume and a requeue bring work."""
    await client.set("request-active:r-1", "t", ex=60)  # as llm-d's producers leave it
    waiting = await subscribed(hearing, client)
    if act == "cancel":
        assert await hearing.cancel_request("r-1", "t")
    elif act == "pause":
        await hearing.pause("me", "why")
    elif act == "resume":
        await hearing.resume()
    else:
        await client.publish(NAMES.wake_channel, "any message will do")
    await woken_within(waiting)
    await hearing.resume()


async def test_foreign_producer_is_found_by_the_poll(any_server: Server, client: redis.asyncio.Redis) -> None:
    async with queues(any_server.url, "a", poll_s=0.05) as (queue,):
        waiting = await subscribed(queue, client)
        await client.zadd(NAMES.queue, {member("foreign"): 1})
        await woken_within(waiting)


async def test_work_that_was_there_before_the_subscription_is_seen_at_once(
    hearing: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    await client.zadd(NAMES.queue, {member("early"): 1})
    await woken_within(asyncio.create_task(hearing.wait_for_work()))


async def test_wake_up_between_two_waits_is_not_missed(
    hearing: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    waiting = await subscribed(hearing, client)
    await hearing.submit([submission("r-1")])
    await woken_within(waiting)
    lease = await claim_one(hearing)
    await hearing.submit([submission(f"r-{number}") for number in range(2, 30)])
    assert len((await claim(hearing)).leases) == 28
    await woken_within(asyncio.create_task(hearing.wait_for_work()))
    waiting = asyncio.create_task(hearing.wait_for_work())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done, "a burst of wake-ups is one"
    waiting.cancel()
    await hearing.release([Release(lease)])


async def test_cancelled_wait_loses_nothing(hearing: OwnerAndDesk, client: redis.asyncio.Redis) -> None:
    """The loop drops its wait whenever something else happens first."""
    for number in range(20):
        waiting = await subscribed(hearing, client)
        waiting.cancel()
        await asyncio.wait([waiting])
        await hearing.submit([submission(f"r-{number}")])
        await woken_within(asyncio.create_task(hearing.wait_for_work()))
        assert len((await claim(hearing)).leases) == 1


async def test_subscription_comes_back_after_a_disconnect_without_missing_work(
    hearing: OwnerAndDesk, client: redis.asyncio.Redis
) -> None:
    waiting = await subscribed(hearing, client)

    async def cut() -> bool:  # not, where it is just being made again because this machine stood still
        return int(await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")) == 1

    for number in range(3):
        await wait_until(cut)
        await client.zadd(NAMES.queue, {member(f"meanwhile-{number}"): 1})
        await woken_within(waiting)
        assert len((await claim(hearing)).leases) == 1
        waiting = await subscribed(hearing, client)
    await hearing.submit([submission("r-1")])
    await woken_within(waiting)


async def test_outage_is_told_and_the_next_wait_hears_again(tmp_path: Path) -> None:
    with server("redis", tmp_path) as running:
        async with queues(running.url, "a", poll_s=NEVER_S) as (queue,):
            with running.client() as blocking:
                async with redis.asyncio.Redis(port=running.port) as client:
                    waiting = await subscribed(queue, client)
                running.kill()
                with pytest.raises(QueueUnavailableError):
                    await woken_within(waiting, 20)
                running.start()
                blocking.zadd(NAMES.queue, {member("after"): 1})
                await woken_within(asyncio.create_task(heard_again(queue)), 20)


async def heard_again(queue: RedisQueue) -> None:
    while True:
        try:
            return await queue.wait_for_work()
        except QueueUnavailableError:
            continue


async def test_user_without_a_channel_falls_back_to_looking(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    await client.execute_command(
        *("ACL", "SETUSER", "mute", "on", ">word", "~*", "resetchannels", "+@all", "-@dangerous")
    )
    try:
        url = any_server.url.replace("redis://", "redis://mute:word@")
        async with queues(url, "a", poll_s=0.05) as (queue,):
            waiting = asyncio.create_task(queue.wait_for_work())
            await queue.submit([submission("r-1")])
            await woken_within(waiting)
    finally:
        await client.execute_command("ACL", "DELUSER", "mute")


async def test_one_subscription_per_process(hearing: OwnerAndDesk, client: redis.asyncio.Redis) -> None:
    for number in range(5):
        waiting = await subscribed(hearing, client)
        await hearing.submit([submission(f"r-{number}")])
        await woken_within(waiting)
    assert (await client.pubsub_numsub(NAMES.wake_channel))[0][1] == 1
