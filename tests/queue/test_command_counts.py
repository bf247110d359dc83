"""Redis commands of each step of plain requests. A feature that is not in use must cost no command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Sequence

import redis.asyncio

from dispatcher.queue.contract import DeadLetter, Lease, Release
from tests.queue.factories import (
    OwnerAndAdmin,
    answer,
    claim,
    count_commands_by_name,
    permit,
    queues,
    submission,
)
from tests.queue.servers import Server

DEADLINE = 4_000_000_000
MANY = 10
COMMANDS: dict[str, str] = {
    "submit": "evalsha 1, get 1, getrange n, hget 1, publish 1, set 1+n, time 1, type 15, zadd 1",
    "claim": (
        "evalsha 1, exists 2, get 1, hdel 1, hget 1, hincrby 1, hmget 1, hset 4, set 1, time 1, type 15, "
        "zadd 2, zcard 5, zrange 2+n, zrangebyscore 1, zremrangebyrank 1"
    ),
    "check_cancelled": "evalsha 1, getrange 2n, type 15",
    "renew": (
        "evalsha 1, exists 1, hdel 1, hget 1+n, hmget 1, time 1, type 15, zadd 1+n, zcard 1, zrangebyscore 1"
    ),
    "share_state": (
        "evalsha 1, exists 1, hdel 1, hget 1, hmget 1, hset 1, time 1, type 15, zadd 1, zcard 1, "
        "zrangebyscore 1"
    ),
    "sweep": (
        "evalsha 1, exists 2, hdel 2, hget 1, hkeys 1, hmget 1, hset 1, time 1, type 15, zadd 1, zrange 1, "
        "zrangebyscore 3"
    ),
    "count_requests": "evalsha 1, hget 2, time 1, type 15, zcard 14",
    "release": (
        "evalsha 1, get 1, hdel 2, hget 1+n, hincrby 1, hset n, set 1, time 1, type 15, zadd n, zrem 1"
    ),
    "claim of returned": (
        "evalsha 1, exists 2, get 1, hdel 1, hget 1+2n, hincrby 1, hmget 1, hset 2, hstrlen n, set 1, "
        "time 1, type 15, zadd 2, zcard 5, zrange 2+n, zrangebyscore 1, zrem n"
    ),
    "release with delay": (
        "evalsha 1, get 1, hdel 2, hget 1+n, hincrby 1, hset n, set 1, time 1, type 15, zadd 2n, zrem 1"
    ),
    "sweep of delayed": (
        "evalsha 1, exists 2, hdel 2, hget 1+n, hkeys 1, hmget 1, hset 1+n, time 1, type 15, zadd 1+n, "
        "zrange 1, zrangebyscore 3, zrem 2n"
    ),
    "settle": (
        "del 2n, evalsha 1, expire 1, get 1, getrange 3n, hdel 4, hincrby 2, hmget 2, lpush 1, set 1, "
        "time 1, type 16, zcard 1, zrem 1"
    ),
    "dead letters": (
        "del 2n, evalsha 1, expire 1, get 1, getrange 3n, hdel 2, hincrby 2, hmget 2, hset n, lpush 1, "
        "set 1, time 1, type 16, zadd 2n, zcard 1, zrem 1"
    ),
}
"""Commands of each step with n requests. `evalsha` is the call of the script, which runs the others. `settle`
is the flush of answered requests, `release` that of requests to be sent again."""


class PlainRequests:
    """Requests as our client submits them, and how often each step runs each command."""

    def __init__(self, queue: OwnerAndAdmin, client: redis.asyncio.Redis) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._queue, self._client = queue, client

    async def run_all_steps(self, tokens: Sequence[str]) -> None:
        queue, count = self._queue, self._count
        requests = [submission(f"r-{token}", DEADLINE, token=token) for token in tokens]
        await count("submit", queue.submit(requests))
        leases = await self._claim("claim", len(tokens))
        await count("check_cancelled", queue.check_cancelled([(f"r-{token}", token) for token in tokens]))
        await count("renew", queue.renew(leases))
        await count("share_state", queue.share_state(permit(), None))
        await count("sweep", queue.sweep())
        await count("count_requests", queue.count_requests())
        await count("release", queue.release([Release(lease, is_failed_attempt=True) for lease in leases]))
        leases = await self._claim("claim of returned", len(tokens))
        await count("release with delay", queue.release([Release(lease, delay_s=1e-6) for lease in leases]))
        await count("sweep of delayed", queue.sweep())
        leases = await self._claim("claim of returned", len(tokens))
        ends = [answer(lease, token=token) for lease, token in zip(leases, tokens, strict=True)]
        await count("settle", queue.settle(ends))

        await queue.submit(requests)
        leases = await self._claim("claim", len(tokens))
        ends = [answer(lease, token=token) for lease, token in zip(leases, tokens, strict=True)]
        await count("dead letters", queue.move_to_dead_letters([DeadLetter(end, "why") for end in ends]))

    async def _count(self, name: str, step: Awaitable[object]) -> None:
        self.counts[name] = await count_commands_by_name(self._client, step)

    async def _claim(self, name: str, count: int) -> list[Lease]:
        leases: list[Lease] = []

        async def claim_all() -> None:
            leases.extend((await claim(self._queue, count)).leases)

        await self._count(name, claim_all())
        assert len(leases) == count
        return leases


def describe_commands(one: Counter[str], many: Counter[str]) -> str:
    """Return the number of each command as a formula, given the numbers for 1 and for MANY requests."""
    formulas = []
    for command in sorted(one | many):
        for_each = (many[command] - one[command]) / (MANY - 1)
        fixed = one[command] - for_each
        parts = [f"{fixed:g}"] if fixed or not for_each else []
        parts += [f"{for_each:g}n" if for_each != 1 else "n"] if for_each else []
        formulas.append(f"{command} {'+'.join(parts)}")
    return ", ".join(formulas)


async def test_each_step_of_plain_requests_runs_the_same_commands(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    counted: list[dict[str, Counter[str]]] = []
    async with queues(any_server.url, "a") as (queue,):
        for size in (1, 1, MANY):  # the first one loads the scripts
            requests = PlainRequests(queue, client)
            await requests.run_all_steps([f"t-{len(counted)}-{number}" for number in range(size)])
            counted.append(requests.counts)
    _, one, many = counted
    commands = {name: describe_commands(one[name], many[name]) for name in one}
    print("\n".join(f"{name}: {formulas}" for name, formulas in commands.items()))
    assert commands == COMMANDS
