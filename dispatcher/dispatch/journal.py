"""What becomes of each request, told by the loop as it happens, to all who keep count."""

from __future__ import annotations

from dispatcher.core.allowance import Allowance
from dispatcher.core.harvest import Meter, Observation
from dispatcher.core.outcome import Delivered, Outcome, Overloaded
from dispatcher.core.request import ErrorCode, Request
from dispatcher.core.usage import tokens
from dispatcher.dispatch.endings import Ending
from dispatcher.dispatch.holding import Held
from dispatcher.ports import Burial, Forwarded, Release, Settled, Settlement
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.metrics import Metrics


class Journal:
    """One process's. `meter` has the integrals over time."""

    def __init__(self, metrics: Metrics) -> None:
        self.meter = Meter()
        self._metrics = metrics

    def turned(
        self, at: float, allowance: Allowance, *, used: int, free: float | None, waiting: bool
    ) -> None:
        """The state of things, at each turn of the loop."""
        self.meter.observe(Observation(at, allowance.reason, used, free, waiting))

    def sent(self, held: Held, request: Request, unix_now: float) -> None:
        """Its try begins."""
        if request.created and held.lease.deliveries <= 1:
            self._metrics.observe(series.WAIT, unix_now - request.created)

    def tried(self, held: Held, forwarded: Forwarded, outcome: Outcome) -> None:
        """Its try has ended, and this is how it counts."""
        held.answered_at = forwarded.ended_at
        metrics = self._metrics
        status = series.status_class(getattr(forwarded.outcome, "status", None))
        metrics.count(series.TRIES, series.OUTCOMES[type(outcome)], status)
        metrics.observe(series.TRY, forwarded.ended_at - forwarded.sent_at)
        match outcome:
            case Overloaded(reason=reason):
                metrics.count(
                    series.REFUSALS, "evicted" if reason.startswith("evicted") else reason or "none"
                )
            case Delivered(status=status_code, body=body) if status_code < 300:
                tokens_in, tokens_out = tokens(body)
                metrics.count(series.TOKENS, "in", by=tokens_in)
                metrics.count(series.TOKENS, "out", by=tokens_out)

    def ended(self, held: Held | None, ending: Ending, answer: Settled, at: float, unix_now: float) -> None:
        """The queue has confirmed its end."""
        metrics = self._metrics
        metrics.count(series.ENDED, series.ENDINGS[type(ending)], answer)
        if isinstance(ending, Release):
            if ending.attempt or ending.refusal:
                metrics.count(series.RETRIES_SERIES, "attempt" if ending.attempt else "refusal")
            return
        settlement = ending.settlement if isinstance(ending, Burial) else ending
        if answer is Settled.LOST or not settlement.result:
            return
        bad_list = answer is Settled.BAD_LIST and isinstance(ending, Settlement)
        metrics.count(series.RESULTS, ErrorCode.INVALID_REQUEST if bad_list else settlement.code)
        if held is None or held.request is None:
            return
        if held.answered_at is not None:
            metrics.observe(series.SETTLE, at - held.answered_at)
        if held.request.created:
            metrics.observe(series.WHOLE, unix_now - held.request.created)

    def expired(self, count: int) -> None:
        """So many ended waiting, past their deadline."""
        self._metrics.count(series.EXPIRED, by=count)
        self._metrics.count(series.RESULTS, ErrorCode.DEADLINE_EXCEEDED, by=count)

    def reclaimed(self, count: int) -> None:
        """So many leases were taken back from whoever held them."""
        self._metrics.count(series.RECLAIMED, by=count)

    def lost(self) -> None:
        """A lease of ours is another's now."""
        self._metrics.count(series.LOST)
