"""Everything dies, and every request has one answer in the end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from dispatcher.ports import Permit, QueueUnavailableError, Settlement, SettleStatus
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from tests.chaos.bench import (
    Network,
    Owner,
    assert_each_answered_once,
    owners,
    requests,
    results_in,
)
from tests.chaos.worker import NAMES
from tests.queue.known import assert_drained
from tests.queue.servers import ENGINES, Server, sentinel_set, server
from tests.support import passed, wait_until

LASTING = ("--appendonly", "yes", "--appendfsync", "always")


@asynccontextmanager
async def looking_at(url: str) -> AsyncIterator[tuple[Any, RedisQueueAdmin]]:
    """A raw client and a desk, closed at the end."""
    desk = RedisQueueAdmin(connect(url), NAMES, attempt_timeout_s=5.0)
    client = connect(url)
    try:
        yield client, desk
    finally:
        await desk.aclose()
        await client.aclose()


async def everything_goes_wrong(
    running: Server, *, total: int, kills: int, redis_kills: int, cuts: int
) -> None:
    """Kill owners at random while they work, Redis now and then, and cut one owner off for a while."""
    lease_s = 1.5
    chance = random.Random(total)
    network = Network(running.port)
    async with network.up() as port, looking_at(running.url) as (client, desk):
        trio = [Owner(f"owner-{number}", running.url, lease_s) for number in range(2)]
        trio.append(Owner("owner-2", f"redis://127.0.0.1:{port}/0", lease_s))
        for owner in trio:
            owner.work_s = (0.02, 0.5)
        await desk.submit(requests(0, total))
        async with owners(*trio):
            redis_dies = set(chance.sample(range(kills), redis_kills))
            network_dies = set(chance.sample(range(kills), cuts))

            async def works(owner: Owner) -> None:
                """It holds work; however long it takes to start, the others leave it some."""

                async def fed() -> bool:
                    nonlocal total
                    if (await desk.count_requests()).pending < 50:
                        await desk.submit(requests(total, 100))
                        total += 100
                    return owner.working.is_set()

                await wait_until(fed, 60, what=f"{owner.name} works")

            for number in range(kills):
                if number in redis_dies:
                    await asyncio.to_thread(running.kill)
                    await asyncio.to_thread(running.start)
                if number in network_dies:
                    await works(trio[2])
                    with network.cut():
                        cut_at = time.monotonic()
                        await wait_until(passed(cut_at + 2 * lease_s), 60)
                victim = trio[chance.randrange(3)]
                await works(victim)
                strike_at = time.monotonic() + chance.uniform(0, 0.15)
                await wait_until(passed(strike_at), 60, every_s=0.005)
                await victim.kill()
                await victim.start()

            async def all_done() -> bool:
                counts = await desk.count_requests()
                return counts.pending + counts.leased + counts.delayed == 0

            await wait_until(all_done, 60 + total / 20, what="every request is finished", every_s=0.1)
        assert (await desk.count_requests()).dead == 0
        assert_each_answered_once(await results_in(client), total)
        await assert_drained(client, NAMES)


@pytest.mark.timeout(180)
async def test_every_request_is_answered_once_whatever_dies(tmp_path: Path) -> None:
    with server("redis", tmp_path, *LASTING) as running:
        await everything_goes_wrong(running, total=500, kills=20, redis_kills=2, cuts=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
async def test_every_request_is_answered_once_whatever_dies_at_length(tmp_path: Path, engine: str) -> None:
    with server(engine, tmp_path, *LASTING) as running:
        await everything_goes_wrong(running, total=5000, kills=200, redis_kills=10, cuts=10)


@pytest.mark.parametrize("engine", ENGINES)
async def test_owner_cut_off_for_longer_than_its_lease_writes_nothing_when_it_is_back(
    tmp_path: Path, engine: str
) -> None:
    lease_s = 0.6
    with server(engine, tmp_path) as running:
        network = Network(running.port)
        async with network.up() as port, looking_at(running.url) as (client, desk):
            await desk.submit(requests(0, 5))
            far = RedisQueue(
                connect(f"redis://127.0.0.1:{port}/0"), NAMES, "far", lease_s=lease_s, attempt_timeout_s=30
            )
            near = RedisQueue(connect(running.url), NAMES, "near", lease_s=lease_s)
            loop = asyncio.get_running_loop()
            held = (await far.claim(5, "far", Permit(5, loop.time(), 0))).leases
            assert len(held) == 5
            late = [Settlement(lease, b"too late", "") for lease in held]
            with network.cut():
                # On its way already: it arrives when the network is back, whoever holds the requests by then.
                writing = asyncio.create_task(far.settle(late))

                async def reclaimed() -> bool:
                    await near.sweep()
                    return (await near.count_requests()).pending == 5

                await wait_until(reclaimed, 30)
                again = (await near.claim(5, "near", Permit(5, loop.time(), 5))).leases
                assert [lease.entry_id for lease in again] == [lease.entry_id for lease in held]
            try:
                assert set(await writing) == {SettleStatus.LOST}
            except QueueUnavailableError:  # its connection had timed out: it asks again
                assert set(await far.settle(late)) == {SettleStatus.LOST}
            assert await results_in(client) == []
            assert set(await near.settle([Settlement(one, b"in time", "") for one in again])) == {
                SettleStatus.DONE
            }
            assert await results_in(client) == [b"in time"] * 5
            await assert_drained(client, NAMES)
            await far.aclose()
            await near.aclose()


@pytest.mark.serial
async def test_requests_of_a_killed_only_owner_run_again_within_its_lease_and_two_seconds(
    tmp_path: Path,
) -> None:
    lease_s = 6.0
    with server("redis", tmp_path) as running:
        async with looking_at(running.url) as (client, desk):
            await desk.submit(requests(0, 4))
            slow = Owner("first", running.url, lease_s, work_s=(600, 600))
            quick = Owner("second", running.url, lease_s, work_s=(0, 0))
            async with owners(slow):
                await wait_until(slow.working.is_set, 60)
                await slow.kill()
                died_at = time.monotonic()
                async with owners(quick):

                    async def answered() -> bool:
                        return int(await client.llen(NAMES.result_list)) == 4

                    await wait_until(answered, 30, what="the second owner answers")
                    took_s = time.monotonic() - died_at
            print(f"ran again {took_s:.1f} s after its owner's death; lease {lease_s:g} s")
            assert took_s <= lease_s + 2
            assert_each_answered_once(await results_in(client), 4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["valkey", pytest.param("redis", marks=pytest.mark.long)])
async def test_work_goes_on_after_a_failover(tmp_path: Path, engine: str) -> None:
    """What Redis itself may lose (the last moments before the failover) runs again: nothing else happens.

    `WAIT` at submission closes the gap for the requests themselves: each is answered once in the end.
    """
    with sentinel_set(engine, tmp_path) as pool:
        old = pool.primary()
        async with looking_at(pool.url) as (client, desk):
            await desk.submit(requests(0, 300))
            assert await client.wait(1, 10_000) == 1
            pair = [Owner(f"owner-{n}", pool.url, 3.0, work_s=(0.02, 0.1)) for n in range(2)]
            async with owners(*pair):
                for owner in pair:
                    await wait_until(owner.working.is_set, 60)
                await asyncio.to_thread(old.kill)
                await wait_until(
                    lambda: pool.primary() is not old, 60, what="the sentinels agree on another", every_s=0.1
                )
                failed_over_at = time.monotonic()

                async def reachable() -> bool:
                    return await _count(client) >= 0

                await wait_until(reachable, 30, what="the new primary answers", every_s=0.05)
                found = await _count(client)
                assert found < 300

                async def works() -> bool:
                    return await _count(client) > found

                await wait_until(works, 30, what="work goes on", every_s=0.05)
                took_s = time.monotonic() - failed_over_at
                print(f"work went on {took_s:.1f} s after the failover")
                assert took_s < 15

                async def all_done() -> bool:
                    try:
                        counts = await desk.count_requests()
                    except QueueUnavailableError:
                        return False
                    return counts.pending + counts.leased == 0

                await wait_until(all_done, 120, what="every request is finished", every_s=0.1)
            assert_each_answered_once(await results_in(client), 300)
            await assert_drained(client, NAMES)
            assert [json.loads(one)["status_code"] for one in await results_in(client)] == [200] * 300


async def _count(client: redis.asyncio.Redis) -> int:
    """Results so far; -1 while there is no primary to ask."""
    try:
        return await client.llen(NAMES.result_list)
    except (redis.RedisError, OSError):
        return -1
