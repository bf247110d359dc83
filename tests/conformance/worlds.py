"""What the conformance suite runs against: the queue in memory, and the real scripts in Redis and Valkey.

A World gives owners (the queue as dispatchers see it), the desk (as producers and operators see it), and a
raw door: what a program in any language may do with plain Redis commands. In memory the raw door leads to
what stands for those keys.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dispatcher.core.requests.lanes import Lane
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.ports import ClaimResult, Lease, Permit, Queue, QueueAdmin, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.owners import DeadOwnerDetector
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from tests.queue.aging import age_board_memory, age_board_redis, age_memory, age_redis
from tests.queue.known import assert_only_known_keys
from tests.queue.made import entry_of
from tests.queue.roles import grant, url_of
from tests.queue.servers import Server

QUEUE = "batch:{qwen}:requests"
RESULTS = "batch:{qwen}:results"
LEASE_S = 30.0
OWNER_TIMEOUT_S = 20.0
"""Far longer than a test takes on a busy machine."""
NOW = int(time.time())
"""Unix seconds, for deadlines well before and after it."""

_nonces = itertools.count()
_readings = itertools.count()


def member(request_id: str = "r-1", *, deadline: int = NOW + 3600, token: str = "", **data: Any) -> bytes:
    """A member written by hand, as a producer in any language does."""
    internal = {"request_token": token} if token else {}
    fields = {"id": request_id, "deadline": deadline, "payload": {"prompt": "hi"}} | data
    return json.dumps({"internal": internal, "request_kind": "redis", "data": fields}).encode()


def permit(limit: int = 1000, *, lost: int = 0) -> Permit:
    """A permit by a reading a second newer than the last one's.

    Not of just now: owners know the server's clock to a round trip, and two readings closer than that may
    come out in either order. Nor of later than now, which counts for nothing.
    """
    return Permit(limit, asyncio.get_running_loop().time() - 10_000 + next(_readings), lost)


async def claim(queue: Queue, most: int = 100, limit: int = 1000, **options: Any) -> Sequence[Lease]:
    """The leases of a claim whose permit is as new as can be."""
    return (await full_claim(queue, most, limit, **options)).leases


async def full_claim(
    queue: Queue, most: int = 100, limit: int = 1000, *, lost: int = 0, suspects: int = 1
) -> ClaimResult:
    lanes = {Lane.SUSPECTS: suspects}
    return await queue.claim(most, f"nonce-{next(_nonces)}", permit(limit, lost=lost), max_per_lane=lanes)


def answer(lease: Lease, result: bytes | None = None, results: str = "", **ids: Any) -> Settlement:
    """The settlement of a lease with a result that can be told from others."""
    return Settlement(
        lease, b'{"id":"r-1","entry":%d}' % lease.entry_id if result is None else result, results, **ids
    )


async def waits(queue: Queue, seconds: float) -> bool:
    """Whether the queue keeps waiting for that long."""
    try:
        async with asyncio.timeout(seconds):
            await queue.wait_for_work()
    except TimeoutError:
        return True
    return False


class World(ABC):
    """One empty queue."""

    desk: QueueAdmin

    @abstractmethod
    def take_snapshot(self, queue: str) -> World:
        """Another queue that feeds the same pool. Time passes in the first one."""

    @abstractmethod
    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        prover: DeadOwnerDetector | None = None,
        max_pending: int = 0,
    ) -> Queue:
        """A dispatcher's door; the same name twice is the same owner restarted."""

    @abstractmethod
    async def zadd(self, score: float, member: bytes) -> None: ...

    @abstractmethod
    async def rpop(self, name: str = RESULTS) -> bytes | None: ...

    @abstractmethod
    async def set_key(self, name: str, value: str) -> None: ...

    @abstractmethod
    async def delete_key(self, name: str) -> None: ...

    @abstractmethod
    async def get_key(self, name: str) -> str | None: ...

    @abstractmethod
    async def run_out(self, *leases: Lease, ago_s: float = 0.0) -> None:
        """Let the time of these leases have run out so long ago; 0: now."""

    @abstractmethod
    async def fall_silent(self, *owners: str) -> None:
        """As if these had not been heard of for their owner_timeout_s, while others had swept. Those that
        never were heard of stay unknown."""

    @abstractmethod
    async def beating(self) -> set[str]:
        """Owners that are presumed to live."""

    @abstractmethod
    async def skip_sweeps(self, seconds: float) -> None:
        """As if the last sweep had been that much longer ago."""

    @abstractmethod
    async def be_away(self, seconds: float) -> None:
        """As if the queue had been away for so long, right after the last call. No lease runs out by it."""

    @abstractmethod
    async def step_back(self, seconds: float) -> None:
        """As if the queue's clock had stepped back: what is stored is of so much later now."""

    @abstractmethod
    async def step_line_back(self, seconds: float) -> None:
        """The same of what is stored of one line alone, where `step_back` was another one's."""

    @abstractmethod
    async def age_sequences(self, seconds: float) -> None:
        """As if all that is known of sequences had been so much earlier."""

    @abstractmethod
    async def age_board(self, seconds: float) -> None:
        """As if all that is said of versions of models had been said so much earlier."""

    @abstractmethod
    async def end_silently(self, lease: Lease) -> None:
        """As a dispatcher of a version ends it that knows nothing of sequences."""

    async def pass_time(self, sweeper: Queue, seconds: int) -> int:
        """As if it had swept each second of so many; how many leases that reclaimed."""
        reclaimed = 0
        for _ in range(seconds):
            await self.skip_sweeps(1)
            reclaimed += (await sweeper.sweep()).reclaimed_count
        return reclaimed

    async def lose(self, queue: Queue, *leases: Lease) -> None:
        """The owner of these leases died: they ran out and were reclaimed."""
        await queue.sweep()
        await self.run_out(*leases)
        assert (await queue.sweep()).reclaimed_count == len(leases)

    async def results(self, name: str = RESULTS) -> list[bytes]:
        """Pop everything."""
        found = []
        while (one := await self.rpop(name)) is not None:
            found.append(one)
        return found


class MemoryWorld(World):
    def __init__(self, queue: str = QUEUE, **options: Any) -> None:
        clock = asyncio.get_running_loop().time
        self.store = MemoryStore(
            clock,
            unix_origin=time.time() - clock(),
            lease_s=LEASE_S,
            name=queue,
            result_list=RESULTS,
            **options,
        )
        self.desk = self.store

    def take_snapshot(self, queue: str) -> MemoryWorld:
        return MemoryWorld(queue, pool=self.store.pool)

    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        prover: DeadOwnerDetector | None = None,
        max_pending: int = 0,
    ) -> MemoryQueue:
        clock = asyncio.get_running_loop().time
        return MemoryQueue(
            self.store,
            name,
            clock=clock,
            owner_timeout_s=timeout_s,
            dead_owner_detector=prover,
            max_pending=max_pending,
        )

    async def zadd(self, score: float, member: bytes) -> None:
        self.store.add_member(member, score)

    async def rpop(self, name: str = RESULTS) -> bytes | None:
        return self.store.pop_result(name)

    async def set_key(self, name: str, value: str) -> None:
        far = self.store.pool.unix_now() + 1000
        for prefix, keys in self._markers().items():
            if name.startswith(prefix):
                keys[name.removeprefix(prefix)] = (value, far)
                return
        self.store.pool.invalid_lists.add(name)

    def _markers(self) -> dict[str, dict[str, tuple[str, float]]]:
        store = self.store
        foreign = {"request-active:": store.pool.foreign_active, "request-cancel:": store.pool.foreign_cancel}
        return {**foreign, f"{QUEUE}:cancel:": store.queue.cancel_markers}

    async def delete_key(self, name: str) -> None:
        self.store.pool.invalid_lists.discard(name)

    async def get_key(self, name: str) -> str | None:
        (found,) = (
            self.store.pool.read_expiring(keys, name.removeprefix(prefix))
            for prefix, keys in self._markers().items()
            if name.startswith(prefix)
        )
        return found

    async def run_out(self, *leases: Lease, ago_s: float = 0.0) -> None:
        for lease in leases:
            held = self.store.pool.leases[lease.entry_id]
            held.expires_at = self.store.pool.clock() - ago_s
            heapq.heappush(self.store.pool.expiries, (held.expires_at, lease.entry_id))

    async def fall_silent(self, *owners: str) -> None:
        for owner in owners:
            if owner in self.store.pool.heartbeats:
                self.store.pool.heartbeats[owner] = self.store.pool.clock()
        if self.store.pool.swept_at is not None:
            self.store.pool.swept_at = self.store.pool.clock()

    async def beating(self) -> set[str]:
        return set(self.store.pool.heartbeats)

    async def skip_sweeps(self, seconds: float) -> None:
        assert self.store.pool.swept_at is not None
        self.store.pool.swept_at -= seconds
        self.store.pool.no_expiry_until -= seconds
        self.store.pool.no_silence_until -= seconds

    async def be_away(self, seconds: float) -> None:
        await self.skip_sweeps(seconds)
        for owner in self.store.pool.heartbeats:
            self.store.pool.heartbeats[owner] -= seconds

    async def step_back(self, seconds: float) -> None:
        before, origin = self.store.pool.clock, self.store.pool.unix_origin
        self.store.pool.clock = lambda: before() - seconds
        self.store.pool.unix_origin = origin + seconds  # the markers' lifetimes are the server's own

    async def step_line_back(self, seconds: float) -> None:
        pass  # it is the pool's clock that did

    async def age_sequences(self, seconds: float) -> None:
        age_memory(self.store, seconds)

    async def age_board(self, seconds: float) -> None:
        age_board_memory(self.store, seconds)

    async def end_silently(self, lease: Lease) -> None:
        grant = self.store.pool.leases[lease.entry_id]
        self.store.pool.end_lease(grant)
        self.store.queue.remove_entry(grant.entry)


class RedisWorld(World):
    """The real scripts on an empty server, with the permissions of docs/explanation/security.md only."""

    def __init__(self, server: Server, queue: str = QUEUE) -> None:
        self._server = server
        with server.client() as admin:
            more = () if queue == QUEUE else (f"~{queue}*", f"&{queue}*")
            grant(admin, "dispatcher", "~a:*", "~tenant:*", *more)
            grant(admin, "operator", *more)
        self._doors: list[RedisQueue] = []
        self._lines: list[RedisWorld] = []
        self._raw: Any = connect(server.url)  # typed, each answer is a union of what any protocol may give
        self.names = QueueNames(queue, RESULTS, pool=QUEUE)
        self._desk = RedisQueueAdmin(connect(url_of(server, "operator")), self.names)
        self.desk = self._desk

    def take_snapshot(self, queue: str) -> RedisWorld:
        self._lines.append(RedisWorld(self._server, queue))
        return self._lines[-1]

    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        prover: DeadOwnerDetector | None = None,
        max_pending: int = 0,
    ) -> RedisQueue:
        client = connect(url_of(self._server, "dispatcher"))
        options: dict[str, Any] = {
            "lease_s": LEASE_S,
            "owner_timeout_s": timeout_s,
            "max_pending": max_pending,
        }
        door = RedisQueue(client, self.names, name, **options, dead_owner_detector=prover)
        self._doors.append(door)
        return door

    async def close(self) -> None:
        keys = [key for line in self._lines for key in line.names.script_keys]
        await assert_only_known_keys(self._raw, self.names, *keys)
        for line in self._lines:
            await line.close_connections()
        await self.close_connections()

    async def close_connections(self) -> None:
        for door in self._doors:
            await door.aclose()
        await self._desk.aclose()
        await self._raw.aclose()

    async def zadd(self, score: float, member: bytes) -> None:
        await self._raw.zadd(self.names.queue, {member: score})

    async def rpop(self, name: str = RESULTS) -> bytes | None:
        found = await self._raw.brpop([name], timeout=0.01)
        return None if found is None else found[1]

    async def set_key(self, name: str, value: str) -> None:
        if not await self._raw.exists(name):  # a queue's own key is what it is
            await self._raw.set(name, value, ex=1000)

    async def delete_key(self, name: str) -> None:
        await self._raw.delete(name)

    async def get_key(self, name: str) -> str | None:
        value = await self._raw.get(name)
        return None if value is None else value.decode()

    async def run_out(self, *leases: Lease, ago_s: float = 0.0) -> None:
        key = f"{self.names.pool_prefix}:leases"
        wanted = {lease.entry_id for lease in leases}
        held = await self._raw.zrange(key, 0, -1)
        ended_at = await self._time() - ago_s
        gone = {name: ended_at for name in held if entry_of(name) in wanted}
        assert len(gone) == len(wanted)
        await self._raw.zadd(key, gone, xx=True)

    async def fall_silent(self, *owners: str) -> None:
        beats, control = f"{self.names.queue_prefix}:heartbeats", f"{self.names.queue_prefix}:control"
        now = await self._time()
        await self._raw.zadd(beats, dict.fromkeys(owners, now), xx=True)
        for field in ("tick", "heartbeats_tick"):
            if await self._raw.hexists(control, field):
                await self._raw.hset(control, field, f"{now:.6f}")

    async def _time(self) -> float:
        seconds, micros = await self._raw.time()
        return float(seconds + micros / 1e6)

    async def beating(self) -> set[str]:
        return {
            owner.decode() for owner in await self._raw.zrange(f"{self.names.queue_prefix}:heartbeats", 0, -1)
        }

    async def skip_sweeps(self, seconds: float) -> None:
        key = f"{self.names.queue_prefix}:control"
        for field in ("tick", "quiet_until", "heartbeats_tick", "heartbeats_quiet_until"):
            if (at := await self._raw.hget(key, field)) is not None:
                await self._raw.hset(key, field, f"{float(at) - seconds:.6f}")

    async def be_away(self, seconds: float) -> None:
        await self.skip_sweeps(seconds)
        key = f"{self.names.queue_prefix}:heartbeats"
        for owner in await self._raw.zrange(key, 0, -1):
            await self._raw.zincrby(key, -seconds, owner)

    async def step_back(self, seconds: float) -> None:
        ticks = ("tick", "quiet_until", "heartbeats_tick", "heartbeats_quiet_until")
        await self._move(
            seconds, ("leases", "heartbeats"), ("read_at", "overload_at", "overload_until", *ticks)
        )
        await self.step_line_back(seconds)

    async def step_line_back(self, seconds: float) -> None:
        await self._move(seconds, (), (f"tick:{self.names.queue}",))
        for key in (f"{self.names.queue_prefix}:delayed", f"{self.names.queue_prefix}:sequences:checks"):
            for name in await self._raw.zrange(key, 0, -1):
                await self._raw.zincrby(key, seconds, name)

    async def age_sequences(self, seconds: float) -> None:
        with self._server.client() as raw:
            age_redis(raw, self.names, seconds)

    async def age_board(self, seconds: float) -> None:
        with self._server.client() as raw:
            age_board_redis(raw, self.names, seconds)

    async def end_silently(self, lease: Lease) -> None:
        pool = self.names.pool_prefix
        (name,) = [
            one for one in await self._raw.zrange(f"{pool}:leases", 0, -1) if entry_of(one) == lease.entry_id
        ]
        await self._raw.zrem(f"{pool}:leases", name)
        await self._raw.hdel(f"{pool}:owners", name.partition(b":")[2])
        for key in ("entries", "members"):
            await self._raw.hdel(f"{self.names.queue_prefix}:{key}", lease.entry_id)

    async def _move(self, seconds: float, sets: Sequence[str], fields: Sequence[str]) -> None:
        pool = self.names.pool_prefix
        for key in sets:
            for name in await self._raw.zrange(f"{pool}:{key}", 0, -1):
                await self._raw.zincrby(f"{pool}:{key}", seconds, name)
        for field in fields:
            if (at := await self._raw.hget(f"{pool}:control", field)) is not None:
                await self._raw.hset(f"{pool}:control", field, f"{float(at) + seconds:.6f}")
