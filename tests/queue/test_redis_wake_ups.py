"""Wake-ups take milliseconds for producers that publish and poll_s for others, and none is missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from dispatcher.queue.contract import Release
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.requests.submission import QueueUnavailableError
from tests.queue.factories import NAMES, OwnerAndAdmin, claim, claim_one, member, queues, submission
from tests.queue.key_checks import assert_only_known_keys
from tests.queue.servers import Server, server
from tests.support import wait_until

NEVER_S = 30.0
"""A poll that cannot be what woke us within a test."""


@pytest.fixture
async def is_subscribed(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a", poll_s=NEVER_S) as (one,):
        yield one
    await assert_only_known_keys(client, NAMES)


async def wait_in_task(queue: RedisQueue, client: redis.asyncio.Redis) -> asyncio.Task[None]:
    """Wait for work in a task that is known to be subscribed."""
    waiting = asyncio.create_task(queue.wait_for_work())

    async def has_subscribers() -> bool:
        return (await client.pubsub_numsub(NAMES.wake_channel))[0][1] == 1

    await wait_until(has_subscribers)
    return waiting


async def assert_woken_within(waiting: asyncio.Task[None], timeout_s: float = 5.0) -> None:
    await asyncio.wait_for(waiting, timeout_s)


async def test_submission_of_our_client_wakes_at_once(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    waiting = await wait_in_task(is_subscribed, client)
    await is_subscribed.submit([submission("r-1")])
    await assert_woken_within(waiting)


@pytest.mark.parametrize("act", ["cancel", "pause", "resume", "requeue"])
async def test_operator_commands_wake_owners(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis, act: str
) -> None:
    """A cancel ends requests in flight, a pause must be noticed, and a resume or a requeue brings work."""
    await client.set("request-active:r-1", "t", ex=60)  # as llm-d's producers write it
    waiting = await wait_in_task(is_subscribed, client)
    if act == "cancel":
        assert await is_subscribed.cancel_request("r-1", "t")
    elif act == "pause":
        await is_subscribed.pause("me", "why")
    elif act == "resume":
        await is_subscribed.resume()
    else:
        await client.publish(NAMES.wake_channel, "any message will do")
    await assert_woken_within(waiting)
    await is_subscribed.resume()


async def test_request_of_a_foreign_producer_is_found_by_polling(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    async with queues(any_server.url, "a", poll_s=0.05) as (queue,):
        waiting = await wait_in_task(queue, client)
        await client.zadd(NAMES.queue, {member("foreign"): 1})
        await assert_woken_within(waiting)


async def test_request_from_before_the_subscription_is_found_at_once(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await client.zadd(NAMES.queue, {member("early"): 1})
    await assert_woken_within(asyncio.create_task(is_subscribed.wait_for_work()))


async def test_wake_up_between_two_waits_is_not_missed(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    waiting = await wait_in_task(is_subscribed, client)
    await is_subscribed.submit([submission("r-1")])
    await assert_woken_within(waiting)
    lease = await claim_one(is_subscribed)
    await is_subscribed.submit([submission(f"r-{number}") for number in range(2, 30)])
    assert len((await claim(is_subscribed)).leases) == 28
    await assert_woken_within(asyncio.create_task(is_subscribed.wait_for_work()))
    waiting = asyncio.create_task(is_subscribed.wait_for_work())
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done, "a burst of wake-ups counts as one"
    waiting.cancel()
    await is_subscribed.release([Release(lease)])


async def test_cancelled_wait_loses_no_wake_up(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """The loop cancels its wait whenever something else happens first."""
    for number in range(20):
        waiting = await wait_in_task(is_subscribed, client)
        waiting.cancel()
        await asyncio.wait([waiting])
        await is_subscribed.submit([submission(f"r-{number}")])
        await assert_woken_within(asyncio.create_task(is_subscribed.wait_for_work()))
        assert len((await claim(is_subscribed)).leases) == 1


async def test_subscription_is_restored_after_a_disconnect_and_misses_nothing(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    waiting = await wait_in_task(is_subscribed, client)

    async def cut() -> bool:  # not if it is just being opened again because this machine was slow
        return int(await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")) == 1

    for number in range(3):
        await wait_until(cut)
        await client.zadd(NAMES.queue, {member(f"meanwhile-{number}"): 1})
        await assert_woken_within(waiting)
        assert len((await claim(is_subscribed)).leases) == 1
        waiting = await wait_in_task(is_subscribed, client)
    await is_subscribed.submit([submission("r-1")])
    await assert_woken_within(waiting)


async def test_outage_is_raised_and_the_next_wait_subscribes_again(tmp_path: Path) -> None:
    with server("redis", tmp_path) as running:
        async with queues(running.url, "a", poll_s=NEVER_S) as (queue,):
            with running.client() as blocking:
                async with redis.asyncio.Redis(port=running.port) as client:
                    waiting = await wait_in_task(queue, client)
                running.kill()
                with pytest.raises(QueueUnavailableError):
                    await assert_woken_within(waiting, 20)
                running.start()
                blocking.zadd(NAMES.queue, {member("after"): 1})
                await assert_woken_within(asyncio.create_task(is_subscribed_again(queue)), 20)


async def is_subscribed_again(queue: RedisQueue) -> None:
    while True:
        try:
            return await queue.wait_for_work()
        except QueueUnavailableError:
            continue


async def test_user_without_channel_permission_falls_back_to_polling(
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
            await assert_woken_within(waiting)
    finally:
        await client.execute_command("ACL", "DELUSER", "mute")


async def test_each_process_has_one_subscription(
    is_subscribed: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    for number in range(5):
        waiting = await wait_in_task(is_subscribed, client)
        await is_subscribed.submit([submission(f"r-{number}")])
        await assert_woken_within(waiting)
    assert (await client.pubsub_numsub(NAMES.wake_channel))[0][1] == 1
