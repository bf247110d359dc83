"""Requests that were evicted from the pool: how long each waits before it is sent again. Pure.

An eviction says that others were more important just then. It is no failure of the request and no lack of
capacity, so it costs no attempt and closes nothing; but a request that is evicted again and again wastes what
it had done each time, so it waits longer each time.

Kept in memory: another replica, or a restart, begins to count anew.
"""

from __future__ import annotations

from collections import OrderedDict

from dispatcher.core.outcome import RetryPolicy

KEPT = 8192
"""Requests remembered at the most."""


class Evictions:
    """How often each request was evicted, by its entry in the queue."""

    def __init__(self) -> None:
        self._times: OrderedDict[int, int] = OrderedDict()

    def evicted(self, entry: int, policy: RetryPolicy, rand: float, retry_after_s: float | None) -> float:
        """Count an eviction, and return how many seconds the request waits.

        `rand`: uniform in [0, 1); many are evicted at the same moment, and are not to return together.
        """
        times = self._times.pop(entry, 0)
        self._times[entry] = times + 1
        if len(self._times) > KEPT:
            self._times.popitem(last=False)
        pause_s = min(policy.max_s, policy.base_s * 2.0 ** min(times, 64))
        return max((0.5 + rand / 2) * pause_s, min(retry_after_s or 0.0, policy.max_s))

    def ended(self, entry: int) -> None:
        """Forget a request: it was answered."""
        self._times.pop(entry, None)
