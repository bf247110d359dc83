"""Measure calls of one size at a time, in epochs.

When the first calls of a size arrive, the server still works on calls of the previous size. Only calls that
began after two events count: the last call of the previous size had ended, and so had a call of the new size
that began after that. Such calls shared the server with calls of their own size, as many as usual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

EPOCH_CALLS = 8
"""Number of calls of one size that are measured before the size is judged."""
MIN_EPOCH_S = 0.02
"""Shortest time for which calls are measured. In a shorter time the overhead of this process dominates."""
PROBE_CALLS = 3
"""Number of calls of a trial that are sent before other calls may have its size."""
FILLED_SHARE = 0.6
"""A larger size is tried only if calls reach this share of the present size. Otherwise there are not enough
requests to fill larger calls."""


@dataclass(frozen=True, slots=True)
class CallMeasurement:
    """Measured cost of one call."""

    size: int
    """Largest size that was allowed when the call was formed (`CallSize.choose_max_items`)."""
    items: int
    unit_s: float
    """Units of the limit × seconds, from the lease of each item to the answer."""
    began_at: float
    ended_at: float
    load: float = 1.0
    """Units of this model's calls that were in flight when the call was formed, including its own."""


@dataclass(slots=True)
class Tally:
    """Sums over several calls."""

    calls: int = 0
    items: int = 0
    unit_s: float = 0.0
    total_call_s: float = 0.0

    def add_call(self, call: CallMeasurement) -> None:
        self.calls += 1
        self.total_call_s += call.ended_at - call.began_at
        self.items += call.items
        self.unit_s += call.unit_s

    @property
    def items_per_unit_s(self) -> float:
        """Items per unit-second."""
        return self.items / max(self.unit_s, 1e-9)


@dataclass(slots=True)
class Epoch:
    """Consecutive calls of one size."""

    size: int
    began_at: float
    is_after_trial: bool = False
    """True if the epoch follows a trial that was lost. Its effect on the server's queue is part of the cost
    of the trial."""
    has_probes: bool = False
    """True if PROBE_CALLS of its calls are sent first, and others only when these have returned."""
    sent_count: int = 0
    measured_from_at: float = inf
    """Time at which the first call ended that shared the server with no call of another size. Calls that
    began later are measured."""
    others_ended_at: float = -inf
    """Time at which the last call of another size ended."""
    all_calls: Tally = field(default_factory=Tally)
    """Sums over all calls of the epoch, including those that shared the server with calls of the previous
    size."""
    measured_calls: Tally = field(default_factory=Tally)

    def count_call(self, call: CallMeasurement) -> bool:
        """Count a call. Return whether it belongs to this epoch."""
        if call.size != self.size:
            # The call shared the server with this epoch's calls, so measuring begins anew.
            self.others_ended_at, self.measured_from_at, self.measured_calls = call.ended_at, inf, Tally()
            return False
        # Calls that waited for more requests when a trial without probes began belong to the trial.
        if call.began_at < self.began_at and not self.has_probes:
            return False
        self.all_calls.add_call(call)
        if call.began_at >= self.measured_from_at:
            self.measured_calls.add_call(call)
        # Probes run beside calls of the best size, so they never start the measurement.
        elif call.began_at >= self.others_ended_at and (
            not self.has_probes or self.all_calls.calls > PROBE_CALLS
        ):
            self.measured_from_at = min(self.measured_from_at, call.ended_at)
        return True

    @property
    def is_probing(self) -> bool:
        return self.has_probes and self.all_calls.calls < PROBE_CALLS

    def is_over(self, now: float) -> bool:
        """Return whether enough calls were measured."""
        return self.measured_calls.calls >= EPOCH_CALLS and now - self.measured_from_at >= MIN_EPOCH_S

    @property
    def is_filled(self) -> bool:
        """True if there were enough requests to fill larger calls."""
        return self.measured_calls.items >= FILLED_SHARE * self.measured_calls.calls * self.size
