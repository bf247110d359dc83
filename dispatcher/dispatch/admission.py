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

from dispatcher.core.gateway.outcome import RetryPolicy, decide_after_deaths
from dispatcher.core.requests.request import Rejection, Request, parse_member
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Completion
from dispatcher.ports import Lease


@dataclass(slots=True)
class AdmissionCase:
    """A claimed request, and what is known about it."""

    lease: Lease
    request: Request
    unix_now: float
    retry_policy: RetryPolicy
    is_cancelled: bool | None = False
    """True if the request was cancelled. `None` if the cancel markers cannot be read now."""
    result_list_problem: str | None = None
    """Reason why the result cannot go to the list that the request names. `None` if it can."""
    can_send: bool = True
    """True if the gate is open or the request is a probe, and the process is not stopping."""
    is_lease_valid: bool = True
    """True if the lease is certainly still held."""
    check_model: Callable[[], Completion | None] = lambda: None
    """Return the completion if the model of the request is not served. `None` if it is, as far as is known.
    """
    get_rest_s: Callable[[], float] = lambda: 0.0
    """Return for how long the tenant must not send. Called last, because a request that may be sent is
    counted there."""


AdmissionRule = Callable[[AdmissionCase], Completion | None]


def parse_lease(lease: Lease, max_payload_bytes: int) -> Request | Completion:
    """Parse the member of a lease. Return the completion if the member is no valid request."""
    parsed = parse_member(lease.member, max_payload_bytes=max_payload_bytes)
    return completions.build_rejection(lease, parsed) if isinstance(parsed, Rejection) else parsed


def apply_rules(case: AdmissionCase, rules: Sequence[AdmissionRule]) -> Completion | None:
    """Return the completion of the first rule that objects. `None` if the request may be sent."""
    for rule in rules:
        completion = rule(case)
        if completion is not None:
            return completion
    return None


def _check_deaths(case: AdmissionCase) -> Completion | None:
    decision = decide_after_deaths(case.lease.deaths_as_suspect, case.retry_policy)
    return (
        None
        if decision is None
        else completions.build_dead_letter_after_deaths(case.lease, case.request, decision)
    )


def _check_deadline(case: AdmissionCase) -> Completion | None:
    return (
        completions.build_deadline_error(case.lease, case.request)
        if case.request.deadline <= case.unix_now
        else None
    )


def _check_cancelled(case: AdmissionCase) -> Completion | None:
    return completions.build_cancellation(case.lease, case.request) if case.is_cancelled else None


def _check_result_list(case: AdmissionCase) -> Completion | None:
    return (
        None
        if case.result_list_problem is None
        else completions.build_invalid_list_error(case.lease, case.request, case.result_list_problem)
    )


def _check_model(case: AdmissionCase) -> Completion | None:
    return case.check_model()


def _check_can_send(case: AdmissionCase) -> Completion | None:
    can_send = case.is_cancelled is not None and case.can_send and case.is_lease_valid
    return None if can_send else completions.build_return(case.lease)


def _check_tenant_rest(case: AdmissionCase) -> Completion | None:
    rest_s = case.get_rest_s()
    return completions.build_return(case.lease, after_s=rest_s) if rest_s > 0 else None


EARLY_RULES: Sequence[AdmissionRule] = (_check_deaths, _check_deadline)
SEND_RULES: Sequence[AdmissionRule] = (
    _check_cancelled,
    _check_result_list,
    _check_model,
    _check_can_send,
    _check_tenant_rest,
)
