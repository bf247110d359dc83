"""Progress of requests in Redis: what it costs, and values that the server or the connection cannot take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from dispatcher.core.requests.lanes import Lane
from dispatcher.ports import DeadLetter, Lease, QueueUnavailableError, Release, SettleStatus
from dispatcher.queue.keys import PROGRESS_KEYS
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, permit, queues, submission
from tests.queue.faulty_relay import Relay
from tests.queue.key_checks import assert_drained
from tests.queue.servers import Server
from tests.queue.test_lanes import count_commands
from tests.queue.test_redis_faults import dump
from tests.queue.test_redis_replies import MEGABYTE, relayed_server, small_value_server

__all__ = ["relayed_server", "small_value_server"]  # fixtures

STARTED = {Lane.STARTED: 1000}
FIELD = f"progress:{NAMES.queue}"


@pytest.fixture
async def queue(any_server: Server, client: object) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a", dead_max=1) as (one,):
        yield one


async def start_requests(queue: OwnerAndAdmin, *names: str, progress: bytes = b"part 1") -> None:
    """Submit these requests, claim them, and release them with progress."""
    await queue.submit([submission(name, 4_000_000_000) for name in names])
    leases = (await claim(queue, max_per_lane={})).leases
    assert len(leases) == len(names)
    releases = [Release(lease, progress=progress) for lease in leases]
    assert await queue.release(releases) == [SettleStatus.DONE] * len(names)


async def claim_started(queue: OwnerAndAdmin, max_count: int = 1000) -> list[Lease]:
    return list((await claim(queue, max_count, max_per_lane=STARTED)).leases)


async def run_requests(queue: OwnerAndAdmin, client: redis.asyncio.Redis) -> dict[str, int]:
    """Let three requests without progress run. Return the number of commands of each step."""
    await queue.submit([submission(f"plain-{number}", 3_000_000_000) for number in range(3)])
    leases: list[Lease] = []

    async def claim_plain(room: int) -> None:
        leases[:] = (await claim(queue, 3, max_per_lane={Lane.SUSPECTS: 1, Lane.STARTED: room})).leases
        assert [lease.score for lease in leases] == [3_000_000_000.0] * 3

    counts = {"claim": await count_commands(client, claim_plain(0))}
    counts["renew"] = await count_commands(client, queue.renew(leases))
    counts["release"] = await count_commands(client, queue.release([Release(each) for each in leases]))
    counts["claim again"] = await count_commands(client, claim_plain(0))
    counts["sweep"] = await count_commands(client, queue.sweep())
    counts["settle"] = await count_commands(client, queue.settle([answer(each) for each in leases]))
    return counts


async def test_no_step_touches_progress_without_requests_that_have_some(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await run_requests(queue, client)  # loads the scripts
    async with client.monitor() as monitor:
        await queue.submit([submission(f"r-{number}") for number in range(4)])
        leases = await claim_started(queue)
        await queue.renew(leases)
        await queue.release([Release(leases[0]), Release(leases[1], delay_s=60)])
        await queue.sweep()
        await queue.settle([answer(leases[2])])
        await queue.move_to_dead_letters([DeadLetter(answer(leases[3]), "why")])
        await claim_started(queue)
        await client.set("the-end", "", ex=60)
        touched = set()
        async with asyncio.timeout(10):
            async for event in monitor.listen():
                if "the-end" in event["command"]:
                    break
                # Commands of scripts only, because each call of a script names all keys.
                if event["client_type"] == "lua":
                    touched |= set(event["command"].split())
    assert f"{NAMES.queue_prefix}:entries" in touched
    assert not touched & {f"{NAMES.queue_prefix}:{suffix}" for suffix, _ in PROGRESS_KEYS.values()}


async def test_started_requests_cost_other_requests_next_to_nothing(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await run_requests(queue, client)  # loads the scripts
    alone = await run_requests(queue, client)
    await start_requests(queue, *(f"r-{number:03}" for number in range(250)))
    beside = await run_requests(queue, client)
    same = ("release", "settle")
    assert {step: beside[step] for step in same} == {step: alone[step] for step in same}
    # The types of two keys.
    assert all(beside[step] <= alone[step] + 2 for step in alone)
    for lease in await claim_started(queue):
        await queue.settle([answer(lease)])
    await queue.sweep()
    assert not await client.hexists(f"{NAMES.queue_prefix}:control", FIELD)
    assert await run_requests(queue, client) == alone
    await assert_drained(client, NAMES, NAMES.result_list)


async def test_dropped_dead_request_loses_its_progress(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await start_requests(queue, "r-1", "r-2")
    for lease in await claim_started(queue):
        await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    (kept,) = await queue.list_dead(9)
    assert await client.hkeys(NAMES.progress_key) == [b"%d" % kept.entry_id]


async def test_lost_progress_lets_the_request_start_again(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await start_requests(queue, "r-1")
    await client.delete(NAMES.progress_key)
    await queue.sweep()
    (lease,) = await claim_started(queue)
    assert lease.progress == b""
    assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]


@pytest.mark.parametrize("key", [suffix for suffix, _ in PROGRESS_KEYS.values()])
async def test_foreign_key_of_progress_stops_steps_before_their_first_write(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, key: str
) -> None:
    await start_requests(queue, "r-1", "r-2", "r-3")
    dead, running = await claim_started(queue, 2)
    await queue.move_to_dead_letters([DeadLetter(answer(dead), "why")])
    await queue.submit([submission("plain", 3_000_000_000)])
    (plain,) = (await claim(queue, max_per_lane={})).leases
    at = f"{NAMES.queue_prefix}:{key}"
    await client.rename(at, "aside")
    await client.set(at, "someone's")
    before = await dump(client)
    steps: list[Any] = [
        lambda: claim(queue, max_per_lane=STARTED),
        lambda: queue.release([Release(running)]),
        lambda: queue.release([Release(plain, progress=b"p")]),
        lambda: queue.sweep(),
        lambda: queue.requeue_dead([dead.entry_id], 4_000_000_000),
        lambda: queue.return_waiting_for_models(["m"]),
    ]
    for act in steps:
        with pytest.raises(QueueUnavailableError, match=f"{key} holds a string, not a"):
            await act()
    assert await dump(client) == before
    assert await queue.release([Release(plain)]) == [SettleStatus.DONE], "its request has no progress"
    assert await queue.settle([answer(running)]) == [SettleStatus.DONE]


async def test_progress_that_the_server_does_not_take_is_left_out(small_value_server: Server) -> None:
    with small_value_server.client() as blocking:
        blocking.flushall()
    async with queues(small_value_server.url, "a") as (queue,):
        await start_requests(queue, "r-1", "r-2", "r-3")
        first, second, third = await claim_started(queue)
        large = b"x" * (2 * MEGABYTE)
        releases = [
            Release(first, progress=b"small"),
            Release(second, progress=large, is_failed_attempt=True),
            Release(third, is_failed_attempt=True),
        ]
        assert await queue.release(releases) == [SettleStatus.DONE] * 3
        found = [(lease.progress, lease.failed_attempts) for lease in await claim_started(queue)]
        assert found == [(b"small", 0), (b"part 1", 1), (b"part 1", 1)]


async def test_large_progress_gets_a_longer_timeout(relayed_server: Relay) -> None:
    """The transfer takes 1.5 s, and the timeout of a call is 1 s."""
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        await queue.submit([submission("r-1")])
        (lease,) = await claim_started(queue)
        relayed_server.bytes_per_s = 1.3e6
        progress = b"x" * 2_000_000
        assert await queue.release([Release(lease, progress=progress)]) == [SettleStatus.DONE]
        (lease,) = await claim_started(queue)
        assert lease.progress == progress


async def test_request_whose_progress_cannot_be_transferred_starts_again(relayed_server: Relay) -> None:
    async with queues(relayed_server.url, "a", attempt_timeout_s=1.0) as (queue,):
        await start_requests(queue, "r-1", progress=b"x" * 1_100_000)
        relayed_server.mute = 65_536
        for _ in range(2):
            with pytest.raises(QueueUnavailableError, match="in time"):
                await queue.claim(10, "nonce", permit(), max_per_lane=STARTED)
        (lease,) = (await queue.claim(10, "nonce", permit(), max_per_lane=STARTED)).leases
        assert (lease.progress, b"r-1" in lease.member) == (b"", True)
        assert not queue._failed_transfers
