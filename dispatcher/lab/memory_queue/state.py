"""What would be in Redis: what lies where, who holds what, and what owners share. Its steps are in steps.py.

What several lines share under one limit is the `Pool`; what waits, is delayed or is dead lies in a `Line`.
Its entries, and their orders, are of entries.py.
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
    """A lease, as the queue keeps it."""

    entry: Entry
    token: str
    owner: str
    touched_at: float
    expires_at: float
    abandoned: bool = False
    """It ran out, and nobody took it back: it counts nothing."""


class Pool:
    """What all owners of a pool share, whatever line they claim from: leases, owners, and what they tell.

    `clock`: Redis TIME elsewhere (seconds, any origin; the loop's own in virtual time). `unix_origin`: Unix
    time at its zero. `down`: set to a sentence, every call raises QueueUnavailableError with it.
    """

    def __init__(
        self, clock: Callable[[], float], *, unix_origin: float = 0.0, lease_s: float = 30.0
    ) -> None:
        self.clock = clock
        self.unix_origin = unix_origin
        self.lease_s = lease_s
        self.down: str | None = None
        self.lists: dict[str, deque[bytes]] = {}
        """Result lists: pushed on the left, popped on the right. They have no lifetime here."""
        self.not_lists: set[str] = set()
        """Names that a key of another type stands under."""
        self.grants: dict[int, Grant] = {}
        """By entry: the leases of all lines, for no entry is of two."""
        self.units = 0
        """Of all leases."""
        self.held_by: Counter[str] = Counter()
        """Units by owner."""
        self.expiries: list[tuple[float, int]] = []
        self.touched: deque[tuple[float, int]] = deque()
        self.beats: dict[str, float] = {}
        self.foreign_active: dict[str, tuple[str, float]] = {}
        self.foreign_cancel: dict[str, tuple[str, float]] = {}
        """The markers of llm-d's producers, by id."""
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
        """The value of an expiring key."""
        value, until = keys.get(name, ("", 0.0))
        if not value or until <= self.unix_now():
            keys.pop(name, None)
            return None
        return value

    @property
    def prober(self) -> str | None:
        return None if self.probe is None else self.grants[self.probe].owner

    def beat(self, owner: str, timeout_s: float, now: float) -> None:
        """An owner shows that it lives, until so long from now. 0: only its leases run out."""
        if timeout_s > 0:
            self.beats[owner] = now + timeout_s

    def new_id(self) -> int:
        return next(self._ids)

    def hold(self, owner: str, units: int) -> None:
        """So many units are held more by this owner, or less."""
        self.units += units
        self.held_by[owner] += units
        if not self.held_by[owner]:
            del self.held_by[owner]

    def grant(self, entry: Entry, owner: str, now: float) -> Grant:
        # Unique is enough: nobody in this process forges a token.
        grant = Grant(entry, f"{next(self._tokens):032x}", owner, now, now + self.lease_s)
        self.grants[entry.id] = grant
        self.hold(owner, entry.units)
        self.touched.append((now, entry.id))
        heapq.heappush(self.expiries, (grant.expires_at, entry.id))
        return grant

    def end_lease(self, grant: Grant) -> int:
        """What it counted, in units."""
        del self.grants[grant.entry.id]
        counted = 0 if grant.abandoned else grant.entry.units
        self.hold(grant.owner, -counted)
        grant.entry.units = grant.entry.units or 1  # nobody counts for it any more
        if self.probe == grant.entry.id:
            self.probe = None
        return counted


class Line:
    """What one queue holds: pending, returned, delayed and dead requests, and the markers of all of them."""

    def __init__(self, pool: Pool, names: Names, *, dead_max: int, max_payload_bytes: int) -> None:
        self.pool = pool
        self.names = names
        self.dead_max = dead_max
        self.largest = max_payload_bytes + ENVELOPE_BYTES
        self.max_pending = 0
        """`queue.max_pending` as the newest sweep gave it. 0 for no limit."""
        self.dead_dropped = 0
        """The dead that went because there were more than dead_max."""
        self.pending: dict[bytes, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self.dead: dict[int, tuple[Entry, str, float]] = {}
        self.count = dict.fromkeys(Place, 0)
        self.sets: dict[Lane | None, Lined] = {lane: Lined() for lane in (None, *Lane)}
        """What waits, by lane; None: outside of any."""
        self.in_lanes: Counter[Lane] = Counter()
        """How many wait in each."""
        self.awaiting = Awaiting()
        self.delayed = Lined()
        self.deadlines = Lined()
        self.overdue: deque[tuple[int, Entry]] = deque()
        self.tick: float | None = None
        """When it was swept last."""
        self.nonces: OrderedDict[tuple[str, str], tuple[float, tuple[str, ...], tuple[int, ...]]] = (
            OrderedDict()
        )
        """Oldest first. To find the first of a plain dict is to walk past all that were deleted before it."""
        self.active: dict[str, dict[str, float]] = {}
        """By id: the tokens that can be cancelled under it, each until then."""
        self.sequences = Sequences()
        self.copied: set[str] = set()
        """What was taken over from another queue."""
        self.cancels: dict[str, tuple[str, float]] = {}
        """By id and token, `id:token`."""

    def add(self, member: bytes, score: float) -> bool:
        """What ZADD does: no token, no wake-up. True where it was not pending."""
        entry = self.pending.get(member)
        if entry is not None and entry.score == score:
            return False
        fresh = Entry(member, score)
        if entry is not None:
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
        """How many are pending or returned."""
        return self.count[Place.PENDING] + self.count[Place.RETURNED]

    @property
    def claimable(self) -> int:
        """Those of them that some claim may take."""
        return self.waiting_count - sum(self.in_lanes[lane] for lane in CLOSED)

    def passed_over(self, lanes: Mapping[Lane, int], taken: Sequence[Grant]) -> int:
        """How many wait in lanes whose room `taken` has used up."""
        if not any(self.in_lanes.values()):
            return 0
        took = Counter(each.entry.lane for each in taken)
        return sum(held for lane, held in self.in_lanes.items() if lanes.get(lane, 0) <= took[lane])

    def waiting(self) -> Iterator[tuple[float, bytes, int]]:
        """Score, member and entry of all that is pending, in no order."""
        return itertools.chain.from_iterable(each.live() for each in self.sets.values())

    def open(self) -> Iterator[tuple[float, bytes, int]]:
        """The same of what some claim may take."""
        sets = (waiting for lane, waiting in self.sets.items() if lane not in CLOSED)
        return itertools.chain.from_iterable(each.live() for each in sets)

    def move(self, entry: Entry, place: Place, due_at: float = 0.0) -> None:
        """Put an entry into a place; every other mention of it is void from here on."""
        if entry.moves:
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
        if entry.score < len(PRIORITIES) * PRIORITY_STEP:
            self.deadlines.put(deadline_of_score(entry.score), entry)

    def leave_lane(self, entry: Entry) -> None:
        """Its turn in its sequence has come: it waits there no longer."""
        if entry.place is Place.RETURNED and entry.in_line:
            self.in_lanes[Lane.SEQUENCED] -= 1
            entry.in_line = False
            if (lane := entry.lane) is not None:
                self.in_lanes[lane] += 1

    def put_back(self, entry: Entry) -> None:
        """What was popped from its place, and lies there still."""
        self.sets[entry.lane].put(entry.score, entry)

    def forget(self, entry: Entry) -> None:
        if entry.place is Place.PENDING:
            del self.pending[entry.member]
        self.dead.pop(entry.id, None)
        self.move(entry, Place.GONE)

    def next(self, lanes: Mapping[Lane, int]) -> Lined | None:
        """Where the next request to claim comes from, where so many more of each lane may be claimed."""
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
        """`units`: what it is taken to weigh if it never was leased."""
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
        """The grant of this lease, if it still stands and is of this line."""
        grant = self.pool.grants.get(lease.entry)
        if grant is None or grant.token != lease.token or lease.entry not in self.entries:
            return None
        return grant

    def refused_list(self, name: str) -> str | None:
        return NO_LIST if name in self.pool.not_lists else self.names.refused_list(name)
