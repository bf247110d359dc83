"""Accepted requests in memory: where each of them is, and the orders in which they are kept.

No function searches. Requests are in heaps, and an item whose request has moved since the push is dropped
when it comes to the top (its `move_count` is outdated).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from enum import Enum

from dispatcher.requests.lanes import Lane, choose_lane, count_losses

NEVER_CLAIMED = 2**62


class Location(Enum):
    __hash__ = object.__hash__  # members are singletons, and the hash of Enum hashes the name each time

    PENDING = "pending"
    """Never claimed. The request is identified by its bytes, as in the sorted set that producers write to."""
    RETURNED = "returned"
    LEASED = "leased"
    DELAYED = "delayed"
    DEAD = "dead"
    GONE = "gone"


AnyLane = Lane | str
"""A lane, or the name of a closed lane of a feature."""


class Entry:
    """One accepted request, until its result."""

    __slots__ = (
        "closed_lane",
        "deaths",
        "deliveries",
        "failed_attempts",
        "id",
        "last_attempt",
        "location",
        "member",
        "move_count",
        "progress",
        "refusals",
        "score",
        "units",
    )

    def __init__(self, member: bytes, score: float) -> None:
        self.member = member
        self.score = score
        self.id = NEVER_CLAIMED
        self.location = Location.PENDING
        self.move_count = 0
        self.units = 0
        """Number of units that it needs, as far as it is known. 0 if it was never leased."""
        self.closed_lane: str | None = None
        """Lane in which it waits for a feature. `None` if it waits for none."""
        self.deliveries = self.failed_attempts = self.refusals = self.deaths = 0
        self.last_attempt = ""
        self.progress = b""

    @property
    def deaths_as_suspect(self) -> int:
        return count_losses(self.deaths) if self.deaths else 0

    @property
    def lane(self) -> AnyLane | None:
        if self.closed_lane is not None or not (self.deaths or self.progress):
            return self.closed_lane  # `None` for most entries, and this runs often
        return choose_lane(self.deaths, has_progress=self.progress != b"")

    @property
    def location_token(self) -> str:
        """Value of `UnleasedRequest.location`. It changes with every move, also with one elsewhere and
        back."""
        return f"{self.id}:{self.move_count}"


class EntryHeap:
    """Entries in the order of a key, without those that have moved since they were pushed."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, bytes, int, int, int, Entry]] = []
        self._puts = itertools.count()

    def push_entry(self, key: float, entry: Entry) -> None:
        # Equal keys are ordered by bytes, then by entry. The counter makes all items different, because
        # entries cannot be compared.
        item = (key, entry.member, entry.id, next(self._puts), entry.move_count, entry)
        heapq.heappush(self.heap, item)

    def peek_entry(self) -> Entry | None:
        heap = self.heap
        while heap:
            item = heap[0]
            entry = item[5]
            if entry.move_count == item[4]:
                return entry
            heapq.heappop(heap)
        return None

    def first_key(self) -> float | None:
        return self.heap[0][0] if self.peek_entry() is not None else None

    def pop_entry(self) -> Entry:
        return heapq.heappop(self.heap)[5]

    def shift_keys(self, delta: float) -> None:
        """Add `delta` to every key."""
        self.heap = [(item[0] + delta, *item[1:]) for item in self.heap]

    def iterate_live(self) -> Iterator[tuple[float, bytes, int]]:
        """Iterate over the entries that have not moved, in no order."""
        return (item[:3] for item in self.heap if item[5].move_count == item[4])

    def drop_stale(self, live_count: int) -> None:
        """Drop outdated items once there are more of them than others. An item with a late deadline would
        stay for long."""
        if len(self.heap) > 2 * live_count + 1024:
            self.heap = [item for item in self.heap if item[5].move_count == item[4]]
            heapq.heapify(self.heap)
