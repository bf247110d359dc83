"""One signal: its newest reading, and the limit that the reading justifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.core.limit.budget import Budget, Policy, Reading, assess
from dispatcher.core.limit.load_ledger import Interval
from dispatcher.core.limit.revision import Revised

KEPT_READINGS = 16


@dataclass(slots=True)
class Track(Revised):
    """Newest reading of one signal, and the limit of that signal."""

    pending: tuple[Reading, ...] = ()
    """Readings whose windows closed less than δ ago."""
    reading: Reading | None = None
    interval: Interval = field(default=Interval(0, 0, 0))
    handed_at: float = float("-inf")
    """Time of the newest sample, repeated samples included."""
    before: int = 0
    """Limit before this reading."""
    limit: int = 0
    lost_before: int = 0
    """Number of leases lost before the window of the reading opened. The limit already accounts for them."""
    capacity: float | None = None
    """Smallest capacity known from elsewhere since the reading."""
    budget: Budget | None = None
    disbelieved: int = 0
    """Number of readings in a row that showed fewer requests than this process certainly had running."""

    def hand_in(self, reading: Reading, now: float) -> None:
        self.handed_at = now
        self.pending = (*self.pending[1 - KEPT_READINGS :], reading)

    def take_due(self, now: float, delta_s: float) -> list[Reading]:
        """Remove and return the readings whose windows closed at least δ ago, oldest first."""
        due = [reading for reading in self.pending if reading.closed_at + delta_s <= now]
        if due:
            self.pending = tuple(r for r in self.pending if r.closed_at + delta_s > now)
        return sorted(due, key=lambda reading: reading.closed_at)

    def reassess(self, policy: Policy, share: float | None) -> None:
        """Compute the budget and the limit from the newest reading, the current policy and the current
        capacity. `learned_share` is the share of the capacity that was learned to fit."""
        if self.reading is None:
            return
        capacities = [c for c in (self.capacity, policy.max_sys) if c is not None]
        budget = self.budget = assess(self.reading, policy, min(capacities, default=None), share)
        if budget.fault is None:
            interval = self.interval
            # Clamp the previous limit to what the reading proves: it may fall to lo + H at least and rise to
            # hi + H at most.
            limit = max(interval.lo + budget.headroom, min(self.before, interval.hi + budget.headroom))
            if self.disbelieved:
                limit = min(limit, self.before)  # the reading did not show our requests, so it proves no room
            self.limit = min(limit, policy.most(budget.max_sys))
