"""Queues for the conformance tests: the queue in memory, and the real scripts in Redis and Valkey.

A `World` has owners (the queue as dispatchers use it), the queue admin (as producers and operators use it),
and plain Redis commands as any program may send them. In memory, these act on what stands for the keys.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

from dispatcher.features.models.queue.calls import ModelAdminCalls, ModelCalls
from dispatcher.features.sequences.queue.calls import SequenceCalls
from dispatcher.queue.admin_contract import QueueAdmin
from dispatcher.queue.contract import ClaimResult, Lease, Permit, Queue, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.owners import DeadOwnerDetector
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.lanes import Lane
from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.queue.factories import parse_entry_id
from tests.queue.key_checks import assert_only_known_keys
from tests.queue.redis_users import grant, url_of
from tests.queue.servers import Server
from tests.queue.time_shifts import (
    age_model_registry_in_memory,
    age_model_registry_in_redis,
    age_sequences_in_memory,
    age_sequences_in_redis,
)

QUEUE = "batch:{qwen}:requests"
RESULTS = "batch:{qwen}:results"
LEASE_S = 30.0
OWNER_TIMEOUT_S = 20.0
"""Far longer than a test takes on a busy machine."""
CONNECT_S = 15.0
"""Time for one connection, and for one call: a busy machine may let a connection wait for seconds."""
NOW = int(time.time())
"""Unix seconds, for deadlines well before and after it."""

_nonces = itertools.count()
_readings = itertools.count()


def member(request_id: str = "r-1", *, deadline: int = NOW + 360_000, token: str = "", **data: Any) -> bytes:
    """Return a member written by hand, as a producer in any language does."""
    internal = {"request_token": token} if token else {}
    fields = {"id": request_id, "deadline": deadline, "payload": {"prompt": "hi"}} | data
    return json.dumps({"internal": internal, "request_kind": "redis", "data": fields}).encode()


def permit(limit: int = 1000, *, lost: int = 0) -> Permit:
    """Return a permit by a reading that is a second newer than the previous one.

    The readings are old, because owners know the server's clock only to a round trip, so that two recent
    readings could be in either order. Readings from the future would be ignored.
    """
    return Permit(limit, asyncio.get_running_loop().time() - 10_000 + next(_readings), lost)


async def claim(queue: Queue, max_count: int = 100, limit: int = 1000, **options: Any) -> Sequence[Lease]:
    """Claim with a newer permit than all before. Return the leases."""
    return (await claim_fully(queue, max_count, limit, **options)).leases


async def claim_fully(
    queue: Queue,
    max_count: int = 100,
    limit: int = 1000,
    *,
    lost: int = 0,
    suspects: int = 1,
    started: int = 1000,
) -> ClaimResult:
    lanes = {Lane.SUSPECTS: suspects, Lane.STARTED: started}
    return await queue.claim(
        max_count, f"nonce-{next(_nonces)}", permit(limit, lost=lost), max_per_lane=lanes
    )


def answer(lease: Lease, result: bytes | None = None, results: str = "", **ids: Any) -> Settlement:
    """Return the settlement of a lease with a result of its own."""
    return Settlement(
        lease, b'{"id":"r-1","entry":%d}' % lease.entry_id if result is None else result, results, **ids
    )


def sequences(queue: Queue) -> SequenceCalls:
    """Return the calls of sequences of a dispatcher."""
    return queue.open_calls(SequenceCalls)


def models(queue: Queue) -> ModelCalls:
    """Return the calls of models of a dispatcher."""
    return queue.open_calls(ModelCalls)


def model_admin(admin: QueueAdmin) -> ModelAdminCalls:
    """Return the calls of models of an operator."""
    return admin.open_calls(ModelAdminCalls)


async def waits(queue: Queue, seconds: float) -> bool:
    """Return whether the queue waits for work for that long."""
    try:
        async with asyncio.timeout(seconds):
            await queue.wait_for_work()
    except TimeoutError:
        return True
    return False


class World(ABC):
    """One empty queue."""

    queue_admin: QueueAdmin

    def open_other_queue(self, queue: str) -> World:
        """Return another queue of the same pool. Time is shifted in the first one. Not in memory."""
        raise NotImplementedError

    @abstractmethod
    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        dead_owner_detector: DeadOwnerDetector | None = None,
        max_pending: int = 0,
        poll_s: float = 0.2,
    ) -> Queue:
        """Return the queue of a dispatcher. The same name twice is the same owner after a restart."""

    @abstractmethod
    async def zadd(self, score: float, member: bytes) -> None: ...

    @abstractmethod
    async def rpop(self, name: str = RESULTS) -> bytes | None: ...

    @abstractmethod
    async def set_key(self, name: str, value: str) -> None: ...

    @abstractmethod
    async def delete_key(self, name: str) -> None: ...

    async def get_key(self, name: str) -> str | None:
        """Return the value of a key. Not in memory."""
        raise NotImplementedError

    @abstractmethod
    async def count_progress(self) -> int:
        """Return the number of requests of which progress is stored."""

    @abstractmethod
    async def expire_leases(self, *leases: Lease, ago_s: float = 0.0) -> None:
        """Let these leases have expired `ago_s` seconds ago."""

    @abstractmethod
    async def silence_owners(self, *owners: str) -> None:
        """Let these owners have been silent for their owner_timeout_s while others have swept. Owners without
        a heartbeat stay unknown."""

    @abstractmethod
    async def get_owners_with_heartbeats(self) -> set[str]:
        """Return the owners that count as alive."""

    @abstractmethod
    async def skip_sweeps(self, seconds: float) -> None:
        """Move the last sweep back by this time."""

    @abstractmethod
    async def simulate_outage(self, seconds: float) -> None:
        """Let the queue have been unreachable for this time since the last call. No lease expires by it."""

    @abstractmethod
    async def step_clock_back(self, seconds: float) -> None:
        """Step the server clock back: all stored times are later by this time."""

    async def step_queue_clock_back(self, seconds: float) -> None:
        """Shift the stored times of this queue only, after `step_clock_back` of another queue. Not in
        memory."""
        raise NotImplementedError

    @abstractmethod
    async def age_sequences(self, seconds: float) -> None:
        """Move all times of sequences back."""

    @abstractmethod
    async def age_model_registry(self, seconds: float) -> None:
        """Move all times of the model registry back."""

    async def sweep_each_second(self, sweeper: Queue, seconds: int) -> int:
        """Sweep once for each second. Return the number of reclaimed leases."""
        reclaimed = 0
        for _ in range(seconds):
            await self.skip_sweeps(1)
            reclaimed += (await sweeper.sweep()).reclaimed_count
        return reclaimed

    async def lose_leases(self, queue: Queue, *leases: Lease) -> None:
        """Let these leases expire and be reclaimed."""
        await queue.sweep()
        await self.expire_leases(*leases)
        assert (await queue.sweep()).reclaimed_count == len(leases)

    async def pop_results(self, name: str = RESULTS) -> list[bytes]:
        """Pop all results of a list."""
        found = []
        while (one := await self.rpop(name)) is not None:
            found.append(one)
        return found


class MemoryWorld(World):
    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.store = MemoryStore(
            clock,
            unix_origin=time.time() - clock(),
            lease_s=LEASE_S,
            name=QUEUE,
            result_list=RESULTS,
        )
        self.queue_admin = cast(
            QueueAdmin, self.store
        )  # tests of the calls that it lacks have the mark `server`

    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        **options: Any,
    ) -> MemoryQueue:
        clock = asyncio.get_running_loop().time
        return MemoryQueue(self.store, name, clock=clock, owner_timeout_s=timeout_s, **options)

    async def zadd(self, score: float, member: bytes) -> None:
        self.store.add_member(member, score)

    async def rpop(self, name: str = RESULTS) -> bytes | None:
        return self.store.pop_result(name)

    async def set_key(self, name: str, value: str) -> None:
        if name.startswith(prefix := f"{QUEUE}:cancel:"):
            until = self.store.pool.unix_now() + 1000
            self.store.queue.cancel_markers[name.removeprefix(prefix)] = (value, until)
        else:
            self.store.pool.invalid_lists.add(name)

    async def delete_key(self, name: str) -> None:
        self.store.pool.invalid_lists.discard(name)

    async def count_progress(self) -> int:
        return sum(entry.progress != b"" for entry in self.store.queue.entries.values())

    async def expire_leases(self, *leases: Lease, ago_s: float = 0.0) -> None:
        for lease in leases:
            held = self.store.pool.leases[lease.entry_id]
            held.expires_at = self.store.pool.clock() - ago_s
            heapq.heappush(self.store.pool.expiries, (held.expires_at, lease.entry_id))

    async def silence_owners(self, *owners: str) -> None:
        for owner in owners:
            if owner in self.store.pool.heartbeats:
                self.store.pool.heartbeats[owner] = self.store.pool.clock()
        if self.store.pool.swept_at is not None:
            self.store.pool.swept_at = self.store.pool.clock()

    async def get_owners_with_heartbeats(self) -> set[str]:
        return set(self.store.pool.heartbeats)

    async def skip_sweeps(self, seconds: float) -> None:
        assert self.store.pool.swept_at is not None
        self.store.pool.swept_at -= seconds
        self.store.pool.no_expiry_until -= seconds
        self.store.pool.no_silence_until -= seconds

    async def simulate_outage(self, seconds: float) -> None:
        await self.skip_sweeps(seconds)
        for owner in self.store.pool.heartbeats:
            self.store.pool.heartbeats[owner] -= seconds

    async def step_clock_back(self, seconds: float) -> None:
        before, origin = self.store.pool.clock, self.store.pool.unix_origin
        self.store.pool.clock = lambda: before() - seconds
        self.store.pool.unix_origin = origin + seconds  # the markers' lifetimes are the server's own

    async def age_sequences(self, seconds: float) -> None:
        age_sequences_in_memory(self.store, seconds)

    async def age_model_registry(self, seconds: float) -> None:
        age_model_registry_in_memory(self.store, seconds)


class RedisWorld(World):
    """The real scripts on an empty server, with the permissions of docs/explanation/security.md only."""

    def __init__(self, server: Server, queue: str = QUEUE, features: Sequence[str] = ALL_FEATURES) -> None:
        self._server = server
        self._features = features
        with server.client() as admin:
            more = () if queue == QUEUE else (f"~{queue}*", f"&{queue}*")
            grant(admin, "dispatcher", "~a:*", "~tenant:*", *more)
            grant(admin, "operator", *more)
        self._owner_queues: list[RedisQueue] = []
        self._other_queues: list[RedisWorld] = []
        # With types, each reply would be a union over all protocols.
        self._raw: Any = connect(server.url, connect_timeout_s=CONNECT_S)
        self.names = QueueNames(queue, RESULTS, pool=QUEUE)
        self._queue_admin = RedisQueueAdmin(
            connect(url_of(server, "operator"), connect_timeout_s=CONNECT_S), self.names, features=features
        )
        self.queue_admin = self._queue_admin

    def open_other_queue(self, queue: str) -> RedisWorld:
        self._other_queues.append(RedisWorld(self._server, queue, self._features))
        return self._other_queues[-1]

    def owner(
        self,
        name: str = "owner-1",
        *,
        timeout_s: float = OWNER_TIMEOUT_S,
        dead_owner_detector: DeadOwnerDetector | None = None,
        max_pending: int = 0,
        poll_s: float = 0.2,
    ) -> RedisQueue:
        client = connect(url_of(self._server, "dispatcher"), connect_timeout_s=CONNECT_S)
        door = RedisQueue(
            client,
            self.names,
            name,
            QueueOptions(
                lease_s=LEASE_S,
                owner_timeout_s=timeout_s,
                max_pending=max_pending,
                poll_s=poll_s,
                attempt_timeout_s=CONNECT_S,
            ),
            dead_owner_detector=dead_owner_detector,
            features=self._features,
        )
        self._owner_queues.append(door)
        return door

    async def close(self) -> None:
        keys = [key for other in self._other_queues for key in other.names.script_keys]
        await assert_only_known_keys(self._raw, self.names, *keys)
        for other in self._other_queues:
            await other.close_connections()
        await self.close_connections()

    async def close_connections(self) -> None:
        for door in self._owner_queues:
            await door.aclose()
        await self._queue_admin.aclose()
        await self._raw.aclose()

    async def zadd(self, score: float, member: bytes) -> None:
        await self._raw.zadd(self.names.queue, {member: score})

    async def rpop(self, name: str = RESULTS) -> bytes | None:
        found = await self._raw.brpop([name], timeout=0.01)
        return None if found is None else found[1]

    async def set_key(self, name: str, value: str) -> None:
        if not await self._raw.exists(name):  # an existing key of the queue is kept
            await self._raw.set(name, value, ex=1000)

    async def delete_key(self, name: str) -> None:
        await self._raw.delete(name)

    async def get_key(self, name: str) -> str | None:
        value = await self._raw.get(name)
        return None if value is None else value.decode()

    async def count_progress(self) -> int:
        count: int = await self._raw.hlen(self.names.progress_key)
        return count

    async def expire_leases(self, *leases: Lease, ago_s: float = 0.0) -> None:
        key = f"{self.names.pool_prefix}:leases"
        wanted = {lease.entry_id for lease in leases}
        held = await self._raw.zrange(key, 0, -1)
        ended_at = await self._time() - ago_s
        gone = {name: ended_at for name in held if parse_entry_id(name) in wanted}
        assert len(gone) == len(wanted)
        await self._raw.zadd(key, gone, xx=True)

    async def silence_owners(self, *owners: str) -> None:
        heartbeats, control = f"{self.names.queue_prefix}:heartbeats", f"{self.names.queue_prefix}:control"
        now = await self._time()
        await self._raw.zadd(heartbeats, dict.fromkeys(owners, now), xx=True)
        if await self._raw.hexists(control, "tick"):
            await self._raw.hset(control, "tick", f"{now:.6f}")

    async def _time(self) -> float:
        seconds, micros = await self._raw.time()
        return float(seconds + micros / 1e6)

    async def get_owners_with_heartbeats(self) -> set[str]:
        return {
            owner.decode() for owner in await self._raw.zrange(f"{self.names.queue_prefix}:heartbeats", 0, -1)
        }

    async def skip_sweeps(self, seconds: float) -> None:
        key = f"{self.names.queue_prefix}:control"
        for field in ("tick", "quiet_until", "heartbeats_quiet_until"):
            if (at := await self._raw.hget(key, field)) is not None:
                await self._raw.hset(key, field, f"{float(at) - seconds:.6f}")

    async def simulate_outage(self, seconds: float) -> None:
        await self.skip_sweeps(seconds)
        key = f"{self.names.queue_prefix}:heartbeats"
        for owner in await self._raw.zrange(key, 0, -1):
            await self._raw.zincrby(key, -seconds, owner)

    async def step_clock_back(self, seconds: float) -> None:
        ticks = ("tick", "quiet_until", "heartbeats_quiet_until")
        await self._move(
            seconds, ("leases", "heartbeats"), ("read_at", "overload_at", "overload_until", *ticks)
        )
        await self.step_queue_clock_back(seconds)

    async def step_queue_clock_back(self, seconds: float) -> None:
        await self._move(seconds, (), (f"tick:{self.names.queue}",))
        for key in (f"{self.names.queue_prefix}:delayed", f"{self.names.queue_prefix}:sequences:checks"):
            for name in await self._raw.zrange(key, 0, -1):
                await self._raw.zincrby(key, seconds, name)

    async def age_sequences(self, seconds: float) -> None:
        with self._server.client() as raw:
            age_sequences_in_redis(raw, self.names, seconds)

    async def age_model_registry(self, seconds: float) -> None:
        with self._server.client() as raw:
            age_model_registry_in_redis(raw, self.names, seconds)

    async def _move(self, seconds: float, sets: Sequence[str], fields: Sequence[str]) -> None:
        pool = self.names.pool_prefix
        for key in sets:
            for name in await self._raw.zrange(f"{pool}:{key}", 0, -1):
                await self._raw.zincrby(f"{pool}:{key}", seconds, name)
        for field in fields:
            if (at := await self._raw.hget(f"{pool}:control", field)) is not None:
                await self._raw.hset(f"{pool}:control", field, f"{float(at) + seconds:.6f}")
