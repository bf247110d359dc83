"""Leases that were taken back from their owners: how many were known of when, and what may still run of them.

Whoever takes back a lease knows that its owner is gone, or only that it is silent. What a silent one sent may
run on at the gateway, and no lease counts it any more: a stray. It is inside every reading as somebody else's
load, so the pool is never overfilled; but a cap on our own requests has to be told of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from dispatcher.core.limit.budget import SLACK
from dispatcher.core.limit.revision import Revised

KEPT = 1024


@dataclass(slots=True)
class Losses(Revised):
    """Counts of leases lost, and of the strays among them, as they became known."""

    _counts: tuple[tuple[float, int, int], ...] = ()

    @property
    def lost(self) -> int:
        return self._counts[-1][1] if self._counts else 0

    def counted(self, at: float, lost: int, stray: int) -> bool:
        """False: the first count, or one of a queue that was emptied; nothing is known of what was before."""
        if not self._counts or lost < self.lost:
            self._counts = ((at, lost, stray),)
            return False
        if lost > self.lost:
            self._counts = (*self._counts[1 - KEPT :], (at, lost, stray))
        return True

    def lost_at(self, at: float) -> int:
        """Leases known to be lost by `at`."""
        lost = self._counts[0][1] if self._counts else 0
        for when, count, _ in self._counts:
            if when > at:
                break
            lost = count
        return lost

    def strays(self, since: float, bounds: Iterable[tuple[float, float]]) -> tuple[int, float]:
        """Strays that became known after `since` and may still run; and when the first of them did.

        `bounds`: (when, how many there are at the most), by whoever looked; who looked before the last of
        them became known did not see them as strays.
        """
        strays, first_at, last_at = 0, float("inf"), float("-inf")
        for (_, _, before), (at, _, after) in itertools.pairwise(self._counts):
            if at > since and after > before:
                strays += after - before
                first_at, last_at = min(first_at, at), max(last_at, at)
        for at, most in bounds:
            if at >= last_at and most < strays:
                strays = math.ceil(max(0.0, most) - SLACK)
        return strays, first_at
