"""Accepted requests in memory: where each lies, and what keeps them in an order.

Nothing here is searched: what lies in order lies in heaps, and what moved on since it was pushed is dropped
when it comes up (an entry's `moves` tells).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum

from dispatcher.core.requests.lanes import Lane, lane_of, losses_of

NEVER_CLAIMED = 2**62


class Place(Enum):
    __hash__ = object.__hash__  # each is there once; Enum's own hashes its name, each time

    PENDING = "pending"
    """Never claimed: known by its bytes, as in the sorted set that producers write to."""
    RETURNED = "returned"
    LEASED = "leased"
    DELAYED = "delayed"
    DEAD = "dead"
    GONE = "gone"


class Entry:
    """One accepted request, until its result."""

    __slots__ = (
        "attempts",
        "awaits",
        "cancelled_by",
        "deaths",
        "deliveries",
        "id",
        "in_line",
        "last_try",
        "member",
        "moves",
        "place",
        "refusals",
        "score",
        "units",
    )

    def __init__(self, member: bytes, score: float) -> None:
        self.member = member
        self.score = score
        self.id = NEVER_CLAIMED
        self.place = Place.PENDING
        self.moves = 0
        self.units = 0
        """What it weighs, as far as is known; 0: it never was leased."""
        self.in_line = False
        """It waits for its turn in a sequence."""
        self.awaits = ""
        """The model that it waits for."""
        self.cancelled_by = ("", "")
        """What cancels it while it does: id and token."""
        self.deliveries = self.attempts = self.refusals = self.deaths = 0
        self.last_try = ""

    @property
    def losses(self) -> int:
        return losses_of(self.deaths) if self.deaths else 0

    @property
    def lane(self) -> Lane | None:
        if not (self.deaths or self.in_line or self.awaits):  # most, and asked often
            return None
        return lane_of(self.deaths, in_line=self.in_line, awaits=self.awaits != "")

    @property
    def where(self) -> str:
        """What `Expired.place` says; a move elsewhere and back is a move."""
        return f"{self.id}:{self.moves}"


class Lined:
    """Entries in the order of a key, those that have not moved since they were put in."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, bytes, int, int, int, Entry]] = []
        self._puts = itertools.count()

    def put(self, key: float, entry: Entry) -> None:
        item = (key, entry.member, entry.id, next(self._puts), entry.moves, entry)
        heapq.heappush(self.heap, item)

    def first(self) -> Entry | None:
        heap = self.heap
        while heap:
            item = heap[0]
            entry = item[5]
            if entry.moves == item[4]:
                return entry
            heapq.heappop(heap)
        return None

    def key(self) -> float | None:
        return self.heap[0][0] if self.first() is not None else None

    def pop(self) -> Entry:
        return heapq.heappop(self.heap)[5]

    def shift(self, by: float) -> None:
        """Move every key by that."""
        self.heap = [(item[0] + by, *item[1:]) for item in self.heap]

    def live(self) -> Iterator[tuple[float, bytes, int]]:
        """In no order."""
        return (item[:3] for item in self.heap if item[5].moves == item[4])

    def tidy(self, live: int) -> None:
        """Drop what moved on, once it outweighs the rest: a far deadline comes up late."""
        if len(self.heap) > 2 * live + 1024:
            self.heap = [item for item in self.heap if item[5].moves == item[4]]
            heapq.heapify(self.heap)


class Awaiting:
    """The entries that wait for their models: how many for which, and the best of each."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._heaps: dict[str, list[tuple[float, int, int, Entry]]] = {}

    def enter(self, entry: Entry) -> None:
        self.count[entry.awaits] += 1
        heapq.heappush(self._heaps.setdefault(entry.awaits, []), (entry.score, entry.id, entry.moves, entry))

    def leave(self, entry: Entry) -> None:
        """It waits for none any more."""
        model, entry.awaits = entry.awaits, ""
        self.count[model] -= 1
        if not self.count[model]:
            del self.count[model], self._heaps[model]

    def best(self, models: Sequence[str]) -> Entry | None:
        """The first of all that wait for one of these."""
        heaps = [self._heaps[model] for model in models if model in self._heaps]
        for heap in heaps:
            while heap[0][3].moves != heap[0][2]:
                heapq.heappop(heap)
        return min((heap[0] for heap in heaps), default=(0.0, 0, 0, None))[3]

    def __iter__(self) -> Iterator[Entry]:
        live = (item for heap in self._heaps.values() for item in heap)
        return (entry for _, _, moves, entry in live if entry.moves == moves)
