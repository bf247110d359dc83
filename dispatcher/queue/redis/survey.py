"""Report on the server of `queue.url` for `batch-dispatcher check`, made with the client of the
dispatcher."""

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
"""Oldest versions that the scripts support."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports about itself. A fact that it does not report counts as good."""

    name: str
    """`Redis` or `Valkey`."""
    version: str
    replica: bool
    evicts: str
    """Policy by which the server drops keys when its memory is full. Empty if it drops none."""
    durable: bool
    """True if the server keeps an append-only file."""

    @property
    def too_old(self) -> bool:
        return tuple(map(int, re.findall(r"\d+", self.version)[:2])) < OLDEST[self.name]


@dataclass(frozen=True, slots=True)
class Survey:
    counts: Counts
    paused: tuple[str, str] | None
    """The user who paused the queue, and the reason. `None` if the queue is not paused."""
    answer_s: float
    """Duration of a PING in seconds."""
    server: ServerFacts | None
    """Facts about the server. `None` if this user may not ask for them."""
    wakes: bool
    """True if this user may subscribe to wake-ups. Otherwise, the dispatcher polls each `queue.poll_s`."""


async def survey(url: str, names: Names) -> Survey:
    """Connect and make the report, without changing anything. Raises QueueUnavailableError, and QueueUrlError
    for an invalid URL."""
    client = connect(url)
    desk = RedisDesk(client, names)
    scripts = Scripts(client)
    try:
        # The first call also checks the connection, TLS and the password.
        lacks = await missing(scripts, names)
        if lacks.rights:
            told = ", ".join(lacks.rights)
            raise QueueUnavailableError(f"Redis does not permit this user: {told} (docs/security.md)")
        # The minimum, because other work of this process may delay single replies.
        answer_s = min([await _ping(scripts) for _ in range(3)])
        return Survey(await desk.counts(), await desk.paused(), answer_s, await _server(scripts), lacks.wakes)
    finally:
        await desk.aclose()


KEYS_LOOKED_AT = 20_000


async def other_queues(desk: RedisDesk) -> tuple[list[str], bool] | None:
    """Return the other queues on the server if there is nothing of this queue on it, and whether all keys
    were read. `None` if there is something of this queue.

    Raises QueueUnavailableError, also for a user who may not SCAN.
    """
    scripts, names = desk.backend.scripts, desk.names
    if await scripts.attempt(lambda: scripts.client.exists(*names.keys, *names.board)):
        return None

    async def scan() -> tuple[set[str], bool]:
        found: set[str] = set()
        looked_at = 0
        async for key in scripts.client.scan_iter(count=1000):
            if looked_at == KEYS_LOOKED_AT:  # the server may have millions of keys of other programs
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
    except QueueUnavailableError:  # the server worked a moment ago, so INFO is not permitted
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
    """Return the INFO of the server. On a Cluster, of one node, because all nodes are set up alike."""
    where = {"target_nodes": client.get_default_node()} if is_cluster else {}
    found: dict[str, Any] = await client.execute_command("INFO", **where)
    return found
