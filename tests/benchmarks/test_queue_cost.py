"""What the queue costs: time against depth, blocking, throughput, round trips, memory.

Figures are compared within one run, since machines differ; the absolute floors are far below what an idle
machine of two cores shows.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from dispatcher.ports import Release, Settlement, Submission
from dispatcher.queue.redis import RedisQueue
from tests.queue.made import NAMES, answer, claim, member, queues
from tests.queue.servers import ENGINES, Server, server
from tests.support import require_tool

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]
BATCH = 64


@pytest.fixture(params=ENGINES)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with server(request.param, tmp_path) as running:
        yield running


@pytest.fixture
async def queue(own_server: Server) -> AsyncIterator[RedisQueue]:
    async with queues(own_server.url, "a", try_s=20, result_ttl_s=3600) as (one,):
        yield one


def fill(own_server: Server, count: int, size: int = 300) -> int:
    """Put members straight into the set, as foreign producers do; their size in all."""
    padding = b"x" * max(0, size - len(numbered(0, b"")))
    total = 0
    with own_server.client() as client:
        for start in range(0, count, 5000):
            some = {numbered(at, padding): at % 9973 for at in range(start, min(count, start + 5000))}
            client.zadd(NAMES.queue, some)
            total += sum(map(len, some))
    return total


def numbered(number: int, padding: bytes) -> bytes:
    data = b'{"id":"r-%07d","deadline":2000000000,"payload":{"p":"%s"}}' % (number, padding)
    return b'{"request_kind":"redis","data":' + data + b"}"


def microseconds(client: redis.Redis) -> float:
    """What the server spent in scripts since resetstat."""
    stats = client.info("commandstats")
    return sum(one["usec"] for name, one in stats.items() if name in ("cmdstat_evalsha", "cmdstat_eval"))


async def claim_cost(queue: RedisQueue, own_server: Server, rounds: int) -> float:
    """The server's median time for a claim of 64, in µs; leases are given up between."""
    times = []
    with own_server.client() as client:
        for _ in range(rounds):
            client.config_resetstat()
            leases = (await claim(queue, BATCH)).leases
            times.append(microseconds(client))
            assert len(leases) == BATCH
            await queue.settle([Settlement(lease, b"", "") for lease in leases])
    return statistics.median(times)


async def test_claim_costs_the_same_with_a_million_pending(queue, own_server):
    fill(own_server, 1_000)
    await claim_cost(queue, own_server, 2)
    shallow = await claim_cost(queue, own_server, 12)
    fill(own_server, 1_000_000)
    # A neighbour on this machine can only add to it: the best of a few medians is the script's own.
    deep = await claim_cost(queue, own_server, 20)
    for _ in range(11):
        if deep <= 1.5 * shallow:
            break
        deep = min(deep, await claim_cost(queue, own_server, 20))
    print(
        f"\n{own_server.engine}: claim of {BATCH}: {shallow:.0f} µs at 1,000 pending, {deep:.0f} at 1,000,000"
    )
    assert deep <= 1.5 * shallow


async def test_a_megabyte_blocks_the_server_for_less_than_5_ms(queue, own_server):
    """Every step that a request of 1 MB goes through, with an answer of 1 MB."""
    blocked: dict[str, list[float]] = {}
    with own_server.client() as client:

        async def timed(step: str, act):
            client.config_resetstat()
            done = await act
            blocked.setdefault(step, []).append(microseconds(client) / 1000)
            return done

        for number in range(9):
            large = member(f"r-{number}") + b" " * 2**20
            await timed("submit", queue.submit([Submission(large, 1.0)]))
            (lease,) = (await timed("claim", claim(queue))).leases
            await timed("release", queue.release([Release(lease)]))
            (lease,) = (await timed("claim again", claim(queue))).leases
            client.zadd(f"{NAMES.prefix}:leases", {f"{lease.entry}:a": 0}, xx=True)
            await timed("reclaim", queue.sweep())
            (lease,) = (await timed("claim again", claim(queue))).leases
            result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 2**20)
            await timed("settle", queue.settle([Settlement(lease, result, "")]))
            client.delete(NAMES.results)
    medians = {step: statistics.median(times) for step, times in blocked.items()}
    print(f"\n{own_server.engine}: " + ", ".join(f"{step} {ms:.2f} ms" for step, ms in medians.items()))
    assert max(medians.values()) <= 5


async def test_many_large_requests_never_share_one_script(queue, own_server):
    """Thirty of a megabyte in one reply would block everyone for a quarter of a second."""
    with own_server.client() as client:
        for number in range(6):
            client.zadd(NAMES.queue, {member(f"r-{number}") + b" " * 600_000: 1.0})
        client.config_set("slowlog-log-slower-than", 50_000)
        client.slowlog_reset()
        held = []
        while leases := (await claim(queue)).leases:
            assert len(leases) == 1
            held += leases
        result = b'{"id":"r","status_code":200,"payload":"%s"}' % (b"y" * 900_000)
        await queue.settle([Settlement(lease, result, "") for lease in held])
        assert client.llen(NAMES.results) == 6
        assert client.slowlog_len() == 0


async def test_claim_and_settle_rate_of_one_process(queue, own_server):
    """≥ 8,000 requests/s, or on a slower or busier machine ≥ 0.3 × what redis-benchmark gets just then."""
    with own_server.client() as client:
        sha = client.script_load("return redis.call('INCR', KEYS[1])")
    rate = bare = 0.0
    for _ in range(5):  # the best of five: what else runs on the machine is not what is measured
        fill(own_server, 3_200)
        started = time.perf_counter()
        done = 0
        while leases := (await claim(queue, BATCH)).leases:
            await queue.settle([answer(lease) for lease in leases])
            done += len(leases)
        assert done == 3_200
        rate = max(rate, done / (time.perf_counter() - started))
        bare = max(bare, benchmark(own_server, sha))
    with own_server.client() as client:
        assert client.llen(NAMES.results) == 16_000
    print(
        f"\n{own_server.engine}: {rate:,.0f} claim-and-settle/s, {rate / bare:.2f} × redis-benchmark EVALSHA"
    )
    assert rate >= min(8_000, 0.3 * bare)


def benchmark(own_server: Server, sha: str) -> float:
    """EVALSHA/s of one connection without pipelining, the way a single dispatcher talks."""
    command = [require_tool("redis-benchmark"), "-p", str(own_server.port), "-n", "5000", "-c", "1", "--csv"]
    done = subprocess.run(
        [*command, "EVALSHA", sha, "1", "counter"], capture_output=True, text=True, timeout=60, check=True
    )
    found = re.search(r'^"EVALSHA[^"]*","([\d.]+)"', done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1])


async def test_a_batch_takes_two_round_trips_however_large(queue, own_server):
    fill(own_server, 2 * BATCH)
    await queue.settle([answer(lease) for lease in (await claim(queue, BATCH)).leases])
    with own_server.client() as client:
        client.config_resetstat()
        await queue.settle([answer(lease, token="t") for lease in (await claim(queue, BATCH)).leases])
        stats = client.info("commandstats")
    # Commands that scripts call are counted too: what only a client sends is what crosses the network.
    sent = {name: one["calls"] for name, one in stats.items() if name.startswith("cmdstat_eval")}
    assert sum(sent.values()) == 2
    assert not stats.keys() & {"cmdstat_multi", "cmdstat_mget", "cmdstat_script"}


@pytest.mark.parametrize("size", [100, 300, 1_000, 10_000])
async def test_memory_of_a_pending_request(own_server, size):
    """≤ 1.25 × its member + 200 bytes."""
    count = 2**16 if size < 10_000 else 2**13
    with own_server.client() as client:
        before = client.info("memory")["used_memory"]
        total = fill(own_server, count, size)
        each = (client.info("memory")["used_memory"] - before) / count
    print(f"\n{own_server.engine}: {each:.0f} bytes for a member of {total / count:.0f}")
    assert each <= 1.25 * total / count + 200
