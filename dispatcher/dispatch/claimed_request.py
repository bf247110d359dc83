"""A claimed request on its way through the stages of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.core.sequences.decisions import TurnDecision, TurnGranted
    from dispatcher.core.slices.eligibility import Generation
    from dispatcher.dispatch.in_flight import InFlightLease
    from dispatcher.ports import Lease, Permit, PinRequest


@dataclass(frozen=True, slots=True)
class ClaimedLeases:
    """Leases that one call to the queue has returned."""

    leases: Sequence[Lease]
    asked_at: float
    """Start of the call, by the clock of `LeaseValidity`."""
    permit: Permit
    granted_turns: Sequence[TurnGranted] = ()
    """Turns that were granted with the leases, one for each lease. Empty if turns are still to be checked."""
    is_probe: bool = False
    """True if the lease was claimed to see whether the gateway is back."""


@dataclass(slots=True, eq=False)
class ClaimedRequest:
    """One claimed request. A stage writes only the fields below its name, and `waits`."""

    # admit
    entry: InFlightLease
    request: Request
    """Request as it is sent. The stages for models and sequences replace it."""
    generation: Generation | None = None
    """Its body as it was checked for an earlier slice. `None` if that is not known."""

    # resolve model
    version: str | PinRequest = ""
    """Version of the model that the request is sent to, or the pin that names it. Empty if the model has no
    versions, or none is open."""

    # order in sequence
    turn: TurnDecision | None = None
    """Decision about its turn. `None` if it belongs to no sequence, or the queue could not be asked."""

    # check cancellation
    is_cancelled: bool | None = False
    """True if the request was cancelled. `None` if the cancel markers cannot be read now."""
    result_list_problem: str | None = None
    """Reason why the result cannot go to the list that the request names. `None` if it can."""

    waits: bool = False
    """True if it returned to the queue until its turn comes or its model is served."""
