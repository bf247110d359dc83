"""What the limiter answers, and how to say it to a person."""

from __future__ import annotations

from dispatcher.core.limit.budget import Budget, Reason, Signal
from dispatcher.core.value import Value

_UNREAD = (Reason.UNREADABLE, Reason.STALE)
"""Reasons that mean that the newest reading may no longer show the state of the pool."""


class Allowance(Value, frozen=True):
    """What may be in flight now, why, and how long that answer stands."""

    limit: int
    """Of our requests in flight, all replicas together. 0 in every closed state."""
    reason: Reason
    because: str
    """The reason's particulars in words; may be empty. Where it is `open`: why a claim got nothing."""
    signal: Signal | None
    """The signal whose limit is the smallest."""
    budget: Budget | None
    """That signal's newest budget."""
    read_at: float
    """When the newest reading behind the limit was taken (its window's start)."""
    lost: int
    """Leases lost so far that the limit already allows for."""
    next_check_at: float | None
    """Ask again then, though nothing happened; None: only when something does."""
    probe: int = 0
    """Within this limit one request may be sent to see whether the gateway is back; 0: not now."""


def explain(allowance: Allowance, in_flight: int) -> str:
    """One sentence from an allowance: what is sent, and why not more."""
    terms = ""
    budget = allowance.budget
    if budget is not None and budget.fault is None and allowance.reason not in _UNREAD:
        fits = f", which fitted where {budget.configured:g} are configured" if budget.learned else ""
        fits = fits if budget.known else ", as far as the search for the capacity has come"
        terms = (
            f" ({allowance.signal}: pool {budget.f_sys:.0%} full, queue {budget.f_epp:.0%}, "
            f"reserve {budget.reserve:.0%} leave D = {budget.d:.3f} of {budget.max_sys:.5g} requests{fits}, "
            f"headroom {budget.headroom})"
        )
    if allowance.reason.closed:
        return f"Nothing is sent: {allowance.reason}, {allowance.because}{terms}."
    limited = f"limit {allowance.limit}"
    match allowance.reason:
        case Reason.SATURATED:
            told = f"{in_flight} in flight over a {limited}: the pool is too full to replace completions"
        case Reason.FULL:
            told = f"{in_flight} in flight fill the {limited}: each completion is replaced"
        case Reason.IDLE:
            told = f"no request is ready to be sent, {in_flight} in flight under a {limited}"
        case _ if allowance.because:
            told = (
                f"{in_flight} in flight under a {limited}, and the queue gives no more: {allowance.because}"
            )
        case _:
            told = f"{in_flight} in flight under a {limited}: sending {allowance.limit - in_flight} more"
    return f"{told[0].upper()}{told[1:]}{terms}."
