"""One signal: its newest reading, and the limit that it proves. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.core.limit.budget import Budget, Policy, Reading, assess
from dispatcher.core.limit.load_ledger import Interval
from dispatcher.core.limit.revision import Revised

KEPT_READINGS = 16


@dataclass(slots=True)
class Track(Revised):
    """One signal: its newest reading and the limit of its own."""

    pending: tuple[Reading, ...] = ()
    """Taken, but not yet older than δ."""
    reading: Reading | None = None
    interval: Interval = field(default=Interval(0, 0, 0))
    handed_at: float = float("-inf")
    """When a sample was last handed in, new or not."""
    before: int = 0
    """The limit before this reading."""
    limit: int = 0
    lost_before: int = 0
    """Leases lost before the reading's window opened: the limit already knows of them."""
    capacity: float | None = None
    """The smallest capacity known from elsewhere since the reading."""
    budget: Budget | None = None
    disbelieved: int = 0
    """Readings in a row that showed less than we surely had running."""

    def hand_in(self, reading: Reading, now: float) -> None:
        self.handed_at = now
        self.pending = (*self.pending[1 - KEPT_READINGS :], reading)

    def take_due(self, now: float, delta_s: float) -> list[Reading]:
        """Those whose windows closed δ ago, oldest first; they are pending no longer."""
        due = [reading for reading in self.pending if reading.closed_at + delta_s <= now]
        if due:
            self.pending = tuple(r for r in self.pending if r.closed_at + delta_s > now)
        return sorted(due, key=lambda reading: reading.closed_at)

    def reassess(self, policy: Policy, share: float | None) -> None:
        """The budget and the limit, from the newest reading under the policy and capacity of now; `share`:
        what was learned to fit of that capacity."""
        if self.reading is None:
            return
        capacities = [c for c in (self.capacity, policy.max_sys) if c is not None]
        budget = self.budget = assess(self.reading, policy, min(capacities, default=None), share)
        if budget.fault is None:
            interval = self.interval
            limit = max(interval.lo + budget.headroom, min(self.before, interval.hi + budget.headroom))
            if self.disbelieved:
                limit = min(limit, self.before)  # it cannot have seen us: it proves no room
            self.limit = min(limit, policy.most(budget.max_sys))
