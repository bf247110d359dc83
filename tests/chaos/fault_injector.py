"""Fault injection by seed: kind, time and duration of faults, and the servers that they affect.

A fault is drawn before it starts, so that the same seed gives the same faults. Faults of the same target wait
for each other, and those of different targets overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import redis

from tests.chaos.submission_oracle import LossWindow
from tests.queue.servers import SentinelSet, Server, cluster_set, sentinel_set, server
from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import wait_until

Topology = Literal["alone", "cluster", "sentinel"]
_UNSYNCED_S = 3.0
"""With `everysec` a server may delay acknowledged writes for up to 2 s while it waits for the disk."""
_DEMOTION_S = 12.0
"""After a failover the old primary may accept writes until a sentinel has demoted it."""


@dataclass(frozen=True)
class ScenarioSize:
    requests: int
    faults: int
    lease_s: float
    max_request_s: float
    """Longest duration of a request."""
    max_pause_s: float
    """Longest pause between two faults."""
    stop_s: float
    """Time for which a dispatcher is stopped: three times its lease."""
    redis_down_s: float
    """Longest time for which Redis is down."""
    redis_pause_s: float
    """Longest duration of CLIENT PAUSE."""
    down_s: float
    """Longest time for which a dispatcher or the gateway is down."""
    refused_deadline_s: float
    """Deadline of requests that the gateway always refuses."""


@dataclass
class QueueServers:
    """Queue servers of a run."""

    url: str
    servers: list[Server]
    is_durable: bool
    """Whether acknowledged writes survive the kill of any process."""
    sentinels: SentinelSet | None = None

    def choose_server(self, random_source: random.Random) -> Server:
        return random_source.choice(self.servers) if self.sentinels is None else self.sentinels.primary()

    def may_be_disturbed(self) -> bool:
        """Return False while a replica is not in sync, since a failover to it would lose everything."""
        return self.sentinels is None or self.sentinels.in_sync()


@contextlib.contextmanager
def run_servers(topology: Topology, engine: str, fsync: str, folder: Path) -> Iterator[QueueServers]:
    options = ("--appendonly", "yes", "--appendfsync", fsync)
    is_durable = fsync != "everysec"  # also with `no`: written data survives the process, but not the machine
    if topology == "alone":
        with server(engine, folder, *options) as queue_server:
            yield QueueServers(queue_server.url, [queue_server], is_durable)
    elif topology == "cluster":
        with cluster_set(engine, folder, *options) as nodes:
            yield QueueServers(nodes.url, nodes.nodes, is_durable)
    else:
        # As recommended in docs/how-to/operations.md: a primary without a replica accepts no writes.
        replica_options = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
        with sentinel_set(engine, folder, *options, *replica_options) as sentinels:
            yield QueueServers(sentinels.url, sentinels.nodes, is_durable=False, sentinels=sentinels)


@dataclass
class FaultInjector:
    """Injects faults of dispatchers, Redis and the gateway. All of them run again at the end."""

    stage: Stage
    world: World
    servers: QueueServers
    scale: ScenarioSize
    random_source: random.Random
    loss_windows: list[LossWindow] = field(default_factory=list)
    fault_counts: Counter[str] = field(default_factory=Counter)
    exit_codes: list[int] = field(default_factory=list)
    """Exit codes of dispatchers that got SIGTERM."""
    started_count: int = 0
    _locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _start_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serializes starts, because the fork server handles one request at a time."""

    async def inject_all(self) -> None:
        kinds = {
            "kill": self._kill,
            "terminate": self._terminate,
            "sleep": self._stop_and_continue,
            "redis-kill": self._kill_redis,
            "redis-pause": self._pause_redis,
            "redis-cut": self._close_redis_connections,
            "resets": self._break_gateway,
            "refuses": self._break_gateway,
            "503": self._break_gateway,
        }
        # All kinds in random order, then again: so a short run has each kind, too.
        remaining_kinds: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            while self.started_count < self.scale.faults:
                if not remaining_kinds:
                    remaining_kinds = self.random_source.sample(sorted(kinds), len(kinds))
                kind = remaining_kinds.pop()
                await asyncio.sleep(self.random_source.uniform(0.0, self.scale.max_pause_s))
                self.started_count += 1
                tasks.create_task(kinds[kind](kind, random.Random(self.random_source.random())))

    @contextlib.asynccontextmanager
    async def _lock_dispatcher(self, kind: str, random_source: random.Random) -> AsyncIterator[Dispatcher]:
        """Choose a running dispatcher and lock it, so that its faults wait for each other."""
        number = random_source.randrange(len(self.stage.dispatchers))
        dispatcher = self.stage.dispatchers[number]
        async with self._locks[f"dispatcher-{number}"]:
            code = dispatcher.child.poll()
            assert code is None, (
                f"{dispatcher.folder.name} ended by itself with {code}: {dispatcher.find_defects()}"
            )
            self.fault_counts[kind] += 1
            yield dispatcher

    async def _restart(self, dispatcher: Dispatcher, down_s: float) -> None:
        await asyncio.sleep(down_s)
        async with self._start_lock:
            await asyncio.to_thread(dispatcher.start)

    async def _kill(self, kind: str, random_source: random.Random) -> None:
        async with self._lock_dispatcher(kind, random_source) as dispatcher:
            await asyncio.to_thread(dispatcher.kill)
            await self._restart(dispatcher, random_source.uniform(0.0, self.scale.down_s))

    async def _terminate(self, kind: str, random_source: random.Random) -> None:
        async with self._lock_dispatcher(kind, random_source) as dispatcher:
            self.exit_codes.append(await asyncio.to_thread(dispatcher.terminate, 60.0))
            await self._restart(dispatcher, random_source.uniform(0.0, self.scale.down_s))

    async def _stop_and_continue(self, kind: str, random_source: random.Random) -> None:
        async with self._lock_dispatcher(kind, random_source) as dispatcher:
            dispatcher.child.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(self.scale.stop_s)
            finally:
                dispatcher.child.send_signal(signal.SIGCONT)

    async def _kill_redis(self, kind: str, random_source: random.Random) -> None:
        async with self._lock_redis(
            kind, random_source, loses_writes=not self.servers.is_durable
        ) as queue_server:
            await asyncio.to_thread(queue_server.kill)
            await asyncio.sleep(random_source.uniform(0.0, self.scale.redis_down_s))
            await asyncio.to_thread(queue_server.start)

    async def _pause_redis(self, kind: str, random_source: random.Random) -> None:
        duration_s = random_source.uniform(0.5, self.scale.redis_pause_s)
        async with self._lock_redis(kind, random_source) as queue_server:
            await asyncio.to_thread(_run_command, queue_server, "CLIENT", "PAUSE", int(duration_s * 1000))
            await asyncio.sleep(duration_s)

    async def _close_redis_connections(self, kind: str, random_source: random.Random) -> None:
        async with self._lock_redis(kind, random_source) as queue_server:
            await asyncio.to_thread(_run_command, queue_server, "CLIENT", "KILL", "TYPE", "normal")

    @contextlib.asynccontextmanager
    async def _lock_redis(
        self, kind: str, random_source: random.Random, *, loses_writes: bool = False
    ) -> AsyncIterator[Server]:
        """Choose a queue server and lock Redis. Record the time in which writes may be lost."""
        async with self._locks["redis"]:

            async def may_be_disturbed() -> bool:
                return await asyncio.to_thread(self.servers.may_be_disturbed)

            await wait_until(may_be_disturbed, 60, what="the replica to be in sync", every_s=0.2)
            queue_server = await asyncio.to_thread(self.servers.choose_server, random_source)
            self.fault_counts[kind] += 1
            started_at = time.monotonic()
            yield queue_server
            fails_over = self.servers.sentinels is not None
            if fails_over or loses_writes:
                until = time.monotonic() + (_DEMOTION_S if fails_over else 0.0)
                self.loss_windows.append(LossWindow(started_at - _UNSYNCED_S, until))

    async def _break_gateway(self, kind: str, random_source: random.Random) -> None:
        faults = {
            "resets": {"answer": {"kind": "reset"}, "share": 0.5},
            "refuses": {"listener": "refuse"},
            "503": {"answer": {"kind": "status", "status": 503}},
        }
        async with self._locks["gateway"]:
            self.fault_counts[kind] += 1
            await asyncio.to_thread(self.world.control, gateway=faults[kind])
            try:
                await asyncio.sleep(random_source.uniform(0.2, self.scale.down_s))
            finally:
                await asyncio.to_thread(self.world.control, gateway=None)


def _run_command(queue_server: Server, *command: str | int) -> None:
    with contextlib.suppress(redis.RedisError), queue_server.client(socket_timeout=2.0) as client:
        client.execute_command(*command)
