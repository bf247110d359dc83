"""What the queue costs: time against depth, blocking, throughput, round trips, memory.

Times are compared within one run, since machines differ and are shared: see tests/floors.py.
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

from dispatcher.ports import Lease, Release, Settlement, Submission
from dispatcher.queue.keys import QueueNames
from tests.floors import beside, of_children
from tests.queue.made import NAMES, OwnerAndDesk, answer, claim, member, queues
from tests.queue.servers import ENGINES, Server, server
from tests.support import require_tool

pytestmark = pytest.mark.timeout(300)
BATCH = 64
T = TypeVar("T")


@pytest.fixture(params=ENGINES)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with server(request.param, tmp_path) as running:
        yield running


@pytest.fixture
async def queue(own_server: Server) -> AsyncIterator[OwnerAndDesk]:
    async with queues(own_server.url, "a", attempt_timeout_s=20, result_ttl_s=3600) as (one,):
        yield one


def fill(
    own_server: Server, count: int, size: int = 300, *, names: QueueNames = NAMES, first: int = 0
) -> int:
    """Put members straight into the set, as foreign producers do; their size in all."""
    padding = b"x" * max(0, size - len(numbered(0, b"")))
    total = 0
    with own_server.client() as client:
        for start in range(first, first + count, 5000):
            numbers = range(start, min(first + count, start + 5000))
            some = {numbered(at, padding): at % 9973 for at in numbers}
            client.zadd(names.queue, some)
            total += sum(map(len, some))
    return total


def numbered(number: int, padding: bytes) -> bytes:
    data = b'{"id":"r-%07d","deadline":2000000000,"payload":{"p":"%s"}}' % (number, padding)
    return b'{"request_kind":"redis","data":' + data + b"}"


def cpu_us(client: redis.Redis) -> float:
    """What the server's main thread has computed, in µs. Waiting for a core is not in it."""
    found = client.info("cpu")
    thread = "_main_thread" if "used_cpu_user_main_thread" in found else ""
    return 1e6 * float(found[f"used_cpu_user{thread}"] + found[f"used_cpu_sys{thread}"])


SHALLOW, DEEP = (
    QueueNames(f"batch:{{{depth}}}:requests", f"batch:{{{depth}}}:results") for depth in ("1e3", "1e6")
)


@pytest.mark.parametrize(
    "own_server", [pytest.param("redis", marks=pytest.mark.long), "valkey"], indirect=True
)
async def test_claim_costs_the_same_with_a_million_pending(own_server: Server) -> None:
    """The same commands, and no more than 1.5 times the server's CPU. Two queues on one server are claimed
    from in turn: what a claim takes changes by half from one second to the next, for both alike."""
    depths = {SHALLOW: 1_000, DEEP: 1_000_000}
    for names, depth in depths.items():
        fill(own_server, depth, names=names)
    commands: dict[QueueNames, list[dict[str, int]]] = {SHALLOW: [], DEEP: []}
    async with AsyncExitStack() as stack:
        client = stack.enter_context(own_server.client())
        made = {}
        for names in depths:
            (made[names],) = await stack.enter_async_context(
                queues(own_server.url, "a", names=names, attempt_timeout_s=20)
            )

        async def cost(names: QueueNames) -> float:
            """The server's time for a claim of 64, in µs; settled and refilled after."""
            client.config_resetstat()
            before = cpu_us(client)
            leases = (await claim(made[names], BATCH)).leases
            took = cpu_us(client) - before
            stats = client.info("commandstats")
            commands[names].append({name: one["calls"] for name, one in stats.items()})
            await made[names].settle([Settlement(lease, b"", "") for lease in leases])
            fill(own_server, BATCH, names=names, first=depths[names] + len(commands[names]) * BATCH)
            assert len(leases) == BATCH
            assert client.zcard(names.queue) == depths[names]
            return took

        found = await beside(lambda: cost(DEEP), lambda: cost(SHALLOW), pairs=41)
    print(
        f"\n{own_server.engine}: claim of {BATCH}: {found.floor:.0f} µs at 1,000 pending, "
        f"{found.ours:.0f} at 1,000,000: {found.ratio:.2f} ×"
    )
    assert commands[DEEP][1:] == commands[SHALLOW][1:]
    assert found.ratio <= 1.5


async def test_the_outlook_takes_the_same_few_steps_with_a_hundred_thousand_pending(
    own_server: Server,
) -> None:
    """However the deadlines lie: some hundreds of counts by rank, one head, no other member, no write."""
    counted: dict[QueueNames, int] = {}
    for names, depth in {SHALLOW: 1_000, DEEP: 100_000}.items():
        due_in_time(own_server, depth, names)
        async with queues(own_server.url, "a", names=names, attempt_timeout_s=20) as (queue,):
            await queue.take_snapshot()
            with own_server.client() as client:
                client.config_resetstat()
                before = cpu_us(client)
                await queue.take_snapshot(depth / 3600, 20.0)
                took = cpu_us(client) - before
                stats = client.info("commandstats")
        calls = {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}
        print(f"\n{own_server.engine}: {depth} pending: {took:.0f} µs of CPU, {calls}")
        counted[names] = calls.pop("zcount")
        assert calls.pop("zrangebyscore") == 1
        assert calls.pop("zrange") == 1, "of the owners"
        looks = {"type", "time", "zcard", "hget", "hkeys", "hmget", "evalsha", "info", "config|resetstat"}
        assert calls.keys() <= looks
    assert max(counted.values()) <= 250


def due_in_time(own_server: Server, count: int, names: QueueNames) -> None:
    """Deadlines on the edge: as many fall due in each second of an hour as are served in it."""
    now = time.time()
    with own_server.client() as client:
        for start in range(0, count, 5000):
            numbers = range(start, min(count, start + 5000))
            client.zadd(names.queue, {numbered(at, b""): int(now + 20 + 3600 * at / count) for at in numbers})


THROUGH_A_SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]); return redis.call('GET', KEYS[1])"


async def test_a_megabyte_costs_no_step_much_more_than_a_bare_script(
    queue: OwnerAndDesk, own_server: Server
) -> None:
    """Every step that a request of 1 MB goes through, with an answer of 1 MB: how long it holds up the
    others, as the server's CPU. The bare script only stores and returns it."""
    took: dict[str, list[float]] = {}
    with own_server.client() as client:

        async def timed(step: str, act: Awaitable[T]) -> T:
            before = cpu_us(client)
            done = await act
            took.setdefault(step, []).append(cpu_us(client) - before)
            return done

        for number in range(15):
            large = member(f"r-{number}") + b" " * 2**20
            await timed("bare", asyncio.to_thread(client.eval, THROUGH_A_SCRIPT, 1, "bare", large))
            await timed("submit", queue.submit([Submission(large, 1.0)]))
            (lease,) = (await timed("claim", claim(queue))).leases
            await timed("release", queue.release([Release(lease)]))
            (lease,) = (await timed("claim again", claim(queue))).leases
            client.zadd(f"{NAMES.queue_prefix}:leases", {f"{lease.entry_id}:a": 0}, xx=True)
            await timed("reclaim", queue.sweep())
            (lease,) = (await timed("claim a third time", claim(queue))).leases
            result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 2**20)
            await timed("settle", queue.settle([Settlement(lease, result, "")]))
            client.delete(NAMES.result_list)
    bare = took.pop("bare")
    ratios = {
        step: statistics.median(one / floor for one, floor in zip(times, bare, strict=True))
        for step, times in took.items()
    }
    print(
        f"\n{own_server.engine}: bare {statistics.median(bare) / 1000:.2f} ms of CPU, "
        + ", ".join(f"{step} {ratio:.2f} ×" for step, ratio in ratios.items())
    )
    assert max(ratios.values()) <= 1.5


async def test_many_large_requests_never_share_one_script(queue: OwnerAndDesk, own_server: Server) -> None:
    """Thirty of a megabyte in one reply would block everyone for a quarter of a second."""
    with own_server.client() as client:
        for number in range(6):
            client.zadd(NAMES.queue, {member(f"r-{number}") + b" " * 600_000: 1.0})
        held: list[Lease] = []
        while leases := (await claim(queue)).leases:
            assert len(leases) == 1
            held += leases
        result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 900_000)
        client.config_resetstat()
        await queue.settle([Settlement(lease, result, "") for lease in held])
        assert client.llen(NAMES.result_list) == 6
        assert scripts(client) == 6


def scripts(client: redis.Redis) -> int:
    """The script calls of clients since resetstat, those that loaded it anew included."""
    stats = client.info("commandstats")
    return sum(
        one["calls"] - one["failed_calls"] for name, one in stats.items() if name.startswith("cmdstat_eval")
    )


async def test_claim_and_settle_cost_less_than_five_bare_calls(
    queue: OwnerAndDesk, own_server: Server
) -> None:
    """A request, claimed and settled in batches of 64, takes client and server together at most five times
    the CPU that redis-benchmark and the server take for one EVALSHA of INCR. Where those run at 45,000/s, as
    on a quiet machine, that is 10,000 requests/s."""
    requests, calls = 10 * BATCH, 2_000
    rounds = 0
    with own_server.client() as client:
        sha = client.script_load("return redis.call('INCR', KEYS[1])")

        async def ours() -> float:
            nonlocal rounds
            fill(own_server, requests, first=rounds * requests)
            rounds += 1
            before = cpu_us(client) + time.process_time() * 1e6
            done = 0
            while leases := (await claim(queue, BATCH)).leases:
                await queue.settle([answer(lease) for lease in leases])
                done += len(leases)
            assert done == requests
            return (cpu_us(client) + time.process_time() * 1e6 - before) / requests

        def bare() -> float:
            before = cpu_us(client) + 1e6 * of_children()
            benchmark(own_server, sha, calls)
            return (cpu_us(client) + 1e6 * of_children() - before) / calls

        found = await beside(ours, bare)
        assert client.llen(NAMES.result_list) == rounds * requests
    print(
        f"\n{own_server.engine}: {found.ours:.0f} µs of CPU to claim and settle one, {found.floor:.0f} for "
        f"an EVALSHA of redis-benchmark: {found.ratio:.2f} ×"
    )
    assert found.ratio <= 5


def benchmark(own_server: Server, sha: str, calls: int) -> None:
    """EVALSHA from one connection without pipelining, the way a single dispatcher talks."""
    command = [require_tool("redis-benchmark"), "-p", str(own_server.port), "-n", str(calls), "-c", "1", "-q"]
    subprocess.run([*command, "EVALSHA", sha, "1", "counter"], capture_output=True, timeout=60, check=True)


async def test_a_batch_takes_two_round_trips_however_large(queue: OwnerAndDesk, own_server: Server) -> None:
    fill(own_server, 2 * BATCH)
    await queue.settle([answer(lease) for lease in (await claim(queue, BATCH)).leases])
    with own_server.client() as client:
        client.config_resetstat()
        await queue.settle([answer(lease, token="t") for lease in (await claim(queue, BATCH)).leases])
        stats = client.info("commandstats")
        # Commands that scripts call are counted too: what only a client sends is what crosses the network.
        assert scripts(client) == 2
    assert not stats.keys() & {"cmdstat_multi", "cmdstat_script"}
    assert stats["cmdstat_getrange"]["calls"] == 3 * BATCH, "of the script that settles, one for each marker"


@pytest.mark.parametrize("size", [100, 300, 1_000, 10_000])
async def test_memory_of_a_pending_request(own_server: Server, size: int) -> None:
    """≤ 1.25 × its member + 200 bytes."""
    count = 2**16 if size < 10_000 else 2**13
    with own_server.client() as client:
        before = client.info("memory")["used_memory"]
        total = fill(own_server, count, size)
        each = (client.info("memory")["used_memory"] - before) / count
    print(f"\n{own_server.engine}: {each:.0f} bytes for a member of {total / count:.0f}")
    assert each <= 1.25 * total / count + 200
