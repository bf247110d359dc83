"""Time for which the newest reading stays valid while later polls fail.

A failed scrape shows nothing about the pool, so the reading before it is merely older, as it would be with a
longer interval. One lost scrape therefore does not close the gate; two in a row do.
"""

from __future__ import annotations

from collections import deque

MAX_AGE_INTERVALS = 2.5
"""Age of the newest good sample, in intervals, from which it is no longer used. At that age two samples in a
row are missing."""


class StalenessLimit:
    """Observed interval between the samples of one source.

    `min_interval_s` is the shortest interval between two samples. Samples older than `max_age_s` are never
    used.
    """

    def __init__(self, min_interval_s: float, max_age_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._max_age_s = max_age_s
        self._newest: tuple[float, float] | None = None
        self._gaps: deque[float] = deque(maxlen=2)

    def record_sample(self, opened_at: float, closed_at: float) -> None:
        """Record a good sample that was taken between `opened_at` and `closed_at`. With several replicas the
        window spans from the oldest view to the newest. A repeated sample is ignored."""
        if self._newest is not None:
            if closed_at <= self._newest[1]:
                return
            # Measured from the oldest view of the previous sample, so that the gap covers all replicas even
            # if their scrapes are staggered.
            self._gaps.append(closed_at - self._newest[0])
        self._newest = opened_at, closed_at

    def compute_stale_at(self) -> float:
        """Return the time from which the newest sample is no longer used."""
        if self._newest is None:
            return float("-inf")
        # The smaller of the last two gaps counts, because a lost sample must not stretch the interval.
        interval_s = max(self._min_interval_s, min(self._gaps, default=0.0))
        return self._newest[0] + min(MAX_AGE_INTERVALS * interval_s, self._max_age_s)
