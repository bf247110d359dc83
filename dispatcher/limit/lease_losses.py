"""Leases that were taken back from their owners: how many were known at which time, and which of their
requests may still run.

An owner that loses a lease is dead, or only silent. A silent owner's request may still run at the gateway
although no lease counts it any more: an orphaned lease. Every reading contains such a request as realtime
load, so the pool is never overfilled. A hard limit on batch requests (`max_in_flight`) has to account for it
separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from dispatcher.common.revision import Revisioned
from dispatcher.limit.budget import ROUNDING_TOLERANCE

MAX_COUNTS = 1024


@dataclass(slots=True)
class LeaseLosses(Revisioned):
    """History of the number of lost leases, and of the orphaned ones among them."""

    _counts: tuple[tuple[float, int, int], ...] = ()

    @property
    def lost_units(self) -> int:
        return self._counts[-1][1] if self._counts else 0

    def record_counts(self, at: float, lost_units: int, orphaned_units: int) -> bool:
        """Record the counts that were known at `at`. Return False if nothing is known of the time before: for
        the first count, or after the queue was emptied."""
        # The counter lives in Redis and only grows. A smaller value means that the queue was emptied or
        # replaced.
        if not self._counts or lost_units < self.lost_units:
            self._counts = ((at, lost_units, orphaned_units),)
            return False
        if lost_units > self.lost_units:
            self._counts = (*self._counts[1 - MAX_COUNTS :], (at, lost_units, orphaned_units))
        return True

    def count_lost_before(self, at: float) -> int:
        """Return the number of leases that were known to be lost at `at`."""
        lost = self._counts[0][1] if self._counts else 0
        for when, count, _ in self._counts:
            if when > at:
                break
            lost = count
        return lost

    def estimate_orphans(self, since: float, bounds: Iterable[tuple[float, float]]) -> tuple[int, float]:
        """Return the number of requests of orphaned leases that became known after `since` and may still run,
        and the time at which the first of them became known.

        `bounds` are pairs of a time and the largest number of such requests that a reading of that time can
        contain. A reading from before the newest loss proves nothing, because the request still counted as a
        leased one then.
        """
        orphans, first_at, last_at = 0, float("inf"), float("-inf")
        for (_, _, before), (at, _, after) in itertools.pairwise(self._counts):
            if at > since and after > before:
                orphans += after - before
                first_at, last_at = min(first_at, at), max(last_at, at)
        for at, most in bounds:
            if at >= last_at and most < orphans:
                orphans = math.ceil(max(0.0, most) - ROUNDING_TOLERANCE)
        return orphans, first_at
