"""Calls of one size, one after the other, and what they came to. Pure.

A server works on calls of the size before when the first of another one come. Those that count began when
the last of these had ended, and one of their own that had begun after that: what they shared the server with
was of their own size, and as much as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

EPOCH_CALLS = 8
"""Calls of one size that are measured before it is judged."""
EPOCH_LEAST_S = 0.02
"""And so long they are measured at the least: what takes less is noise of ours."""
PROBES = 3
"""Calls of a trial that are made before others may have its size."""
COMPANY = 0.6
"""A larger size is tried only where calls reach this share of the one before: else nobody could fill it."""


@dataclass(frozen=True, slots=True)
class CallTime:
    """What one call took."""

    size: int
    """The largest that was allowed when it was formed (`CallSize.most`)."""
    items: int
    unit_s: float
    """Units of the limit × seconds, from the lease of each item to the answer."""
    began_at: float
    ended_at: float
    load: float = 1.0
    """Units of this model's calls that were under way when it was formed, its own among them."""


@dataclass(slots=True)
class Tally:
    """What some calls came to."""

    calls: int = 0
    items: int = 0
    unit_s: float = 0.0
    took_s: float = 0.0

    def add(self, call: CallTime) -> None:
        self.calls += 1
        self.took_s += call.ended_at - call.began_at
        self.items += call.items
        self.unit_s += call.unit_s

    @property
    def rate(self) -> float:
        """Items per unit-second."""
        return self.items / max(self.unit_s, 1e-9)


@dataclass(slots=True)
class Epoch:
    """Calls of one size, one after the other."""

    size: int
    began_at: float
    after_trial: bool = False
    """Which was lost: what it leaves behind in the server is its cost."""
    probed: bool = False
    """PROBES of its calls go first, and others when these are back."""
    went: int = 0
    opens_at: float = inf
    """When the first of them ended that shared the server with none of another size: those that began later
    are measured."""
    alone_at: float = -inf
    """When the last of another size ended."""
    seen: Tally = field(default_factory=Tally)
    """Of all its calls, those among them that shared the server with calls of the size before."""
    measured: Tally = field(default_factory=Tally)

    def count(self, call: CallTime) -> bool:
        """Whether it is one of these."""
        if call.size != self.size:
            self.alone_at, self.opens_at, self.measured = call.ended_at, inf, Tally()
            return False
        # Those that waited for company when a trial began are of it.
        if call.began_at < self.began_at and not self.probed:
            return False
        self.seen.add(call)
        if call.began_at >= self.opens_at:
            self.measured.add(call)
        elif call.began_at >= self.alone_at and (not self.probed or self.seen.calls > PROBES):
            self.opens_at = min(self.opens_at, call.ended_at)
        return True

    @property
    def probing(self) -> bool:
        return self.probed and self.seen.calls < PROBES

    def over(self, now: float) -> bool:
        """Whether enough is known of the size."""
        return self.measured.calls >= EPOCH_CALLS and now - self.opens_at >= EPOCH_LEAST_S

    @property
    def filled(self) -> bool:
        """Whether there would be company for larger calls."""
        return self.measured.items >= COMPANY * self.measured.calls * self.size
