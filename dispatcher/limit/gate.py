"""Conditions that close the gate regardless of free capacity: operator, queue, signals and gateway."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.common.revision import Revisioned
from dispatcher.limit.budget import Reason
from dispatcher.requests.outcomes.reachability import Reachability
from dispatcher.requests.outcomes.refusals import Refusals


@dataclass(frozen=True, slots=True)
class SignalFailure:
    """Failure to read the signals."""

    reason: Reason
    why: str
    at: float
    closes_at: float
    """Time from which the state of the pool is unknown (`StalenessLimit`)."""


class Gate(Revisioned):
    """State of the conditions that close the gate."""

    def __init__(self) -> None:
        self.is_draining = self.is_paused = False
        self.queue_problem: str | None = None
        self.signal_failure: SignalFailure | None = None
        self.refusals = Refusals()
        self.reachability = Reachability()

    @property
    def total_revision(self) -> int:
        """Sum of the revisions of all parts. It changes whenever one of them does."""
        return self.revision + self.refusals.revision + self.reachability.revision

    @property
    def is_gateway_reachable(self) -> bool:
        """True unless the gateway is known to be unreachable."""
        return self.reachability.outage is None

    def check_claiming(self) -> tuple[Reason, str] | None:
        """Return why nothing may be claimed, regardless of the state of the pool. `None` if claiming is
        allowed."""
        if self.is_draining:
            return Reason.DRAINING, Reason.DRAINING.meaning
        if self.is_paused:
            return Reason.PAUSED, "by an operator"
        if self.queue_problem is not None:
            return Reason.QUEUE_UNREACHABLE, self.queue_problem
        return None

    def check_signals(self, now: float) -> tuple[Reason, str] | None:
        """Return why the state of the pool is unknown. `None` if the signals are readable, or failed only for
        a short time."""
        failure = self.signal_failure
        return None if failure is None or now < failure.closes_at else (failure.reason, failure.why)

    def check_gateway(self) -> tuple[Reason, str] | None:
        """Return why no gateway can be used. `None` if there is one."""
        outage = self.reachability.outage
        if outage is None:
            return None
        return (Reason.GATEWAY_FAILING if outage.is_answering else Reason.GATEWAY_UNREACHABLE), outage.why

    def check_refusals(self, now: float, read_at: float) -> tuple[Reason, str] | None:
        """Return why nothing is sent on a reading of `read_at` after refusals. `None` if refusals do not
        matter."""
        why = self.refusals.explain_closure(now, read_at)
        return (Reason.BACKPRESSURE, why) if why else None

    def can_probe(self, now: float, read_at: float) -> bool:
        """Return whether one request may be sent to probe whether the gateway is back."""
        outage = self.reachability.outage
        return outage is not None and now >= outage.next_probe_at and not self.check_refusals(now, read_at)

    @property
    def change_times(self) -> list[float]:
        """Times at which the gate may open or close without an event."""
        times = [self.refusals.retry_at]
        if self.signal_failure is not None:
            times.append(self.signal_failure.closes_at)
        if self.reachability.outage is not None:
            times.append(self.reachability.outage.next_probe_at)
        return times
