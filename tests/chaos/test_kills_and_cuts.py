"""Processes and connections fail at random, and every request has exactly one answer in the end."""

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

from dispatcher.queue.contract import Permit, Settlement, SettleStatus
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.submission import QueueUnavailableError
from tests.chaos.fault_tools import (
    Network,
    WorkerProcess,
    assert_each_answered_once,
    make_requests,
    read_results,
    run_workers,
)
from tests.chaos.worker import NAMES
from tests.queue.key_checks import assert_drained
from tests.queue.servers import ENGINES, Server, sentinel_set, server
from tests.support import has_passed, wait_until

DURABLE_OPTIONS = ("--appendonly", "yes", "--appendfsync", "always")


@asynccontextmanager
async def open_queue(url: str) -> AsyncIterator[tuple[Any, RedisQueueAdmin]]:
    """Open a Redis client and a queue admin for the duration of the block."""
    admin = RedisQueueAdmin(connect(url), NAMES, attempt_timeout_s=5.0)
    client = connect(url)
    try:
        yield client, admin
    finally:
        await admin.aclose()
        await client.aclose()


async def run_with_kills_and_cuts(
    redis_server: Server, *, total: int, kills: int, redis_kills: int, cuts: int
) -> None:
    """Kill workers at random while they work, kill Redis sometimes, and cut off one worker for some time."""
    lease_s = 1.5
    random_source = random.Random(total)
    network = Network(redis_server.port)
    async with network.start_proxy() as port, open_queue(redis_server.url) as (client, admin):
        workers = [WorkerProcess(f"owner-{number}", redis_server.url, lease_s) for number in range(2)]
        workers.append(WorkerProcess("owner-2", f"redis://127.0.0.1:{port}/0", lease_s))
        for worker in workers:
            worker.work_s = (0.02, 0.5)
        await admin.submit(make_requests(0, total))
        async with run_workers(*workers):
            redis_kill_rounds = set(random_source.sample(range(kills), redis_kills))
            cut_rounds = set(random_source.sample(range(kills), cuts))

            async def wait_until_working(worker: WorkerProcess) -> None:
                """Wait until the worker has requests.

                Submit more if the other workers leave too few for it.
                """

                async def is_working() -> bool:
                    nonlocal total
                    if (await admin.count_requests()).pending < 50:
                        await admin.submit(make_requests(total, 100))
                        total += 100
                    return worker.working.is_set()

                await wait_until(is_working, 60, what=f"{worker.name} to have requests")

            for number in range(kills):
                if number in redis_kill_rounds:
                    await asyncio.to_thread(redis_server.kill)
                    await asyncio.to_thread(redis_server.start)
                if number in cut_rounds:
                    await wait_until_working(workers[2])
                    with network.cut():
                        cut_at = time.monotonic()
                        await wait_until(has_passed(cut_at + 2 * lease_s), 60)
                victim = workers[random_source.randrange(3)]
                await wait_until_working(victim)
                kill_at = time.monotonic() + random_source.uniform(0, 0.15)
                await wait_until(has_passed(kill_at), 60, every_s=0.005)
                await victim.kill()
                await victim.start()

            async def is_queue_empty() -> bool:
                counts = await admin.count_requests()
                return counts.pending + counts.leased + counts.delayed == 0

            await wait_until(
                is_queue_empty, 60 + total / 20, what="every request to be finished", every_s=0.1
            )
        assert (await admin.count_requests()).dead == 0
        assert_each_answered_once(await read_results(client), total)
        await assert_drained(client, NAMES)


@pytest.mark.timeout(180)
async def test_every_request_is_answered_once_despite_kills_and_network_cuts(tmp_path: Path) -> None:
    with server("redis", tmp_path, *DURABLE_OPTIONS) as redis_server:
        await run_with_kills_and_cuts(redis_server, total=500, kills=20, redis_kills=2, cuts=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
async def test_every_request_is_answered_once_despite_many_kills_and_network_cuts(
    tmp_path: Path, engine: str
) -> None:
    with server(engine, tmp_path, *DURABLE_OPTIONS) as redis_server:
        await run_with_kills_and_cuts(redis_server, total=5000, kills=200, redis_kills=10, cuts=10)


@pytest.mark.parametrize("engine", ENGINES)
async def test_owner_cut_off_for_longer_than_its_lease_writes_no_results_afterwards(
    tmp_path: Path, engine: str
) -> None:
    lease_s = 0.6
    with server(engine, tmp_path) as redis_server:
        network = Network(redis_server.port)
        async with network.start_proxy() as port, open_queue(redis_server.url) as (client, admin):
            await admin.submit(make_requests(0, 5))
            cut_off = RedisQueue(
                connect(f"redis://127.0.0.1:{port}/0"),
                NAMES,
                "far",
                QueueOptions(lease_s=lease_s, attempt_timeout_s=30),
            )
            connected = RedisQueue(connect(redis_server.url), NAMES, "near", QueueOptions(lease_s=lease_s))
            loop = asyncio.get_running_loop()
            leases = (await cut_off.claim(5, "far", Permit(5, loop.time(), 0))).leases
            assert len(leases) == 5
            late_settlements = [Settlement(lease, b"too late", "") for lease in leases]
            with network.cut():
                # The command is in transit already, and arrives when the network is back. By then
                # the requests have been reclaimed.
                settle_task = asyncio.create_task(cut_off.settle(late_settlements))

                async def is_reclaimed() -> bool:
                    await connected.sweep()
                    return (await connected.count_requests()).pending == 5

                await wait_until(is_reclaimed, 30)
                reclaimed_leases = (await connected.claim(5, "near", Permit(5, loop.time(), 5))).leases
                assert [lease.entry_id for lease in reclaimed_leases] == [lease.entry_id for lease in leases]
            try:
                assert set(await settle_task) == {SettleStatus.LOST}
            except QueueUnavailableError:  # the connection has timed out, so the call must be repeated
                assert set(await cut_off.settle(late_settlements)) == {SettleStatus.LOST}
            assert await read_results(client) == []
            assert set(
                await connected.settle([Settlement(lease, b"in time", "") for lease in reclaimed_leases])
            ) == {SettleStatus.DONE}
            assert await read_results(client) == [b"in time"] * 5
            await assert_drained(client, NAMES)
            await cut_off.aclose()
            await connected.aclose()


@pytest.mark.slow
@pytest.mark.serial
async def test_requests_of_the_only_owner_run_again_within_lease_plus_two_seconds_after_its_death(
    tmp_path: Path,
) -> None:
    lease_s = 6.0
    with server("redis", tmp_path) as redis_server:
        async with open_queue(redis_server.url) as (client, admin):
            await admin.submit(make_requests(0, 4))
            slow_worker = WorkerProcess("first", redis_server.url, lease_s, work_s=(600, 600))
            quick_worker = WorkerProcess("second", redis_server.url, lease_s, work_s=(0, 0))
            async with run_workers(slow_worker):
                await wait_until(slow_worker.working.is_set, 60)
                await slow_worker.kill()
                died_at = time.monotonic()
                async with run_workers(quick_worker):

                    async def are_all_answered() -> bool:
                        return int(await client.llen(NAMES.result_list)) == 4

                    await wait_until(are_all_answered, 30, what="the second worker to answer")
                    took_s = time.monotonic() - died_at
            print(
                f"the requests ran again {took_s:.1f} s after the death of their owner; lease {lease_s:g} s"
            )
            assert took_s <= lease_s + 2
            assert_each_answered_once(await read_results(client), 4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["valkey", pytest.param("redis", marks=pytest.mark.long)])
async def test_requests_are_answered_after_a_failover(tmp_path: Path, engine: str) -> None:
    """Requests whose results Redis loses in the failover run again, and nothing else happens.

    `WAIT` after the submission makes sure that no request is lost, so each is answered once in the end.
    """
    with sentinel_set(engine, tmp_path) as sentinels:
        old_primary = sentinels.primary()
        async with open_queue(sentinels.url) as (client, admin):
            await admin.submit(make_requests(0, 300))
            assert await client.wait(1, 10_000) == 1
            workers = [WorkerProcess(f"owner-{n}", sentinels.url, 3.0, work_s=(0.02, 0.1)) for n in range(2)]
            async with run_workers(*workers):
                for worker in workers:
                    await wait_until(worker.working.is_set, 60)
                await asyncio.to_thread(old_primary.kill)
                await wait_until(
                    lambda: sentinels.primary() is not old_primary,
                    60,
                    what="the sentinels to agree on another primary",
                    every_s=0.1,
                )
                failed_over_at = time.monotonic()

                async def is_reachable() -> bool:
                    return await _count_results(client) >= 0

                await wait_until(is_reachable, 30, what="the new primary to answer", every_s=0.05)
                count_after_failover = await _count_results(client)
                assert count_after_failover < 300

                async def has_new_results() -> bool:
                    return await _count_results(client) > count_after_failover

                await wait_until(has_new_results, 30, what="more results", every_s=0.05)
                took_s = time.monotonic() - failed_over_at
                print(f"requests were answered again {took_s:.1f} s after the failover")
                assert took_s < 15

                async def is_queue_empty() -> bool:
                    try:
                        counts = await admin.count_requests()
                    except QueueUnavailableError:
                        return False
                    return counts.pending + counts.leased == 0

                await wait_until(is_queue_empty, 120, what="every request to be finished", every_s=0.1)
            assert_each_answered_once(await read_results(client), 300)
            await assert_drained(client, NAMES)
            assert [json.loads(result)["status_code"] for result in await read_results(client)] == [200] * 300


async def _count_results(client: redis.asyncio.Redis) -> int:
    """Return the number of results so far, or -1 if no primary is reachable."""
    try:
        return await client.llen(NAMES.result_list)
    except (redis.RedisError, OSError):
        return -1
