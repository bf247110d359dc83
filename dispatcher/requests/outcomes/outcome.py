"""Outcome of an attempt.

`classify_answer` interprets a complete answer of the gateway. Everything that is no complete answer (a
refused connection, a truncated body, a timeout) is translated in `forward`. `judge` decides what follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.requests.headers import DROP_REASON
from dispatcher.requests.outcomes.retry_after import parse_retry_after_header
from dispatcher.requests.outcomes.server_overload import (
    SERVER_FULL,
    extract_error_text,
    find_stream_error,
    is_server_full,
    is_server_full_error,
    list_error_texts,
)

GATEWAY_NAME = "the gateway"
UNINFORMATIVE_REASONS = ("rejected-no-endpoints", "rejected-shutting-down", "rejected-context-cancelled")
"""Prefixes of drop reasons that say nothing about the size of the pool."""
INTERNAL_REASON = "rejected-internal"
"""Prefix of the drop reason for an internal failure of the picker. It concerns the request or the picker, not
the pool."""
EVICTED_REASON = "evicted"
"""Prefix of drop reasons of requests that ran and were stopped to make room for more important ones."""
_NOT_ADMITTED = b"request cannot be admitted"
_NO_COST = "failed to prepare projected request cost"
"""Beginning of the error of a picker that cannot compute what a request costs. It has no drop reason."""


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
    """A failure that does not count as a failed attempt: an intermediary error that may be the fault of the
    gateway or of an endpoint instead of the request, or a call that broke off after new output, which is
    kept. `classify_answer` never returns it, because the answer alone does not show it."""

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
    waits until it is served, or is sent again soon if other servers have it. That is no failed attempt."""

    why: str
    wait: Any = None
    """Reason for which the request waits in the queue (`Release.extra`). `None` if it is sent again."""
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
    """Settings of the section `retry`, and one constant."""

    base_s: float = 2.0
    """Upper end of the range [0, base_s] from which the first delay is drawn. It doubles with each failed
    attempt."""
    max_s: float = 60.0
    """Maximum delay."""
    max_attempts: int = 8
    """Number of failed attempts after which the request is moved to the dead-letter set."""
    max_deliveries: int = 5
    """Number of owners that may die while they run the request apart from other suspects. After one more, it
    is moved to the dead-letter set. With a smaller number, a harmless request that ran beside the deadly one
    may be blamed; a larger one costs more dispatchers (docs/decisions/0004)."""


_MAX_DESCRIPTION_CHARS = 200
"""Maximum length of the description of an outcome, which is stored for each request that is sent again."""


def describe_outcome(
    outcome: Failed | Overloaded | Evicted | Unreachable | UncountedError | ModelNotServed,
) -> str:
    """Return the outcome of an attempt in one line of bounded length, with the beginning of the answer."""
    match outcome:
        case Overloaded(status, reason):
            text = f"the gateway refused it for now: {status}{reason and f', {reason}'}"
        case Evicted(status, reason):
            text = f"the gateway stopped it for more important requests: {status}, {reason}"
        case Unreachable(why) | UncountedError(why) | ModelNotServed(why):
            text = why
        case _:
            body = " ".join(outcome.body[: 4 * _MAX_DESCRIPTION_CHARS].decode(errors="replace").split())
            text = outcome.why + (f": {body}" if body else "")
    return truncate_text(escape_unprintable(text), _MAX_DESCRIPTION_CHARS)


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
    if status == 503 and extract_error_text(body).startswith(_NO_COST):
        return Failed(f"{answered_by} answered 503, {_NO_COST}", status, body, retry_after_s=retry_after_s)
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
