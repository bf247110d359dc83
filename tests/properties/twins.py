"""Redis and memory side by side: what the model-based test of the queue does its steps on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.memory_queue.entries import Location
from dispatcher.ports import (
    ClaimResult,
    Lease,
    LeaseCounts,
    Permit,
    RenewResult,
    SharedState,
)
from dispatcher.queue.keys import QueueNames
from tests.queue.known import assert_only_known_keys
from tests.queue.made import OwnerAndDesk, entry_of, units_of
from tests.queue.servers import Server, server

OWNERS = 3
CLOCKS_APART_S = (0.0, 1_000_000.0, -500_000.0)
LEASE_S = 3000.0
OWNER_TIMEOUT_S = 1000.0
DEAD_MAX = 3
LISTS = ("", "l:{m}:1", "l:{m}:2", "m:{m}:q:leases")
"""The default, two of the requests' own, and one that takes no results."""
NAMES = QueueNames("m:{m}:q", "m:{m}:results")
MARKED = ("r-0", "r-1", "r-2")
"""Ids that may have markers."""
SETS = (
    *(
        "returned",
        "suspects",
        "sequenced",
        "waiting-for-model",
        "waiting-for-model:order",
        "waiting-for-model:counts",
    ),
    *("delayed", "delayed:order", "leases", "dead", "heartbeats", "sequences:turns", "sequences:closed-runs"),
)
HASHES = ("members", "entries", "owners", "control", "sequences", "sequences:conversations")
"""What is looked at after each step, by the ends of the names."""
TICKS = ("tick", "heartbeats_tick", f"tick:{NAMES.queue}")
UNLEASED = Lease(0, "", b"", 0, 0, 0, 0, 0)
BAND = 10**11


class ApartLoop(asyncio.SelectorEventLoop):
    """An event loop on another machine, as far as its clock tells."""

    apart_s = 0.0

    def time(self) -> float:
        return super().time() + self.apart_s


class LossyRedis(redis.asyncio.Redis):
    """A connection that may break after a script ran and before its reply came."""

    lose_next = False

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await super().execute_command(*args, **options)
        if self.lose_next and args[0] in ("EVALSHA", "EVAL"):
            self.lose_next = False
            raise redis.ConnectionError("the reply was lost")
        return reply


@dataclass
class Bench:
    """What all runs share: one server, and one loop and connection per owner."""

    raw: Any
    """A client of redis-py: typed, each answer is a union of what any protocol may give."""
    loops: list[ApartLoop]
    clients: list[LossyRedis]


@contextmanager
def open_bench() -> Iterator[Bench]:
    with _valkey() as running:
        socket = str(running.directory / "s")
        loops, clients = [], []
        for apart_s in CLOCKS_APART_S:
            loop = ApartLoop()
            loop.apart_s = apart_s
            loops.append(loop)
            retry = Retry(NoBackoff(), 0)
            clients.append(LossyRedis(unix_socket_path=socket, protocol=2, retry=retry))
        with redis.Redis(unix_socket_path=socket) as raw:
            yield Bench(raw, loops, clients)
        for loop, client in zip(loops, clients, strict=True):
            loop.run_until_complete(client.aclose())
            loop.close()


@contextmanager
def _valkey() -> Iterator[Server]:
    # Not pytest's directory: its names are too long for a socket.
    directory = Path(mkdtemp(prefix="model-"))
    with server("valkey", directory, "--unixsocket", str(directory / "s")) as running:
        yield running
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


class Knows:
    """A prover that knows what a run tells it."""

    def __init__(self) -> None:
        self.ended: set[str] = set()

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        return [owner for owner in owners if owner in self.ended]


@dataclass(frozen=True)
class Held:
    """One lease, as Redis and as memory told it."""

    real: Lease
    twin: Lease


def _part(model: str) -> str:
    """How the place of one begins that waits for this model."""
    return f"{len(model.encode()):03}{model}"


def alike(real: Lease, twin: Lease) -> None:
    assert real.copy_with(token="") == twin.copy_with(token="")


class Twins(RuleBasedStateMachine):
    """One run: an empty queue, in Redis and in memory, and what holds after each step."""

    bench: Bench

    @initialize()
    def begin(self) -> None:
        self.bench.raw.flushall()
        self.began_at = time.time()
        # Redis TIME and time.time() are one clock on one machine: the twin's time is Redis's.
        self.store = MemoryStore(
            time.time, lease_s=LEASE_S, name=NAMES.queue, result_list=NAMES.result_list, dead_max=DEAD_MAX
        )
        self.knows = Knows()
        self.real: list[OwnerAndDesk] = []
        self.twin: list[MemoryQueue] = []
        for number, (loop, client) in enumerate(zip(self.bench.loops, self.bench.clients, strict=True)):
            client.lose_next = False
            name = f"owner-{number}"
            presence: dict[str, Any] = {"owner_timeout_s": OWNER_TIMEOUT_S, "dead_owner_detector": self.knows}
            queue = OwnerAndDesk(client, NAMES, name, lease_s=LEASE_S, dead_max=DEAD_MAX, **presence)
            self.real.append(queue)
            self.twin.append(MemoryQueue(self.store, name, clock=loop.time, **presence))
            for _ in range(3):  # know the server's clock well
                loop.run_until_complete(queue.renew([]))
            loop.run_until_complete(self.twin[number].renew([]))
        self.known: list[list[Held]] = [[] for _ in range(OWNERS)]
        self.ended: list[Held] = []
        self.nonces: list[tuple[str, bool]] = [("", False)] * OWNERS
        self.written: Counter[tuple[str, bytes]] = Counter()
        self.accepted = self.finished = self.serial = 0
        self.moments: set[int] = set()
        self.moment = 0
        self.error_s = 0.3
        """How far two ideas of one moment may lie apart: as long as the longest step took."""
        for number in range(10):
            self.add_line(4.0e9 + number // 3, b"%d" % (number % 4))

    seen: Counter[str]
    """What happened in all runs: a model in which nothing happens would prove nothing."""

    def both(
        self, owner: int, step: Callable[[Any, int], Awaitable[Any]], lose: bool = False
    ) -> tuple[Any, Any]:
        """Do a step on Redis (where `lose`, its first reply is lost) and in memory, as one owner."""
        loop = self.bench.loops[owner]
        self.bench.clients[owner].lose_next = lose
        began = time.monotonic()
        real = loop.run_until_complete(step(self.real[owner], 0))
        self.error_s = max(self.error_s, 0.3 + time.monotonic() - began)
        self.seen["replies lost"] += lose and not self.bench.clients[owner].lose_next
        self.bench.clients[owner].lose_next = False
        return real, loop.run_until_complete(step(self.twin[owner], 1))

    def at(self, owner: int, moment: int) -> float:
        """A moment on the owner's clock; they are far enough apart for any measuring error."""
        return self.began_at - 2000 + moment - (time.time() - self.bench.loops[owner].time())

    def when(self, owner: int, lag: int) -> float:
        """Now, less a lag, in moments; no two are the same: equality is the conformance suite's business."""
        self.moment += 2
        moment = self.moment - lag
        while moment in self.moments:
            moment += 1
        self.moments.add(moment)
        return self.at(owner, moment)

    def permit(self, owner: int, limit: int, lag: int = 0) -> Permit:
        return Permit(limit, self.when(owner, lag), self.store.pool.lost_units)

    def same_facts(
        self, owner: int, real: ClaimResult | RenewResult, twin: ClaimResult | RenewResult
    ) -> None:
        self.same_count(real.lease_counts, twin.lease_counts)
        self.same_shared(real.shared, twin.shared)

    def same_count(self, real: LeaseCounts, twin: LeaseCounts) -> None:
        assert (real.live_units, real.other_owners_units) == (twin.live_units, twin.other_owners_units)
        assert (real.lost_units, real.orphaned_units) == (twin.lost_units, twin.orphaned_units)
        assert real.counted_at == pytest.approx(twin.counted_at, abs=self.error_s)

    def same_shared(self, real: SharedState, twin: SharedState) -> None:
        assert (real.limit, real.probing_owner, real.is_paused) == (
            twin.limit,
            twin.probing_owner,
            twin.is_paused,
        )
        if real.limit is not None:
            assert real.read_at == pytest.approx(twin.read_at, abs=self.error_s)
        assert (real.overload is None) == (twin.overload is None)
        if real.overload is not None and twin.overload is not None:
            a, b = real.overload, twin.overload
            assert (a.is_out_of_capacity, a.in_flight) == (b.is_out_of_capacity, b.in_flight)
            assert (a.refused_at, a.retry_at) == pytest.approx((b.refused_at, b.retry_at), abs=self.error_s)

    def add_line(self, score: float, member: bytes) -> None:
        """A foreign producer's ZADD."""
        new = self.store.add_member(member, score)
        assert self.bench.raw.zadd(NAMES.queue, {member: score}) == new
        self.accepted += new

    @invariant()
    def both_hold_the_same(self) -> None:
        self.compare(self.look())

    def look(self) -> dict[str, Any]:
        """All that lies in Redis, by the end of its name: in one go, for each way there costs more than the
        answer."""
        prefix, pipe = NAMES.queue_prefix, self.bench.raw.pipeline(transaction=False)
        pipe.zrange(NAMES.queue, 0, -1, withscores=True)
        for end in SETS:
            pipe.zrange(f"{prefix}:{end}", 0, -1, withscores=True)
        for end in HASHES:
            pipe.hgetall(f"{prefix}:{end}")
        for name in (NAMES.result_list, *LISTS[1:3]):
            pipe.lrange(name, 0, -1)
        for name in MARKED:
            pipe.get(NAMES.active_key(name))
        pipe.keys(NAMES.cancel_key("*", "*"))
        ends = ("", *SETS, *HASHES, NAMES.result_list, *LISTS[1:3], *MARKED, "cancels")
        return dict(zip(ends, pipe.execute(), strict=True))

    def compare(self, found: dict[str, Any]) -> None:
        """What holds after each step."""
        self.every_request_is_in_exactly_one_place(found)
        self.what_waits_for_its_model_is_counted_and_ordered(found)
        self.units_are_counted_as_they_are_held(found)
        self.the_same_owners_are_presumed_alive(found)
        self.each_result_is_there_exactly_once(found)
        self.markers_are_the_same(found)
        self.desks_tell_the_same(found)

    def every_request_is_in_exactly_one_place(self, found: dict[str, Any]) -> None:
        places = self.real_places(found)
        assert places == {
            entry.id: (entry.location.value, entry.member, entry.score)
            for entry in self.store.queue.entries.values()
        }
        pending = dict(found[""])
        assert pending == {member: entry.score for member, entry in self.store.queue.pending.items()}
        dropped = self.store.queue.dropped_dead_count
        assert self.accepted == self.finished + dropped + len(places) + len(pending)

    def real_places(self, lie: dict[str, Any]) -> dict[int, tuple[str, bytes, float]]:
        """Where each claimed request lies in Redis; fails on one that lies in two places, or in none."""
        waiting = (lie[end] for end in ("returned", "suspects", "sequenced", "waiting-for-model"))
        returned = [seat for several in waiting for seat in several]
        order, members = lie["delayed:order"], lie["members"]
        found: list[tuple[int, str]] = []
        found += [(int(seat[-16:]), Location.RETURNED.value) for seat, _ in returned]
        found += [(int(seat[-16:]), Location.DELAYED.value) for seat, _ in order]
        found += [(entry_of(name), Location.LEASED.value) for name, _ in lie["leases"]]
        found += [(int(entry), Location.DEAD.value) for entry, _ in lie["dead"]]
        places = dict(found)
        assert len(places) == len(found)
        assert {int(name) for name, _ in lie["delayed"]} == {entry for entry, at in found if at == "delayed"}
        assert {int(entry) for entry in members} == {int(entry) for entry in lie["entries"]} == set(places)
        scores = {int(seat[-16:]): score for seat, score in [*returned, *order]}
        return {
            entry: (place, members[b"%d" % entry], scores.get(entry, self.store.queue.entries[entry].score))
            for entry, place in places.items()
        }

    def what_waits_for_its_model_is_counted_and_ordered(self, found: dict[str, Any]) -> None:
        """What is kept by model is of exactly those that lie in the lane."""
        awaiting = {one.id: one for one in self.store.queue.entries.values() if one.missing_model}
        assert {int(seat[-16:]) for seat, _ in found["waiting-for-model"]} == set(awaiting)
        order = [name.decode() for name, _ in found["waiting-for-model:order"]]
        place = sorted(awaiting.values(), key=lambda one: (_part(one.missing_model), one.score, one.id))
        assert [(name[:-33], int(name[-16:])) for name in order] == [
            (_part(one.missing_model), one.id) for one in place
        ]
        counts = {name.decode(): count for name, count in found["waiting-for-model:counts"]}
        assert counts == Counter(one.missing_model for one in awaiting.values())

    def real_units(self) -> int:
        """What all leases count, by their names."""
        leases = self.bench.raw.zrange(f"{NAMES.queue_prefix}:leases", 0, -1)
        return sum(units_of(name) for name in leases)

    def units_are_counted_as_they_are_held(self, found: dict[str, Any]) -> None:
        by_owner = {key.decode(): int(n) for key, n in found["owners"].items()}
        assert by_owner == dict(self.store.pool.units_by_owner)
        extra = int(found["control"].get(b"extra_units") or 0)
        leases = found["leases"]
        units = sum(units_of(name) for name, _ in leases)
        assert len(leases) + extra == units == self.store.pool.leased_units

    def the_same_owners_are_presumed_alive(self, found: dict[str, Any]) -> None:
        assert {owner.decode() for owner, _ in found["heartbeats"]} == set(self.store.pool.heartbeats)

    def each_result_is_there_exactly_once(self, found: dict[str, Any]) -> None:
        there: Counter[tuple[str, bytes]] = Counter()
        for name in (NAMES.result_list, *LISTS[1:3]):
            assert sorted(found[name]) == sorted(self.store.result_lists.get(name, ()))
            for result in found[name]:
                if b'"error_code":"INVALID_REQUEST"' not in result:
                    there[name, result] += 1
        assert there == self.written

    def markers_are_the_same(self, found: dict[str, Any]) -> None:
        for name in MARKED:
            packed = found[name]
            tokens = {} if packed is None else msgspec.msgpack.decode(packed, type=dict[str, float])
            assert tokens.keys() == self.store.queue.active_tokens.get(name, {}).keys()
        assert {key.decode() for key in found["cancels"]} == {
            NAMES.cancel_key(*name.split(":")) for name in self.store.queue.cancel_markers
        }

    def desks_tell_the_same(self, found: dict[str, Any]) -> None:
        """The order is by score, then bytes."""

        async def told(desk: Any) -> tuple[Any, list[bytes]]:
            return await desk.count_waiting_by_model(), list(await desk.peek_next(1000))

        loop = self.bench.loops[0]
        counts, line = loop.run_until_complete(told(self.real[0]))
        assert line == sorted(line)
        assert (counts, line) == loop.run_until_complete(told(self.store))
        assert counts == {name.decode(): count for name, count in found["waiting-for-model:counts"]}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            loop = self.bench.loops[0]
            loop.run_until_complete(assert_only_known_keys(self.bench.clients[0], NAMES, *LISTS[1:3]))
