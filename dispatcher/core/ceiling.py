"""The ceiling that refusals teach.

A pool can be smaller than its configuration says, and then readings promise room that is not there; the
only witness is a refusal for lack of capacity. The first one sets a ceiling C on our requests in flight:

    C = max(1, β × I)            I: our requests in flight when the refusal came

Every reading without another refusal raises it again, along the curve of CUBIC congestion control: fast at
first, flat around the place W of the last refusal, then ever faster, until it no longer binds.

    C(k) = W + RISE × W × ((k − K) / K)³     k readings after the refusal, K readings to W: PLATEAU, or
                                             fewer for a small W, so that it is as steep as a larger one

A reading that shows requests waiting in the picker raises nothing: the pool is full as it is, and the next
refusal would be realtime's as much as ours.

At k = 0 that is W × (1 − RISE) with RISE = 1 − β.
"""

from __future__ import annotations

from dataclasses import dataclass

PLATEAU = 20
"""Readings until the ceiling is back where the last refusal came, at most."""
STEEPNESS = 0.3 * 30 / PLATEAU**3
"""In requests per reading³: a ceiling below 30 rises as one of 30 does, or a single refusal while little was
in flight would hold for a hundred readings."""


@dataclass(slots=True)
class Ceiling:
    """C, and where it stands on its curve. Infinite (None) until the first refusal."""

    value: float | None = None
    _refused_at: float = 0.0
    """W."""
    _rise: float = 0.3
    _readings: int = 0
    """k."""
    _uncut: float | None = None
    """C before the newest cut."""
    _fresh: bool = True
    """A reading has come since the last cut: the next refusal may cut again."""

    def refused(self, in_flight: int, backoff: float, *, known: bool = False) -> None:
        """A refusal for lack of capacity with `in_flight` of ours out there. Cuts once per reading.

        Requests that are refused together count each other out one by one, and replicas do not know the
        newest of each other: of several refusals under one reading the largest number is the truth.
        `known`: heard of before, so it starts no new cut.
        """
        if self._fresh:
            if known:
                return
            self._fresh = False
            self._uncut = self.value
        elif in_flight <= self._refused_at:
            return
        self._refused_at = max(1.0, float(in_flight))
        self._rise = 1.0 - backoff
        self._readings = 0
        cut = max(1.0, backoff * self._refused_at)
        self.value = cut if self._uncut is None else min(cut, self._uncut)

    def reading(self, unbound: int, *, waiting: bool = False) -> None:
        """A reading came without a refusal; `waiting`: it showed requests that wait in the picker.

        `unbound`: the limit there would be without a ceiling at its highest. Past that the ceiling has
        nothing left to say and is forgotten.
        """
        self._fresh = True
        if self.value is None or waiting:
            return
        self._readings += 1
        plateau = min(PLATEAU, (self._rise * self._refused_at / STEEPNESS) ** (1 / 3))
        step = (self._readings - plateau) / plateau
        self.value = max(self.value, self._refused_at * (1.0 + self._rise * step * step * step))
        if self.value >= max(1, unbound):
            self.value = None
