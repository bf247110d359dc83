"""Records what happens to each request, for metrics, traces and the log."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from dispatcher.core.gateway.outcome import EVICTED, Delivered, Evicted, Outcome, Overloaded
from dispatcher.core.gateway.recent_attempts import RecentTries
from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.utilization import Meter, Observation
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.requests.routing import trace_of
from dispatcher.core.requests.usage import tokens
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.dispatch.queue_access import now
from dispatcher.ports import Burial, Forwarded, Release, Settled, Settlement
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, detailed, emit, speaking_of
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.tracing import Tracing, Trail

_STEPS = {Settlement: "settle", Release: "release", Burial: "bury"}
"""Names of the queue steps that end a lease."""
_OURS = re.compile(r"[^:'\"]*(?:: [A-Za-z]+(?![A-Za-z\[]))?")
"""Part of a failure text that is safe to show: words of the dispatcher and the name of an error. The rest may
come from the gateway, and may be the payload sent back."""


P = ParamSpec("P")


def _ends_nothing(told: Callable[Concatenate[Journal, P], None]) -> Callable[Concatenate[Journal, P], None]:
    """Log errors of the method instead of raising them: a defect in metrics must cost no request anything."""

    @wraps(told)
    def guarded(journal: Journal, /, *args: P.args, **more: P.kwargs) -> None:
        try:
            told(journal, *args, **more)
        except Exception as error:
            emit(Event.SURPRISE, where=f"journal: {told.__name__}", error=repr(error))

    return guarded


class Journal:
    """Records of one process. No method raises, except for `observe_state`.

    `meter` has the integrals over time, `recent_attempts` the outcomes of the last attempts. `tracing` is
    `None` if tracing is off.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.meter = Meter()
        self.recent = RecentTries()
        self.tracing: Tracing | None = None
        self._metrics = metrics
        self._free: float | None = None
        self._free_by = float("nan"), 0
        """Reading and limit for which `_free_units` was computed. While the gate is open, it changes only
        with these."""

    @_ends_nothing
    def turned(self, at: float, allowance: Allowance, limiter: Limiter, *, used: int) -> None:
        """Record the state at each turn of the loop. `used_units` are the units of this process at the
        gateway."""
        self.observed(at, allowance, limiter, used)

    def observed(self, at: float, allowance: Allowance, limiter: Limiter, used: int) -> None:
        """Do the same as `record_state`, but raise errors."""
        seen = allowance.read_at, allowance.limit
        # Computing free units is expensive, and this runs at every turn.
        if seen != self._free_by or allowance.reason.closed:
            self._free, self._free_by = limiter.free(at), seen
        self.meter.observe(Observation(at, allowance.reason, used, self._free, limiter.work))

    @_ends_nothing
    def sent(self, held: HeldLease, request: Request, unix_now: float) -> None:
        """Record that an attempt begins. Must be called in the task of the attempt."""
        lease = held.lease
        if self.tracing is not None:
            held.trail = trail = _follow(self.tracing, held, request)
            if trail is not None:
                # Only before the first delivery has the request waited since the producer created it.
                first = lease.deliveries <= 1 and not lease.attempts + lease.refusals
                trail.sent(now(), created=request.created, attempt=lease.attempts + 1, first=first)
        if held.trail is None:
            # Log context of the task: all lines of this attempt name the request.
            speaking_of(request=request.id, attempt=lease.attempts + 1)
        else:
            speaking_of(request=request.id, attempt=lease.attempts + 1, trace=held.trail.trace_id)
        if detailed():
            emit(Event.SENT, delivery=lease.deliveries, refusals=lease.refusals, probe=held.probe)
        # Count the waiting time once per request, not for each retry.
        if request.created and held.lease.deliveries <= 1:
            self._metrics.observe(series.WAIT, unix_now - request.created)

    @_ends_nothing
    def tried(self, held: HeldLease, forwarded: Forwarded, outcome: Outcome) -> None:
        """Record that an attempt has ended, and how the outcome counts."""
        held.answered_at = forwarded.ended_at
        metrics = self._metrics
        code: int | None = getattr(forwarded.outcome, "status", None)
        name = series.OUTCOMES[type(outcome)]
        self.recent.ended(forwarded.ended_at, outcome, code)
        metrics.count(series.TRIES, name, series.status_class(code))
        metrics.observe(series.TRY, forwarded.ended_at - forwarded.sent_at)
        if forwarded.queued_s is not None:
            metrics.observe(series.PICKER_WAIT, forwarded.queued_s)
        if held.trail is not None:
            went_well = isinstance(outcome, Delivered) and outcome.status < 400
            error = None if went_well else name
            held.trail.tried(forwarded.ended_at, status=code, error=error, why=_why(outcome))
        if detailed():
            took_s = round(forwarded.ended_at - forwarded.sent_at, 4)
            emit(Event.TRY, outcome=name, status=code, took_s=took_s, why=_why(outcome))
        match outcome:
            case Overloaded(reason=reason):
                metrics.count(series.REFUSALS, _drop_reason(reason))
            case Delivered(status=status_code, body=body) if status_code < 300:
                tokens_in, tokens_out = tokens(body)
                metrics.count(series.TOKENS, "in", by=tokens_in)
                metrics.count(series.TOKENS, "out", by=tokens_out)

    @_ends_nothing
    def ended(
        self, held: HeldLease | None, ending: Ending, answer: Settled, at: float, unix_now: float
    ) -> None:
        """Record that the queue has confirmed the end of a lease."""
        metrics = self._metrics
        metrics.count(series.ENDED, series.ENDINGS[type(ending)], answer)
        if held is not None and held.request is not None:
            self._tell_end(held, held.request, ending, answer, at)
        if isinstance(ending, Release):
            if ending.attempt or ending.refusal:
                metrics.count(series.RETRIES, "attempt" if ending.attempt else "refusal")
            return
        settlement = ending.settlement if isinstance(ending, Burial) else ending
        # No result was written, so there is none to count.
        if answer is Settled.LOST or not settlement.result:
            return
        code = settlement.code
        # The queue has replaced the result by an error: count what the consumer gets.
        if answer is Settled.TOO_LARGE:
            code = ErrorCode.TOO_LARGE
        elif answer is Settled.BAD_LIST and isinstance(ending, Settlement):
            code = ErrorCode.INVALID_REQUEST
        metrics.count(series.RESULTS, code)
        if held is None or held.request is None:
            return
        if held.answered_at is not None:
            metrics.observe(series.SETTLE, at - held.answered_at)
        if held.request.created:
            metrics.observe(series.WHOLE, unix_now - held.request.created)

    def _tell_end(
        self, held: HeldLease, request: Request, ending: Ending, answer: Settled, at: float
    ) -> None:
        """Write the end of a lease to its trace and to the log."""
        step = _STEPS[type(ending)]
        settlement = ending.settlement if isinstance(ending, Burial) else ending
        code = settlement.code if isinstance(settlement, Settlement) else None
        if held.trail is None and code is not None and held.answered_at is None and self.tracing is not None:
            held.trail = _follow(self.tracing, held, request)  # it was never sent
        if held.trail is not None:
            error = str(answer) if answer is not Settled.DONE else code if code != "2xx" else None
            since = held.claimed_at if held.answered_at is None else held.answered_at
            held.trail.ended(since, at, step=step, error=error)
        if detailed():
            about = {} if held.trail is None else {"trace": held.trail.trace_id}
            emit(Event.ENDED, request=request.id, step=step, answer=str(answer), code=code, **about)

    @_ends_nothing
    def expired(self, count: int) -> None:
        """Record that waiting requests were answered because their deadline had passed."""
        self._metrics.count(series.EXPIRED, by=count)
        self._metrics.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED, by=count)

    @_ends_nothing
    def unserved(self, code: ErrorCode, count: int) -> None:
        """Record that remaining requests of sequences were answered with this error without being sent."""
        self._metrics.count(series.RESULTS, code, by=count)

    @_ends_nothing
    def reclaimed(self, count: int) -> None:
        """Record that leases were taken back from their owners."""
        self._metrics.count(series.RECLAIMED, by=count)

    @_ends_nothing
    def lost(self, held: HeldLease) -> None:
        """Record that another owner has a lease of this process now."""
        self._metrics.count(series.LOST)
        if held.trail is not None:
            held.trail.lost(now())


def _follow(tracing: Tracing, held: HeldLease, request: Request) -> Trail | None:
    trace, state = trace_of(request)
    return tracing.follow(
        held.claimed_at,
        request_id=request.id,
        seed=f"{request.id} {request.token} {request.deadline}",
        delivery=held.lease.deliveries,
        traceparent=trace,
        tracestate=state,
    )


def _drop_reason(reason: str) -> str:
    """Return a declared drop reason; "none" if the gateway gave none."""
    return reason if reason in series.DROP_REASONS else series.OTHER if reason else "none"


def _why(outcome: Outcome) -> str:
    """Describe a failure without text of the gateway."""
    if isinstance(outcome, Evicted):
        return EVICTED
    if isinstance(outcome, Overloaded):
        known = _drop_reason(outcome.reason)
        return known if known not in ("none", series.OTHER) else ""
    why: str = getattr(outcome, "why", "")
    if why.startswith("no connection"):
        return why  # no peer has contributed to this text
    match = _OURS.match(why)
    return match[0].strip() if match else ""
