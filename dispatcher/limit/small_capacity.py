"""Evidence that the configured capacity is too small.

A capacity that is too large shows itself, because requests wait. One that is too small hides itself: the
limit keeps the pool below it, and nobody waits. Two observations tell it apart from a right one.

Proof. Requests above the configured capacity run while none waits, because realtime requests come while batch
requests hold the rest. A pool whose capacity is right makes some of them wait.

Suggestion. The pool was as full as the configured capacity allows for QUIET_S, and no request waited in that
time. A pool with the right capacity looks the same if its realtime traffic never grows beyond the reserve
within a reading, so this proves nothing.

Nothing is controlled by these values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.limit.budget import Reading
from dispatcher.limit.capacity import MAX_READING_INTERVAL_S, MIN_WAITING, PoolCounts, PoolSnapshot
from dispatcher.limit.picker_inference import FLUSH_S

QUIET_S = 600.0
"""Time in a full pool without a waiting request from which a larger capacity is suggested."""
FULL_SHARE = 0.9
"""Share of what the configured capacity and the reserve allow from which a pool is full. Requests that end
are replaced a moment later, so a reading shows a little less than the limit."""
EXCESS_SHARE, EXCESS_REQUESTS = 0.02, 0.5
"""Excess over the configured capacity, as a share of it and in requests, from which requests prove that it is
too small. Averages are not whole numbers."""
PROOFS = 3
"""Number of observations, at least FLUSH_S apart, that prove a larger capacity. After a change of the
capacity the first of them may still contain endpoints that have left."""


def count_without_waiting(
    current: PoolCounts | None, averages: PoolCounts | None, waiting_requests: float = 0.0
) -> float | None:
    """Return the number of requests that ran while none waited. `None` if one waited, or no count separates
    running from waiting requests."""
    # A picker knows the queues of its model servers later than the requests that it sends to them. In a
    # burst, requests that wait there look as if they ran. So its own counts prove nothing if there are
    # averages.
    counts = averages or current
    if counts is None:
        return None
    waiting = max(waiting_requests, counts.waiting, 0.0 if current is None else current.waiting)
    return None if waiting >= MIN_WAITING else counts.certainly_running


def count_running_without_waiting(reading: Reading) -> float | None:
    """Return the same for a single reading. Its counts have to be of one time."""
    if reading.averages is None and not reading.has_exact_counts:
        return None
    averages = None if reading.averages is None else PoolCounts(*reading.averages, reading.averages[0])
    current = None
    if reading.running is not None:
        current = PoolCounts(reading.running, reading.waiting, reading.running)
    return count_without_waiting(current, averages, reading.f_epp * reading.max_sys)


def exceeds_capacity(running: float, capacity: float) -> bool:
    """Return whether requests that run while none waits prove that the capacity is larger."""
    return running >= capacity * (1.0 + EXCESS_SHARE) + EXCESS_REQUESTS


@dataclass(slots=True)
class SmallCapacityCheck:
    """Observations under one configured capacity."""

    quiet_s: float = 0.0
    """Time in a full pool since a request waited last."""
    _capacity: float = 0.0
    _sampled_at: float | None = None
    """Time of the newest sample. `None` if the pool was not full in it, or requests waited."""
    _proven_at: float = float("-inf")
    """Time of the newest observation in `_most_running`."""
    _most_running: list[float] = field(default_factory=list)
    """The PROOFS largest numbers of requests above the capacity that ran while none waited, at least FLUSH_S
    apart."""

    @property
    def proven_capacity(self) -> float | None:
        """Number of requests that ran PROOFS times while none waited. `None` if it was never more than the
        configured capacity."""
        return min(self._most_running) if len(self._most_running) == PROOFS else None

    @property
    def is_larger_suggested(self) -> bool:
        """True if the pool was full for so long without a waiting request that more requests may fit."""
        return self.quiet_s >= QUIET_S

    def record_refusal(self) -> None:
        """Record a refusal for lack of capacity: as good as a waiting request."""
        self.quiet_s, self._sampled_at = 0.0, None

    def record_snapshot(self, snapshot: PoolSnapshot, *, reserve: float, is_learned: bool) -> None:
        """Record a sample. `is_learned` is True if the capacity in use is a learned one."""
        before, self._sampled_at = self._sampled_at, None
        capacity, at = snapshot.configured_capacity, snapshot.sampled_at
        if is_learned or not snapshot.is_capacity_known:
            self._forget(0.0)
            return
        if capacity != self._capacity:
            self._forget(capacity)
            before = None
        running = count_without_waiting(
            snapshot.current_counts, snapshot.average_counts, snapshot.waiting_requests
        )
        if running is None:
            self.quiet_s = 0.0
            return
        if max(running, snapshot.present_requests) >= FULL_SHARE * capacity * (1.0 - reserve):
            self._sampled_at = at
            if before is not None:
                self.quiet_s += min(max(0.0, at - before), MAX_READING_INTERVAL_S)
        if at - self._proven_at >= FLUSH_S and exceeds_capacity(running, capacity):
            self._proven_at = at
            self._most_running = sorted([*self._most_running, running])[-PROOFS:]

    def _forget(self, capacity: float) -> None:
        self.quiet_s, self._most_running = 0.0, []
        self._capacity = capacity
