"""What a request takes of the limit, in units. Pure.

Everything that is held against the limit counts units: leases, the ledger behind the readings, what a claim
has room for. Today each request counts one.
"""

from __future__ import annotations

import math

from dispatcher.core.requests.request import Request

_RECENT = 32
"""So many requests the typical weight is of, more or less."""
_SHARED = 0.75
"""Requests that weigh less on average share units."""
_RIDE_MOST = 64
"""So many requests are asked for to share a unit, at the most."""


def units_of(_request: Request) -> int:
    """What it weighs: one, whatever it asks for."""
    return 1


class Weights:
    """What recent requests weighed: what a claim takes one to weigh that nobody has read yet."""

    def __init__(self) -> None:
        self._mean = 1.0

    def seen(self, units: float) -> None:
        self._mean += (units - self._mean) / _RECENT

    @property
    def typical(self) -> int:
        """Their mean, rounded up: better a lease that counts too much for a moment than one too little."""
        return math.ceil(self._mean - 1e-9)

    def claim(self, free: int, riding: int = 0) -> tuple[int, int]:
        """How many requests to ask for where so many units are free (1 at least), and what each counts.

        Where several share a unit, as calls that count one have it, each counts 0 until it is known with whom
        it travels: as many are asked for as such units have room for, less the `riding` that are held and
        count nothing yet.
        """
        if self._mean < _SHARED:
            return max(0, math.ceil(free / max(self._mean, 1 / _RIDE_MOST)) - riding), 0
        units = min(self.typical, free)
        return free // units, units
