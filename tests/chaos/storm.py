"""A bad day by a seed: what is struck, when, and for how long; and the servers that it strikes.

A strike is drawn before it begins, so that the same seed strikes the same way. Strikes on one target wait for
each other, and those on different targets overlap.
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

from tests.chaos.oracle import Gap
from tests.queue.servers import SentinelSet, Server, cluster_set, sentinel_set, server
from tests.scenarios.processes import Dispatcher, Stage, World
from tests.support import wait_until

Place = Literal["alone", "cluster", "sentinel"]
_FORGETS_S = 3.0
"""With `everysec` a server waits up to 2 s for the disk before it writes what it has acknowledged."""
_DEMOTED_S = 12.0
"""After a failover the old primary may take writes until a sentinel has told it."""


@dataclass(frozen=True)
class Scale:
    requests: int
    strikes: int
    lease_s: float
    run_s: float
    """The longest that a request runs."""
    calm_s: float
    """Between strikes, at the most."""
    asleep_s: float
    """A dispatcher stands still: three times its lease."""
    away_s: float
    """Redis, at the most."""
    pause_s: float
    """CLIENT PAUSE, at the most."""
    down_s: float
    """Dispatcher and gateway, at the most."""
    refused_for_s: float
    """The deadline of a request that is never taken."""


@dataclass
class Ground:
    """The servers of a run."""

    url: str
    servers: list[Server]
    durable: bool
    """What was acknowledged stays, whichever process is killed."""
    pair: SentinelSet | None = None

    def struck(self, chance: random.Random) -> Server:
        return chance.choice(self.servers) if self.pair is None else self.pair.primary()

    def holds(self) -> bool:
        """Whether it may be struck: a failover to a replica that has nothing yet loses everything."""
        return self.pair is None or self.pair.in_sync()


@contextlib.contextmanager
def ground(place: Place, engine: str, fsync: str, folder: Path) -> Iterator[Ground]:
    options = ("--appendonly", "yes", "--appendfsync", fsync)
    durable = fsync != "everysec"  # with `no`, too: what is written outlives the process, if not the machine
    if place == "alone":
        with server(engine, folder, *options) as one:
            yield Ground(one.url, [one], durable)
    elif place == "cluster":
        with cluster_set(engine, folder, *options) as nodes:
            yield Ground(nodes.url, nodes.nodes, durable)
    else:
        # As docs/how-to/operations.md has it: a primary that is cut off takes no writes.
        held = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")
        with sentinel_set(engine, folder, *options, *held) as pair:
            yield Ground(pair.url, pair.nodes, durable=False, pair=pair)


@dataclass
class Storm:
    """Strikes dispatchers, Redis and the gateway; ends with all of them up again."""

    stage: Stage
    world: World
    ground: Ground
    scale: Scale
    chance: random.Random
    gaps: list[Gap] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    codes: list[int] = field(default_factory=list)
    """Exit codes of those that were asked to end."""
    begun: int = 0
    _locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _starts: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The warm interpreter forks for one at a time."""

    async def rage(self) -> None:
        kinds = {
            "kill": self._kill,
            "terminate": self._terminate,
            "sleep": self._sleep,
            "redis-kill": self._kill_redis,
            "redis-pause": self._pause_redis,
            "redis-cut": self._cut_redis,
            "resets": self._gateway,
            "refuses": self._gateway,
            "503": self._gateway,
        }
        # Each kind in turn, shuffled anew: a short storm has them all, too.
        order: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            while self.begun < self.scale.strikes:
                if not order:
                    order = self.chance.sample(sorted(kinds), len(kinds))
                kind = order.pop()
                await asyncio.sleep(self.chance.uniform(0.0, self.scale.calm_s))
                self.begun += 1
                tasks.create_task(kinds[kind](kind, random.Random(self.chance.random())))

    @contextlib.asynccontextmanager
    async def _dispatcher(self, kind: str, chance: random.Random) -> AsyncIterator[Dispatcher]:
        """One that runs; strikes on the same one wait for each other."""
        number = chance.randrange(len(self.stage.dispatchers))
        one = self.stage.dispatchers[number]
        async with self._locks[f"dispatcher-{number}"]:
            code = one.child.poll()
            assert code is None, f"{one.folder.name} ended by itself with {code}: {one.complaints()}"
            self.struck[kind] += 1
            yield one

    async def _start(self, one: Dispatcher, down_s: float) -> None:
        await asyncio.sleep(down_s)
        async with self._starts:
            await asyncio.to_thread(one.start)

    async def _kill(self, kind: str, chance: random.Random) -> None:
        async with self._dispatcher(kind, chance) as one:
            await asyncio.to_thread(one.kill)
            await self._start(one, chance.uniform(0.0, self.scale.down_s))

    async def _terminate(self, kind: str, chance: random.Random) -> None:
        async with self._dispatcher(kind, chance) as one:
            self.codes.append(await asyncio.to_thread(one.terminate, 60.0))
            await self._start(one, chance.uniform(0.0, self.scale.down_s))

    async def _sleep(self, kind: str, chance: random.Random) -> None:
        async with self._dispatcher(kind, chance) as one:
            one.child.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(self.scale.asleep_s)
            finally:
                one.child.send_signal(signal.SIGCONT)

    async def _kill_redis(self, kind: str, chance: random.Random) -> None:
        async with self._redis(kind, chance, forgets=not self.ground.durable) as struck:
            await asyncio.to_thread(struck.kill)
            await asyncio.sleep(chance.uniform(0.0, self.scale.away_s))
            await asyncio.to_thread(struck.start)

    async def _pause_redis(self, kind: str, chance: random.Random) -> None:
        pause_s = chance.uniform(0.5, self.scale.pause_s)
        async with self._redis(kind, chance) as struck:
            await asyncio.to_thread(_tell, struck, "CLIENT", "PAUSE", int(pause_s * 1000))
            await asyncio.sleep(pause_s)

    async def _cut_redis(self, kind: str, chance: random.Random) -> None:
        async with self._redis(kind, chance) as struck:
            await asyncio.to_thread(_tell, struck, "CLIENT", "KILL", "TYPE", "normal")

    @contextlib.asynccontextmanager
    async def _redis(
        self, kind: str, chance: random.Random, *, forgets: bool = False
    ) -> AsyncIterator[Server]:
        """A server that may be struck; afterwards, what it may have forgotten."""
        async with self._locks["redis"]:

            async def holds() -> bool:
                return await asyncio.to_thread(self.ground.holds)

            await wait_until(holds, 60, what="the replica to be in sync", every_s=0.2)
            struck = await asyncio.to_thread(self.ground.struck, chance)
            self.struck[kind] += 1
            begun_at = time.monotonic()
            yield struck
            fails_over = self.ground.pair is not None
            if fails_over or forgets:
                until = time.monotonic() + (_DEMOTED_S if fails_over else 0.0)
                self.gaps.append(Gap(begun_at - _FORGETS_S, until))

    async def _gateway(self, kind: str, chance: random.Random) -> None:
        faults = {
            "resets": {"answer": {"kind": "reset"}, "share": 0.5},
            "refuses": {"listener": "refuse"},
            "503": {"answer": {"kind": "status", "status": 503}},
        }
        async with self._locks["gateway"]:
            self.struck[kind] += 1
            await asyncio.to_thread(self.world.control, gateway=faults[kind])
            try:
                await asyncio.sleep(chance.uniform(0.2, self.scale.down_s))
            finally:
                await asyncio.to_thread(self.world.control, gateway=None)


def _tell(struck: Server, *command: str | int) -> None:
    with contextlib.suppress(redis.RedisError), struck.client(socket_timeout=2.0) as client:
        client.execute_command(*command)
