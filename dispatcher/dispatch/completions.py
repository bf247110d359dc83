"""How a lease ends: what is handed in to the queue for each way a request can go. Pure."""

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
"""The lease of a request that expires without one."""


_ID_CHARS, _CAUSE_CHARS = 80, 300
"""Of what is told to those who come later in a sequence."""


def lease_of(ending: Ending) -> Lease:
    """The lease that it ends."""
    return ending.settlement.lease if isinstance(ending, Burial) else ending.lease


def turn_of(ending: Settlement | Burial) -> TurnEnd | None:
    """What it leaves to its sequence."""
    return ending.settlement.turn if isinstance(ending, Burial) else ending.turn


def error(lease: Lease, request: Request, code: ErrorCode, message: str, *, version: str = "") -> Settlement:
    """The request ends with an error of ours as its result. `version`: what it was sent as."""
    result = failed(request.id, code, message, token=request.token, version=version)
    return _settlement(lease, request, result, code, f"{code}: {message}")


def barred(lease: Lease, request: Request, code: ErrorCode, why: str) -> Settlement:
    """Its sequence will not have it, and knows nothing of it."""
    return error(lease, request, code, why).but(turn=None)


def unserved(one: Unserved) -> Settlement:
    """Without a lease: its sequence has ended, and knows that it has not gone."""
    parsed = parse(one.item.member)
    if isinstance(parsed, Request):
        return barred(NOBODY, parsed, one.code, one.why)
    if parsed.id is None:
        return Settlement(NOBODY, b"", "")
    refused = Rejection(one.code, one.why, parsed.id, parsed.token, parsed.results)
    ending = rejected(NOBODY, refused)
    return ending.settlement if isinstance(ending, Burial) else ending


def unlisted(lease: Lease, request: Request, why: str) -> Settlement:
    """Not sent, for its result may not go where it asks: it says so on the default list."""
    result = misdirected(request.id, request.results, why, token=request.token)
    settlement = _settlement(lease, request, result, ErrorCode.INVALID_REQUEST, why)
    return settlement.but(results="")


def expired(lease: Lease, request: Request) -> Settlement:
    ended = too_late(lease.last_try, lease.attempts, lease.refusals)
    return error(lease, request, ended.code, ended.message)


def overdue(one: Expired, request: Request) -> Settlement:
    """Without a lease."""
    nobody = NOBODY.but(last_try=one.last_try, attempts=one.attempts, refusals=one.refusals)
    return expired(nobody, request)


def cancelled(lease: Lease, request: Request) -> Settlement:
    return error(lease, request, ErrorCode.CANCELLED, "cancelled")


def returned(lease: Lease, after_s: float = 0.0) -> Release:
    """Untouched, back to its place, at once or later."""
    return Release(lease, delay_s=after_s, undelivered=True)


def awaiting(lease: Lease, request: Request, model: str, why: str) -> Release:
    """Untouched, to where it waits for its model."""
    return Release(
        lease,
        undelivered=True,
        last_try=why,
        awaits=model,
        request_id=request.id,
        request_token=request.token,
    )


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
        turn=_left(rejection.id, rejection.sequence, f"{rejection.code}: {rejection.message}"),
    )


def deadly(lease: Lease, request: Request, verdict: Bury) -> Burial:
    """Its owners keep dying of it."""
    return _burial(lease, request, verdict)


def after_try(
    lease: Lease, request: Request, outcome: Outcome, now: float, policy: RetryPolicy, rand: float
) -> Ending:
    """What is decided on an outcome. `now` in Unix time, `rand` in [0, 1)."""
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
            version = "" if isinstance(outcome, Refused) else request.version  # that was not sent
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
    """What it leaves to its sequence. `failure`: what came instead of an answer; empty: it has one."""
    if turn is None or not failure:
        return None if turn is None else TurnEnd(turn)
    cause = f"request {shortened(request_id, _ID_CHARS)} has failed: {failure}"
    return TurnEnd(turn, failed=True, cause=shortened(cause, _CAUSE_CHARS))
