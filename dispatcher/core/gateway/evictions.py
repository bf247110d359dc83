"""Pauses of evicted requests before they are sent again.

A request is evicted from the pool to make room for more important ones. That is neither a failure of the
request nor a lack of capacity, so it counts as no failed attempt and does not close the gate. But each
eviction wastes the work that was done, so the request waits longer each time.

The counts are kept in memory: after a restart, or at another replica, they begin at 0.
"""

from __future__ import annotations

from collections import OrderedDict

from dispatcher.core.gateway.outcome import RetryPolicy

MAX_REMEMBERED = 8192
"""Maximum number of requests that are remembered."""


class Evictions:
    """Number of evictions of each request, by its entry in the queue."""

    def __init__(self) -> None:
        self._eviction_counts: OrderedDict[int, int] = OrderedDict()

    def record_eviction(
        self, entry: int, policy: RetryPolicy, rand: float, retry_after_s: float | None
    ) -> float:
        """Count an eviction, and return the seconds for which the request waits.

        `rand` is uniform in [0, 1), so that requests which were evicted together do not return together.
        """
        times = self._eviction_counts.pop(entry, 0)
        self._eviction_counts[entry] = times + 1
        if len(self._eviction_counts) > MAX_REMEMBERED:
            self._eviction_counts.popitem(last=False)
        pause_s = min(policy.max_s, policy.base_s * 2.0 ** min(times, 64))
        return max((0.5 + rand / 2) * pause_s, min(retry_after_s or 0.0, policy.max_s))

    def forget_request(self, entry: int) -> None:
        """Forget a request that was answered."""
        self._eviction_counts.pop(entry, None)
