"""State that would be in Redis: where each request is, which owner has which lease, and what the owners
share.

The steps on it are in steps.py. `PoolState` has what several queues share under one limit. `QueueState` has
waiting, delayed and dead requests. Their entries and orders are in entries.py.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dispatcher.features import import_modules
from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, AnyLane, Entry, EntryHeap, Location
from dispatcher.queue.contract import Lease, Overload, Permit, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.lanes import Lane, rank_in_queue
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.result import NOT_A_LIST
from dispatcher.requests.score import PRIORITIES, PRIORITY_STEP, decode_deadline
from dispatcher.requests.submission import QueueUnavailableError

_COUNTS_BY_FEATURE = import_modules("counts")


def _get_place(entry: Entry, lane: AnyLane | None) -> tuple[float, bool, bytes, int]:
    return (*rank_in_queue(entry.score, lane), entry.member, entry.id)


def get_room(rooms: Mapping[Lane, int], lane: AnyLane | None) -> int:
    """Return how many requests of a lane may be claimed. 0 for a closed one."""
    return rooms.get(lane, 0) if isinstance(lane, Lane) else 0


class LeaseRecord(msgspec.Struct):
    """A lease as the queue keeps it."""

    entry: Entry
    token: str
    owner: str
    touched_at: float
    expires_at: float


class PoolState:
    """State that all owners of a pool share: leases, owners, limit and overload.

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
        self.outage_message: str | None = None
        self.result_lists: dict[str, deque[bytes]] = {}
        """Result lists. They are pushed on the left and popped on the right, and have no lifetime here."""
        self.invalid_lists: set[str] = set()
        """Names of keys that have another type than a list."""
        self.leases: dict[int, LeaseRecord] = {}
        """Leases by entry."""
        self.leased_units = 0
        """Number of units of all leases."""
        self.units_by_owner: Counter[str] = Counter()
        """Number of units by owner."""
        self.expiries: list[tuple[float, int]] = []
        self.touched_entries: deque[tuple[float, int]] = deque()
        self.heartbeats: dict[str, float] = {}
        self.shared_permit: Permit | None = None
        self.overload: Overload | None = None
        self.probe_entry: int | None = None
        self.probe_reserved_until = float("-inf")
        self.pause: tuple[str, str] | None = None
        self.lost_units = self.orphaned_units = self.settled_count = 0
        self.swept_at: float | None = None
        self.no_expiry_until = self.no_silence_until = float("-inf")
        self.wake_events: list[asyncio.Event] = []
        self._ids = itertools.count(1)
        self._tokens = itertools.count(1)

    def unix_now(self) -> float:
        return self.clock() + self.unix_origin

    def check_available(self) -> None:
        if self.outage_message is not None:
            raise QueueUnavailableError(self.outage_message)

    def wake_dispatchers(self) -> None:
        for waker in self.wake_events:
            waker.set()

    def read_expiring(self, keys: dict[str, tuple[str, float]], name: str) -> str | None:
        """Return the value of an expiring key, or `None`."""
        value, until = keys.get(name, ("", 0.0))
        if not value or until <= self.unix_now():
            keys.pop(name, None)
            return None
        return value

    @property
    def probing_owner(self) -> str | None:
        return None if self.probe_entry is None else self.leases[self.probe_entry].owner

    def record_heartbeat(self, owner: str, timeout_s: float, now: float) -> None:
        """Record that an owner is alive until `now + timeout_s`. With a timeout of 0, only its leases run
        out."""
        if timeout_s > 0:
            self.heartbeats[owner] = now + timeout_s

    def next_entry_id(self) -> int:
        return next(self._ids)

    def add_owner_units(self, owner: str, units: int) -> None:
        """Add units to those of an owner. They may be negative."""
        self.leased_units += units
        self.units_by_owner[owner] += units
        if not self.units_by_owner[owner]:
            del self.units_by_owner[owner]

    def grant_lease(self, entry: Entry, owner: str, now: float) -> LeaseRecord:
        # A unique token is enough, because nothing in this process forges one.
        lease = LeaseRecord(entry, f"{next(self._tokens):032x}", owner, now, now + self.lease_s)
        self.leases[entry.id] = lease
        self.add_owner_units(owner, entry.units)
        self.touched_entries.append((now, entry.id))
        heapq.heappush(self.expiries, (lease.expires_at, entry.id))
        return lease

    def end_lease(self, lease: LeaseRecord) -> int:
        """End a lease. Return the units that it counted."""
        del self.leases[lease.entry.id]
        counted = lease.entry.units
        self.add_owner_units(lease.owner, -counted)
        # A member of a merged call has 0 units while another lease counts for it, which is over now.
        lease.entry.units = lease.entry.units or 1
        if self.probe_entry == lease.entry.id:
            self.probe_entry = None
        return counted


class QueueState:
    """State of one queue: pending, returned, delayed and dead requests, and the markers of all of them.

    A queue with features overrides the methods at the end. They correspond to the hooks of the scripts.
    """

    def __init__(self, pool: PoolState, names: QueueNames) -> None:
        self.pool = pool
        self.names = names
        self.pending: dict[bytes, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self.dead: dict[int, tuple[Entry, str]] = {}
        """Dead requests with their reasons, by entry. The first one died first."""
        self.count_by_location = dict.fromkeys(Location, 0)
        self.waiting_by_lane: defaultdict[AnyLane | None, EntryHeap] = defaultdict(EntryHeap)
        """Waiting entries by lane. `None` for those in no lane."""
        self.count_by_lane: Counter[AnyLane] = Counter()
        """Number of waiting entries by lane."""
        self.delayed = EntryHeap()
        self.deadlines = EntryHeap()
        self.overdue: deque[tuple[int, Entry]] = deque()
        self.claims_by_nonce: OrderedDict[tuple[str, str], tuple[float, tuple[str, ...], tuple[int, ...]]] = (
            OrderedDict()
        )
        """Claims by owner and nonce, oldest first. The first item of a plain dict is slow to find after many
        deletions."""
        self.active_tokens: dict[str, dict[str, float]] = {}
        """Tokens that can be cancelled under each id, with the time until which they can."""
        self.cancel_markers: dict[str, tuple[str, float]] = {}
        """Cancel markers by `id:token`."""

    def add_member(self, member: bytes, score: float) -> bool:
        """Add a member like ZADD: without token and wake-up. Return True if it was not pending."""
        entry = self.pending.get(member)
        if entry is not None and entry.score == score:
            return False
        fresh = Entry(member, score)
        if entry is not None:  # the same member with another score replaces the old one, as in a sorted set
            self.move_entry(entry, Location.GONE)
        self.pending[member] = fresh
        self.move_entry(fresh, Location.PENDING)
        return entry is None

    def count_requests(self) -> QueueCounts:
        count, lanes = self.count_by_location, self.count_by_lane
        return QueueCounts(
            pending=self.waiting_count,
            leased=len(self.pool.leases),
            delayed=count[Location.DELAYED],
            dead=count[Location.DEAD],
            units=self.pool.leased_units,
        ).add_features(
            _COUNTS_BY_FEATURE[name].decode_counts(lanes[lane])
            for name, lane in (("models", "waiting-for-model"), ("slices", Lane.STARTED))
            if name in _COUNTS_BY_FEATURE
        )

    @property
    def waiting_count(self) -> int:
        """Number of pending and returned requests."""
        return self.count_by_location[Location.PENDING] + self.count_by_location[Location.RETURNED]

    @property
    def claimable_count(self) -> int:
        """Number of waiting requests that a claim may take."""
        return self.waiting_count - sum(n for lane, n in self.count_by_lane.items() if isinstance(lane, str))

    def count_passed_over(self, max_per_lane: Mapping[Lane, int], taken: Sequence[LeaseRecord]) -> int:
        """Return the number of requests that wait in lanes whose room `taken` has used up."""
        if not any(self.count_by_lane.values()):
            return 0
        took = Counter(each.entry.lane for each in taken)
        return sum(
            held for lane, held in self.count_by_lane.items() if get_room(max_per_lane, lane) <= took[lane]
        )

    def iterate_waiting(self) -> Iterator[tuple[float, bytes, int]]:
        """Iterate over score, member and entry of all waiting requests, in no order."""
        return itertools.chain.from_iterable(each.iterate_live() for each in self.waiting_by_lane.values())

    def move_entry(self, entry: Entry, location: Location, due_at: float = 0.0) -> None:
        """Move an entry to a location. All its items in other heaps are outdated from then on."""
        if entry.move_count:  # an entry without moves is new and was not counted yet
            self.count_by_location[entry.location] -= 1
            if entry.location is Location.RETURNED and (lane := entry.lane) is not None:
                self.leave_lane(entry, lane)
        entry.move_count += 1
        entry.location = location
        if location is Location.GONE:
            self.entries.pop(entry.id, None)
            return
        self.count_by_location[location] += 1
        if location in (Location.LEASED, Location.DEAD):
            return
        if location is Location.DELAYED:
            self.delayed.push_entry(due_at, entry)
        else:
            lane = entry.lane
            if lane is not None:
                self.enter_lane(entry, lane)
            self.waiting_by_lane[lane].push_entry(entry.score, entry)
        # Higher scores contain no priority and no deadline.
        if entry.score < len(PRIORITIES) * PRIORITY_STEP:
            self.deadlines.push_entry(decode_deadline(entry.score), entry)

    def enter_lane(self, entry: Entry, lane: AnyLane) -> None:
        self.count_by_lane[lane] += 1

    def leave_lane(self, entry: Entry, lane: AnyLane) -> None:
        """An entry that leaves a closed lane waits for no feature any more."""
        self.count_by_lane[lane] -= 1
        entry.closed_lane = None

    def put_back(self, entry: Entry) -> None:
        """Push an entry again that was popped and has not moved."""
        self.waiting_by_lane[entry.lane].push_entry(entry.score, entry)

    def remove_entry(self, entry: Entry) -> None:
        if entry.location is Location.PENDING:
            del self.pending[entry.member]
        self.dead.pop(entry.id, None)
        self.move_entry(entry, Location.GONE)

    def next_source(self, max_per_lane: Mapping[Lane, int]) -> EntryHeap | None:
        """Return the heap with the next request to claim, given the number of claims that are left for each
        lane."""
        best: Entry | None = None
        best_lane: AnyLane | None = None
        found = None
        for lane, waiting in self.waiting_by_lane.items():
            if not waiting.heap or (lane is not None and get_room(max_per_lane, lane) <= 0):
                continue
            first = waiting.peek_entry()
            if first is None:
                continue
            # Mostly there is only one lane with requests, and nothing to compare.
            if best is None or _get_place(first, lane) < _get_place(best, best_lane):
                best, best_lane, found = first, lane, waiting
        return found

    def lease_entry(self, entry: Entry, owner: str, now: float, assumed_units: int) -> LeaseRecord:
        """Lease an entry. `assumed_units` are the units that it counts if it was never leased."""
        if entry.location is Location.PENDING:
            del self.pending[entry.member]
        if entry.id == NEVER_CLAIMED:
            entry.id = self.pool.next_entry_id()
            self.entries[entry.id] = entry
        self.move_entry(entry, Location.LEASED)
        entry.deliveries += 1
        entry.units = entry.units or assumed_units
        return self.pool.grant_lease(entry, owner, now)

    def find_lease(self, lease: Lease) -> LeaseRecord | None:
        """Return the record of a lease if it is still valid."""
        grant = self.pool.leases.get(lease.entry_id)
        return None if grant is None or grant.token != lease.token else grant

    def find_list_problem(self, name: str) -> str | None:
        return NOT_A_LIST if name in self.pool.invalid_lists else self.names.find_list_problem(name)

    def hold_entry(self, entry: Entry, release: Release) -> None:
        """Let an entry wait for the feature whose `extra` its release has."""
        raise NotImplementedError

    def end_entry(self, entry: Entry, settlement: Settlement, now: float) -> Sequence[Entry]:
        """End what features keep of an entry. Return the entries that they free with it."""
        return ()

    def get_extra(self, entry: Entry) -> Any:
        """Return what a feature returns with the lease of an entry that it has freed."""
        raise NotImplementedError

    def free_entries(self) -> int:
        """Free the entries that features let go at a sweep. Return their number."""
        return 0

    def shift_times(self, delta_s: float) -> None:
        """Shift the stored times, because the clock has stepped back."""
        self.delayed.shift_keys(delta_s)
