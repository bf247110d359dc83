"""Units: the weight of requests in the limit.

Leases, the load ledger behind the readings, and the room of a claim are all counted in units. Today each
request has a weight of one unit.
"""

from __future__ import annotations

import math

from dispatcher.core.requests.request import Request

_RECENT = 32
"""Approximate number of recent requests over which the average weight is computed."""
_SHARED = 0.75
"""Average weight below which requests count as sharing units."""
_RIDE_MOST = 64
"""Largest number of requests that are assumed to share a unit."""


def units_of(_request: Request) -> int:
    """Return the weight of a request. It is one unit for every request."""
    return 1


class Weights:
    """Weight of recent requests, to estimate the weight of requests that were not read yet."""

    def __init__(self) -> None:
        self._mean = 1.0

    def seen(self, units: float) -> None:
        # Exponential moving average.
        self._mean += (units - self._mean) / _RECENT

    @property
    def typical(self) -> int:
        """Average weight, rounded up: a lease that counts too much for a moment is better than one that
        counts too little."""
        # The small difference hides rounding errors just above a whole number.
        return math.ceil(self._mean - 1e-9)

    def claim(self, free: int, riding: int = 0) -> tuple[int, int]:
        """Return how many requests to claim with this many free units (at least 1), and the weight of each.

        If several requests share a unit, as in merged calls that count one unit, each has a weight of 0 until
        it is known which requests it is merged with. In that case ask for as many requests as have room in
        the free units, less the `unweighed_count` that are in flight and have no weight yet.
        """
        if self._mean < _SHARED:
            return max(0, math.ceil(free / max(self._mean, 1 / _RIDE_MOST)) - riding), 0
        units = min(self.typical, free)
        return free // units, units
