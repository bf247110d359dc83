"""Verdicts on the outcomes of attempts. Pure: time, random numbers and all that is known are arguments.

    judge_attempt         what the outcome says about the gateway           once for each attempt
    judge_lease           what it says about one request and its group      for each lease of the attempt
    decide_after_attempt  how the lease ends: with a result, back in the queue, or as a dead letter

Each function is a table with one row for a kind of outcome and what is known. A row returns the outcome that
counts, signs for the parts that have a state of their own (`limit.limiter`, `refusal_groups`), and the
records that are known when the next outcome is judged. `kernel.outcome_judge` keeps the records and applies
the rest. The records are kept in memory: another replica, or a restart, begins with empty ones.

Is the server a gateway? Any web server answers something. Until one request was answered as only a gateway
does (2xx, or a refusal with a drop reason), a response that means "not found here" is taken as a sign of a
wrong address: no gateway, and not the fault of the request. After that, it is the answer to its request. Many
requests in a row may get such a response although requests behind them would get through. The first
MAX_TRIALS of them therefore do not close the gate while other requests wait. Each returns to the queue, so
that another one is tried. At a wrong address, this many requests are sent once, and no failed attempt is
counted for them. Two kinds of 404 always concern the request:

    names its model   an error body as only model servers write it, for a model that they do not serve
    empty             Envoy has no route for the request, but has one for another path or model: the newest
                      recent 2xx was for another one, and that one got no empty 404 since

Who is to blame for an intermediary error (a response without gateway headers)? One such response cannot tell.
Later ones can: if another request, sent after it, was answered, there was a gateway, and the request is
charged when it gets such a response again. The first FREE_CHARGES cost nothing, because a dead endpoint among
several does the same to any request. After that, each intermediary error counts as a failed attempt. If no
request got through since, no request is charged, however often it happens: a gateway outage of an hour costs
no request an attempt.

While there is no gateway, requests with such errors give way to the others that wait, so that each probe is a
different request, and a request that can get through is reached however many are ahead of it. The rest grows
with the duration of the outage, and with it the number of different requests that are tried. A request stays
delayed in the queue for MAX_DELAY_S at most, so that it is sent soon after the gateway is back; if it is
claimed while it still has to rest, it is returned unsent.

An evicted request was stopped to make room for more important ones. That is neither a failure of the request
nor a lack of capacity. But each eviction wastes the work that was done, so the request waits longer each
time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, assert_never

from dispatcher.common.value import Value
from dispatcher.requests.model_names import parse_model, says_no_model
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    ModelNotServed,
    Outcome,
    Overloaded,
    Refused,
    RetryPolicy,
    TooLarge,
    TooLate,
    UncountedError,
    Unreachable,
    Unsent,
    describe_outcome,
)
from dispatcher.wire_format import ErrorCode

# ── the gateway ─────────────────────────────────────────────────────────────────────────────────────────────

NOT_FOUND_STATUSES = (403, 404, 405, 501)
"""Statuses, besides redirects, of a server that has nothing at this path, or does not accept POST there."""
MAX_TRIALS = 500
"""Number of requests that may get such a response from an unverified address, while others wait, without a
consequence for the gate."""
ROUTE_MEMORY_S = 300.0
"""Maximum age of a 2xx that shows that the gateway has routes: as long as the attempts of a request usually
take."""
_MAY_BE_NO_GATEWAY = (
    ", and none of our requests with 2xx yet: it may be no inference gateway; look at gateway.url and "
    "gateway.path, or at the model that the requests name"
)
_NOT_ALLOWED = (
    ", and none of our requests with 2xx yet: it may not allow what our credentials ask for; look at "
    "gateway.token_file, or at gateway.url and gateway.path"
)


class GatewaySign(Enum):
    """Meaning of an outcome for the gateway, which the limiter is told."""

    NOTHING = auto()
    """Nothing was sent, or there was no answer."""
    ANSWERED = auto()
    OVERLOADED = auto()
    """The gateway answered that it is full, so the gate closes."""
    INTERMEDIARY_ERROR = auto()
    NO_CONNECTION = auto()


class GatewayRecord(Value, frozen=True):
    """Knowledge about the server at gateway.url, from all its answers."""

    is_verified: bool = False
    """True if the server has answered like an inference gateway."""
    trial_count: int = 0
    """Number of requests whose response has left open whether the server is a gateway."""
    last_route: tuple[float, str, bytes] | None = None
    """Time, path and body of the last request that was answered with 2xx. `None` if there was none, or if a
    request for the same path and model got an empty 404 since."""


def judge_attempt(
    outcome: Outcome,
    gateway: GatewayRecord,
    *,
    path: str = "",
    payload: bytes = b"",
    at: float = 0.0,
    can_try_others: bool = False,
) -> tuple[Outcome, GatewaySign, GatewayRecord]:
    """Return the outcome as it counts, what it says about the gateway, and what is known of that afterwards.

    `path` and `payload` are those of the request, `at` is the time of the answer. `can_try_others` is True if
    other requests wait, and none of those in this attempt had an intermediary error before.
    """
    if not gateway.is_verified:
        outcome = _doubt_answer(outcome, payload)
    match outcome:
        case Delivered(status=status) | TooLarge(status=status) if 200 <= status < 300:
            verified = GatewayRecord(True, gateway.trial_count, (at, path, payload))
            return outcome, GatewaySign.ANSWERED, verified
        case Overloaded(reason=reason) | Evicted(reason=reason):
            sign = GatewaySign.OVERLOADED if isinstance(outcome, Overloaded) else GatewaySign.ANSWERED
            return outcome, sign, gateway.copy_with(is_verified=gateway.is_verified or reason != "")
        case Delivered() | TooLarge() | ModelNotServed() | Failed(status=int(), is_intermediary_error=False):
            return outcome, GatewaySign.ANSWERED, gateway
        case Failed(status=404, is_intermediary_error=True) if (
            gateway.last_route is not None and at - gateway.last_route[0] <= ROUTE_MEMORY_S
        ):
            _, routed_path, routed_payload = gateway.last_route
            if (routed_path, parse_model(routed_payload)) == (path, parse_model(payload)):
                return outcome, GatewaySign.INTERMEDIARY_ERROR, gateway.copy_with(last_route=None)
            own = replace(outcome, why=f"{outcome.why}, and others have one", is_intermediary_error=False)
            return own, GatewaySign.ANSWERED, gateway
        case Failed(is_intermediary_error=True) if can_try_others and _leaves_open(outcome, gateway):
            tried = gateway.copy_with(trial_count=gateway.trial_count + 1)
            return UncountedError(outcome.why, outcome.kind), GatewaySign.NOTHING, tried
        case Failed(is_intermediary_error=True):
            return outcome, GatewaySign.INTERMEDIARY_ERROR, gateway
        case Unreachable():
            return outcome, GatewaySign.NO_CONNECTION, gateway
        case Failed() | UncountedError() | Refused() | TooLate() | Unsent():
            return outcome, GatewaySign.NOTHING, gateway
        case _:
            assert_never(outcome)


def _doubt_answer(outcome: Outcome, payload: bytes) -> Outcome:
    """Return an answer of an unverified server as an intermediary error if it may be that of no gateway."""
    match outcome:
        case Delivered(status=404, body=body) if says_no_model(404, body, parse_model(payload)):
            return outcome  # a model server wrote it
        case Delivered(status=status, body=body) if status in NOT_FOUND_STATUSES:
            why = f"a server answered {status}{_NOT_ALLOWED if status == 403 else _MAY_BE_NO_GATEWAY}"
            failed = Failed(why, status, body)
        case Failed(status=int(status), is_intermediary_error=False) if (
            status in NOT_FOUND_STATUSES or status < 400
        ):
            failed = replace(outcome, why=outcome.why + _MAY_BE_NO_GATEWAY)
        case _:
            return outcome
    return replace(failed, is_intermediary_error=True, kind=FailureKind.MAYBE_NO_GATEWAY)


def _leaves_open(outcome: Failed, gateway: GatewayRecord) -> bool:
    """Return whether an intermediary error leaves open whether the server is a gateway."""
    is_not_found = outcome.status in NOT_FOUND_STATUSES or outcome.kind is FailureKind.MAYBE_NO_GATEWAY
    return is_not_found and not gateway.is_verified and gateway.trial_count < MAX_TRIALS


# ── the request and its group ───────────────────────────────────────────────────────────────────────────────

FREE_CHARGES = 5
"""Number of charges that cost no failed attempt."""
MIN_REST_S = 10.0
REST_PER_SECOND = 2.0
"""Rest time per second without a success. At this rate, two thirds of all probes are requests that were not
tried before."""
MAX_PROBE_INTERVAL_S = 2.0
"""Maximum time that one probe adds to the outage: a pause of a second, and a response that takes as long."""
MAX_DELAY_S = 30.0
SLOW_ANSWER_S = 1.0
"""Time from which a request that held a slot without a useful answer has to wait as long before it takes one
again."""


class GroupSign(Enum):
    """Meaning of an outcome for the group of a request (`refusal_groups`)."""

    ACCEPTED = auto()
    REFUSED = auto()
    """The refusal is recorded once for all leases of the attempt, with GatewaySign.OVERLOADED."""
    UNKNOWN = auto()
    """The request was neither refused nor answered, so the next one of a resting group may be tried."""


class RequestRecord(Value, frozen=True):
    """Knowledge about one request, from its earlier attempts."""

    eviction_count: int = 0
    """Number of evictions since the request was last answered."""
    error_count: int = 0
    """Number of intermediary errors since a gateway last gave the request an answer of any kind."""
    last_error_at: float = 0.0
    charges: int = 0
    """Number of errors before which another request was answered."""
    rest_until: float = float("-inf")


class OutageRecord(Value, frozen=True):
    """Knowledge about outages of the gateway, from the attempts of all requests."""

    answered_sent_at: float = float("-inf")
    """Time at which the newest request was sent that the gateway answered."""
    since: float = float("-inf")
    """Start of the newest outage."""
    last_error_at: float = float("-inf")
    """Time of the newest error in it."""
    probed_s: float = 0.0
    """Time for which this process has probed in it. Probes of other replicas, which may have got through, are
    not included."""


class ErrorFacts(Value, frozen=True):
    """Facts that are needed only to judge an error."""

    unreachable_since: float | None = None
    """Time since which the gateway is unreachable. `None` if it is reachable as far as known."""
    has_others: bool = False
    """True if other requests wait, which can show whether there is a gateway."""
    time_left_s: float = 0.0
    """Time until the deadline of the request. 0 if the request is not known."""


class LeaseVerdict(Value, frozen=True):
    """Verdict on an outcome for one lease."""

    outcome: Outcome
    """Outcome as it counts, with the delay before the request is sent again."""
    group: GroupSign
    request: RequestRecord
    outage: OutageRecord


NO_RECORD = RequestRecord()
NO_FACTS = ErrorFacts()


def judge_lease(
    outcome: Outcome,
    request: RequestRecord,
    outage: OutageRecord,
    *,
    sent_at: float,
    at: float,
    policy: RetryPolicy,
    rand: float,
    facts: ErrorFacts = NO_FACTS,
) -> LeaseVerdict:
    """Return the outcome as it counts for one lease, and what is known afterwards.

    `outcome` is what `judge_attempt` has returned. The request was sent at `sent_at` and the attempt ended at
    `at`. `rand` is uniform in [0, 1), so that requests which were evicted together do not return together.
    """
    group = GroupSign.UNKNOWN
    match outcome:
        case Delivered() | TooLarge():
            group, request, outage = GroupSign.ACCEPTED, NO_RECORD, _record_answer(outage, sent_at)
        case Overloaded():
            group = GroupSign.REFUSED
            request, outage = RequestRecord(request.eviction_count), _record_answer(outage, sent_at)
        case Evicted():
            pause_s = (0.5 + rand / 2) * _compute_backoff_s(request.eviction_count, policy)
            outcome = replace(outcome, delay_s=max(pause_s, min(outcome.retry_after_s or 0.0, policy.max_s)))
            request, outage = RequestRecord(request.eviction_count + 1), _record_answer(outage, sent_at)
        case Failed(status=int(), is_intermediary_error=False):
            request, outage = RequestRecord(request.eviction_count), _record_answer(outage, sent_at)
        case UncountedError():  # whether there is a gateway is left open, and others are tried
            request = _set_aside(_record_error(request, outage, at), at, MIN_REST_S, facts)
            outcome = replace(outcome, delay_s=compute_rest_s(request, at))
        case Failed(is_intermediary_error=True):
            request, delay_s = _record_error(request, outage, at), 0.0
            if facts.unreachable_since is None:
                delay_s = _compute_retry_delay_s(request.error_count, at - sent_at, policy)
            elif facts.has_others:
                outage = _record_probe(outage, at, facts.unreachable_since)
                request = _set_aside(request, at, max(MIN_REST_S, REST_PER_SECOND * outage.probed_s), facts)
                delay_s = compute_rest_s(request, at)
            # Without a gateway, no request is to blame. With one, the cause of a few errors may pass.
            if facts.unreachable_since is not None or request.charges <= FREE_CHARGES:
                outcome = UncountedError(outcome.why, outcome.kind, delay_s)
        case Failed() | Unreachable() | Refused() | TooLate() | Unsent() | ModelNotServed():
            pass
        case _:
            assert_never(outcome)
    return LeaseVerdict(outcome, group, request, outage)


def compute_rest_s(request: RequestRecord, now: float) -> float:
    """Return for how long the request has to rest from now on, while there is no gateway and others wait. 0
    if it may probe."""
    return min(MAX_DELAY_S, max(0.0, request.rest_until - now))


def _record_answer(outage: OutageRecord, sent_at: float) -> OutageRecord:
    """Record that a request sent at `sent_at` got an answer that only a gateway gives."""
    return outage if sent_at <= outage.answered_sent_at else outage.copy_with(answered_sent_at=sent_at)


def _record_error(request: RequestRecord, outage: OutageRecord, at: float) -> RequestRecord:
    """Record an intermediary error. The request is charged if it had one before and another request, sent
    after that, was answered: there was a gateway in between."""
    is_charged = request.error_count > 0 and outage.answered_sent_at >= request.last_error_at
    return request.copy_with(
        last_error_at=at, error_count=request.error_count + 1, charges=request.charges + is_charged
    )


def _record_probe(outage: OutageRecord, at: float, since: float) -> OutageRecord:
    """Record an error at `at` in the outage that began at `since`."""
    # In a new outage, the time without success starts again.
    last_at, probed_s = (outage.last_error_at, outage.probed_s) if outage.since == since else (since, 0.0)
    probed_s += min(at - last_at, MAX_PROBE_INTERVAL_S)
    return OutageRecord(outage.answered_sent_at, since, at, probed_s)


def _set_aside(request: RequestRecord, at: float, rest_s: float, facts: ErrorFacts) -> RequestRecord:
    """Let the request rest, but never for more than half of the time until its deadline."""
    return request.copy_with(rest_until=at + min(rest_s, facts.time_left_s / 2))


def _compute_retry_delay_s(error_count: int, took_s: float, policy: RetryPolicy) -> float:
    """Return after how many seconds a request is sent again while there is a gateway: at once the first time,
    because it may reach another endpoint, then later each time."""
    again_s = _compute_backoff_s(error_count - 2, policy) if error_count > 1 else 0.0
    # A slow failure held a slot for `took_s`, so the request gives it to others for as long.
    return max(again_s, min(took_s, MAX_DELAY_S)) if took_s >= SLOW_ANSWER_S else again_s


# ── how a lease ends ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Errored:
    """An error of the dispatcher is the result, and the request is finished."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class Retry:
    """The request returns to the queue. The fields have the meaning of those of `queue.contract.Release`."""

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
    wait: Any = None
    """Reason for which the request waits in the queue (`Release.extra`). `None` if it does not wait."""


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


Decision = Delivered | Errored | Retry | MoveToDeadLetters
"""How a lease ends. The answer that was delivered is the result."""


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
        case Delivered():
            return outcome
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
        case _:
            retry = _build_retry(outcome, failed_attempts, refusals, policy, rand)
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


def _build_retry(
    outcome: Failed | Overloaded | Evicted | Unreachable | UncountedError | ModelNotServed | Unsent,
    failed_attempts: int,
    refusals: int,
    policy: RetryPolicy,
    rand: float,
) -> Retry:
    """Return how a request returns to the queue, apart from its deadline."""
    if isinstance(outcome, Unsent):
        return Retry(is_undelivered=True)
    last_attempt = describe_outcome(outcome)
    match outcome:
        case Failed(retry_after_s=retry_after_s):
            backoff_s = rand * _compute_backoff_s(failed_attempts, policy)
            delay_s = max(backoff_s, min(retry_after_s or 0.0, policy.max_s))
            return Retry(delay_s, is_failed_attempt=True, last_attempt=last_attempt)
        case Overloaded():
            # A refusal closes the gate, so the first retry needs no delay of its own.
            delay_s = _compute_backoff_s(refusals - 1, policy) if refusals > 0 else 0.0
            return Retry(delay_s, is_refusal=True, last_attempt=last_attempt)
        case Evicted(delay_s=delay_s):
            return Retry(delay_s, last_attempt=last_attempt)
        case Unreachable():
            return Retry(is_undelivered=True, last_attempt=last_attempt)
        case UncountedError(delay_s=delay_s):
            return Retry(delay_s, is_undelivered=True, last_attempt=last_attempt)
        case ModelNotServed(wait=wait, delay_s=delay_s):
            return Retry(delay_s, is_undelivered=True, last_attempt=last_attempt, wait=wait)


def decide_after_deaths(deaths: int, policy: RetryPolicy) -> MoveToDeadLetters | None:
    """Return what happens to a request whose owners died `deaths` times while no other suspect ran next to
    it.

    Such a request crashes dispatchers, so after more than max_deliveries it is not given to another one.
    """
    if deaths <= policy.max_deliveries:
        return None
    message = f"{deaths} dispatchers died while they ran it alone"
    return MoveToDeadLetters(ErrorCode.DELIVERIES_EXHAUSTED, message)


def _compute_backoff_s(times: int, policy: RetryPolicy) -> float:
    return float(min(policy.max_s, policy.base_s * 2.0 ** min(times, 64)))
