"""Admission: the rules that decide whether a claimed request is sent. Pure.

    early    checks of the member and its history, before the queue is asked anything
    send     checks with the answers of the queue, and with the state of the pool and of the tenant

A rule takes an `AdmissionCase` and returns `None`, or the completion of the lease. The first completion
counts, so the rules are in the order of what the consumer of the result should learn first. Rules that only
return the lease to the queue come last, because their reason may pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispatcher.core.gateway.outcome import RetryPolicy, after_losses
from dispatcher.core.requests.request import Rejection, Request, parse
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Ending
from dispatcher.ports import Lease


@dataclass(slots=True)
class Case:
    """A claimed request, and what is known about it."""

    lease: Lease
    request: Request
    unix_now: float
    retry: RetryPolicy
    cancelled: bool | None = False
    """True if the request was cancelled. `None` if the cancel markers cannot be read now."""
    unfit: str | None = None
    """Reason why the result cannot go to the list that the request names. `None` if it can."""
    may_send: bool = True
    """True if the gate is open or the request is a probe, and the process is not stopping."""
    ours: bool = True
    """True if the lease is certainly still held."""
    without_model: Callable[[], Ending | None] = lambda: None
    """Return the completion if the model of the request is not served. `None` if it is, as far as is known.
    """
    rest_s: Callable[[], float] = lambda: 0.0
    """Return for how long the tenant must not send. Called last, because a request that may be sent is
    counted there."""


Rule = Callable[[Case], Ending | None]


def admit(lease: Lease, max_payload_bytes: int) -> Request | Ending:
    """Parse the member of a lease. Return the completion if the member is no valid request."""
    parsed = parse(lease.member, max_payload_bytes=max_payload_bytes)
    return completions.rejected(lease, parsed) if isinstance(parsed, Rejection) else parsed


def judge(case: Case, rules: Sequence[Rule]) -> Ending | None:
    """Return the completion of the first rule that objects. `None` if the request may be sent."""
    for rule in rules:
        ending = rule(case)
        if ending is not None:
            return ending
    return None


def _deadly(case: Case) -> Ending | None:
    verdict = after_losses(case.lease.losses, case.retry)
    return None if verdict is None else completions.deadly(case.lease, case.request, verdict)


def _expired(case: Case) -> Ending | None:
    return completions.expired(case.lease, case.request) if case.request.deadline <= case.unix_now else None


def _cancelled(case: Case) -> Ending | None:
    return completions.cancelled(case.lease, case.request) if case.cancelled else None


def _unlisted(case: Case) -> Ending | None:
    return None if case.unfit is None else completions.unlisted(case.lease, case.request, case.unfit)


def _without_model(case: Case) -> Ending | None:
    return case.without_model()


def _not_now(case: Case) -> Ending | None:
    sure = case.cancelled is not None and case.may_send and case.ours
    return None if sure else completions.returned(case.lease)


def _at_rest(case: Case) -> Ending | None:
    rest_s = case.rest_s()
    return completions.returned(case.lease, after_s=rest_s) if rest_s > 0 else None


BY_ITSELF: Sequence[Rule] = (_deadly, _expired)
TO_SEND: Sequence[Rule] = (_cancelled, _unlisted, _without_model, _not_now, _at_rest)
