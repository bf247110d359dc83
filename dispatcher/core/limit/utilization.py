"""What was free for batch work, how much of it was used, and how long the gate said what. Pure.

Integrals over time: from one observation to the next the values of the first hold. The harvest is

    ∫ used dt / ∫ free dt        over the time in which work waited

with `free` as the readings show it (the pool's capacity less the reserve less realtime), whatever else kept
the gate closed, so that what a closed gate cost is seen too. Where no reading says what is free, what is used
is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dispatcher.core.limit.budget import Reason
from dispatcher.core.value import Value


class Work(StrEnum):
    """Whether there was any to send while time passed."""

    WAITING = "waiting"
    NONE = "none"
    UNKNOWN = "unknown"
    """Nobody knew what was free, so it tells nothing of the harvest."""


class Observation(Value, frozen=True):
    """What holds from `at` on."""

    at: float
    reason: Reason
    used: float
    """Our requests at the gateway."""
    free: float | None
    """What they may be, by the newest readings; None: unknown."""
    waiting: bool
    """There is work that is not in flight."""


@dataclass(slots=True)
class Meter:
    """The integrals so far, in seconds and request-seconds."""

    reason_s: dict[Reason, float] = field(default_factory=lambda: dict.fromkeys(Reason, 0.0))
    used_s: dict[Work, float] = field(default_factory=lambda: dict.fromkeys(Work, 0.0))
    free_s: dict[Work, float] = field(default_factory=lambda: dict.fromkeys(Work, 0.0))
    _last: Observation | None = None

    def observe(self, seen: Observation) -> None:
        """Time goes only forward: an observation of earlier than the last one replaces that one, and adds
        nothing."""
        last, self._last = self._last, seen
        if last is None or seen.at <= last.at:
            return
        passed_s = seen.at - last.at
        self.reason_s[last.reason] += passed_s
        if last.free is None:
            self.used_s[Work.UNKNOWN] += last.used * passed_s
            return
        work = Work.WAITING if last.waiting else Work.NONE
        self.used_s[work] += last.used * passed_s
        self.free_s[work] += last.free * passed_s
