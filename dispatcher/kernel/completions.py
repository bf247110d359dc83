"""Completions: how a lease ends, as it is reported to the queue. Pure; nothing here calls the queue.

A completion is a settlement (with the result), a release (back to the queue) or a dead letter.
"""

from __future__ import annotations

from collections.abc import Mapping

from dispatcher.common.printable import truncate_text
from dispatcher.queue.contract import (
    DeadLetter,
    Extra,
    Lease,
    Release,
    Settlement,
    UnleasedRequest,
)
from dispatcher.requests.outcomes.judge import (
    Errored,
    MoveToDeadLetters,
    Retry,
    decide_after_attempt,
    make_deadline_error,
)
from dispatcher.requests.outcomes.outcome import Delivered, Failed, FailureKind, Outcome, Refused, RetryPolicy
from dispatcher.requests.request import Rejection, Request
from dispatcher.requests.result import encode_answer, encode_bad_list, encode_failure
from dispatcher.wire_format import ErrorCode

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


_UNKNOWN_REQUEST = Request(id="", deadline=10**11 - 1, payload=b"")
"""Placeholder for a request that could not be parsed."""
_MAX_CAUSE_CHARS = 300
"""Length limit of an exception in a result."""


def get_lease(completion: Completion) -> Lease:
    return completion.settlement.lease if isinstance(completion, DeadLetter) else completion.lease


def get_extra(completion: Completion) -> Extra | None:
    """Return what the completion leaves to a feature."""
    return completion.settlement.extra if isinstance(completion, DeadLetter) else completion.extra


def build_error(
    lease: Lease, request: Request, code: ErrorCode, message: str, *, chosen_model: str = ""
) -> Settlement:
    """Settle the request with an error of the dispatcher. `chosen_model` is the model that it was sent to,
    if the dispatcher chose it."""
    result = encode_failure(request.id, code, message, token=request.token, chosen_model=chosen_model)
    return _build_settlement(lease, request, result, code, f"{code}: {message}")


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
        request_extra=rejection.extra,
        failure=f"{rejection.code}: {rejection.message}",
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
    result_fields: Mapping[str, object] | None = None,
) -> Completion:
    """Decide what follows from the outcome of an attempt. `now` is Unix time, `rand` is in [0, 1).

    `result_fields` are fields that a feature adds to the result of an answered request.
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
                extra=decision.wait,
                # The queue looks up cancel markers only for a request that waits because of `extra`.
                request_id=request.id if decision.wait is not None else "",
                request_token=request.token if decision.wait is not None else "",
            )
        case MoveToDeadLetters():
            return _build_dead_letter(lease, request, decision)
        case Delivered(status, body):
            result = encode_answer(
                request.id,
                status,
                body,
                result_fields,
                token=request.token,
                chosen_model=request.chosen_model,
            )
            failure = "" if 200 <= status < 300 else f"the gateway answered {status}"
            return _build_settlement(lease, request, result, f"{status // 100}xx", failure)
        case Errored(code, message):
            # `Refused` is decided before sending, so no model has seen the request.
            chosen_model = "" if isinstance(outcome, Refused) else request.chosen_model
            return build_error(lease, request, code, message, chosen_model=chosen_model)


def build_internal_outcome(error: BaseException) -> Failed:
    """Return the outcome of an attempt that ended with an unexpected exception."""
    # Some exceptions, such as UnicodeDecodeError, name the whole text that they are about.
    why = f"the dispatcher failed: {truncate_text(repr(error), _MAX_CAUSE_CHARS)}"
    return Failed(why, kind=FailureKind.INTERNAL_ERROR)


def build_internal_failure(
    lease: Lease, request: Request | None, error: Exception, now: float, policy: RetryPolicy, rand: float
) -> Completion:
    """Count a failed attempt because an unexpected exception was raised. `request` is `None` if the member
    could not be parsed."""
    known = request or _UNKNOWN_REQUEST
    completion = build_completion(lease, known, build_internal_outcome(error), now, policy, rand)
    if request is None and isinstance(completion, DeadLetter):
        # Without an id there is no result, but the member is kept.
        return DeadLetter(Settlement(lease, b"", ""), completion.reason, completion.is_failed_attempt)
    return completion


def _build_dead_letter(lease: Lease, request: Request, decision: MoveToDeadLetters) -> DeadLetter:
    result = encode_failure(
        request.id,
        decision.code,
        decision.message,
        decision.status,
        decision.body,
        token=request.token,
        chosen_model=request.chosen_model,
    )
    failure = f"{decision.code}: {decision.message}"
    settlement = _build_settlement(lease, request, result, decision.code, failure)
    return DeadLetter(settlement, decision.message, decision.is_failed_attempt)


def _build_settlement(lease: Lease, request: Request, result: bytes, code: str, failure: str) -> Settlement:
    return Settlement(
        lease, result, request.results, request.id, request.token, code, None, request.extra, failure
    )
