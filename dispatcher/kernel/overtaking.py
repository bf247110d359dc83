"""Bounds how long lighter requests may overtake one that waits for room.

If the first request of the queue needs more units than are free, and nothing else were claimed, the units
that come free would stay unused until they are enough. Lighter requests behind it are therefore claimed
before it, for as long as a request takes on average (at most MAX_OVERTAKEN_S). From then on, units that come
free are kept for it.

In that time earlier heavy requests end, and each leaves all its units at once. So the pool is seldom emptied
for a heavy request.

Each process counts the time since it first saw that request wait. So a request is overtaken for no longer
than that after the last process has seen it, and as much longer for each request that goes before it and
waits for room as well.
"""

from __future__ import annotations

MAX_OVERTAKEN_S = 60.0
"""Longest time for which a request is overtaken."""
MAX_PASSED_BLOCKED = 16
"""Number of requests without room that one claim passes over. If more wait, the pool is emptied for the first
of them, because a claim reads each of them."""
MAX_KNOWN_REQUESTS = 256


class Overtaking:
    """Requests that waited for room as the first of the queue, as seen by one process."""

    def __init__(self) -> None:
        self.first: int | None = None
        """Entry of the request that waited for room last. It may have been sent since."""
        self._blocked_since: dict[int, float] = {}
        """Time at which each request was seen first, oldest first."""

    def count_passable(self, now: float, mean_duration_s: float) -> int:
        """Return how many requests without room a claim may pass over."""
        allowed_s = min(mean_duration_s, MAX_OVERTAKEN_S)
        waited_s = 0.0 if self.first is None else now - self._blocked_since[self.first]
        return MAX_PASSED_BLOCKED if waited_s < allowed_s else 0

    def record_claim(self, blocked_entry_id: int | None, now: float) -> bool:
        """Record the first request for which a claim found no room. `None` if it came to none.

        Return True if it is another one than before.
        """
        # After a claim that came to none, the request before may still be there: a claim without a free unit
        # reads nothing.
        if blocked_entry_id is None or blocked_entry_id == self.first:
            return False
        self.first = blocked_entry_id
        # A request that waited before goes on waiting when a better one has been sent before it.
        if blocked_entry_id not in self._blocked_since:
            if len(self._blocked_since) == MAX_KNOWN_REQUESTS:
                del self._blocked_since[next(iter(self._blocked_since))]
            self._blocked_since[blocked_entry_id] = now
        return True
