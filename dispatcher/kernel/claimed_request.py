"""A claimed request on its way through the stages of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.queue.contract import Lease, Permit
    from dispatcher.requests.request import Request


@dataclass(frozen=True, slots=True)
class ClaimedLeases:
    """Leases that one call to the queue has returned."""

    leases: Sequence[Lease]
    asked_at: float
    """Start of the call, by the clock of `LeaseValidity`."""
    permit: Permit
    extras: Sequence[object] = ()
    """Facts for a feature that came with the leases, one for each. Empty if there are none."""
    is_probe: bool = False
    """True if the lease was claimed to see whether the gateway is back."""


@dataclass(slots=True, eq=False)
class ClaimedRequest:
    """One claimed request on its way through the stages of the pipeline."""

    entry: InFlightLease
    request: Request
    """Request as it is sent. Stages may replace it."""
    remembered: object = None
    """Fact that a feature stored with the parsed request when it returned to the queue the last time."""
    extra: Any = None
    """Fact for a feature that came with the lease."""
    is_cancelled: bool | None = False
    """True if the request was cancelled. `None` if its cancel marker cannot be read now."""
    result_list_problem: str | None = None
    """Reason why the result cannot go to the list that the request names. `None` if it can."""
    waits: bool = False
    """True if it returned to the queue to wait for something else than room."""
