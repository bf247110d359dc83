"""Conditions that close the gate regardless of free capacity: operator, queue, signals and gateway."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.gateway.reachability import Reach
from dispatcher.core.gateway.refusals import Refusals
from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.revision import Revised


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure to read the signals."""

    reason: Reason
    why: str
    at: float
    closes_at: float
    """Time from which the state of the pool is unknown (`StalenessLimit`)."""


class Gate(Revised):
    """State of the conditions that close the gate."""

    def __init__(self) -> None:
        self.draining = self.paused = False
        self.queue_problem: str | None = None
        self.failure: Failure | None = None
        self.refusals = Refusals()
        self.reach = Reach()

    @property
    def revisions(self) -> int:
        """Sum of the revisions of all parts. It changes whenever one of them does."""
        return self.revision + self.refusals.revision + self.reach.revision

    @property
    def reachable(self) -> bool:
        """True unless the gateway is known to be unreachable."""
        return self.reach.closure is None

    def closed_to_claiming(self) -> tuple[Reason, str] | None:
        """Return why nothing may be claimed, regardless of the state of the pool. `None` if claiming is
        allowed."""
        if self.draining:
            return Reason.DRAINING, "shutting down"
        if self.paused:
            return Reason.PAUSED, "by an operator"
        if self.queue_problem is not None:
            return Reason.QUEUE_UNREACHABLE, self.queue_problem
        return None

    def unreadable(self, now: float) -> tuple[Reason, str] | None:
        """Return why the state of the pool is unknown. `None` if the signals are readable, or failed only for
        a short time."""
        failure = self.failure
        return None if failure is None or now < failure.closes_at else (failure.reason, failure.why)

    def unreachable(self) -> tuple[Reason, str] | None:
        """Return why no gateway can be used. `None` if there is one."""
        closure = self.reach.closure
        return None if closure is None else (Reason.GATEWAY_UNREACHABLE, closure.why)

    def refused(self, now: float, read_at: float) -> tuple[Reason, str] | None:
        """Return why nothing is sent on a reading of `read_at` after refusals. `None` if refusals do not
        matter."""
        why = self.refusals.closed(now, read_at)
        return (Reason.BACKPRESSURE, why) if why else None

    def may_probe(self, now: float, read_at: float) -> bool:
        """Return whether one request may be sent to probe whether the gateway is back."""
        closure = self.reach.closure
        return closure is not None and now >= closure.next_probe_at and not self.refused(now, read_at)

    @property
    def changes_at(self) -> list[float]:
        """Times at which the gate may open or close without an event."""
        times = [self.refusals.until]
        if self.failure is not None:
            times.append(self.failure.closes_at)
        if self.reach.closure is not None:
            times.append(self.reach.closure.next_probe_at)
        return times
