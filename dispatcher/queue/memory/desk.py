"""What would be in Redis, in memory: the state behind `memory.MemoryQueue`, and its producers' side.

Nothing here is searched: what lies in order lies in heaps, and what moved on since it was pushed is dropped
when it comes up (an entry's `moves` tells). Names with an underscore are for `memory.py`, the other half.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dispatcher.core.oversize import ENVELOPE_BYTES, cut
from dispatcher.core.request import NO_LIST, decode_result, misdirected
from dispatcher.core.score import PRIORITIES, PRIORITY_STEP, deadline_of_score
from dispatcher.ports import (
    CallRefusedError,
    Counts,
    Dead,
    Lease,
    Overload,
    Permit,
    QueueUnavailableError,
    Settled,
    Settlement,
    Submission,
)
from dispatcher.queue.constants import CANCEL_TTL_S, SUSPECT_DEATHS
from dispatcher.queue.keys import Names
from dispatcher.queue.requeue import accept_anew

NEVER_CLAIMED = 2**62


class Place(Enum):
    PENDING = "pending"
    """Never claimed: known by its bytes, as in the sorted set that producers write to."""
    RETURNED = "returned"
    LEASED = "leased"
    DELAYED = "delayed"
    DEAD = "dead"
    GONE = "gone"


class Entry:
    """One accepted request, from its first breath to its result."""

    __slots__ = (
        "attempts",
        "deaths",
        "deliveries",
        "id",
        "member",
        "moves",
        "place",
        "refusals",
        "score",
    )

    def __init__(self, member: bytes, score: float) -> None:
        self.member = member
        self.score = score
        self.id = NEVER_CLAIMED
        self.place = Place.PENDING
        self.moves = 0
        self.deliveries = self.attempts = self.refusals = self.deaths = 0

    @property
    def losses(self) -> int:
        return max(0, self.deaths - SUSPECT_DEATHS)

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    @property
    def where(self) -> str:
        """What `Expired.place` says; a move elsewhere and back is a move."""
        return f"{self.id}:{self.moves}"


class _Lined:
    """Entries in the order of a key, those that have not moved since they were put in."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bytes, int, int, int, Entry]] = []
        self._puts = itertools.count()

    def put(self, key: float, entry: Entry) -> None:
        item = (key, entry.member, entry.id, next(self._puts), entry.moves, entry)
        heapq.heappush(self._heap, item)

    def first(self) -> Entry | None:
        heap = self._heap
        while heap:
            moves, entry = heap[0][4:]
            if entry.moves == moves:
                return entry
            heapq.heappop(heap)
        return None

    def key(self) -> float | None:
        return self._heap[0][0] if self.first() is not None else None

    def pop(self) -> Entry:
        return heapq.heappop(self._heap)[5]

    def shift(self, by: float) -> None:
        """Move every key by that."""
        self._heap = [(item[0] + by, *item[1:]) for item in self._heap]

    def live(self) -> Iterator[tuple[float, bytes, int]]:
        """In no order."""
        return (item[:3] for item in self._heap if item[5].moves == item[4])

    def tidy(self, live: int) -> None:
        """Drop what moved on, once it outweighs the rest: a far deadline comes up late."""
        if len(self._heap) > 2 * live + 1024:
            self._heap = [item for item in self._heap if item[5].moves == item[4]]
            heapq.heapify(self._heap)


@dataclass(slots=True)
class Held:
    """A lease, as the store sees it."""

    entry: Entry
    token: str
    owner: str
    touched_at: float
    expires_at: float


class MemoryStore:
    """What all owners of one queue share, and the queue as producers and operators see it.

    `clock`: the store's clock, which Redis TIME is elsewhere (seconds, any origin; the loop's own in virtual
    time). `unix_origin`: Unix time at its zero. `down`: set to a sentence, every call of every owner raises
    QueueUnavailableError with it. Result lists have no lifetime here.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        unix_origin: float = 0.0,
        lease_s: float = 30.0,
        name: str = "batch:{pool}:requests",
        results: str = "batch:{pool}:results",
        lists: tuple[str, ...] | None = None,
        dead_max: int = 100_000,
        max_payload_bytes: int = 16 << 20,
    ) -> None:
        self.clock = clock
        self.unix_origin = unix_origin
        self.lease_s = lease_s
        self.names = Names(name, results, lists)
        self.results = results
        self.dead_max = dead_max
        self.largest = max_payload_bytes + ENVELOPE_BYTES
        self.down: str | None = None
        self.lists: dict[str, deque[bytes]] = {}
        """Result lists: pushed on the left, popped on the right."""
        self.not_lists: set[str] = set()
        """Names that a key of another type stands under."""
        self.dead_dropped = 0
        """The dead that went because there were more than dead_max."""

        self._pending: dict[bytes, Entry] = {}
        self._entries: dict[int, Entry] = {}
        self._held: dict[int, Held] = {}
        self._dead: dict[int, tuple[Entry, str, float]] = {}
        self._count: Counter[Place] = Counter()
        self._suspects = 0
        self._ready = _Lined()
        self._apart = _Lined()
        self._delayed = _Lined()
        self._deadlines = _Lined()
        self._overdue: deque[tuple[int, Entry]] = deque()
        self._expiries: list[tuple[float, int]] = []
        self._touched: deque[tuple[float, int]] = deque()
        self._held_by: Counter[str] = Counter()
        self._beats: dict[str, float] = {}
        self._nonces: dict[tuple[str, str], tuple[float, tuple[str, ...], tuple[int, ...]]] = {}
        self._ids = itertools.count(1)
        self._grants = itertools.count(1)
        self._active: dict[str, dict[str, float]] = {}
        """By id: the tokens that can be cancelled under it, each until then."""
        self._cancel: dict[str, tuple[str, float]] = {}
        """By id and token, `id:token`."""
        self._foreign_active: dict[str, tuple[str, float]] = {}
        self._foreign_cancel: dict[str, tuple[str, float]] = {}
        """The markers of llm-d's producers, by id."""
        self._permit: Permit | None = None
        self._overload: Overload | None = None
        self._probe: int | None = None
        self._probe_waits = float("-inf")
        self._pause: tuple[str, str] | None = None
        self._lost = self._stray = self._settled = 0
        self._tick: float | None = None
        self._quiet_until = self._beats_quiet_until = float("-inf")
        self._wakers: list[asyncio.Event] = []

    def __repr__(self) -> str:
        counts = self._counts()
        return f"<MemoryStore {self.names.queue} {counts.pending} pending, {counts.leased} leased>"

    def unix_now(self) -> float:
        return self.clock() + self.unix_origin

    def add(self, member: bytes, score: float) -> bool:
        """What a foreign producer's ZADD does: no token, no wake-up. True where it was not pending."""
        entry = self._pending.get(member)
        if entry is not None and entry.score == score:
            return False
        fresh = Entry(member, score)
        if entry is not None:
            self._move(entry, Place.GONE)
        self._pending[member] = fresh
        self._move(fresh, Place.PENDING)
        return entry is None

    def pop(self, name: str = "") -> bytes | None:
        """What a consumer's RPOP does; no name: the queue's default list."""
        results = self.lists.get(name or self.results)
        return results.pop() if results else None

    async def submit(self, submissions: Sequence[Submission]) -> int:
        self._check_up()
        now = self.unix_now()
        new = 0
        for each in submissions:
            if each.request_id and each.request_token and each.deadline:
                tokens = self._active.setdefault(each.request_id, {})
                tokens[each.request_token] = max(each.deadline, now + 1)
            new += self.add(each.member, each.score)
        self._wake()
        return new

    async def cancel(self, request_id: str, request_token: str = "") -> bool:
        self._check_up()
        now = self.unix_now()
        tokens = dict(self._active.get(request_id, {}))
        if (theirs := self._value(self._foreign_active, request_id)) is not None:
            tokens.setdefault(theirs, now + CANCEL_TTL_S)
        asked = {
            f"{request_id}:{token}": (token, until)
            for token, until in tokens.items()
            if request_token in ("", token) and until > now
        }
        self._cancel |= asked
        if asked:
            self._wake()
        return bool(asked)

    def _is_cancelled(self, request_id: str, token: str) -> bool:
        markers = (
            self._value(self._cancel, f"{request_id}:{token}"),
            self._value(self._foreign_cancel, request_id),
        )
        return token != "" and token in markers

    async def pause(self, by: str, why: str) -> None:
        self._check_up()
        self._pause = (by, why)
        self._wake()

    async def resume(self) -> None:
        self._check_up()
        self._pause = None
        self._wake()

    async def paused(self) -> tuple[str, str] | None:
        self._check_up()
        return self._pause

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        self._check_up()
        lines = itertools.chain(self._ready.live(), self._apart.live())
        return [(score, member) for score, member, _ in heapq.nsmallest(most, lines)]

    def _in_line(self) -> Iterator[tuple[float, bytes]]:
        """Score and member of all that is pending, in no order."""
        return (item[:2] for item in itertools.chain(self._ready.live(), self._apart.live()))

    async def counts(self) -> Counts:
        self._check_up()
        return self._counts()

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        self._check_up()
        ids = heapq.nsmallest(most, (entry for entry in self._dead if entry > after))
        return [_dead(*self._dead[entry]) for entry in ids]

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        self._check_up()
        return [_dead(*self._dead[entry]) for entry in heapq.nlargest(most, self._dead)]

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        self._check_up()
        done = 0
        for entry_id in entries:
            if entry_id not in self._dead:
                continue
            entry = self._dead[entry_id][0]
            again = accept_anew(entry.member, entry.score, deadline)
            if again is None:
                continue
            self._forget(entry)
            await self.submit([again])
            done += 1
        return done

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        self._check_up()
        doomed = [entry for entry in (self._dead if entries is None else entries) if entry in self._dead]
        for entry in doomed:
            self._forget(self._dead[entry][0])
        return len(doomed)

    def _check_up(self) -> None:
        if self.down is not None:
            raise QueueUnavailableError(self.down)

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    def _value(self, keys: dict[str, tuple[str, float]], name: str) -> str | None:
        """The value of an expiring key."""
        value, until = keys.get(name, ("", 0.0))
        if not value or until <= self.unix_now():
            keys.pop(name, None)
            return None
        return value

    def _counts(self) -> Counts:
        count = self._count
        return Counts(
            pending=count[Place.PENDING] + count[Place.RETURNED],
            leased=count[Place.LEASED],
            delayed=count[Place.DELAYED],
            dead=count[Place.DEAD],
        )

    def _move(self, entry: Entry, place: Place, due_at: float = 0.0) -> None:
        """Put an entry into a place; every other mention of it is void from here on."""
        if entry.moves:
            self._count[entry.place] -= 1
            if entry.place is Place.RETURNED and entry.suspect:
                self._suspects -= 1
        entry.moves += 1
        entry.place = place
        if place is Place.GONE:
            self._entries.pop(entry.id, None)
            return
        self._count[place] += 1
        if place in (Place.LEASED, Place.DEAD):
            return
        if place is Place.DELAYED:
            self._delayed.put(due_at, entry)
        elif entry.suspect:
            self._suspects += 1
            self._apart.put(entry.score, entry)
        else:
            self._ready.put(entry.score, entry)
        if entry.score < len(PRIORITIES) * PRIORITY_STEP:
            self._deadlines.put(deadline_of_score(entry.score), entry)

    def _forget(self, entry: Entry) -> None:
        if entry.place is Place.PENDING:
            del self._pending[entry.member]
        self._dead.pop(entry.id, None)
        self._move(entry, Place.GONE)

    def _next(self, suspects: int) -> _Lined | None:
        """Where the next request to claim comes from."""
        ready, apart = self._ready.first(), self._apart.first() if suspects > 0 else None
        if apart is None:
            return None if ready is None else self._ready
        if ready is None or (apart.score, apart.member, apart.id) < (ready.score, ready.member, ready.id):
            return self._apart
        return self._ready

    def _lease(self, entry: Entry, owner: str, now: float) -> Held:
        if entry.place is Place.PENDING:
            del self._pending[entry.member]
            if len(entry.member) > self.largest:
                entry.member = cut(entry.member)
        if entry.id == NEVER_CLAIMED:
            entry.id = next(self._ids)
            self._entries[entry.id] = entry
        self._move(entry, Place.LEASED)
        entry.deliveries += 1
        # Unique is enough: nobody in this process forges a token.
        held = Held(entry, f"{next(self._grants):032x}", owner, now, now + self.lease_s)
        self._held[entry.id] = held
        self._held_by[owner] += 1
        self._touched.append((now, entry.id))
        heapq.heappush(self._expiries, (held.expires_at, entry.id))
        return held

    def _held_as(self, lease: Lease) -> Held | None:
        held = self._held.get(lease.entry)
        return held if held is not None and held.token == lease.token else None

    def _end(self, held: Held) -> None:
        del self._held[held.entry.id]
        self._held_by[held.owner] -= 1
        if not self._held_by[held.owner]:
            del self._held_by[held.owner]
        if self._probe == held.entry.id:
            self._probe = None

    def _reclaim(self, held: Held) -> None:
        entry = held.entry
        self._end(held)
        entry.deaths += 1
        self._lost += 1
        self._move(entry, Place.RETURNED)

    def _reclaim_of(self, owners: Collection[str]) -> int:
        doomed = [held for held in self._held.values() if held.owner in owners] if owners else []
        for held in doomed:
            self._reclaim(held)
        for owner in owners:
            self._beats.pop(owner, None)
        return len(doomed)

    def _silent(self, now: float) -> list[str]:
        """Owners that should have been heard of by now; those without leases are forgotten."""
        silent = [owner for owner, until in self._beats.items() if until <= now]
        for owner in silent:
            if not self._held_by[owner]:
                del self._beats[owner]
        return [owner for owner in silent if owner in self._beats]

    def _reclaim_late(self, now: float) -> int:
        reclaimed = 0
        while self._expiries and self._expiries[0][0] <= now:
            _, entry_id = heapq.heappop(self._expiries)
            held = self._held.get(entry_id)
            if held is None:
                continue
            if held.expires_at > now:  # renewed since
                heapq.heappush(self._expiries, (held.expires_at, entry_id))
                continue
            self._reclaim(held)
            reclaimed += 1
        return reclaimed

    def _write(self, settlement: Settlement) -> Settled:
        """Push a result and forget the request's token; raises, with nothing done, where it has no place."""
        name, result = settlement.results or self.results, settlement.result
        said = Settled.DONE
        if result and name != self.results and (why := self._refused_list(name)) is not None:
            told = settlement.request_id or decode_result(result).id
            result = misdirected(told, name, why, token=settlement.request_token)
            name, said = self.results, Settled.BAD_LIST
        if result:
            if name in self.not_lists:
                raise CallRefusedError(f"{name} is no list: results have no place to go")
            self.lists.setdefault(name, deque()).appendleft(result)
        request_id, token = settlement.request_id, settlement.request_token
        if request_id and token:
            for keys in (self._foreign_active, self._foreign_cancel):
                if self._value(keys, request_id) == token:
                    del keys[request_id]
            self._cancel.pop(f"{request_id}:{token}", None)
            tokens = self._active.get(request_id, {})
            tokens.pop(token, None)
            if not tokens:
                self._active.pop(request_id, None)
        return said

    def _refused_list(self, name: str) -> str | None:
        return NO_LIST if name in self.not_lists else self.names.refused_list(name)

    def _bury(self, entry: Entry, reason: str) -> None:
        self._move(entry, Place.DEAD)
        self._dead[entry.id] = (entry, reason, self.unix_now())
        while len(self._dead) > self.dead_max:
            self._forget(next(iter(self._dead.values()))[0])
            self.dead_dropped += 1


def _dead(entry: Entry, reason: str, died_at: float) -> Dead:
    counts = entry.deliveries, entry.attempts, entry.refusals, entry.losses
    return Dead(entry.id, entry.member, entry.score, reason, died_at, *counts)
