"""Accepted requests in memory: where each of them is, and the orders in which they are kept.

No function searches. Requests are in heaps, and an item whose request has moved since the push is dropped
when it comes to the top (its `move_count` is outdated).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
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


class Entry:
    """One accepted request, until its result."""

    __slots__ = (
        "cancel_key",
        "deaths",
        "deliveries",
        "failed_attempts",
        "id",
        "last_attempt",
        "location",
        "member",
        "missing_model",
        "move_count",
        "progress",
        "refusals",
        "score",
        "units",
        "waits_for_turn",
    )

    def __init__(self, member: bytes, score: float) -> None:
        self.member = member
        self.score = score
        self.id = NEVER_CLAIMED
        self.location = Location.PENDING
        self.move_count = 0
        self.units = 0
        """Number of units that it needs, as far as it is known. 0 if it was never leased."""
        self.waits_for_turn = False
        """True if it waits for its turn in a sequence."""
        self.missing_model = ""
        """Model that it waits for. Empty if it waits for none."""
        self.cancel_key = ("", "")
        """Request id and token by which it can be cancelled while it waits for its model."""
        self.deliveries = self.failed_attempts = self.refusals = self.deaths = 0
        self.last_attempt = ""
        self.progress = b""

    @property
    def deaths_as_suspect(self) -> int:
        return count_losses(self.deaths) if self.deaths else 0

    @property
    def lane(self) -> Lane | None:
        if not (
            self.deaths or self.waits_for_turn or self.missing_model or self.progress
        ):  # true for most entries, and this runs often
            return None
        return choose_lane(
            self.deaths,
            waits_for_turn=self.waits_for_turn,
            waits_for_model=self.missing_model != "",
            has_progress=self.progress != b"",
        )

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


class ModelWaitIndex:
    """Entries that wait for their models: the number for each model, and the first of each."""

    def __init__(self) -> None:
        self.count_by_model: Counter[str] = Counter()
        self._heaps: dict[str, list[tuple[float, int, int, Entry]]] = {}

    def add_entry(self, entry: Entry) -> None:
        self.count_by_model[entry.missing_model] += 1
        heapq.heappush(
            self._heaps.setdefault(entry.missing_model, []), (entry.score, entry.id, entry.move_count, entry)
        )

    def remove_entry(self, entry: Entry) -> None:
        """Remove an entry, which then waits for no model."""
        model, entry.missing_model = entry.missing_model, ""
        self.count_by_model[model] -= 1
        if not self.count_by_model[model]:
            del self.count_by_model[model], self._heaps[model]

    def find_first(self, models: Sequence[str]) -> Entry | None:
        """Return the first entry that waits for one of these models, or `None`."""
        heaps = [self._heaps[model] for model in models if model in self._heaps]
        for heap in heaps:
            # `remove_entry` deletes a heap with its last entry, so each heap has at least one current item.
            while heap[0][3].move_count != heap[0][2]:
                heapq.heappop(heap)
        return min((heap[0] for heap in heaps), default=(0.0, 0, 0, None))[3]

    def __iter__(self) -> Iterator[Entry]:
        live = (item for heap in self._heaps.values() for item in heap)
        return (entry for _, _, moves, entry in live if entry.move_count == moves)
