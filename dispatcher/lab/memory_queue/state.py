"""State that would be in Redis: where each request is, which owner has which lease, and what the owners
share.

The steps on it are in steps.py. `PoolState` has what several queues share under one limit. `QueueState` has
waiting, delayed and dead requests. Their entries and orders are in entries.py.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from dispatcher.core.requests.lanes import CLOSED, Lane
from dispatcher.core.requests.oversize import ENVELOPE_BYTES, cut
from dispatcher.core.requests.result import NO_LIST
from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP, deadline_of_score
from dispatcher.core.sequences.decisions import SequenceCounts
from dispatcher.core.sequences.rules import Sequences
from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, Awaiting, Entry, Lined, Place
from dispatcher.lab.memory_queue.model_registry import Board
from dispatcher.ports import Counts, Lease, Overload, Permit, QueueUnavailableError
from dispatcher.queue.keys import Names


class Grant(msgspec.Struct):
    """A lease as the queue keeps it."""

    entry: Entry
    token: str
    owner: str
    touched_at: float
    expires_at: float
    abandoned: bool = False
    """True if it ran out and no sweep took it back. It counts nothing then."""


class Pool:
    """State that all owners of a pool share, whatever queue they claim from: leases, owners, limit and
    overload.

    `clock` stands for Redis TIME (seconds from any origin; the clock of the loop in virtual time).
    `unix_origin` is the Unix time at its zero. While `outage_message` is set, every call raises
    QueueUnavailableError with it.
    """

    def __init__(
        self, clock: Callable[[], float], *, unix_origin: float = 0.0, lease_s: float = 30.0
    ) -> None:
        self.clock = clock
        self.unix_origin = unix_origin
        self.lease_s = lease_s
        self.down: str | None = None
        self.lists: dict[str, deque[bytes]] = {}
        """Result lists. They are pushed on the left and popped on the right, and have no lifetime here."""
        self.not_lists: set[str] = set()
        """Names of keys that have another type than a list."""
        self.grants: dict[int, Grant] = {}
        """Leases of all queues by entry. No entry belongs to two queues."""
        self.units = 0
        """Number of units of all leases."""
        self.held_by: Counter[str] = Counter()
        """Number of units by owner."""
        self.expiries: list[tuple[float, int]] = []
        self.touched: deque[tuple[float, int]] = deque()
        self.beats: dict[str, float] = {}
        self.foreign_active: dict[str, tuple[str, float]] = {}
        self.foreign_cancel: dict[str, tuple[str, float]] = {}
        """Markers of llm-d's producers by request id."""
        self.permit: Permit | None = None
        self.overload: Overload | None = None
        self.probe: int | None = None
        self.probe_waits = float("-inf")
        self.pause: tuple[str, str] | None = None
        self.board = Board()
        self.lost = self.stray = self.settled = 0
        self.tick: float | None = None
        self.quiet_until = self.beats_quiet_until = float("-inf")
        self.wakers: list[asyncio.Event] = []
        self._ids = itertools.count(1)
        self._tokens = itertools.count(1)

    def unix_now(self) -> float:
        return self.clock() + self.unix_origin

    def check_up(self) -> None:
        if self.down is not None:
            raise QueueUnavailableError(self.down)

    def wake(self) -> None:
        for waker in self.wakers:
            waker.set()

    def value(self, keys: dict[str, tuple[str, float]], name: str) -> str | None:
        """Return the value of an expiring key, or `None`."""
        value, until = keys.get(name, ("", 0.0))
        if not value or until <= self.unix_now():
            keys.pop(name, None)
            return None
        return value

    @property
    def prober(self) -> str | None:
        return None if self.probe is None else self.grants[self.probe].owner

    def beat(self, owner: str, timeout_s: float, now: float) -> None:
        """Record that an owner is alive until `now + timeout_s`. With a timeout of 0, only its leases run
        out."""
        if timeout_s > 0:
            self.beats[owner] = now + timeout_s

    def new_id(self) -> int:
        return next(self._ids)

    def hold(self, owner: str, units: int) -> None:
        """Add units to those of an owner. They may be negative."""
        self.units += units
        self.held_by[owner] += units
        if not self.held_by[owner]:
            del self.held_by[owner]

    def grant(self, entry: Entry, owner: str, now: float) -> Grant:
        # A unique token is enough, because nothing in this process forges one.
        grant = Grant(entry, f"{next(self._tokens):032x}", owner, now, now + self.lease_s)
        self.grants[entry.id] = grant
        self.hold(owner, entry.units)
        self.touched.append((now, entry.id))
        heapq.heappush(self.expiries, (grant.expires_at, entry.id))
        return grant

    def end_lease(self, grant: Grant) -> int:
        """End a lease. Return the units that it counted."""
        del self.grants[grant.entry.id]
        counted = 0 if grant.abandoned else grant.entry.units
        self.hold(grant.owner, -counted)
        # A member of a merged call has 0 units while another lease counts for it, which is over now.
        grant.entry.units = grant.entry.units or 1
        if self.probe == grant.entry.id:
            self.probe = None
        return counted


class Line:
    """State of one queue: pending, returned, delayed and dead requests, and the markers of all of them."""

    def __init__(self, pool: Pool, names: Names, *, dead_max: int, max_payload_bytes: int) -> None:
        self.pool = pool
        self.names = names
        self.dead_max = dead_max
        self.largest = max_payload_bytes + ENVELOPE_BYTES
        self.max_pending = 0
        """`queue.max_pending` as the newest sweep set it. 0 for no limit."""
        self.dead_dropped = 0
        """Number of dead requests that were dropped because there were more than `dead_max`."""
        self.pending: dict[bytes, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self.dead: dict[int, tuple[Entry, str, float]] = {}
        self.count = dict.fromkeys(Place, 0)
        self.sets: dict[Lane | None, Lined] = {lane: Lined() for lane in (None, *Lane)}
        """Waiting entries by lane. `None` for those in no lane."""
        self.in_lanes: Counter[Lane] = Counter()
        """Number of waiting entries by lane."""
        self.awaiting = Awaiting()
        self.delayed = Lined()
        self.deadlines = Lined()
        self.overdue: deque[tuple[int, Entry]] = deque()
        self.tick: float | None = None
        """Time of the last sweep."""
        self.nonces: OrderedDict[tuple[str, str], tuple[float, tuple[str, ...], tuple[int, ...]]] = (
            OrderedDict()
        )
        """Claims by owner and nonce, oldest first. The first item of a plain dict is slow to find after many
        deletions."""
        self.active: dict[str, dict[str, float]] = {}
        """Tokens that can be cancelled under each id, with the time until which they can."""
        self.sequences = Sequences()
        self.copied: set[str] = set()
        """Names of the requests that were copied from another queue."""
        self.cancels: dict[str, tuple[str, float]] = {}
        """Cancel markers by `id:token`."""

    def add(self, member: bytes, score: float) -> bool:
        """Add a member like ZADD: without token and wake-up. Return True if it was not pending."""
        entry = self.pending.get(member)
        if entry is not None and entry.score == score:
            return False
        fresh = Entry(member, score)
        if entry is not None:  # the same member with another score replaces the old one, as in a sorted set
            self.move(entry, Place.GONE)
        self.pending[member] = fresh
        self.move(fresh, Place.PENDING)
        return entry is None

    def counts(self) -> Counts:
        count = self.count
        return Counts(
            pending=self.waiting_count,
            leased=len(self.pool.grants),
            delayed=count[Place.DELAYED],
            dead=count[Place.DEAD],
            units=self.pool.units,
            sequences=SequenceCounts.of(self.sequences.count, self.in_lanes[Lane.SEQUENCED]),
            news=replace(self.sequences.news),
            awaiting=self.in_lanes[Lane.ABSENT],
        )

    @property
    def waiting_count(self) -> int:
        """Number of pending and returned requests."""
        return self.count[Place.PENDING] + self.count[Place.RETURNED]

    @property
    def claimable(self) -> int:
        """Number of waiting requests that a claim may take."""
        return self.waiting_count - sum(self.in_lanes[lane] for lane in CLOSED)

    def passed_over(self, lanes: Mapping[Lane, int], taken: Sequence[Grant]) -> int:
        """Return the number of requests that wait in lanes whose room `taken` has used up."""
        if not any(self.in_lanes.values()):
            return 0
        took = Counter(each.entry.lane for each in taken)
        return sum(held for lane, held in self.in_lanes.items() if lanes.get(lane, 0) <= took[lane])

    def waiting(self) -> Iterator[tuple[float, bytes, int]]:
        """Iterate over score, member and entry of all waiting requests, in no order."""
        return itertools.chain.from_iterable(each.live() for each in self.sets.values())

    def open(self) -> Iterator[tuple[float, bytes, int]]:
        """Iterate over score, member and entry of the requests that a claim may take, in no order."""
        sets = (waiting for lane, waiting in self.sets.items() if lane not in CLOSED)
        return itertools.chain.from_iterable(each.live() for each in sets)

    def move(self, entry: Entry, place: Place, due_at: float = 0.0) -> None:
        """Move an entry to a location. All its items in other heaps are outdated from then on."""
        if entry.moves:  # an entry without moves is new and was not counted yet
            self.count[entry.place] -= 1
            if entry.place is Place.RETURNED and (lane := entry.lane) is not None:
                self.in_lanes[lane] -= 1
                if lane is Lane.ABSENT:
                    self.awaiting.leave(entry)
        entry.moves += 1
        entry.place = place
        if place is Place.GONE:
            self.entries.pop(entry.id, None)
            return
        self.count[place] += 1
        if place in (Place.LEASED, Place.DEAD):
            return
        if place is Place.DELAYED:
            self.delayed.put(due_at, entry)
        else:
            lane = entry.lane
            if lane is not None:
                self.in_lanes[lane] += 1
                if lane is Lane.ABSENT:
                    self.awaiting.enter(entry)
            self.sets[lane].put(entry.score, entry)
        # Higher scores contain no priority and no deadline.
        if entry.score < len(PRIORITIES) * PRIORITY_STEP:
            self.deadlines.put(deadline_of_score(entry.score), entry)

    def leave_lane(self, entry: Entry) -> None:
        """Let an entry whose turn in its sequence has come leave its lane."""
        if entry.place is Place.RETURNED and entry.in_line:
            self.in_lanes[Lane.SEQUENCED] -= 1
            entry.in_line = False
            if (lane := entry.lane) is not None:
                self.in_lanes[lane] += 1

    def put_back(self, entry: Entry) -> None:
        """Push an entry again that was popped and has not moved."""
        self.sets[entry.lane].put(entry.score, entry)

    def forget(self, entry: Entry) -> None:
        if entry.place is Place.PENDING:
            del self.pending[entry.member]
        self.dead.pop(entry.id, None)
        self.move(entry, Place.GONE)

    def next(self, lanes: Mapping[Lane, int]) -> Lined | None:
        """Return the heap with the next request to claim, given the number of claims that are left for each
        lane."""
        best: tuple[float, bytes, int] | None = None
        found = None
        for lane, waiting in self.sets.items():
            if not waiting.heap or (lane is not None and lanes.get(lane, 0) <= 0):
                continue
            first = waiting.first()
            if first is None:
                continue
            place = first.score, first.member, first.id
            if best is None or place < best:
                best, found = place, waiting
        return found

    def lease(self, entry: Entry, owner: str, now: float, units: int) -> Grant:
        """Lease an entry. `assumed_units` are the units that it counts if it was never leased."""
        if entry.place is Place.PENDING:
            del self.pending[entry.member]
            if len(entry.member) > self.largest:
                entry.member = cut(entry.member)
        if entry.id == NEVER_CLAIMED:
            entry.id = self.pool.new_id()
            self.entries[entry.id] = entry
        self.move(entry, Place.LEASED)
        entry.deliveries += 1
        entry.units = entry.units or units
        return self.pool.grant(entry, owner, now)

    def held(self, lease: Lease) -> Grant | None:
        """Return the record of a lease if it is still valid and belongs to this queue."""
        grant = self.pool.grants.get(lease.entry)
        if grant is None or grant.token != lease.token or lease.entry not in self.entries:
            return None
        return grant

    def refused_list(self, name: str) -> str | None:
        return NO_LIST if name in self.pool.not_lists else self.names.refused_list(name)
