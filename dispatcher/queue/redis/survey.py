"""What stands behind queue.url, for `batch-dispatcher check`: asked through the dispatcher's own client."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from dispatcher.ports import Counts, QueueUnavailableError
from dispatcher.queue.keys import Names, queue_of
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisDesk
from dispatcher.queue.redis.rights import missing
from dispatcher.queue.redis.scripts import Scripts

OLDEST = {"Redis": (6, 2), "Valkey": (8, 0)}
"""The versions that the scripts are written for."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; what it does not tell is taken for good."""

    name: str
    """`Redis` or `Valkey`."""
    version: str
    replica: bool
    evicts: str
    """The policy by which it drops keys when its memory is full; empty: it never does."""
    durable: bool
    """It keeps an append-only file."""

    @property
    def too_old(self) -> bool:
        return tuple(map(int, re.findall(r"\d+", self.version)[:2])) < OLDEST[self.name]


@dataclass(frozen=True, slots=True)
class Survey:
    counts: Counts
    paused: tuple[str, str] | None
    """Who paused the queue and why."""
    answer_s: float
    """How long a PING took."""
    server: ServerFacts | None
    """None: it does not let this user ask."""
    wakes: bool
    """Whether this user may hear of new work; else it looks each queue.poll_s."""


async def survey(url: str, names: Names) -> Survey:
    """Connect, ask, change nothing. Raises QueueUnavailableError, or QueueUrlError for a URL of no server."""
    client = connect(url)
    desk = RedisDesk(client, names)
    scripts = Scripts(client)
    try:
        lacks = await missing(scripts, names)  # connected, TLS and password included
        if lacks.rights:
            told = ", ".join(lacks.rights)
            raise QueueUnavailableError(f"Redis does not permit this user: {told} (docs/security.md)")
        answer_s = min([await _ping(scripts) for _ in range(3)])  # what else the process does is not its time
        return Survey(await desk.counts(), await desk.paused(), answer_s, await _server(scripts), lacks.wakes)
    finally:
        await desk.aclose()


KEYS_LOOKED_AT = 20_000


async def other_queues(desk: RedisDesk) -> tuple[list[str], bool] | None:
    """Where nothing of this queue is on its server: which queues are, and whether all keys were looked at.
    None: something of it is there. Raises QueueUnavailableError, also for a user who may not SCAN."""
    scripts, names = desk.backend.scripts, desk.names
    if await scripts.attempt(lambda: scripts.client.exists(*names.keys, *names.board)):
        return None

    async def scan() -> tuple[set[str], bool]:
        found: set[str] = set()
        looked_at = 0
        async for key in scripts.client.scan_iter(count=1000):
            if looked_at == KEYS_LOOKED_AT:
                return found, False
            looked_at += 1
            if (queue := queue_of(key.decode(errors="replace"))) is not None:
                found.add(queue)
        return found, True

    queues, all_of_them = await scripts.attempt(scan)
    return sorted(queues), all_of_them


async def _ping(scripts: Scripts) -> float:
    clock = asyncio.get_running_loop().time
    asked_at = clock()
    await scripts.attempt(scripts.client.ping)
    return clock() - asked_at


async def _server(scripts: Scripts) -> ServerFacts | None:
    try:
        told = await scripts.attempt(lambda: _info(scripts.client, is_cluster=scripts.is_cluster))
    except QueueUnavailableError:  # it worked a moment ago: it is this command that is not permitted
        return None
    name, version = ("Valkey", told["valkey_version"]) if "valkey_version" in told else ("Redis", "")
    policy = str(told.get("maxmemory_policy", "noeviction"))
    return ServerFacts(
        name,
        str(version or told.get("redis_version", "0")),
        replica=told.get("role") == "slave",
        evicts=policy if told.get("maxmemory") and policy != "noeviction" else "",
        durable=bool(told.get("aof_enabled", 1)),
    )


async def _info(client: Any, *, is_cluster: bool) -> dict[str, Any]:
    """INFO of the server; of a Cluster, of one node: they are set up alike."""
    where = {"target_nodes": client.get_default_node()} if is_cluster else {}
    found: dict[str, Any] = await client.execute_command("INFO", **where)
    return found
