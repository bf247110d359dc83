"""Comparison of the queue in Redis with the queue in memory, for the model-based tests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, run_state_machine_as_test
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dispatcher.features.models.queue.calls import ModelAdminCalls
from dispatcher.lab.memory_queue.entries import Location
from dispatcher.queue.contract import (
    ClaimResult,
    Lease,
    LeaseCounts,
    Permit,
    RenewResult,
    SharedState,
    SweepSummary,
)
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.lanes import Lane
from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.properties import queue_oracle
from tests.queue.factories import OwnerAndAdmin, parse_entry_id, parse_lease_units
from tests.queue.key_checks import assert_only_known_keys
from tests.queue.servers import Server, server

OWNERS = 3
CLOCK_SHIFTS_S = (0.0, 1_000_000.0, -500_000.0)
LEASE_S = 3000.0
OWNER_TIMEOUT_S = 1000.0
DEAD_MAX = 3
RESULT_LISTS = ("", "l:{m}:1", "l:{m}:2", "m:{m}:q:leases")
"""The default list, two lists that requests name, and a key that cannot take results."""
NAMES = QueueNames("m:{m}:q", "m:{m}:results")
MARKER_IDS = ("r-0", "r-1", "r-2")
"""Ids that may have markers."""
SORTED_SETS = (
    *(
        "returned",
        "suspects",
        "sequenced",
        "waiting-for-model",
        "waiting-for-model:order",
        "waiting-for-model:counts",
        "started",
    ),
    *("delayed", "delayed:order", "leases", "dead", "heartbeats", "sequences:turns", "sequences:closed-runs"),
)
HASHES = ("members", "entries", "owners", "control", "sequences", "sequences:conversations", "progress")
"""Suffixes of the hashes that are read after each step, as `SORTED_SETS` has those of the sets."""
TICK_FIELDS = ("tick", f"tick:{NAMES.queue}")
UNLEASED = Lease(0, "", b"", 0, 0, 0, 0, 0)
SCORE_BAND = 10**11


class ShiftedLoop(asyncio.SelectorEventLoop):
    """Event loop with a shifted clock, like one on another machine."""

    shift_s = 0.0

    def time(self) -> float:
        return super().time() + self.shift_s


class LossyRedis(redis.asyncio.Redis):
    """Connection that may break after a script ran and before its reply arrives."""

    lose_next_reply = False

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        reply = await super().execute_command(*args, **options)
        if self.lose_next_reply and args[0] in ("EVALSHA", "EVAL"):
            self.lose_next_reply = False
            raise redis.ConnectionError("the reply was lost")
        return reply


@dataclass
class Connections:
    """One server that all runs share, with one event loop and one connection for each owner."""

    raw: Any
    """Client of redis-py. It is not typed, because each typed reply would be a union over all protocols."""
    loops: list[ShiftedLoop]
    clients: list[LossyRedis]


@contextmanager
def open_connections() -> Iterator[Connections]:
    with _run_valkey() as running:
        socket = str(running.directory / "s")
        loops, clients = [], []
        for shift_s in CLOCK_SHIFTS_S:
            loop = ShiftedLoop()
            loop.shift_s = shift_s
            loops.append(loop)
            retry = Retry(NoBackoff(), 0)
            clients.append(LossyRedis(unix_socket_path=socket, protocol=2, retry=retry))
        with redis.Redis(unix_socket_path=socket) as raw:
            yield Connections(raw, loops, clients)
        for loop, client in zip(loops, clients, strict=True):
            loop.run_until_complete(client.aclose())
            loop.close()


@contextmanager
def _run_valkey() -> Iterator[Server]:
    # Paths in the directory of pytest are too long for a socket.
    directory = Path(mkdtemp(prefix="model-"))
    with server("valkey", directory, "--unixsocket", str(directory / "s")) as running:
        yield running
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


class KnownEndedOwners:
    """Detector of ended owners that knows the owners that a run names."""

    def __init__(self) -> None:
        self.owners: set[str] = set()

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        return [owner for owner in owners if owner in self.owners]


@dataclass(frozen=True)
class LeasePair:
    """One lease as Redis returned it, and as the memory queue did."""

    real: Lease
    twin: Lease


def _encode_model_prefix(model: str) -> str:
    """Return the prefix of the order names of requests that wait for this model."""
    return f"{len(model.encode()):03}{model}"


def assert_same_lease(real: Lease, twin: Lease) -> None:
    assert real.copy_with(token="") == twin.copy_with(token="")


class QueueComparison(RuleBasedStateMachine):
    """One run: the same steps on a queue in Redis and on one in memory, compared after each step."""

    connections: Connections

    @initialize()
    def start_run(self) -> None:
        self.connections.raw.flushall()
        self.began_at = time.time()
        # On one machine, Redis TIME and time.time() are the same clock.
        self.store = MemoryStore(time.time, lease_s=LEASE_S, name=NAMES.queue, result_list=NAMES.result_list)
        self.dead_owner_detector = KnownEndedOwners()
        self.real: list[OwnerAndAdmin] = []
        self.twin: list[MemoryQueue] = []
        for number, (loop, client) in enumerate(
            zip(self.connections.loops, self.connections.clients, strict=True)
        ):
            client.lose_next_reply = False
            name = f"owner-{number}"
            queue = OwnerAndAdmin(
                client,
                NAMES,
                name,
                lease_s=LEASE_S,
                dead_max=DEAD_MAX,
                attempt_timeout_s=15.0,  # a busy machine may let a call wait for seconds
                owner_timeout_s=OWNER_TIMEOUT_S,
                dead_owner_detector=self.dead_owner_detector,
            )
            self.real.append(queue)
            self.twin.append(MemoryQueue(self.store, name, clock=loop.time, owner_timeout_s=OWNER_TIMEOUT_S))
            for _ in range(3):  # measures the clock of the server precisely
                loop.run_until_complete(queue.renew([]))
            loop.run_until_complete(self.twin[number].renew([]))
        self.held_leases: list[list[LeasePair]] = [[] for _ in range(OWNERS)]
        self.ended_leases: list[LeasePair] = []
        self.nonces: list[tuple[str, bool]] = [("", False)] * OWNERS
        self.written_results: Counter[tuple[str, bytes]] = Counter()
        self.accepted_count = self.finished_count = self.dropped_dead_count = self.serial_number = 0
        self.used_moments: set[int] = set()
        self.last_moment = 0
        self.time_error_s = 0.3
        """Largest difference of two times of the same moment: the duration of the longest step."""
        for number in range(10):
            self.add_foreign_request(4.0e9 + number // 3, b"%d" % (number % 4))

    event_counts: Counter[str]
    """Number of events in all runs. A model in which nothing happens would prove nothing."""

    def run_on_both(
        self, owner: int, step: Callable[[Any, int], Awaitable[Any]], lose_reply: bool = False
    ) -> tuple[Any, Any]:
        """Run a step in Redis and in memory as one owner. `lose_reply` loses the first reply of Redis."""
        loop = self.connections.loops[owner]
        self.connections.clients[owner].lose_next_reply = lose_reply
        started = time.monotonic()
        real = loop.run_until_complete(step(self.real[owner], 0))
        self.time_error_s = max(self.time_error_s, 0.3 + time.monotonic() - started)
        self.event_counts["replies lost"] += (
            lose_reply and not self.connections.clients[owner].lose_next_reply
        )
        self.connections.clients[owner].lose_next_reply = False
        twin = loop.run_until_complete(step(self.twin[owner], 1))
        self.dropped_dead_count += queue_oracle.drop_oldest_dead(self.store.queue, DEAD_MAX)
        return real, twin

    def sweep_both(self, owner: int, lose_reply: bool = False) -> tuple[SweepSummary, SweepSummary]:
        ended = self.dead_owner_detector.owners
        return self.run_on_both(
            owner,
            lambda queue, which: queue_oracle.sweep(queue, ended) if which else queue.sweep(),
            lose_reply,
        )

    def get_owner_time(self, owner: int, moment: int) -> float:
        """Return a moment by the owner's clock. Moments differ by more than any error of measurement."""
        return self.began_at - 2000 + moment - (time.time() - self.connections.loops[owner].time())

    def make_distinct_time(self, owner: int, lag: int) -> float:
        """Return a time that differs from all earlier ones. The conformance suite covers equal times."""
        self.last_moment += 2
        moment = self.last_moment - lag
        while moment in self.used_moments:
            moment += 1
        self.used_moments.add(moment)
        return self.get_owner_time(owner, moment)

    def make_permit(self, owner: int, limit: int, lag: int = 0) -> Permit:
        return Permit(limit, self.make_distinct_time(owner, lag), self.store.pool.lost_units)

    def assert_same_facts(
        self, owner: int, real: ClaimResult | RenewResult, twin: ClaimResult | RenewResult
    ) -> None:
        self.assert_same_counts(real.lease_counts, twin.lease_counts)
        self.assert_same_shared_state(real.shared, twin.shared)

    def assert_same_counts(self, real: LeaseCounts, twin: LeaseCounts) -> None:
        assert (real.live_units, real.other_owners_units) == (twin.live_units, twin.other_owners_units)
        assert (real.lost_units, real.orphaned_units) == (twin.lost_units, twin.orphaned_units)
        assert real.counted_at == pytest.approx(twin.counted_at, abs=self.time_error_s)

    def assert_same_shared_state(self, real: SharedState, twin: SharedState) -> None:
        assert (real.limit, real.probing_owner, real.is_paused) == (
            twin.limit,
            twin.probing_owner,
            twin.is_paused,
        )
        if real.limit is not None:
            assert real.read_at == pytest.approx(twin.read_at, abs=self.time_error_s)
        assert (real.overload is None) == (twin.overload is None)
        if real.overload is not None and twin.overload is not None:
            a, b = real.overload, twin.overload
            assert (a.is_out_of_capacity, a.in_flight) == (b.is_out_of_capacity, b.in_flight)
            assert (a.refused_at, a.retry_at) == pytest.approx(
                (b.refused_at, b.retry_at), abs=self.time_error_s
            )

    def add_foreign_request(self, score: float, member: bytes) -> None:
        """Add a member as another producer does, with ZADD."""
        added_count = self.store.add_member(member, score)
        assert self.connections.raw.zadd(NAMES.queue, {member: score}) == added_count
        self.accepted_count += added_count

    @invariant()
    def states_agree(self) -> None:
        self.check_state(self.read_redis_state())

    def read_redis_state(self) -> dict[str, Any]:
        """Return all keys of the queue in Redis by suffix, read in one round trip to save time."""
        prefix, pipe = NAMES.queue_prefix, self.connections.raw.pipeline(transaction=False)
        pipe.zrange(NAMES.queue, 0, -1, withscores=True)
        for suffix in SORTED_SETS:
            pipe.zrange(f"{prefix}:{suffix}", 0, -1, withscores=True)
        for suffix in HASHES:
            pipe.hgetall(f"{prefix}:{suffix}")
        for name in (NAMES.result_list, *RESULT_LISTS[1:3]):
            pipe.lrange(name, 0, -1)
        for name in MARKER_IDS:
            pipe.get(NAMES.active_key(name))
        pipe.keys(NAMES.cancel_key("*", "*"))
        labels = ("", *SORTED_SETS, *HASHES, NAMES.result_list, *RESULT_LISTS[1:3], *MARKER_IDS, "cancels")
        return dict(zip(labels, pipe.execute(), strict=True))

    def check_state(self, state: dict[str, Any]) -> None:
        """Check all that must hold after each step."""
        self.check_each_request_is_stored_once(state)
        self.check_requests_waiting_for_models(state)
        self.check_progress(state)
        self.check_units(state)
        self.check_heartbeats(state)
        self.check_results(state)
        self.check_markers(state)
        self.check_lookups(state)

    def check_each_request_is_stored_once(self, state: dict[str, Any]) -> None:
        locations = self.find_redis_locations(state)
        assert locations == {
            entry.id: (entry.location.value, entry.member, entry.score)
            for entry in self.store.queue.entries.values()
        }
        pending = dict(state[""])
        assert pending == {member: entry.score for member, entry in self.store.queue.pending.items()}
        ended_count = self.finished_count + self.dropped_dead_count
        assert self.accepted_count == ended_count + len(locations) + len(pending)

    def find_redis_locations(self, state: dict[str, Any]) -> dict[int, tuple[str, bytes, float]]:
        """Return where each claimed request is stored in Redis. Fail if one is stored twice, or nowhere."""
        sets = ("returned", "suspects", "sequenced", "waiting-for-model", "started")
        waiting = (state[suffix] for suffix in sets)
        returned = [item for items in waiting for item in items]
        order, members = state["delayed:order"], state["members"]
        entry_locations: list[tuple[int, str]] = []
        entry_locations += [(int(name[-16:]), Location.RETURNED.value) for name, _ in returned]
        entry_locations += [(int(name[-16:]), Location.DELAYED.value) for name, _ in order]
        entry_locations += [(parse_entry_id(name), Location.LEASED.value) for name, _ in state["leases"]]
        entry_locations += [(int(entry), Location.DEAD.value) for entry, _ in state["dead"]]
        location_by_entry = dict(entry_locations)
        assert len(location_by_entry) == len(entry_locations)
        assert {int(name) for name, _ in state["delayed"]} == {
            entry for entry, at in entry_locations if at == "delayed"
        }
        assert (
            {int(entry) for entry in members}
            == {int(entry) for entry in state["entries"]}
            == set(location_by_entry)
        )
        scores = {int(name[-16:]): score for name, score in [*returned, *order]}
        return {
            entry: (
                location,
                members[b"%d" % entry],
                scores.get(entry, self.store.queue.entries[entry].score),
            )
            for entry, location in location_by_entry.items()
        }

    def check_requests_waiting_for_models(self, state: dict[str, Any]) -> None:
        """Check that order and counts by model are those of the requests in the lane."""
        queue = self.store.queue
        model_by_entry = {entry_id: model for entry_id, (model, _) in queue.model_waits.items()}
        assert {int(name[-16:]) for name, _ in state["waiting-for-model"]} == set(model_by_entry)
        order = [name.decode() for name, _ in state["waiting-for-model:order"]]
        expected_order = sorted(
            (_encode_model_prefix(model), queue.entries[entry_id].score, entry_id)
            for entry_id, model in model_by_entry.items()
        )
        assert [(name[:-33], int(name[-16:])) for name in order] == [
            (prefix, entry_id) for prefix, _, entry_id in expected_order
        ]
        counts = {name.decode(): count for name, count in state["waiting-for-model:counts"]}
        assert counts == Counter(model_by_entry.values())

    def check_progress(self, state: dict[str, Any]) -> None:
        """Check that progress is stored for exactly the requests that have some, and that claims know of
        it."""
        entries = self.store.queue.entries.values()
        assert {int(name): progress for name, progress in state["progress"].items()} == {
            entry.id: entry.progress for entry in entries if entry.progress
        }
        assert {int(name[-16:]) for name, _ in state["started"]} == {
            entry.id
            for entry in entries
            if entry.location is Location.RETURNED and entry.lane is Lane.STARTED
        }
        if state["progress"]:
            assert f"progress:{NAMES.queue}".encode() in state["control"]

    def sum_redis_units(self) -> int:
        """Return the units of all leases in Redis, by their names."""
        leases = self.connections.raw.zrange(f"{NAMES.queue_prefix}:leases", 0, -1)
        return sum(parse_lease_units(name) for name in leases)

    def check_units(self, state: dict[str, Any]) -> None:
        units_by_owner = {key.decode(): int(n) for key, n in state["owners"].items()}
        assert units_by_owner == dict(self.store.pool.units_by_owner)
        extra_units = int(state["control"].get(b"extra_units") or 0)
        leases = state["leases"]
        units = sum(parse_lease_units(name) for name, _ in leases)
        assert len(leases) + extra_units == units == self.store.pool.leased_units

    def check_heartbeats(self, state: dict[str, Any]) -> None:
        assert {owner.decode() for owner, _ in state["heartbeats"]} == set(self.store.pool.heartbeats)

    def check_results(self, state: dict[str, Any]) -> None:
        stored_results: Counter[tuple[str, bytes]] = Counter()
        for name in (NAMES.result_list, *RESULT_LISTS[1:3]):
            assert sorted(state[name]) == sorted(self.store.result_lists.get(name, ()))
            for result in state[name]:
                if b'"error_code":"INVALID_REQUEST"' not in result:
                    stored_results[name, result] += 1
        assert stored_results == self.written_results

    def check_markers(self, state: dict[str, Any]) -> None:
        for name in MARKER_IDS:
            packed = state[name]
            tokens = {} if packed is None else msgspec.msgpack.decode(packed, type=dict[str, float])
            assert tokens.keys() == self.store.queue.active_tokens.get(name, {}).keys()
        assert {key.decode() for key in state["cancels"]} == {
            NAMES.cancel_key(*name.split(":")) for name in self.store.queue.cancel_markers
        }

    def check_lookups(self, state: dict[str, Any]) -> None:
        """Check that the next requests are shown in their order: by score and then by bytes."""

        admin, loop = self.real[0], self.connections.loops[0]
        counts = loop.run_until_complete(admin.open_calls(ModelAdminCalls).count_waiting_by_model())
        next_members = list(loop.run_until_complete(admin.peek_next(1000)))
        ranks = [((score, True), score, name) for name, score in state[""]]
        for suffix in ("returned", "suspects"):
            ranks += [((score, True), score, name[:-17]) for name, score in state[suffix]]
        # Started requests go before all others of their priority.
        for name, score in state["started"]:
            first = score if math.isinf(score) else score // SCORE_BAND * SCORE_BAND
            ranks.append(((first, False), score, name[:-17]))
        assert next_members == [(score, name) for _, score, name in sorted(ranks)]
        assert counts == self.store.queue.count_waiting_by_model()
        assert counts == {name.decode(): count for name, count in state["waiting-for-model:counts"]}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            loop = self.connections.loops[0]
            loop.run_until_complete(
                assert_only_known_keys(self.connections.clients[0], NAMES, *RESULT_LISTS[1:3])
            )


def run_model(
    model: type[QueueComparison],
    connections: Connections,
    expected_events: Iterable[str],
    *,
    examples: int,
    steps: int,
    is_long: bool = False,
) -> None:
    """Run a model, and require that each of the expected events happened."""
    machine: Any = type("BoundModel", (model,), {"connections": connections, "event_counts": Counter()})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            derandomize=not is_long,
            # Only the long form shrinks, because that takes minutes.
            phases=[Phase.generate, Phase.shrink] if is_long else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    missing = {event for event in expected_events if not machine.event_counts[event]}
    assert missing == set(), machine.event_counts
