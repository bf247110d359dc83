"""Completions: how a lease ends, as it is reported to the queue. Pure; nothing here calls the queue.

A completion is a settlement (with the result), a release (back to the queue) or a dead letter.
"""

from __future__ import annotations

from dispatcher.core.gateway.outcome import (
    Answered,
    Bury,
    Errored,
    Outcome,
    Refused,
    Retry,
    RetryPolicy,
    after,
    too_late,
)
from dispatcher.core.printable import shortened
from dispatcher.core.requests.request import Rejection, Request, parse
from dispatcher.core.requests.result import ErrorCode, answered, failed, misdirected
from dispatcher.core.sequences.decisions import TurnEnd
from dispatcher.core.sequences.turns import Turn
from dispatcher.ports import Burial, Expired, Lease, Release, Settlement, Unserved

Ending = Settlement | Release | Burial

NOBODY = Lease(entry=0, token="", member=b"", score=0.0, deliveries=0, attempts=0, refusals=0, losses=0)
"""Placeholder for the lease of a request that is answered without one."""


_ID_CHARS, _CAUSE_CHARS = 80, 300
"""Length limits of the request id and of the cause in errors of later requests of a sequence."""


def lease_of(ending: Ending) -> Lease:
    return ending.settlement.lease if isinstance(ending, Burial) else ending.lease


def turn_of(ending: Settlement | Burial) -> TurnEnd | None:
    """Return what the completion leaves to the sequence of the request."""
    return ending.settlement.turn if isinstance(ending, Burial) else ending.turn


def error(lease: Lease, request: Request, code: ErrorCode, message: str, *, version: str = "") -> Settlement:
    """Settle the request with an error of the dispatcher. `version` is the model version that it was sent to,
    if any."""
    result = failed(request.id, code, message, token=request.token, version=version)
    return _settlement(lease, request, result, code, f"{code}: {message}")


def barred(lease: Lease, request: Request, code: ErrorCode, why: str) -> Settlement:
    """Settle a request that its sequence rejected. The sequence does not know the request, and no turn
    ends."""
    return error(lease, request, code, why).but(turn=None)


def unserved(one: Unserved) -> Settlement:
    """Settle a request without a lease whose sequence has ended. The sequence knows that it was not sent."""
    parsed = parse(one.item.member)
    if isinstance(parsed, Request):
        return barred(NOBODY, parsed, one.code, one.why)
    if parsed.id is None:
        return Settlement(NOBODY, b"", "")
    refused = Rejection(one.code, one.why, parsed.id, parsed.token, parsed.results)
    ending = rejected(NOBODY, refused)
    return ending.settlement if isinstance(ending, Burial) else ending


def unlisted(lease: Lease, request: Request, why: str) -> Settlement:
    """Settle a request that was not sent, because its result list cannot be used. The result goes to the
    default list."""
    result = misdirected(request.id, request.results, why, token=request.token)
    settlement = _settlement(lease, request, result, ErrorCode.INVALID_REQUEST, why)
    return settlement.but(results="")


def expired(lease: Lease, request: Request) -> Settlement:
    ended = too_late(lease.last_try, lease.attempts, lease.refusals)
    return error(lease, request, ended.code, ended.message)


def overdue(one: Expired, request: Request) -> Settlement:
    """Settle a request without a lease that is past its deadline."""
    nobody = NOBODY.but(last_try=one.last_try, attempts=one.attempts, refusals=one.refusals)
    return expired(nobody, request)


def cancelled(lease: Lease, request: Request) -> Settlement:
    return error(lease, request, ErrorCode.CANCELLED, "cancelled")


def returned(lease: Lease, after_s: float = 0.0) -> Release:
    """Release the lease without counting a delivery: the request returns to its place, at once or after
    `after_s`."""
    return Release(lease, delay_s=after_s, undelivered=True)


def awaiting(lease: Lease, request: Request, model: str, why: str) -> Release:
    """Release the lease without counting a delivery: the request waits in the queue until its model is
    served."""
    return Release(
        lease,
        undelivered=True,
        last_try=why,
        awaits=model,
        request_id=request.id,
        request_token=request.token,
    )


def rejected(lease: Lease, rejection: Rejection) -> Settlement | Burial:
    """Complete a lease whose member is not a valid request: with a result if its id could be read, else as a
    dead letter with the whole member."""
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
        turn=_left(rejection.id, rejection.sequence, f"{rejection.code}: {rejection.message}"),
    )


def deadly(lease: Lease, request: Request, verdict: Bury) -> Burial:
    """Move a request to the dead-letter set because too many of its owners died."""
    return _burial(lease, request, verdict)


def after_try(
    lease: Lease, request: Request, outcome: Outcome, now: float, policy: RetryPolicy, rand: float
) -> Ending:
    """Decide what follows from the outcome of an attempt. `now` is Unix time, `rand` is in [0, 1)."""
    decision = after(
        outcome,
        last_try=lease.last_try,
        attempts=lease.attempts,
        refusals=lease.refusals,
        deadline=request.deadline,
        now=now,
        policy=policy,
        rand=rand,
    )
    match decision:
        case Retry():
            return Release(
                lease,
                delay_s=decision.delay_s,
                attempt=decision.attempt,
                refusal=decision.refusal,
                undelivered=decision.undelivered,
                last_try=decision.last_try,
                awaits=decision.awaits,
                # Cancel markers are only looked up by the queue while a request waits for its model.
                request_id=request.id if decision.awaits else "",
                request_token=request.token if decision.awaits else "",
            )
        case Bury():
            return _burial(lease, request, decision)
        case Answered(status, body):
            result = answered(request.id, status, body, token=request.token, version=request.version)
            failure = "" if 200 <= status < 300 else f"the gateway answered {status}"
            return _settlement(lease, request, result, f"{status // 100}xx", failure)
        case Errored(code, message):
            # `Refused` is decided before sending, so no version has seen the request.
            version = "" if isinstance(outcome, Refused) else request.version
            return error(lease, request, code, message, version=version)


def _burial(lease: Lease, request: Request, verdict: Bury) -> Burial:
    result = failed(
        request.id,
        verdict.code,
        verdict.message,
        verdict.status,
        verdict.body,
        token=request.token,
        version=request.version,
    )
    failure = f"{verdict.code}: {verdict.message}"
    return Burial(_settlement(lease, request, result, verdict.code, failure), verdict.message)


def _settlement(lease: Lease, request: Request, result: bytes, code: str, failure: str) -> Settlement:
    turn = _left(request.id, request.sequence, failure)
    return Settlement(lease, result, request.results, request.id, request.token, code, turn)


def _left(request_id: str, turn: Turn | None, failure: str) -> TurnEnd | None:
    """Return what the request leaves to its sequence. `failure` says why it has no answer; empty if it has
    one."""
    if turn is None or not failure:
        return None if turn is None else TurnEnd(turn)
    cause = f"request {shortened(request_id, _ID_CHARS)} has failed: {failure}"
    return TurnEnd(turn, failed=True, cause=shortened(cause, _CAUSE_CHARS))
