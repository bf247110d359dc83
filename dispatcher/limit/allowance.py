"""The result of the limiter, and its explanation in one sentence."""

from __future__ import annotations

from dispatcher.common.value import Value
from dispatcher.limit.budget import Budget, Reason, Signal

_OUTDATED_REASONS = (Reason.UNREADABLE, Reason.STALE)
"""Reasons for which the newest reading may no longer show the state of the pool."""


class Allowance(Value, frozen=True):
    """Number of batch requests that may be in flight now, with the reason and the time for which the number
    is valid."""

    limit: int
    """Maximum number of batch requests in flight over all replicas. 0 if the gate is closed."""
    reason: Reason
    detail: str
    """Details of the reason in words. May be empty. If the reason is `open`, the cause why a claim returned
    nothing."""
    signal: Signal | None
    """Signal with the smallest limit."""
    budget: Budget | None
    """Newest budget of `signal`."""
    read_at: float
    """Time at which the newest reading behind the limit was taken (the start of its window)."""
    lost_units: int
    """Total of lost leases that the limit already accounts for."""
    next_check_at: float | None
    """Time at which the allowance has to be computed again even without an event. `None` if only an event can
    change it."""
    probe_limit: int = 0
    """Limit within which one request may be sent to probe whether the gateway is back. 0 if no probe is
    due."""


def explain_allowance(allowance: Allowance, in_flight: int, *, with_terms: bool = True) -> str:
    """Return one sentence that says what is sent, and why not more.

    `with_terms`: add the terms of the limit in parentheses, where they are known.
    """
    terms = ""
    budget = allowance.budget if with_terms else None
    if budget is not None and budget.fault is None and allowance.reason not in _OUTDATED_REASONS:
        fits = (
            f", which fitted where {budget.configured_max_sys:g} are configured"
            if budget.is_capacity_learned
            else ""
        )
        fits = fits if budget.is_capacity_known else ", as far as the search for the capacity has come"
        terms = (
            f" ({allowance.signal}: pool {budget.f_sys:.0%} full, queue {budget.f_epp:.0%}, "
            f"reserve {budget.reserve:.0%} leave D = {budget.d:.3f} of {budget.max_sys:.5g} requests{fits}, "
            f"headroom {budget.headroom})"
        )
    if allowance.reason.is_closed:
        return f"Nothing is sent: {allowance.reason}, {allowance.detail}{terms}."
    limited = f"limit {allowance.limit}"
    match allowance.reason:
        case Reason.SATURATED:
            text = f"{in_flight} in flight over a {limited}: the pool is too full to replace completions"
        case Reason.FULL:
            text = f"{in_flight} in flight fill the {limited}: each completion is replaced"
        case Reason.IDLE:
            text = f"no request is ready to be sent, {in_flight} in flight under a {limited}"
        # The gate is open, but the newest claim returned nothing although requests wait.
        case _ if allowance.detail:
            text = f"{in_flight} in flight under a {limited}, and the queue gives no more: {allowance.detail}"
        case _:
            text = f"{in_flight} in flight under a {limited}: sending {allowance.limit - in_flight} more"
    return f"{text[0].upper()}{text[1:]}{terms}."
