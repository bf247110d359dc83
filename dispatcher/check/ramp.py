"""Rules of `check --probe`: when it sends requests, when it stops and what it reports.

This module has no clock and does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dispatcher.check.finding import Finding, Level
from dispatcher.limit.budget import Reading, round_down
from dispatcher.limit.capacity import CONFIRMATION_TOLERANCE, MIN_WAITING
from dispatcher.signals.readings import PerEndpointFrom

WHERE = "budget.per_endpoint"
OBSERVE_S = 6.0
"""Seconds of readings before the first request. They include one flush of the picker's averages (FLUSH_S).
Requests that bypass the picker show only in these averages."""
QUIET_SHARE, QUIET_MAX_REQUESTS = 0.25, 8.0
"""The hour is not quiet if requests of others exceed both: this share of what runs, and this number."""
SUGGESTION_S = 10.0
"""Seconds for which the picker's pages have to suggest the same number until it is reported. A proof needs
different loads, and a ramp that is bounded by this number may never reach them."""
READINGS = 3
"""Number of readings in a row that have to confirm a ceiling, or a full load with no request waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """The parts of one reading of the pool that the probe needs."""

    sampled_at: float
    present: float | None
    """Requests in the pool, running or waiting. `None` if the signals do not count them."""
    running: float | None
    """Requests that run. `None` if the signals do not separate them from those that wait."""
    waiting: float
    max_probe_requests: int
    """Largest number of the probe's requests that the reading may contain."""
    ceiling: float | None = None
    """Requests that ran while others waited, as the limiter learned it."""
    confirmations: int = 0
    """Number of times in a row that the limiter measured the ceiling."""
    endpoints: float | None = None
    per_endpoint: float | None = None
    """Requests per endpoint that the reading was made with."""
    per_endpoint_source: PerEndpointFrom | None = None
    is_capacity_known: bool = False


class ProbeEnd(Enum):
    """Reason why the probe ended."""

    CEILING = auto()
    """Requests waited while others ran, and the number that ran is certain."""
    BOUND = auto()
    """The allowed number of requests ran, and no request waited."""
    TIME = auto()
    REFUSED = auto()
    """The gateway refused a request as overloaded."""
    NOT_QUIET = auto()
    NAMED = auto()
    """The picker or the model servers show the capacity, so nothing has to be measured."""
    UNCOUNTED = auto()
    """The signals do not count requests, so it is not known whether the hour is quiet."""
    CLOSED = auto()
    """The signals cannot be read, or the limiter closed the gate for another reason."""
    FAILED = auto()
    """A request of the probe failed."""


class Ramp:
    """Decides when the probe may send, when it ends and what it reports.

    `max_in_flight` is the largest number of requests in flight, and `bound` the name of the option or setting
    that has this number. `observe_s` is the time for which the pool is observed before the first request.
    """

    def __init__(
        self, max_in_flight: int, *, bound: str = "--probe-most", observe_s: float = OBSERVE_S
    ) -> None:
        self.max_in_flight = max_in_flight
        self.may_send = False
        """True if the pool was quiet for long enough and the probe has not ended."""
        self.end: ProbeEnd | None = None
        self.sent_count = 0
        """Number of requests that the probe has sent, for the report."""
        self._bound = bound
        self._observe_s = observe_s
        self._detail = ""
        self._began_at: float | None = None
        self._max_ran = 0.0
        """Largest number of requests that ran in two readings in a row with no request waiting."""
        self._ran_before: float | None = None
        """Requests that ran in the previous reading. `None` if a request waited then."""
        self._full_readings = 0
        """Number of readings in a row with `max_in_flight` requests in flight and no request waiting."""
        self._ceiling: float | None = None
        self._steady_ceiling_readings = 0
        """Number of readings in a row that left the ceiling about the same."""
        self._endpoints: float | None = None
        self._suggested: tuple[float, float | None] | None = None
        """Time at which the picker's pages began to suggest a number of requests per endpoint, and that
        number."""

    def stop(self, end: ProbeEnd, detail: str = "") -> None:
        """End the probe. Only the first reason counts."""
        if self.end is None:
            self.end, self._detail, self.may_send = end, detail, False

    def observe_sample(self, sample: PoolSample) -> None:
        """Take in a new reading. It may start the sending, or end the probe."""
        if sample.endpoints is not None:
            self._endpoints = sample.endpoints
        # Both reasons hold at any time, not only before the first request: others may begin to send.
        if (named := self._find_named_capacity(sample)) is not None:
            self.stop(ProbeEnd.NAMED, named)
        elif sample.present is None:
            self.stop(ProbeEnd.UNCOUNTED)
        elif (why := self._find_other_traffic(sample, sample.present)) is not None:
            self.stop(ProbeEnd.NOT_QUIET, why)
        if self.end is not None:
            return
        if self._began_at is None:
            self._began_at = sample.sampled_at
        self.may_send = self.may_send or sample.sampled_at - self._began_at >= self._observe_s
        self._record_running(sample)
        self._follow_ceiling(sample)

    def _find_named_capacity(self, sample: PoolSample) -> str | None:
        """Return a sentence that says where the capacity is shown. `None` if it is not shown anywhere."""
        suggested, self._suggested = self._suggested, None
        match sample.per_endpoint_source:
            case "picker":
                return f"the endpoint picker counts with {sample.per_endpoint:g} requests per endpoint"
            case "server":
                return f"the model servers' own pages name {sample.per_endpoint:g} requests per endpoint"
            case "suggestion":
                if suggested is None or suggested[1] != sample.per_endpoint:
                    suggested = sample.sampled_at, sample.per_endpoint
                self._suggested = suggested
                if sample.sampled_at - suggested[0] < SUGGESTION_S:
                    return None
                return f"the endpoint picker's pages suggest {sample.per_endpoint:g} requests per endpoint"
            case None if sample.is_capacity_known:
                return "a query in the settings gives the capacity"
            case _:
                return None

    def _find_other_traffic(self, sample: PoolSample, present: float) -> str | None:
        """Return why this is not a quiet hour. `None` if it is a quiet hour."""
        # Later on, waiting requests are what the probe wants to cause.
        if self.sent_count == 0 and sample.waiting >= MIN_WAITING:
            return f"{_format_requests(sample.waiting)} of others wait"
        others = max(0.0, present - sample.max_probe_requests)
        runs = present if sample.running is None else sample.running
        if others > QUIET_MAX_REQUESTS and others > QUIET_SHARE * runs:
            verb = "is" if round(others) == 1 else "are"
            return f"{_format_requests(others)} in the pool {verb} not the probe's"
        return None

    def _record_running(self, sample: PoolSample) -> None:
        """Keep the largest number of requests that ran with no request waiting.

        The queue lengths of the model servers may be up to SERVER_LAG_S old, so that requests that have just
        arrived look as if they ran. A number that two readings in a row show is reliable.
        """
        ran = sample.present if sample.running is None else sample.running
        if ran is None or sample.waiting >= MIN_WAITING:
            self._ran_before, self._full_readings = None, 0
            return
        if self._ran_before is not None:
            self._max_ran = max(self._max_ran, min(ran, self._ran_before))
        self._ran_before = ran
        self._full_readings = (
            self._full_readings + 1 if sample.max_probe_requests >= self.max_in_flight else 0
        )
        if self._full_readings >= READINGS:
            self.stop(ProbeEnd.BOUND)

    def _follow_ceiling(self, sample: PoolSample) -> None:
        """End the probe if the limiter's ceiling was confirmed, or stayed the same for READINGS readings."""
        before, self._ceiling = self._ceiling, sample.ceiling
        if sample.ceiling is None:
            self._steady_ceiling_readings = 0
            return
        same = before is not None and abs(sample.ceiling - before) <= CONFIRMATION_TOLERANCE * before
        self._steady_ceiling_readings = self._steady_ceiling_readings + 1 if same else 1
        if sample.confirmations > 1 or self._steady_ceiling_readings >= READINGS:
            self.stop(ProbeEnd.CEILING)

    def build_finding(self) -> Finding:
        """Return the report of the probe."""
        level, what, hint = self._summarize_result()
        return Finding(level, WHERE, what, hint)

    def _summarize_result(self) -> tuple[Level, str, str]:
        max_ran = _format_requests(round_down(self._max_ran))
        at_least = f"at least {max_ran} ran at once with no request waiting"
        match self.end:
            case ProbeEnd.CEILING:
                return "ok", self._describe_measurement(), ""
            case ProbeEnd.BOUND:
                return "ok", f"{at_least} (the bound of {self._bound} was reached)", ""
            case ProbeEnd.NAMED:
                return "ok", f"{self._detail}, so nothing has to be measured; {self._describe_sent()}", ""
            case ProbeEnd.REFUSED:
                return "warning", f"{self._detail}, so the probe stopped; {at_least}", ""
            case ProbeEnd.NOT_QUIET:
                what = f"this is not a quiet hour: {self._detail}; {self._describe_sent()}"
                return "warning", what, "an hour with less traffic"
            case ProbeEnd.UNCOUNTED:
                what = "the signals do not count requests, so it is not known whether this is a quiet hour"
                return "warning", f"{what}; {self._describe_sent()}", "signals.use"
            case ProbeEnd.CLOSED | ProbeEnd.FAILED:
                return "failed", f"the probe stopped: {self._detail}; {self._describe_sent()}", ""
            case _:
                return "warning", self._describe_timeout(at_least), "--probe-seconds"

    def _describe_measurement(self) -> str:
        count = round_down(self._ceiling or 0.0)
        ran = _format_requests(count)
        endpoints = round(self._endpoints or 0.0)
        if endpoints < 1 or count < endpoints:
            return f"the pool ran {ran} at once while others waited: set budget.max_sys to {count}"
        on = f"{endpoints} endpoint{'' if endpoints == 1 else 's'}"
        return (
            f"the pool ran {ran} at once on {on} while others waited: "
            f"set budget.per_endpoint to {count // endpoints}"
        )

    def _describe_timeout(self, at_least: str) -> str:
        if self._ceiling is not None:
            ran = _format_requests(round_down(self._ceiling))
            return (
                f"the time was over before a measurement was confirmed: {ran} ran at once while others waited"
            )
        if self.sent_count == 0:
            why = f": {self._detail}" if self._detail else ""
            return f"the time was over before the pool could be judged{why}; {_NOTHING_SENT}"
        return f"the time was over before any request had to wait: {at_least}"

    def _describe_sent(self) -> str:
        return "nothing more was sent" if self.sent_count else _NOTHING_SENT


_NOTHING_SENT = "nothing was sent"


def _format_requests(count: float) -> str:
    return "1 request" if round(count) == 1 else f"{count:.0f} requests"


def extract_counts(reading: Reading) -> tuple[float | None, float | None, float]:
    """Return the numbers of requests in the pool, running and waiting. `None` if the reading has no count."""
    running, waiting = reading.running, reading.waiting
    if running is None and reading.averages is not None:
        running, waiting = reading.averages[0], max(waiting, reading.averages[1])
    waiting = max(waiting, reading.f_epp * reading.max_sys)
    if reading.is_request_count:
        return reading.load, running, waiting
    return None if running is None else running + waiting, running, waiting
