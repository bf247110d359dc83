"""Cost of the queue: CPU by depth, duration of scripts, throughput, round trips, and memory.

Costs are compared within one run, since machines differ and are shared (tests/cost_comparison.py).
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from dispatcher.queue.contract import Lease, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.submission import Submission
from tests.cost_comparison import compare_costs, get_children_cpu_s
from tests.queue.factories import NAMES, OwnerAndAdmin, answer, claim, member, queues
from tests.queue.servers import ENGINE_PARAMS, Server, server
from tests.support import require_tool

pytestmark = pytest.mark.timeout(300)
BATCH = 64
T = TypeVar("T")


@pytest.fixture(params=ENGINE_PARAMS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with server(request.param, tmp_path) as redis_server:
        yield redis_server


@pytest.fixture
async def queue(own_server: Server) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(own_server.url, "a", attempt_timeout_s=20, result_ttl_s=3600) as (queue,):
        yield queue


def add_members(
    own_server: Server, count: int, size: int = 300, *, names: QueueNames = NAMES, first: int = 0
) -> int:
    """Add members directly to the sorted set, and return their total size."""
    padding = b"x" * max(0, size - len(make_numbered_member(0, b"")))
    total = 0
    with own_server.client() as client:
        for start in range(first, first + count, 5000):
            numbers = range(start, min(first + count, start + 5000))
            members = {make_numbered_member(at, padding): at % 9973 for at in numbers}
            client.zadd(names.queue, members)
            total += sum(map(len, members))
    return total


def make_numbered_member(number: int, padding: bytes) -> bytes:
    data = b'{"id":"r-%07d","deadline":2000000000,"payload":{"p":"%s"}}' % (number, padding)
    return b'{"request_kind":"redis","data":' + data + b"}"


def read_server_cpu_us(client: redis.Redis) -> float:
    """Return the CPU time of the main thread of the server in µs, which excludes waiting for a core."""
    info = client.info("cpu")
    thread = "_main_thread" if "used_cpu_user_main_thread" in info else ""
    return 1e6 * float(info[f"used_cpu_user{thread}"] + info[f"used_cpu_sys{thread}"])


SHALLOW, DEEP = (
    QueueNames(f"batch:{{{depth}}}:requests", f"batch:{{{depth}}}:results") for depth in ("1e3", "1e6")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own_server", [pytest.param("redis", marks=pytest.mark.long), "valkey"], indirect=True
)
async def test_claim_costs_the_same_with_a_million_pending(own_server: Server) -> None:
    """A claim makes the same commands and costs at most 1.5 times the CPU of the server.

    Claims alternate between two queues on one server, because the cost of a claim changes by half from one
    second to the next.
    """
    depths = {SHALLOW: 1_000, DEEP: 1_000_000}
    for names, depth in depths.items():
        add_members(own_server, depth, names=names)
    commands: dict[QueueNames, list[dict[str, int]]] = {SHALLOW: [], DEEP: []}
    async with AsyncExitStack() as stack:
        client = stack.enter_context(own_server.client())
        queue_by_names = {}
        for names in depths:
            (queue_by_names[names],) = await stack.enter_async_context(
                queues(own_server.url, "a", names=names, attempt_timeout_s=20)
            )

        async def measure_claim(names: QueueNames) -> float:
            """Claim 64 requests and return the CPU time of the server in µs.

            Then settle them and refill the queue.
            """
            client.config_resetstat()
            before = read_server_cpu_us(client)
            leases = (await claim(queue_by_names[names], BATCH)).leases
            cpu_us = read_server_cpu_us(client) - before
            stats = client.info("commandstats")
            commands[names].append({name: command_stats["calls"] for name, command_stats in stats.items()})
            await queue_by_names[names].settle([Settlement(lease, b"", "") for lease in leases])
            add_members(own_server, BATCH, names=names, first=depths[names] + len(commands[names]) * BATCH)
            assert len(leases) == BATCH
            assert client.zcard(names.queue) == depths[names]
            return cpu_us

        comparison = await compare_costs(
            lambda: measure_claim(DEEP), lambda: measure_claim(SHALLOW), pairs=41
        )
    print(
        f"\n{own_server.engine}: claim of {BATCH}: {comparison.baseline:.0f} µs at 1,000 pending, "
        f"{comparison.ours:.0f} at 1,000,000: {comparison.ratio:.2f} ×"
    )
    assert commands[DEEP][1:] == commands[SHALLOW][1:]
    assert comparison.ratio <= 1.5


async def test_forecast_makes_few_calls_with_a_hundred_thousand_pending(
    own_server: Server,
) -> None:
    """It makes some hundred counts by rank, reads the first member only, and writes nothing."""
    rank_counts: dict[QueueNames, int] = {}
    for names, depth in {SHALLOW: 1_000, DEEP: 100_000}.items():
        add_members_at_the_edge(own_server, depth, names)
        async with queues(own_server.url, "a", names=names, attempt_timeout_s=20) as (queue,):
            await queue.take_snapshot()
            with own_server.client() as client:
                client.config_resetstat()
                before = read_server_cpu_us(client)
                await queue.take_snapshot(depth / 3600, 20.0)
                cpu_us = read_server_cpu_us(client) - before
                stats = client.info("commandstats")
        calls = {
            name.removeprefix("cmdstat_"): command_stats["calls"] for name, command_stats in stats.items()
        }
        print(f"\n{own_server.engine}: {depth} pending: {cpu_us:.0f} µs of CPU, {calls}")
        rank_counts[names] = calls.pop("zcount")
        assert calls.pop("zrangebyscore") == 1
        assert calls.pop("zrange") == 1, "the list of owners"
        allowed_commands = {
            "type",
            "time",
            "zcard",
            "hget",
            "hkeys",
            "hmget",
            "evalsha",
            "info",
            "config|resetstat",
        }
        assert calls.keys() <= allowed_commands
    assert max(rank_counts.values()) <= 250


def add_members_at_the_edge(own_server: Server, count: int, names: QueueNames) -> None:
    """Add members of which in each second of an hour as many become due as are served."""
    now = time.time()
    with own_server.client() as client:
        for start in range(0, count, 5000):
            numbers = range(start, min(count, start + 5000))
            client.zadd(
                names.queue,
                {make_numbered_member(at, b""): int(now + 20 + 3600 * at / count) for at in numbers},
            )


BARE_SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]); return redis.call('GET', KEYS[1])"


async def test_no_step_with_a_megabyte_costs_much_more_than_a_bare_script(
    queue: OwnerAndAdmin, own_server: Server
) -> None:
    """Measure the CPU of the server for each step of a request and an answer of 1 MB each, which blocks
    others.

    The bare script only stores and returns the data.
    """
    cpu_by_step: dict[str, list[float]] = {}
    with own_server.client() as client:

        async def measure_step(step: str, call: Awaitable[T]) -> T:
            before = read_server_cpu_us(client)
            done = await call
            cpu_by_step.setdefault(step, []).append(read_server_cpu_us(client) - before)
            return done

        for number in range(15):
            large = member(f"r-{number}") + b" " * 2**20
            await measure_step("bare", asyncio.to_thread(client.eval, BARE_SCRIPT, 1, "bare", large))
            await measure_step("submit", queue.submit([Submission(large, 1.0)]))
            (lease,) = (await measure_step("claim", claim(queue))).leases
            await measure_step("release", queue.release([Release(lease)]))
            (lease,) = (await measure_step("claim again", claim(queue))).leases
            client.zadd(f"{NAMES.queue_prefix}:leases", {f"{lease.entry_id}:a": 0}, xx=True)
            await measure_step("reclaim", queue.sweep())
            (lease,) = (await measure_step("claim a third time", claim(queue))).leases
            result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 2**20)
            await measure_step("settle", queue.settle([Settlement(lease, result, "")]))
            client.delete(NAMES.result_list)
    bare_cpu_us = cpu_by_step.pop("bare")
    ratios = {
        step: statistics.median(
            step_cpu / bare_cpu for step_cpu, bare_cpu in zip(times, bare_cpu_us, strict=True)
        )
        for step, times in cpu_by_step.items()
    }
    print(
        f"\n{own_server.engine}: bare {statistics.median(bare_cpu_us) / 1000:.2f} ms of CPU, "
        + ", ".join(f"{step} {ratio:.2f} ×" for step, ratio in ratios.items())
    )
    assert max(ratios.values()) <= 1.5


async def test_large_requests_are_not_claimed_or_settled_in_one_script_call(
    queue: OwnerAndAdmin, own_server: Server
) -> None:
    """30 requests of 1 MB in one reply would block all clients for a quarter of a second."""
    with own_server.client() as client:
        for number in range(6):
            client.zadd(NAMES.queue, {member(f"r-{number}") + b" " * 600_000: 1.0})
        all_leases: list[Lease] = []
        while leases := (await claim(queue)).leases:
            assert len(leases) == 1
            all_leases += leases
        result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 900_000)
        client.config_resetstat()
        await queue.settle([Settlement(lease, result, "") for lease in all_leases])
        assert client.llen(NAMES.result_list) == 6
        assert count_script_calls(client) == 6


def count_script_calls(client: redis.Redis) -> int:
    """Return the number of script calls by clients since resetstat, including calls that load a script."""
    stats = client.info("commandstats")
    return sum(
        command_stats["calls"] - command_stats["failed_calls"]
        for name, command_stats in stats.items()
        if name.startswith("cmdstat_eval")
    )


async def test_claim_and_settle_cost_less_than_five_bare_calls(
    queue: OwnerAndAdmin, own_server: Server
) -> None:
    """Claiming and settling a request costs at most five times the CPU of an EVALSHA of INCR.

    Both include client and server. Requests are claimed and settled in batches of 64, and redis-benchmark
    makes the bare calls. An idle machine makes 45,000 of them per second, so it handles 10,000 requests/s.
    """
    requests, calls = 10 * BATCH, 2_000
    rounds = 0
    with own_server.client() as client:
        sha = client.script_load("return redis.call('INCR', KEYS[1])")

        async def measure_requests() -> float:
            nonlocal rounds
            add_members(own_server, requests, first=rounds * requests)
            rounds += 1
            before = read_server_cpu_us(client) + time.process_time() * 1e6
            done = 0
            while leases := (await claim(queue, BATCH)).leases:
                await queue.settle([answer(lease) for lease in leases])
                done += len(leases)
            assert done == requests
            return (read_server_cpu_us(client) + time.process_time() * 1e6 - before) / requests

        def measure_bare_calls() -> float:
            before = read_server_cpu_us(client) + 1e6 * get_children_cpu_s()
            run_redis_benchmark(own_server, sha, calls)
            return (read_server_cpu_us(client) + 1e6 * get_children_cpu_s() - before) / calls

        comparison = await compare_costs(measure_requests, measure_bare_calls)
        assert client.llen(NAMES.result_list) == rounds * requests
    print(
        f"\n{own_server.engine}: {comparison.ours:.0f} µs of CPU to claim and settle one, "
        f"{comparison.baseline:.0f} for an EVALSHA of redis-benchmark: {comparison.ratio:.2f} ×"
    )
    assert comparison.ratio <= 5


def run_redis_benchmark(own_server: Server, sha: str, calls: int) -> None:
    """Call EVALSHA on one connection without pipelining, like a single dispatcher does."""
    command = [require_tool("redis-benchmark"), "-p", str(own_server.port), "-n", str(calls), "-c", "1", "-q"]
    subprocess.run([*command, "EVALSHA", sha, "1", "counter"], capture_output=True, timeout=60, check=True)


async def test_batch_takes_two_round_trips_whatever_its_size(
    queue: OwnerAndAdmin, own_server: Server
) -> None:
    add_members(own_server, 2 * BATCH)
    await queue.settle([answer(lease) for lease in (await claim(queue, BATCH)).leases])
    with own_server.client() as client:
        client.config_resetstat()
        await queue.settle([answer(lease, token="t") for lease in (await claim(queue, BATCH)).leases])
        stats = client.info("commandstats")
        # Commands called by scripts are counted too, so only commands that scripts cannot call are checked.
        assert count_script_calls(client) == 2
    assert not stats.keys() & {"cmdstat_multi", "cmdstat_script"}
    assert stats["cmdstat_getrange"]["calls"] == 3 * BATCH, "the settle script reads each marker once"


@pytest.mark.parametrize("size", [100, 300, 1_000, 10_000])
async def test_pending_request_needs_little_more_memory_than_its_member(
    own_server: Server, size: int
) -> None:
    """The memory is at most 1.25 × the size of the member + 200 bytes."""
    count = 2**16 if size < 10_000 else 2**13
    with own_server.client() as client:
        before = client.info("memory")["used_memory"]
        total = add_members(own_server, count, size)
        bytes_per_request = (client.info("memory")["used_memory"] - before) / count
    print(f"\n{own_server.engine}: {bytes_per_request:.0f} bytes for a member of {total / count:.0f}")
    assert bytes_per_request <= 1.25 * total / count + 200
