"""Records what happens to each request, for metrics, traces and the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.queue_access import loop_time
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.utilization import Observation, UtilizationMeter
from dispatcher.queue.contract import DeadLetter, Release, Settlement, SettleStatus
from dispatcher.requests.outcomes.outcome import (
    EVICTED_REASON,
    Delivered,
    Evicted,
    Failed,
    FailureKind,
    Outcome,
    Overloaded,
    UncountedError,
    Unreachable,
)
from dispatcher.requests.outcomes.recent_attempts import RecentAttempts
from dispatcher.requests.request import Request
from dispatcher.requests.routing import parse_trace_context
from dispatcher.requests.usage import parse_token_usage
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, bind_event_fields, emit, is_debug_enabled
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.series import OTHER_LABEL
from dispatcher.telemetry.tracing import DeliveryTrace, Tracing
from dispatcher.wire_format import ErrorCode

_STEP_NAMES = {Settlement: "settle", Release: "release", DeadLetter: "dead-letter"}
"""Names of the queue steps that end a lease."""

P = ParamSpec("P")


def _log_errors(method: Callable[Concatenate[Journal, P], None]) -> Callable[Concatenate[Journal, P], None]:
    """Log errors of the method instead of raising them: a defect in metrics must cost no request anything."""

    @wraps(method)
    def guarded(journal: Journal, /, *args: P.args, **more: P.kwargs) -> None:
        try:
            method(journal, *args, **more)
        except Exception as error:
            emit(Event.INTERNAL_ERROR, where=f"journal: {method.__name__}", error=repr(error))

    return guarded


class Journal:
    """Records of one process. No method raises, except for `observe_state`.

    `meter` has the integrals over time, `recent_attempts` the outcomes of the last attempts. `tracing` is
    `None` if tracing is off.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.meter = UtilizationMeter()
        self.recent_attempts = RecentAttempts()
        self.tracing: Tracing | None = None
        self._metrics = metrics
        self._trails: dict[str, DeliveryTrace] = {}
        """Traces of deliveries in progress, by the token of the lease."""
        self._free_units: float | None = None
        self._free_units_key = float("nan"), 0
        """Reading and limit for which `_free_units` was computed. While the gate is open, it changes only
        with these."""

    @_log_errors
    def record_state(self, at: float, allowance: Allowance, limiter: Limiter, *, used_units: int) -> None:
        """Record the state in each round of the loop. `used_units` are the units of this process at the
        gateway."""
        self.observe_state(at, allowance, limiter, used_units)

    def observe_state(self, at: float, allowance: Allowance, limiter: Limiter, used_units: int) -> None:
        """Do the same as `record_state`, but raise errors."""
        key = allowance.read_at, allowance.limit
        # Computing free units is expensive, and this runs in every round.
        if key != self._free_units_key or allowance.reason.is_closed:
            self._free_units, self._free_units_key = limiter.estimate_free_units(at), key
        self.meter.add_observation(
            Observation(at, allowance.reason, used_units, self._free_units, limiter.has_work)
        )

    @_log_errors
    def record_sent(self, entry: InFlightLease, request: Request, unix_now: float) -> None:
        """Record that an attempt begins. Must be called in the task of the attempt."""
        lease = entry.lease
        trail = None
        if self.tracing is not None:
            trail = _start_trail(self.tracing, entry, request)
            if trail is not None:
                self._trails[lease.token] = trail
                # Only before the first delivery has the request waited since the producer created it.
                first = lease.deliveries <= 1 and not lease.failed_attempts + lease.refusals
                trail.start_attempt(
                    loop_time(),
                    created=request.created,
                    attempt=lease.failed_attempts + 1,
                    is_first_delivery=first,
                )
        if trail is None:
            # Log context of the task: all lines of this attempt name the request.
            bind_event_fields(request=request.id, attempt=lease.failed_attempts + 1)
        else:
            bind_event_fields(request=request.id, attempt=lease.failed_attempts + 1, trace=trail.trace_id)
        if is_debug_enabled():
            emit(
                Event.ATTEMPT_STARTED,
                delivery=lease.deliveries,
                refusals=lease.refusals,
                probe=entry.is_probe,
            )
        # Count the waiting time once per request, not for each retry.
        if request.created and entry.lease.deliveries <= 1:
            self._metrics.observe(series.WAIT_SECONDS, unix_now - request.created)

    @_log_errors
    def record_attempt(
        self,
        entry: InFlightLease,
        result: AttemptResult,
        outcome: Outcome,
        tokens: tuple[int, int, int] | None = None,
    ) -> None:
        """Record that an attempt has ended, and how the outcome counts. `tokens` are those in and out. If it
        is `None`, the answer is searched for them."""
        metrics = self._metrics
        code: int | None = getattr(result.outcome, "status", None)
        name = series.OUTCOMES[type(outcome)]
        self.recent_attempts.record_attempt(result.ended_at, outcome, code)
        metrics.count(series.ATTEMPTS, name, series.classify_status(code))
        metrics.observe(series.ATTEMPT_SECONDS, result.ended_at - result.sent_at)
        if result.queued_s is not None:
            metrics.observe(series.PICKER_WAIT_SECONDS, result.queued_s)
        trail = self._trails.get(entry.lease.token)
        if trail is not None:
            went_well = isinstance(outcome, Delivered) and outcome.status < 400
            error = None if went_well else name
            trail.end_attempt(result.ended_at, status=code, error=error, why=_describe_failure(outcome))
        if is_debug_enabled():
            duration_s = round(result.ended_at - result.sent_at, 4)
            emit(Event.ATTEMPT, outcome=name, status=code, took_s=duration_s, why=_describe_failure(outcome))
        match outcome:
            case Overloaded(reason=reason):
                metrics.count(series.REFUSALS, _normalize_drop_reason(reason))
            case Delivered(status=status_code, body=body) if status_code < 300:
                tokens_in, tokens_out, _ = tokens or parse_token_usage(body)
                metrics.count(series.TOKENS, "in", amount=tokens_in)
                metrics.count(series.TOKENS, "out", amount=tokens_out)

    @_log_errors
    def record_completion(
        self,
        entry: InFlightLease | None,
        completion: Completion,
        status: SettleStatus,
        at: float,
        unix_now: float,
    ) -> None:
        """Record that the queue has confirmed the end of a lease."""
        metrics = self._metrics
        metrics.count(series.LEASES_ENDED, series.COMPLETION_KINDS[type(completion)], status)
        if entry is not None and entry.request is not None:
            self._trace_and_log_completion(entry, entry.request, completion, status, at)
        if isinstance(completion, Release):
            if completion.is_failed_attempt or completion.is_refusal:
                metrics.count(series.RETRIES, "failed-attempt" if completion.is_failed_attempt else "refusal")
            return
        settlement = completion.settlement if isinstance(completion, DeadLetter) else completion
        # No result was written, so there is none to count.
        if status is SettleStatus.LOST or not settlement.result:
            return
        code = settlement.result_class
        # The queue has replaced the result by an error: count what the consumer gets.
        if status is SettleStatus.TOO_LARGE:
            code = ErrorCode.TOO_LARGE
        elif status is SettleStatus.BAD_LIST and isinstance(completion, Settlement):
            code = ErrorCode.INVALID_REQUEST
        metrics.count(series.RESULTS, code)
        if entry is None or entry.request is None:
            return
        if entry.answered_at is not None:
            metrics.observe(series.SETTLE_SECONDS, at - entry.answered_at)
        if entry.request.created:
            metrics.observe(series.REQUEST_SECONDS, unix_now - entry.request.created)

    def _trace_and_log_completion(
        self, entry: InFlightLease, request: Request, completion: Completion, status: SettleStatus, at: float
    ) -> None:
        """Write the end of a lease to its trace and to the log."""
        step = _STEP_NAMES[type(completion)]
        settlement = completion.settlement if isinstance(completion, DeadLetter) else completion
        code = settlement.result_class if isinstance(settlement, Settlement) else None
        trail = self._trails.pop(entry.lease.token, None)
        if trail is None and code is not None and entry.answered_at is None and self.tracing is not None:
            trail = _start_trail(self.tracing, entry, request)  # it was never sent
        if trail is not None:
            error = str(status) if status is not SettleStatus.DONE else code if code != "2xx" else None
            since = entry.claimed_at if entry.answered_at is None else entry.answered_at
            trail.end_delivery(since, at, step=step, error=error)
        if is_debug_enabled():
            about = {} if trail is None else {"trace": trail.trace_id}
            emit(Event.LEASE_ENDED, request=request.id, step=step, answer=str(status), code=code, **about)

    @_log_errors
    def record_expired(self, count: int) -> None:
        """Record that waiting requests were answered because their deadline had passed."""
        self._metrics.count(series.REQUESTS_EXPIRED, amount=count)
        self._metrics.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED, amount=count)

    @_log_errors
    def record_unsent(self, code: ErrorCode, count: int) -> None:
        """Record that requests were answered with this error before they were sent."""
        self._metrics.count(series.RESULTS, code, amount=count)

    @_log_errors
    def record_reclaimed(self, count: int) -> None:
        """Record that leases were taken back from their owners."""
        self._metrics.count(series.LEASES_RECLAIMED, amount=count)

    @_log_errors
    def record_lost(self, entry: InFlightLease) -> None:
        """Record that another owner has a lease of this process now."""
        self._metrics.count(series.LEASES_LOST)
        trail = self._trails.pop(entry.lease.token, None)
        if trail is not None:
            trail.mark_lost(loop_time())


def _start_trail(tracing: Tracing, entry: InFlightLease, request: Request) -> DeliveryTrace | None:
    trace, state = parse_trace_context(request)
    return tracing.start_delivery(
        entry.claimed_at,
        request_id=request.id,
        seed=f"{request.id} {request.token} {request.deadline}",
        delivery=entry.lease.deliveries,
        traceparent=trace,
        tracestate=state,
    )


def _normalize_drop_reason(reason: str) -> str:
    """Return a declared drop reason; "none" if the gateway gave none."""
    return reason if reason in series.DROP_REASONS else OTHER_LABEL if reason else "none"


def _describe_failure(outcome: Outcome) -> str:
    """Describe a failure without text of the gateway, which may be the payload sent back."""
    match outcome:
        case Evicted():
            return EVICTED_REASON
        case Overloaded(reason=reason):
            known = _normalize_drop_reason(reason)
            return known if known not in ("none", OTHER_LABEL) else ""
        case Unreachable(why, FailureKind.NO_CONNECTION | FailureKind.NO_CREDENTIALS):
            return why  # no peer has contributed to this text
        case Failed(kind=kind) | Unreachable(kind=kind) | UncountedError(kind=kind):
            return str(kind)
        case _:
            return ""
