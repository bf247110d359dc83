"""Integrals over time of free and used capacity, and of the time spent in each reason of the gate.

From one observation to the next, the values of the first apply. The utilization is

    ∫ used dt / ∫ free dt        over the time in which requests waited

where `free` is what readings show (capacity minus reserve minus realtime requests) even while the gate is
closed, so that the cost of a closed gate is visible. Usage is counted separately while no reading shows what
is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.common.value import Value
from dispatcher.limit.budget import Reason


class WorkState(StrEnum):
    """State of the queue while time passed."""

    WAITING = "waiting"
    NONE = "none"
    UNKNOWN = "unknown"
    """The free capacity was not known, so this time does not count towards the utilization."""


class Observation(Value, frozen=True):
    """Values that apply from `at` on."""

    at: float
    reason: Reason
    used_units: float
    """Units of batch requests at the gateway."""
    free_units: float | None
    """Units that batch requests may occupy according to the newest readings. `None` if that is not known."""
    is_work_waiting: bool
    """True if the queue has requests that are not in flight."""


@dataclass(slots=True)
class UtilizationMeter:
    """Integrals so far, in seconds and unit-seconds."""

    reason_s: dict[Reason, float] = field(default_factory=lambda: dict.fromkeys(Reason, 0.0))
    used_unit_s: dict[WorkState, float] = field(default_factory=lambda: dict.fromkeys(WorkState, 0.0))
    free_unit_s: dict[WorkState, float] = field(default_factory=lambda: dict.fromkeys(WorkState, 0.0))
    _last: Observation | None = None

    def add_observation(self, observation: Observation) -> None:
        """Add the time since the last observation, and start the next interval. An observation that is older
        than the last one replaces it and adds nothing."""
        last, self._last = self._last, observation
        if last is None or observation.at <= last.at:
            return
        passed_s = observation.at - last.at
        self.reason_s[last.reason] += passed_s
        if last.free_units is None:
            self.used_unit_s[WorkState.UNKNOWN] += last.used_units * passed_s
            return
        work = WorkState.WAITING if last.is_work_waiting else WorkState.NONE
        self.used_unit_s[work] += last.used_units * passed_s
        self.free_unit_s[work] += last.free_units * passed_s
