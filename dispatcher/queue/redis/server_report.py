"""Report on the server of `queue.url` for `batch-dispatcher check`, made with the client of the
dispatcher."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.queue.keys import QueueNames, parse_queue_name
from dispatcher.queue.pool_identity import PoolIdentity, decode_identities
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.permissions import find_missing_permissions
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.queue.redis.scripts import ScriptRunner
from dispatcher.queue.redis.steps.share_pool_identity import share_pool_identity
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import QueueUnavailableError

OLDEST_SERVERS = {"Redis": (6, 2), "Valkey": (8, 0)}
"""Oldest servers that the scripts support."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts that a server reports about itself. A fact that it does not report counts as good."""

    name: str
    """`Redis` or `Valkey`."""
    release: str
    is_replica: bool
    eviction_policy: str
    """Name of the server's policy for dropping keys when its memory is full. Empty if it drops none."""
    is_durable: bool
    """True if the server keeps an append-only file."""

    @property
    def is_too_old(self) -> bool:
        return tuple(map(int, re.findall(r"\d+", self.release)[:2])) < OLDEST_SERVERS[self.name]


@dataclass(frozen=True, slots=True)
class ServerReport:
    counts: QueueCounts
    paused: tuple[str, str] | None
    """The user who paused the queue, and the reason. `None` if the queue is not paused."""
    ping_s: float
    """Duration of a PING in seconds."""
    server: ServerFacts | None
    """Facts about the server. `None` if this user may not ask for them."""
    pools: Sequence[PoolIdentity]
    """Pools to which the dispatchers of the queue send."""
    can_subscribe: bool
    """True if this user may subscribe to wake-ups. Otherwise, the dispatcher polls each `queue.poll_s`."""


async def inspect_server(url: str, names: QueueNames) -> ServerReport:
    """Connect and make the report, without changing anything. Raises QueueUnavailableError, and QueueUrlError
    for an invalid URL."""
    client = connect(url)
    admin = RedisQueueAdmin(client, names)
    scripts = ScriptRunner(client)
    try:
        # The first call also checks the connection, TLS and the password.
        missing_permissions = await find_missing_permissions(scripts, names)
        if missing_permissions.acl_rules:
            denied = ", ".join(missing_permissions.acl_rules)
            raise QueueUnavailableError(
                f"Redis does not permit this user: {denied} (docs/explanation/security.md)"
            )
        # The minimum, because other work of this process may delay single replies.
        answer_s = min([await _measure_ping(scripts) for _ in range(3)])
        return ServerReport(
            await admin.count_requests(),
            await admin.read_pause(),
            answer_s,
            await _read_server_facts(scripts),
            decode_identities(await share_pool_identity(admin.backend, b"", 0.0)),
            missing_permissions.can_subscribe,
        )
    finally:
        await admin.aclose()


MAX_SCANNED_KEYS = 20_000


async def find_other_queues(admin: RedisQueueAdmin) -> tuple[list[str], bool] | None:
    """Return the other queues on the server if there is nothing of this queue on it, and whether all keys
    were read. `None` if there is something of this queue.

    Raises QueueUnavailableError, also for a user who may not SCAN.
    """
    scripts, names = admin.backend.scripts, admin.names
    if await scripts.call_with_retries(
        lambda: scripts.client.exists(*names.script_keys, *names.feature_pool_keys)
    ):
        return None

    async def scan_queues() -> tuple[set[str], bool]:
        found: set[str] = set()
        looked_at = 0
        async for key in scripts.client.scan_iter(count=1000):
            if looked_at == MAX_SCANNED_KEYS:  # the server may have millions of keys of other programs
                return found, False
            looked_at += 1
            if (queue := parse_queue_name(key.decode(errors="replace"))) is not None:
                found.add(queue)
        return found, True

    queues, all_of_them = await scripts.call_with_retries(scan_queues)
    return sorted(queues), all_of_them


async def _measure_ping(scripts: ScriptRunner) -> float:
    clock = asyncio.get_running_loop().time
    asked_at = clock()
    await scripts.call_with_retries(scripts.client.ping)
    return clock() - asked_at


async def _read_server_facts(scripts: ScriptRunner) -> ServerFacts | None:
    try:
        info = await scripts.call_with_retries(
            lambda: _read_info(scripts.client, is_cluster=scripts.is_cluster)
        )
    except QueueUnavailableError:  # the server worked a moment ago, so INFO is not permitted
        return None
    name, release = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", "")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    return ServerFacts(
        name,
        str(release or info.get("redis_version", "0")),
        is_replica=info.get("role") == "slave",
        eviction_policy=policy if info.get("maxmemory") and policy != "noeviction" else "",
        is_durable=bool(info.get("aof_enabled", 1)),
    )


async def _read_info(client: Any, *, is_cluster: bool) -> dict[str, Any]:
    """Return the INFO of the server. On a Cluster, of one node, because all nodes are set up alike."""
    where = {"target_nodes": client.get_default_node()} if is_cluster else {}
    found: dict[str, Any] = await client.execute_command("INFO", **where)
    return found
