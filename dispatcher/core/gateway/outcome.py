"""Outcome of an attempt, and the decision what happens to the request next.

`classify_answer` interprets a complete answer of the gateway, and `decide_after_attempt` decides what follows
from an outcome. Everything that is no complete answer (a refused connection, a truncated body, a timeout) is
translated in `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

import msgspec

from dispatcher.core.gateway.retry_after import parse_retry_after_header
from dispatcher.core.gateway.server_overload import (
    SERVER_FULL,
    find_stream_error,
    is_server_full,
    is_server_full_error,
    list_error_texts,
)
from dispatcher.core.printable import escape_unprintable, truncate_text
from dispatcher.core.requests.headers import DROP_REASON
from dispatcher.core.requests.result import ErrorCode

GATEWAY_NAME = "the gateway"
UNINFORMATIVE_REASONS = ("rejected-no-endpoints", "rejected-shutting-down", "rejected-context-cancelled")
"""Prefixes of drop reasons that say nothing about the size of the pool."""
INTERNAL_REASON = "rejected-internal"
"""Prefix of the drop reason for an internal failure of the picker. It concerns the request or the picker, not
the pool."""
EVICTED_REASON = "evicted"
"""Prefix of drop reasons of requests that ran and were stopped to make room for more important ones."""
_NOT_ADMITTED = b"request cannot be admitted"


class FailureKind(StrEnum):
    """Kind of failure of an attempt, in words of the dispatcher. `why` of an outcome may quote the peer."""

    NO_CONNECTION = "no connection"
    NO_CREDENTIALS = "no credentials"
    """The token file or a TLS file cannot be read."""
    NO_ANSWER = "no answer"
    CONNECTION_RESET = "connection reset"
    NO_ANSWER_IN_TIME = "no answer in time"
    BROKEN_OFF = "answer broken off"
    """The body was cut short, or cannot be decoded."""
    ERROR_STATUS = "error status"
    REDIRECT = "redirect"
    CREDENTIALS_REJECTED = "credentials rejected"
    NO_ROUTE = "no route"
    """The gateway has no route for the path and the model."""
    MAYBE_NO_GATEWAY = "maybe no gateway"
    """The server has not answered like an inference gateway yet."""
    UNUSABLE_ANSWER = "unusable answer"
    """The answers to the pieces of a list cannot be joined."""
    INTERNAL_ERROR = "a defect of the dispatcher"


class Delivered(msgspec.Struct, frozen=True):
    """The gateway answered, and no retry would change the answer: 2xx, or a 4xx that retrying does not
    fix."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The gateway refused the request for now: a 429, a 503 or 500 with a drop reason, a 500 "request cannot
    be admitted", or a refusal by a model server whose own queue is full."""

    status: int
    reason: str
    """Drop reason, SERVER_FULL, or the empty string."""
    is_out_of_capacity: bool
    """True if the refusal was for lack of capacity, so that the limiter may learn from it."""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """The request ran and was stopped for more important ones. Because this is policy, it counts as no failed
    attempt, the gate stays open, and nothing is learned about the capacity."""

    status: int
    reason: str
    """Drop reason."""
    retry_after_s: float | None = None
    delay_s: float = 0.0
    """Seconds until the request is sent again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed and counts as failed: another 5xx, a 408, a truncated body, a timeout, or a reset
    before an answer."""

    why: str
    status: int | None = None
    """Status of a complete answer. `None` if there was none."""
    body: bytes = b""
    is_intermediary_error: bool = False
    """True for an intermediary error: a 401 or 407, an empty 404 or 500, or a 502, 503 or 504 without drop
    reason. The cause may be a missing gateway, a dead endpoint, or the request itself."""
    retry_after_s: float | None = None
    kind: FailureKind = FailureKind.ERROR_STATUS


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The gateway was not reached. It counts as no failed attempt."""

    why: str
    kind: FailureKind = FailureKind.NO_CONNECTION


@dataclass(frozen=True, slots=True)
class UncountedError:
    """An intermediary error that may be the fault of the gateway or of an endpoint instead of the request. It
    counts as no failed attempt. `classify_answer` never returns it: other attempts show it."""

    why: str
    kind: FailureKind = FailureKind.ERROR_STATUS
    delay_s: float = 0.0
    """Seconds until the request is sent again."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The answer exceeds gateway.max_response_bytes. A retry would not shrink it."""

    status: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not sent, because it asks for an endpoint or header that it must not use. A retry does
    not fix that."""

    why: str


@dataclass(frozen=True, slots=True)
class TooLate:
    """The deadline passed before or during the attempt."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """Nothing was sent, or not again, because the lease may belong to another owner by now."""


@dataclass(frozen=True, slots=True)
class ModelNotServed:
    """The server answered that it does not have the model, in a situation where that is expected. The request
    waits for the model, or is sent again soon if other servers have it. It counts as no failed attempt."""

    why: str
    missing_model: str = ""
    """Model for which the request waits. Empty if it is sent again."""
    delay_s: float = 0.0
    """Seconds until the request is sent again."""


Outcome = (
    Delivered
    | Overloaded
    | Evicted
    | Failed
    | Unreachable
    | UncountedError
    | TooLarge
    | Refused
    | TooLate
    | Unsent
    | ModelNotServed
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Settings of the section `retry`."""

    base_s: float = 2.0
    """Upper end of the range [0, base_s] from which the first delay is drawn. It doubles with each failed
    attempt."""
    max_s: float = 60.0
    """Maximum delay."""
    max_attempts: int = 8
    """Number of failed attempts after which the request is moved to the dead-letter set."""
    max_deliveries: int = 5
    """Number of owners that may die while they run the request apart from other suspects. After one more, it
    is moved to the dead-letter set."""


class Answered(msgspec.Struct, frozen=True):
    """The gateway's answer is the result, and the request is finished."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Errored:
    """An error of the dispatcher is the result, and the request is finished."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The request returns to the queue. The fields have the meaning of those of `ports.Release`."""

    delay_s: float = 0.0
    """Delay in seconds. 0 returns the request to its place at once."""
    is_failed_attempt: bool = False
    """True if this counts as a failed attempt."""
    is_refusal: bool = False
    """True if this counts as a refusal for overload."""
    is_undelivered: bool = False
    """True if nothing was tried, so that the delivery is not counted."""
    last_attempt: str = ""
    """Outcome of the attempt in words. Empty if the request was not sent."""
    missing_model: str = ""
    """Model for which the request waits. Empty if it waits for none."""


@dataclass(frozen=True, slots=True)
class MoveToDeadLetters:
    """The request gets an error result and is moved to the dead-letter set for an operator."""

    code: ErrorCode
    message: str
    """One sentence for the consumer and the operator."""
    status: int | None = None
    body: bytes = b""
    is_failed_attempt: bool = False
    """True if the attempt before counts as a failed one."""


Decision = Answered | Errored | Retry | MoveToDeadLetters

_MAX_DESCRIPTION_CHARS = 200
"""Maximum length of the description of an outcome, which is stored for each request that is sent again."""


def make_deadline_error(
    last_attempt: str, failed_attempts: int, refusals: int, why: str = "deadline exceeded"
) -> Errored:
    """Return the result of a request that is too late, because of its deadline or for the reason `why`.
    `last_attempt` is the outcome of the last attempt, if there was one."""
    counts = ((failed_attempts, "attempt"), (refusals, "refusal"))
    tries = " and ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts if count)
    after = f" after {tries}" if tries else ""
    last = f"; the last attempt: {last_attempt}" if last_attempt else ""
    return Errored(ErrorCode.DEADLINE_EXCEEDED, f"{why}{after}{last}")


def describe_outcome(outcome: Failed | Overloaded | Evicted | Unreachable | UncountedError) -> str:
    """Return the outcome of an attempt in one line of bounded length, with the beginning of the answer."""
    match outcome:
        case Overloaded(status, reason):
            text = f"the gateway refused it for now: {status}{reason and f', {reason}'}"
        case Evicted(status, reason):
            text = f"the gateway stopped it for more important requests: {status}, {reason}"
        case Unreachable(why) | UncountedError(why):
            text = why
        case _:
            body = " ".join(outcome.body[: 4 * _MAX_DESCRIPTION_CHARS].decode(errors="replace").split())
            text = outcome.why + (f": {body}" if body else "")
    return truncate_text(escape_unprintable(text), _MAX_DESCRIPTION_CHARS)


def decide_after_attempt(
    outcome: Outcome,
    *,
    last_attempt: str = "",
    failed_attempts: int,
    refusals: int,
    deadline: float,
    now: float,
    policy: RetryPolicy,
    rand: float,
) -> Decision:
    """Decide what happens to a request after an attempt. Every outcome leads to exactly one decision.

    `failed_attempts` and `refusals` are counted without this attempt. `last_attempt` is the outcome of the
    attempt before this one. `deadline` and `now` are on the same clock. `rand` is uniform in [0, 1).

    After failed attempt k the request waits rand × min(max_s, base_s × 2^(k − 1)), or a longer Retry-After up
    to max_s; attempt max_attempts is the last. After its first refusal for overload the request returns at
    once, and after refusal k + 1 it waits min(max_s, base_s × 2^(k − 1)). No delay passes the deadline, so
    that the sweep answers on time.
    """
    match outcome:
        case Delivered(status, body):
            return Answered(status, body)
        case TooLarge(status, limit_bytes):
            # The status is omitted: a consumer that looks at it first would take the error for the answer.
            return Errored(ErrorCode.TOO_LARGE, f"the answer ({status}) is larger than {limit_bytes} bytes")
        case Refused(why):
            return Errored(ErrorCode.INVALID_REQUEST, why)
        case TooLate():
            return make_deadline_error(last_attempt, failed_attempts, refusals)
        case Failed() if failed_attempts + 1 >= policy.max_attempts:
            counted = f"{failed_attempts + 1} attempt{'s' if failed_attempts else ''}"
            message = f"no answer after {counted}, the last: {outcome.why}"
            return MoveToDeadLetters(
                ErrorCode.RETRIES_EXHAUSTED, message, outcome.status, outcome.body, is_failed_attempt=True
            )
        case Failed():
            delay = max(
                rand * _compute_backoff_s(failed_attempts, policy),
                min(outcome.retry_after_s or 0.0, policy.max_s),
            )
            retry = Retry(delay, is_failed_attempt=True, last_attempt=describe_outcome(outcome))
        case Overloaded():
            # A refusal closes the gate, so the first retry needs no delay of its own.
            retry = Retry(
                _compute_refusal_delay_s(refusals, policy),
                is_refusal=True,
                last_attempt=describe_outcome(outcome),
            )
        case Evicted():
            retry = Retry(outcome.delay_s, last_attempt=describe_outcome(outcome))
        case Unreachable() | UncountedError() | Unsent() | ModelNotServed():
            retry = _retry_uncounted(outcome)
        case _:
            assert_never(outcome)
    time_left_s = deadline - now
    if time_left_s <= 0:
        return make_deadline_error(
            retry.last_attempt or last_attempt,
            failed_attempts + retry.is_failed_attempt,
            refusals + retry.is_refusal,
        )
    if retry.delay_s > time_left_s:
        return replace(retry, delay_s=time_left_s)
    return retry


def _retry_uncounted(outcome: Unreachable | UncountedError | Unsent | ModelNotServed) -> Retry:
    """Return the retry for an outcome that counts neither as failed attempt nor as refusal."""
    match outcome:
        case Unreachable():
            return Retry(is_undelivered=True, last_attempt=describe_outcome(outcome))
        case UncountedError():
            return Retry(outcome.delay_s, is_undelivered=True, last_attempt=describe_outcome(outcome))
        case Unsent():
            return Retry(is_undelivered=True)
        case ModelNotServed(why, awaits, rest_s):
            why = truncate_text(escape_unprintable(why), _MAX_DESCRIPTION_CHARS)
            return Retry(rest_s, is_undelivered=True, last_attempt=why, missing_model=awaits)


def decide_after_deaths(deaths: int, policy: RetryPolicy) -> MoveToDeadLetters | None:
    """Return what happens to a request whose owners died `deaths` times while no other suspect ran next to
    it.

    Such a request crashes dispatchers, so after more than max_deliveries it is not given to another one.
    """
    if deaths <= policy.max_deliveries:
        return None
    message = f"{deaths} dispatchers died while they ran it alone"
    return MoveToDeadLetters(ErrorCode.DELIVERIES_EXHAUSTED, message)


def _compute_refusal_delay_s(refusals: int, policy: RetryPolicy) -> float:
    """Return the delay after a refusal: none the first time, then longer each time."""
    return _compute_backoff_s(refusals - 1, policy) if refusals > 0 else 0.0


def _compute_backoff_s(times: int, policy: RetryPolicy) -> float:
    return float(min(policy.max_s, policy.base_s * 2.0 ** min(times, 64)))


def classify_answer(
    status: int, headers: Mapping[str, str], body: bytes, now_unix: float, *, answered_by: str = GATEWAY_NAME
) -> Outcome:
    """Return the outcome of a complete answer.

    `headers` have names in lower case, or are a case-insensitive mapping. `body` is decoded and complete; a
    stream of events is treated like any other body. `answered_by` names the server in messages. The table in
    docs/reference/forwarding.md lists all cases, and a test checks it.
    """
    reason = headers.get(DROP_REASON, "").strip()
    retry_after_s = parse_retry_after_header(headers, now_unix)
    if status in (429, 500, 503):
        refused = _classify_refusal(status, reason, body, retry_after_s, answered_by)
        if refused is not None:
            return refused
    if status in (401, 407):
        where = "; look at gateway.token_file" if answered_by == GATEWAY_NAME else ""
        why = f"{answered_by} answered {status}: it does not accept our credentials{where}"
        return Failed(why, status, body, is_intermediary_error=True, kind=FailureKind.CREDENTIALS_REJECTED)
    if status == 404 and not body:
        why = f"{answered_by} answered 404 with an empty body: it has no such route"
        return Failed(why, status, body, is_intermediary_error=True, kind=FailureKind.NO_ROUTE)
    if 300 <= status < 400:
        # A gateway answered. A redirect belongs to the path of one request, and must not close the gate for
        # the others.
        where = headers.get("location", "")[:200]
        why = f"redirected ({status}) to {where!r}; redirects are not followed"
        return Failed(why, status, body, kind=FailureKind.REDIRECT)
    # A 4xx is the final answer of a request, except 408, which a retry may fix.
    if 200 <= status < 500 and status != 408:
        return _classify_stream_end(status, headers, body, retry_after_s) or Delivered(status, body)
    is_intermediary_error = (status == 500 and not body) or (status in (502, 503, 504) and not reason)
    return Failed(f"{answered_by} answered {status}", status, body, is_intermediary_error, retry_after_s)


def _classify_refusal(
    status: int, reason: str, body: bytes, retry_after_s: float | None, answered_by: str
) -> Overloaded | Evicted | Failed | None:
    """Return what a 429, 500 or 503 says about the pool. `None` if it says nothing."""
    if reason.startswith(EVICTED_REASON):
        return Evicted(status, reason, retry_after_s)
    if status == 500 and _NOT_ADMITTED in body:
        # A plugin refused this one request. That closes the gate, but says nothing about the pool's size.
        return Overloaded(status, reason, is_out_of_capacity=False, retry_after_s=retry_after_s)
    if reason.startswith(INTERNAL_REASON):
        return Failed(
            f"{answered_by} answered {status}, {INTERNAL_REASON}", status, body, retry_after_s=retry_after_s
        )
    if reason:
        return Overloaded(status, reason, not reason.startswith(UNINFORMATIVE_REASONS), retry_after_s)
    if status != 500 and is_server_full(body):
        return Overloaded(status, SERVER_FULL, is_out_of_capacity=True, retry_after_s=retry_after_s)
    return (
        Overloaded(status, "", is_out_of_capacity=True, retry_after_s=retry_after_s)
        if status == 429
        else None
    )


def _classify_stream_end(
    status: int, headers: Mapping[str, str], body: bytes, retry_after_s: float | None
) -> Overloaded | Evicted | None:
    """Return the refusal in the last event of a stream, whose status was sent before the refusal."""
    event = find_stream_error(headers, body)
    if event is None:
        return None
    if is_server_full_error(event):
        return Overloaded(status, SERVER_FULL, is_out_of_capacity=True, retry_after_s=retry_after_s)
    reason = next((each for each in list_error_texts(event) if each.startswith(EVICTED_REASON)), "")
    return Evicted(status, reason, retry_after_s) if reason else None


def classify_cut_answer(status: int, headers: Mapping[str, str], end: bytes) -> Overloaded | Evicted | None:
    """Return what an answer says whose body broke off after the bytes `end`. `None` if it says nothing.

    If a request is evicted after the first bytes of its answer, Envoy ends the connection without a reason
    (kubernetes-sigs/gateway-api-inference-extension#2669). Such a cut says nothing.
    """
    reason = headers.get(DROP_REASON, "").strip()
    if reason.startswith(EVICTED_REASON):
        return Evicted(status, reason)
    return _classify_stream_end(status, headers, end, None)
