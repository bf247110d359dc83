"""How long the newest reading stands while later ones fail. Pure.

A scrape that fails tells nothing of the pool: the reading before it is as old as with a longer interval, and
the law holds for that. So one lost scrape closes nothing, two in a row do.
"""

from __future__ import annotations

from collections import deque

INTERVALS = 2.5
"""So many intervals after the newest good sample it is no longer acted on: the next but one is late."""


class Patience:
    """What one source's samples have shown of their interval.

    `every_s`: no two samples come closer. `max_age_s`: older ones are not acted on in any case.
    """

    def __init__(self, every_s: float, max_age_s: float) -> None:
        self._every_s = every_s
        self._max_age_s = max_age_s
        self._newest: tuple[float, float] | None = None
        self._gaps: deque[float] = deque(maxlen=2)

    def read(self, opened_at: float, closed_at: float) -> None:
        """A good sample was taken in this stretch of time: of several replicas from the oldest view to the
        newest. The same one may come again."""
        if self._newest is not None:
            if closed_at <= self._newest[1]:
                return
            # Until each of them was taken anew, however they are staggered.
            self._gaps.append(closed_at - self._newest[0])
        self._newest = opened_at, closed_at

    def until(self) -> float:
        """When it ends. The smaller of the last two gaps counts: a lost sample must not stretch it."""
        if self._newest is None:
            return float("-inf")
        interval_s = max(self._every_s, min(self._gaps, default=0.0))
        return self._newest[0] + min(INTERVALS * interval_s, self._max_age_s)
