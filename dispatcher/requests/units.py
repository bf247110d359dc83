"""Units: the weight of requests in the limit.

Leases, the load ledger behind the readings, and the room of a claim are all counted in units. Today each
request has a weight of one unit.
"""

from __future__ import annotations

import math

from dispatcher.requests.request import Request

_RECENT_REQUESTS = 32
"""Approximate number of recent requests over which the average weight is computed."""
_SHARING_BELOW = 0.75
"""Average weight below which requests count as sharing units."""
_MAX_SHARING = 64
"""Largest number of requests that are assumed to share a unit."""


def compute_units(_request: Request) -> int:
    """Return the weight of a request. It is one unit for every request."""
    return 1


class UnitsEstimate:
    """Weight of recent requests, to estimate the weight of requests that were not read yet."""

    def __init__(self) -> None:
        self._mean_units = 1.0

    def record_units(self, units: float) -> None:
        # Exponential moving average.
        self._mean_units += (units - self._mean_units) / _RECENT_REQUESTS

    @property
    def typical_units(self) -> int:
        """Average weight, rounded up: a lease that counts too much for a moment is better than one that
        counts too little."""
        # The small difference hides rounding errors just above a whole number.
        return math.ceil(self._mean_units - 1e-9)

    def plan_claim(self, free_units: int, unweighed_count: int = 0) -> tuple[int, int]:
        """Return how many requests to claim with this many free units (at least 1), and the weight of each.

        If several requests are sent in one call and share its unit, each has a weight of 0 until it is known
        which requests are in its call. In that case ask for as many requests as have room in
        the free units, less the `unweighed_count` that are in flight and have no weight yet.
        """
        if self._mean_units < _SHARING_BELOW:
            return max(
                0, math.ceil(free_units / max(self._mean_units, 1 / _MAX_SHARING)) - unweighed_count
            ), 0
        units = min(self.typical_units, free_units)
        return free_units // units, units
