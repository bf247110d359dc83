"""How a lease ends: what is handed in to the queue for each way a request can go. Pure."""

from __future__ import annotations

from dispatcher.core.outcome import Answered, Bury, Errored, Outcome, Retry, RetryPolicy, after
from dispatcher.core.request import Rejection, Request
from dispatcher.core.result import ErrorCode, answered, failed, misdirected
from dispatcher.ports import Burial, Lease, Release, Settlement

Ending = Settlement | Release | Burial

NOBODY = Lease(entry=0, token="", member=b"", score=0.0, deliveries=0, attempts=0, refusals=0, losses=0)
"""The lease of a request that expires without one."""


def lease_of(ending: Ending) -> Lease:
    """The lease that it ends."""
    return ending.settlement.lease if isinstance(ending, Burial) else ending.lease


def error(lease: Lease, request: Request, code: ErrorCode, message: str) -> Settlement:
    """The request ends with an error of ours as its result."""
    return _settlement(lease, request, failed(request.id, code, message, token=request.token), code)


def unlisted(lease: Lease, request: Request, why: str) -> Settlement:
    """Not sent, for its result may not go where it asks: it says so on the default list."""
    result = misdirected(request.id, request.results, why, token=request.token)
    return Settlement(lease, result, "", request.id, request.token, ErrorCode.INVALID_REQUEST)


def expired(lease: Lease, request: Request) -> Settlement:
    return error(lease, request, ErrorCode.DEADLINE_EXCEEDED, "deadline exceeded")


def cancelled(lease: Lease, request: Request) -> Settlement:
    return error(lease, request, ErrorCode.CANCELLED, "cancelled")


def returned(lease: Lease, after_s: float = 0.0) -> Release:
    """Untouched, back to its place, at once or later."""
    return Release(lease, delay_s=after_s, undelivered=True)


def rejected(lease: Lease, rejection: Rejection) -> Settlement | Burial:
    """A member that can never be served: a result where its id could be read, else dead, whole."""
    if rejection.id is None:
        nowhere = Settlement(lease, b"", "")
        return Burial(nowhere, f"{rejection.code}: {rejection.message}")
    return Settlement(
        lease=lease,
        result=failed(rejection.id, rejection.code, rejection.message, token=rejection.token),
        results=rejection.results,
        request_id=rejection.id,
        request_token=rejection.token,
        code=rejection.code,
    )


def deadly(lease: Lease, request: Request, verdict: Bury) -> Burial:
    """Its owners keep dying of it."""
    return _burial(lease, request, verdict)


def after_try(
    lease: Lease, request: Request, outcome: Outcome, now: float, policy: RetryPolicy, rand: float
) -> Ending:
    """What is decided on an outcome. `now` in Unix time, `rand` in [0, 1)."""
    counted = {"attempts": lease.attempts, "refusals": lease.refusals}
    decision = after(outcome, **counted, deadline=request.deadline, now=now, policy=policy, rand=rand)
    match decision:
        case Retry():
            return Release(
                lease,
                delay_s=decision.delay_s,
                attempt=decision.attempt,
                refusal=decision.refusal,
                undelivered=decision.undelivered,
            )
        case Bury():
            return _burial(lease, request, decision)
        case Answered(status, body):
            result = answered(request.id, status, body, token=request.token)
            return _settlement(lease, request, result, f"{status // 100}xx")
        case Errored(code, message):
            return error(lease, request, code, message)


def _burial(lease: Lease, request: Request, verdict: Bury) -> Burial:
    result = failed(
        request.id, verdict.code, verdict.message, verdict.status, verdict.body, token=request.token
    )
    return Burial(_settlement(lease, request, result, verdict.code), verdict.message)


def _settlement(lease: Lease, request: Request, result: bytes, code: str) -> Settlement:
    return Settlement(lease, result, request.results, request.id, request.token, code)
