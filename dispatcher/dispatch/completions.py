"""Completions: how a lease ends, as it is reported to the queue. Pure; nothing here calls the queue.

A completion is a settlement (with the result), a release (back to the queue) or a dead letter.
"""

from __future__ import annotations

from dispatcher.core.gateway.outcome import (
    Answered,
    Errored,
    MoveToDeadLetters,
    Outcome,
    Refused,
    Retry,
    RetryPolicy,
    decide_after_attempt,
    make_deadline_error,
)
from dispatcher.core.printable import truncate_text
from dispatcher.core.requests.request import Rejection, Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_answer, encode_bad_list, encode_failure
from dispatcher.core.sequences.decisions import TurnEnd
from dispatcher.core.sequences.turns import Turn
from dispatcher.core.slices.answers import Finished, build_partial_answer
from dispatcher.core.slices.progress import Progress, decode_progress, encode_progress
from dispatcher.ports import DeadLetter, Lease, Release, RemainingRequest, Settlement, UnleasedRequest

Completion = Settlement | Release | DeadLetter

NO_LEASE = Lease(
    entry_id=0,
    token="",
    member=b"",
    score=0.0,
    deliveries=0,
    failed_attempts=0,
    refusals=0,
    deaths_as_suspect=0,
)
"""Placeholder for the lease of a request that is answered without one."""


_MAX_ID_CHARS, _MAX_CAUSE_CHARS = 80, 300
"""Length limits of the request id and of the cause in errors of later requests of a sequence."""


def get_lease(completion: Completion) -> Lease:
    return completion.settlement.lease if isinstance(completion, DeadLetter) else completion.lease


def get_turn_end(completion: Settlement | DeadLetter) -> TurnEnd | None:
    """Return what the completion leaves to the sequence of the request."""
    return completion.settlement.turn_end if isinstance(completion, DeadLetter) else completion.turn_end


def build_error(
    lease: Lease, request: Request, code: ErrorCode, message: str, *, version: str = ""
) -> Settlement:
    """Settle the request with an error of the dispatcher, and with what was generated so far, if anything
    was. `version` is the model version that it was sent to, if any."""
    progress = decode_progress(lease.progress)
    partial = None if progress is None else build_partial_answer(progress)
    result = encode_failure(
        request.id,
        code,
        message,
        body=partial,
        token=request.token,
        version=version,
        is_partial=partial is not None,
    )
    return _build_settlement(lease, request, result, code, f"{code}: {message}")


def build_turn_rejection(lease: Lease, request: Request, code: ErrorCode, message: str) -> Settlement:
    """Settle a request that its sequence rejected. The sequence does not know the request, and no turn
    ends."""
    return build_error(lease, request, code, message).copy_with(turn_end=None)


def build_remaining_error(remaining: RemainingRequest) -> Settlement:
    """Settle a request without a lease whose sequence has ended. The sequence knows that it was not sent."""
    parsed = parse_member(remaining.request.member)
    if isinstance(parsed, Request):
        return build_turn_rejection(NO_LEASE, parsed, remaining.error_code, remaining.message)
    if parsed.id is None:
        return Settlement(NO_LEASE, b"", "")
    refused = Rejection(remaining.error_code, remaining.message, parsed.id, parsed.token, parsed.results)
    completion = build_rejection(NO_LEASE, refused)
    return completion.settlement if isinstance(completion, DeadLetter) else completion


def build_invalid_list_error(lease: Lease, request: Request, problem: str) -> Settlement:
    """Settle a request that was not sent, because its result list cannot be used. The result goes to the
    default list."""
    result = encode_bad_list(request.id, request.results, problem, token=request.token)
    settlement = _build_settlement(lease, request, result, ErrorCode.INVALID_REQUEST, problem)
    return settlement.copy_with(result_list="")


def build_deadline_error(lease: Lease, request: Request, why: str = "deadline exceeded") -> Settlement:
    ended = make_deadline_error(lease.last_attempt, lease.failed_attempts, lease.refusals, why)
    return build_error(lease, request, ended.code, ended.message)


def build_overdue_error(overdue: UnleasedRequest, request: Request) -> Settlement:
    """Settle a request without a lease that is past its deadline."""
    lease = NO_LEASE.copy_with(
        last_attempt=overdue.last_attempt,
        failed_attempts=overdue.failed_attempts,
        refusals=overdue.refusals,
        progress=overdue.progress,
    )
    return build_deadline_error(lease, request)


def build_cancellation(lease: Lease, request: Request) -> Settlement:
    return build_error(lease, request, ErrorCode.CANCELLED, "cancelled")


def build_return(lease: Lease, after_s: float = 0.0, *, new_score: float | None = None) -> Release:
    """Release the lease without counting a delivery: the request returns to its place, or to that of
    `new_score`, at once or after `after_s`."""
    return Release(lease, delay_s=after_s, is_undelivered=True, new_score=new_score)


def build_progress_release(lease: Lease, progress: Progress, why: str) -> Release:
    """Release the lease with what was generated so far: the next claim of the request goes on from there.
    `why` says why it is not continued in slices, if so."""
    return Release(lease, progress=encode_progress(progress), last_attempt=why)


def build_model_wait(lease: Lease, request: Request, model: str, why: str) -> Release:
    """Release the lease without counting a delivery: the request waits in the queue until its model is
    served."""
    return Release(
        lease,
        is_undelivered=True,
        last_attempt=why,
        missing_model=model,
        request_id=request.id,
        request_token=request.token,
    )


def build_rejection(lease: Lease, rejection: Rejection) -> Settlement | DeadLetter:
    """Complete a lease whose member is not a valid request: with a result if its id could be read, else as a
    dead letter with the whole member."""
    if rejection.id is None:
        no_result = Settlement(lease, b"", "")
        return DeadLetter(no_result, f"{rejection.code}: {rejection.message}")
    return Settlement(
        lease=lease,
        result=encode_failure(rejection.id, rejection.code, rejection.message, token=rejection.token),
        result_list=rejection.results,
        request_id=rejection.id,
        request_token=rejection.token,
        result_class=rejection.code,
        turn_end=_build_turn_end(rejection.id, rejection.sequence, f"{rejection.code}: {rejection.message}"),
    )


def build_dead_letter_after_deaths(lease: Lease, request: Request, decision: MoveToDeadLetters) -> DeadLetter:
    """Move a request to the dead-letter set because too many of its owners died."""
    return _build_dead_letter(lease, request, decision)


def build_completion(
    lease: Lease,
    request: Request,
    outcome: Outcome,
    now: float,
    policy: RetryPolicy,
    rand: float,
    sliced: Finished | None = None,
) -> Completion:
    """Decide what follows from the outcome of an attempt. `now` is Unix time, `rand` is in [0, 1).

    `sliced` says in how many slices the answer was generated, if it was.
    """
    decision = decide_after_attempt(
        outcome,
        last_attempt=lease.last_attempt,
        failed_attempts=lease.failed_attempts,
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
                is_failed_attempt=decision.is_failed_attempt,
                is_refusal=decision.is_refusal,
                is_undelivered=decision.is_undelivered,
                last_attempt=decision.last_attempt,
                missing_model=decision.missing_model,
                # Cancel markers are only looked up by the queue while a request waits for its model.
                request_id=request.id if decision.missing_model else "",
                request_token=request.token if decision.missing_model else "",
            )
        case MoveToDeadLetters():
            return _build_dead_letter(lease, request, decision)
        case Answered(status, body):
            result = encode_answer(
                request.id,
                status,
                body,
                token=request.token,
                version=request.version,
                slices=1 if sliced is None else sliced.slices,
                cached_tokens=0 if sliced is None else sliced.cached_tokens,
            )
            failure = "" if 200 <= status < 300 else f"the gateway answered {status}"
            return _build_settlement(lease, request, result, f"{status // 100}xx", failure)
        case Errored(code, message):
            # `Refused` is decided before sending, so no version has seen the request.
            version = "" if isinstance(outcome, Refused) else request.version
            return build_error(lease, request, code, message, version=version)


def _build_dead_letter(lease: Lease, request: Request, decision: MoveToDeadLetters) -> DeadLetter:
    result = encode_failure(
        request.id,
        decision.code,
        decision.message,
        decision.status,
        decision.body,
        token=request.token,
        version=request.version,
    )
    failure = f"{decision.code}: {decision.message}"
    settlement = _build_settlement(lease, request, result, decision.code, failure)
    return DeadLetter(settlement, decision.message, decision.is_failed_attempt)


def _build_settlement(lease: Lease, request: Request, result: bytes, code: str, failure: str) -> Settlement:
    turn = _build_turn_end(request.id, request.sequence, failure)
    return Settlement(lease, result, request.results, request.id, request.token, code, turn)


def _build_turn_end(request_id: str, turn: Turn | None, failure: str) -> TurnEnd | None:
    """Return what the request leaves to its sequence. `failure` says why it has no answer; empty if it has
    one."""
    if turn is None or not failure:
        return None if turn is None else TurnEnd(turn)
    cause = f"request {truncate_text(request_id, _MAX_ID_CHARS)} has failed: {failure}"
    return TurnEnd(turn, has_failed=True, cause=truncate_text(cause, _MAX_CAUSE_CHARS))
