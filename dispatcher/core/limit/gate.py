"""What closes the gate, whatever the pool has room for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.gateway.reachability import Reach
from dispatcher.core.gateway.refusals import Refusals
from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.revision import Revised


@dataclass(frozen=True, slots=True)
class Failure:
    """The signals cannot be read."""

    reason: Reason
    why: str
    at: float
    closes_at: float
    """From then on nothing is known (`Patience`)."""


class Gate(Revised):
    """The operator's switch, the queue, the signals' failures, and the gateway."""

    def __init__(self) -> None:
        self.draining = self.paused = False
        self.queue_problem: str | None = None
        self.failure: Failure | None = None
        self.refusals = Refusals()
        self.reach = Reach()

    @property
    def revisions(self) -> int:
        """Of all that closes it."""
        return self.revision + self.refusals.revision + self.reach.revision

    @property
    def reachable(self) -> bool:
        """There is a gateway, as far as one can know."""
        return self.reach.closure is None

    def closed_to_claiming(self) -> tuple[Reason, str] | None:
        """Why nothing is claimed, whatever is known of the pool."""
        if self.draining:
            return Reason.DRAINING, "shutting down"
        if self.paused:
            return Reason.PAUSED, "by an operator"
        if self.queue_problem is not None:
            return Reason.QUEUE_UNREACHABLE, self.queue_problem
        return None

    def unreadable(self, now: float) -> tuple[Reason, str] | None:
        """Why nothing is known of the pool any more; None: nothing failed, or not for long."""
        failure = self.failure
        return None if failure is None or now < failure.closes_at else (failure.reason, failure.why)

    def unreachable(self) -> tuple[Reason, str] | None:
        """Why there is no gateway to send to."""
        closure = self.reach.closure
        return None if closure is None else (Reason.GATEWAY_UNREACHABLE, closure.why)

    def refused(self, now: float, read_at: float) -> tuple[Reason, str] | None:
        """Why a gateway that refused is sent nothing on a reading of `read_at`."""
        why = self.refusals.closed(now, read_at)
        return (Reason.BACKPRESSURE, why) if why else None

    def may_probe(self, now: float, read_at: float) -> bool:
        """Whether one request may be sent to see if the gateway is back."""
        closure = self.reach.closure
        return closure is not None and now >= closure.next_probe_at and not self.refused(now, read_at)

    @property
    def changes_at(self) -> list[float]:
        """When time alone may open or close it."""
        times = [self.refusals.until]
        if self.failure is not None:
            times.append(self.failure.closes_at)
        if self.reach.closure is not None:
            times.append(self.reach.closure.next_probe_at)
        return times
