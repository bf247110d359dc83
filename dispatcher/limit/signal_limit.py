"""One signal: its newest reading, and the limit that the reading justifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.common.revision import Revisioned
from dispatcher.limit.budget import Budget, Policy, Reading, compute_budget
from dispatcher.limit.load_ledger import LoadBounds

MAX_PENDING_READINGS = 16


@dataclass(slots=True)
class SignalLimit(Revisioned):
    """Newest reading of one signal, and the limit of that signal."""

    pending_readings: tuple[Reading, ...] = ()
    """Readings whose windows closed less than δ ago."""
    reading: Reading | None = None
    batch_load: LoadBounds = field(default=LoadBounds(0, 0, 0))
    last_sample_at: float = float("-inf")
    """Time of the newest sample, repeated samples included."""
    previous_limit: int = 0
    """Limit before this reading."""
    limit: int = 0
    lost_before: int = 0
    """Number of leases lost before the window of the reading opened. The limit already accounts for them."""
    capacity_bound: float | None = None
    """Smallest capacity known from elsewhere since the reading."""
    budget: Budget | None = None
    unseen_readings: int = 0
    """Number of readings in a row that showed fewer requests than this process certainly had running."""

    def add_reading(self, reading: Reading, now: float) -> None:
        self.last_sample_at = now
        self.pending_readings = (*self.pending_readings[1 - MAX_PENDING_READINGS :], reading)

    def take_due_readings(self, now: float, delta_s: float) -> list[Reading]:
        """Remove and return the readings whose windows closed at least δ ago, oldest first."""
        due = [reading for reading in self.pending_readings if reading.closed_at + delta_s <= now]
        if due:
            self.pending_readings = tuple(r for r in self.pending_readings if r.closed_at + delta_s > now)
        return sorted(due, key=lambda reading: reading.closed_at)

    def update_limit(self, policy: Policy, learned_share: float | None) -> None:
        """Compute the budget and the limit from the newest reading, the current policy and the current
        capacity. `learned_share` is the share of the capacity that was learned to fit."""
        if self.reading is None:
            return
        capacities = [c for c in (self.capacity_bound, policy.max_sys) if c is not None]
        budget = self.budget = compute_budget(
            self.reading, policy, min(capacities, default=None), learned_share
        )
        if budget.fault is None:
            batch_load = self.batch_load
            # Clamp the previous limit to what the reading proves: it may fall to lo + H at least and rise to
            # hi + H at most.
            limit = max(
                batch_load.lo + budget.headroom, min(self.previous_limit, batch_load.hi + budget.headroom)
            )
            if self.unseen_readings:
                limit = min(
                    limit, self.previous_limit
                )  # the reading did not show our requests, so it proves no room
            self.limit = min(limit, policy.compute_max_limit(budget.max_sys))
