"""Measure what the pool runs at once, with a short and bounded ramp of real requests at a quiet hour.

The probe uses the parts of a running dispatcher: the poller reads the signals, the limiter says how many
requests may be in flight, and the gateway adapter sends them. Capacities from the settings are left out,
because the capacity is what the probe measures. `Ramp` decides when to send, when to stop and what to report;
it does no I/O. `measure` does the I/O.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto

from dispatcher.check.finding import Finding, Level
from dispatcher.core.allowance import Allowance
from dispatcher.core.budget import SERVER_LAG_S, Reading, Reason, whole
from dispatcher.core.capacity import ONE_WAITS, SAME
from dispatcher.core.counting import FLUSH_S
from dispatcher.core.held import LoadLedger
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    Unreachable,
    told,
)
from dispatcher.core.plain import plain, shortened
from dispatcher.core.request import Request
from dispatcher.forward import HttpGateway
from dispatcher.ports import Forwarded
from dispatcher.settings import Settings
from dispatcher.signals.cluster import ClusterAccess
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.sources import sources
from dispatcher.signals.verdict import PerEndpointFrom, at_most
from dispatcher.telemetry.events import diverted

WHERE = "budget.per_endpoint"
INTERVAL_S = 1.0
LOOK_S = 6.0
"""Seconds of readings before the first request. They include a rewrite of the picker's averages (FLUSH_S),
which are the only place where requests that bypass the picker show."""
QUIET_SHARE, QUIET_MOST = 0.25, 8.0
"""The hour is not quiet if requests of others exceed both: this share of what runs, and this number."""
READINGS = 3
"""Readings in a row that a ceiling, or a full load without anybody waiting, has to last."""
MAX_TOKENS = 64
"""Tokens that each request generates at most, so that it holds its slot for about a second."""
_ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """What the operator chose for the probe."""

    model: str
    seconds: float = 60.0
    most: int = 256
    """Requests of the probe that are in flight at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """What one reading of the pool shows."""

    at: float
    present: float | None
    """Requests in the pool, running or waiting. `None` if the signals do not count them."""
    running: float | None
    """Requests that run. `None` if they cannot be told from those that wait."""
    waiting: float
    ours: int
    """The most requests of the probe that the reading may contain."""
    ceiling: float | None = None
    """Requests that ran while others waited, as the limiter learned it."""
    confirmed: int = 0
    """How often in a row the limiter measured that ceiling."""
    endpoints: float | None = None
    per_endpoint: float | None = None
    """Requests per endpoint that the reading was made with."""
    per_endpoint_from: PerEndpointFrom | None = None
    capacity_known: bool = False


class Stop(Enum):
    """Why the probe ended."""

    CEILING = auto()
    """Requests waited while others ran, and the number that ran is certain."""
    BOUND = auto()
    """As many requests as allowed ran, and nobody waited."""
    TIME = auto()
    REFUSED = auto()
    """The gateway refused a request as overloaded."""
    NOT_QUIET = auto()
    NAMED = auto()
    """The picker or the model servers name the capacity, so that nothing has to be measured."""
    UNCOUNTED = auto()
    """The signals do not count requests, so that nobody can tell whether the hour is quiet."""
    CLOSED = auto()
    """The signals cannot be read, or the limiter closed the gate for another reason."""
    FAILED = auto()
    """A request of the probe failed."""


class Ramp:
    """Decides when the probe may send, when it ends and what it reports. It has no clock and does no I/O.

    `most`: requests of the probe that are in flight at most; `bound`: the option or setting that says so.
    `look_s`: how long to watch the pool before the first request.
    """

    def __init__(self, most: int, *, bound: str = "--probe-most", look_s: float = LOOK_S) -> None:
        self.most = most
        self.may_send = False
        """The pool was quiet for long enough, and the probe has not ended."""
        self.stopped: Stop | None = None
        self.sent = 0
        """Requests that the probe has sent, which the report mentions."""
        self._bound = bound
        self._look_s = look_s
        self._why = ""
        self._began_at: float | None = None
        self._ran = 0.0
        """The most requests that ran in two readings in a row in which nobody waited."""
        self._ran_before: float | None = None
        """What ran in the previous reading, if nobody waited then."""
        self._full = 0
        """Readings in a row with `most` requests of the probe in flight and nobody waiting."""
        self._ceiling: float | None = None
        self._held = 0
        """Readings in a row that left the ceiling about the same."""
        self._endpoints: float | None = None

    def stop(self, why: Stop, detail: str = "") -> None:
        """End the probe. Only the first reason counts."""
        if self.stopped is None:
            self.stopped, self._why, self.may_send = why, detail, False

    def observe(self, sample: PoolSample) -> None:
        """Take in a new reading. It may start the sending, or end the probe."""
        if sample.endpoints is not None:
            self._endpoints = sample.endpoints
        if (named := _named_by(sample)) is not None:
            self.stop(Stop.NAMED, named)
        elif sample.present is None:
            self.stop(Stop.UNCOUNTED)
        elif (why := self._not_quiet(sample, sample.present)) is not None:
            self.stop(Stop.NOT_QUIET, why)
        if self.stopped is not None:
            return
        if self._began_at is None:
            self._began_at = sample.at
        self.may_send = self.may_send or sample.at - self._began_at >= self._look_s
        self._note_what_ran(sample)
        self._follow_ceiling(sample)

    def _not_quiet(self, sample: PoolSample, present: float) -> str | None:
        """Why this is not a quiet hour. `None` if it is one."""
        if self.sent == 0 and sample.waiting >= ONE_WAITS:
            return f"{_requests(sample.waiting)} of others wait"
        others = max(0.0, present - sample.ours)
        runs = present if sample.running is None else sample.running
        if others > QUIET_MOST and others > QUIET_SHARE * runs:
            return f"{_requests(others)} in the pool {'is' if round(others) == 1 else 'are'} not the probe's"
        return None

    def _note_what_ran(self, sample: PoolSample) -> None:
        """Keep the largest number that ran with nobody waiting.

        The queues of the model servers may be those of up to SERVER_LAG_S before, so that requests which have
        just come look as if they ran. What two readings in a row show did run.
        """
        ran = sample.present if sample.running is None else sample.running
        if ran is None or sample.waiting >= ONE_WAITS:
            self._ran_before, self._full = None, 0
            return
        if self._ran_before is not None:
            self._ran = max(self._ran, min(ran, self._ran_before))
        self._ran_before = ran
        self._full = self._full + 1 if sample.ours >= self.most else 0
        if self._full >= READINGS:
            self.stop(Stop.BOUND)

    def _follow_ceiling(self, sample: PoolSample) -> None:
        """End the probe if the limiter's ceiling was confirmed, or stayed the same for READINGS readings."""
        before, self._ceiling = self._ceiling, sample.ceiling
        if sample.ceiling is None:
            self._held = 0
            return
        same = before is not None and abs(sample.ceiling - before) <= SAME * before
        self._held = self._held + 1 if same else 1
        if sample.confirmed > 1 or self._held >= READINGS:
            self.stop(Stop.CEILING)

    def finding(self) -> Finding:
        """What the probe reports."""
        level, what, hint = self._report()
        return Finding(level, WHERE, what, hint)

    def _report(self) -> tuple[Level, str, str]:
        at_least = f"at least {_requests(whole(self._ran))} ran at once with nobody waiting"
        match self.stopped:
            case Stop.CEILING:
                return "ok", self._measured(), ""
            case Stop.BOUND:
                return "ok", f"{at_least} (the bound of {self._bound} was reached)", ""
            case Stop.NAMED:
                return "ok", f"{self._why}, so nothing has to be measured; {self._sent_in_words()}", ""
            case Stop.REFUSED:
                return "warning", f"{self._why}, so the probe stopped; {at_least}", ""
            case Stop.NOT_QUIET:
                what = f"this is not a quiet hour: {self._why}; {self._sent_in_words()}"
                return "warning", what, "an hour with less traffic"
            case Stop.UNCOUNTED:
                what = "the signals do not count requests, so nobody can tell whether this is a quiet hour"
                return "warning", f"{what}; {self._sent_in_words()}", "signals.use"
            case Stop.CLOSED | Stop.FAILED:
                return "failed", f"the probe stopped: {self._why}; {self._sent_in_words()}", ""
            case _:
                return "warning", self._time_is_over(at_least), "--probe-seconds"

    def _measured(self) -> str:
        count = whole(self._ceiling or 0.0)
        endpoints = round(self._endpoints or 0.0)
        if endpoints < 1 or count < endpoints:
            return (
                f"the pool ran {_requests(count)} at once while others waited: set budget.max_sys to {count}"
            )
        on = f"{endpoints} endpoint{'' if endpoints == 1 else 's'}"
        return (
            f"the pool ran {_requests(count)} at once on {on} while others waited: "
            f"set budget.per_endpoint to {count // endpoints}"
        )

    def _time_is_over(self, at_least: str) -> str:
        if self._ceiling is not None:
            ran = _requests(whole(self._ceiling))
            return (
                f"the time was over before a measurement was confirmed: {ran} ran at once while others waited"
            )
        if self.sent == 0:
            why = f": {self._why}" if self._why else ""
            return f"the time was over before the pool could be judged{why}; {_NOTHING}"
        return f"the time was over before anybody had to wait: {at_least}"

    def _sent_in_words(self) -> str:
        return "nothing more was sent" if self.sent else _NOTHING


_NOTHING = "nothing was sent"


def _requests(count: float) -> str:
    return "1 request" if round(count) == 1 else f"{count:.0f} requests"


def _named_by(sample: PoolSample) -> str | None:
    """Who names the capacity. `None` if nobody does; a number that one page suggests is not proven."""
    match sample.per_endpoint_from:
        case "picker":
            return f"the endpoint picker counts with {sample.per_endpoint:g} requests per endpoint"
        case "server":
            return f"the model servers' own pages name {sample.per_endpoint:g} requests per endpoint"
        case None if sample.capacity_known:
            return "a query in the settings tells the capacity"
        case _:
            return None


def counts_of(reading: Reading) -> tuple[float | None, float | None, float]:
    """Requests in the pool, those that run and those that wait, as far as a reading counts them."""
    running, waiting = reading.running, reading.waiting
    if running is None and reading.averages is not None:
        running, waiting = reading.averages[0], max(waiting, reading.averages[1])
    waiting = max(waiting, reading.f_epp * reading.max_sys)
    if reading.exact:
        return reading.load, running, waiting
    return None if running is None else running + waiting, running, waiting


def payload_for(path: str, model: str) -> bytes:
    """The body of each request, in the form that the gateway's default path takes."""
    text = "capacity probe"
    if path.rstrip("/").endswith("/chat/completions"):
        prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    else:
        prompt = {"prompt": text}
    return json.dumps({"model": model, **prompt, "max_tokens": MAX_TOKENS}).encode()


async def measure(settings: Settings, plan: ProbePlan) -> Finding:
    """Run the probe and return what it found. No request of the probe is left when this returns or raises."""
    signals = settings.signals.model_copy(update={"interval_s": INTERVAL_S})
    settings = settings.model_copy(update={"signals": signals})
    # The events are those of a dispatcher's log; the operator of `check` reads the finding instead.
    with diverted(lambda event, fields: None):
        replicas = await _picker_addresses(settings)
        try:
            driver = _Driver(settings, plan)
        except OSError as error:
            return Finding("failed", WHERE, f"the probe cannot start: {error}")
        driver.poller.discovered(replicas)
        await driver.run()
    return driver.ramp.finding()


async def _picker_addresses(settings: Settings) -> tuple[str, ...] | None:
    """The picker's pods, where Kubernetes knows them."""
    if settings.signals.vllm or not ClusterAccess():
        return None
    from dispatcher.check import kubernetes  # its client library takes long to import

    _, replicas = await kubernetes.look_around(settings)()
    return replicas


class _Driver:
    """Keeps as many requests in flight as the limiter allows, until the ramp ends."""

    def __init__(self, settings: Settings, plan: ProbePlan) -> None:
        configured = settings.budget.max_in_flight
        by_setting = configured is not None and configured < plan.most
        most = configured if by_setting and configured is not None else plan.most
        policy = replace(settings.policy(), per_endpoint=None, max_sys=None, max_in_flight=most)
        self.ramp = Ramp(
            most,
            bound="budget.max_in_flight" if by_setting else "--probe-most",
            look_s=min(LOOK_S, plan.seconds / 4),
        )
        self.poller = Poller(sources(settings), settings.signals, policy, self._polled)
        self._gateway = HttpGateway(settings.gateway, subset_header=settings.serving.subset_header)
        self._payload = payload_for(settings.gateway.path, plan.model)
        self._seconds = plan.seconds
        self._limiter = Limiter(policy, at_most(settings.signals.use))
        self._ledger = LoadLedger(horizon_s=policy.max_age_s + 2 * FLUSH_S)
        """The probe's own requests, to tell them from those of others."""
        self._poll: SourcePoll | None = None
        self._read_at = float("-inf")
        """When the newest reading that the ramp has seen was taken."""
        self._awake = asyncio.Event()
        self._ends_at = 0.0

    async def run(self) -> None:
        """Send until the ramp ends, then cancel every request and close all connections."""
        self._ends_at = _now() + self._seconds
        try:
            self._gateway.prepare()
            async with asyncio.TaskGroup() as tasks:
                polling = tasks.create_task(self.poller.run())
                sending: set[asyncio.Task[None]] = set()
                try:
                    async with asyncio.timeout_at(self._ends_at):
                        await self._until_stopped(tasks, sending)
                except TimeoutError:
                    self.ramp.stop(Stop.TIME, self._limiter.allowance(_now()).because)
                finally:
                    self.ramp.may_send = False
                    for task in (*sending, polling):
                        task.cancel()
        finally:
            await self._gateway.aclose()

    async def _until_stopped(self, tasks: asyncio.TaskGroup, sending: set[asyncio.Task[None]]) -> None:
        while True:
            now = _now()
            allowance = self._limiter.allowance(now)
            self._look(allowance)
            if self.ramp.stopped is not None:
                return
            while self.ramp.may_send and self._ledger.own < min(allowance.limit, self.ramp.most):
                self.ramp.sent += 1
                token = f"capacity-probe-{self.ramp.sent}"
                # Counted before the task runs: the loop must not start one too many.
                self._limiter.sent(token, now)
                self._ledger.sent(token, now)
                task = tasks.create_task(self._send(token))
                sending.add(task)
                task.add_done_callback(sending.discard)
            # A reading counts some milliseconds after it came, when `next_check_at` says.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(allowance.next_check_at):
                    await self._awake.wait()
            self._awake.clear()

    def _look(self, allowance: Allowance) -> None:
        """Show the ramp a reading that it has not seen, or that the gate is closed."""
        if allowance.read_at > self._read_at and self._poll is not None:
            self._read_at = allowance.read_at
            self.ramp.observe(self._sample(self._limiter.readings, self._poll))
        match allowance.reason:
            case Reason.NO_ROOM:
                pass  # the first estimate may be less than what others run; it grows with the next readings
            case Reason.STARTING:
                if self._poll is not None and self._poll.worst is not None:
                    self.ramp.stop(Stop.CLOSED, allowance.because)
            case reason if reason.closed:
                self.ramp.stop(Stop.CLOSED, f"{reason}: {allowance.because or reason.meaning}")
            case _:
                pass

    def _sample(self, readings: Sequence[Reading], poll: SourcePoll) -> PoolSample:
        exact = [each for each in readings if each.exact]
        reading = max(exact or readings, key=lambda each: each.closed_at)
        present, running, waiting = counts_of(reading)
        ours = self._ledger.between(reading.opened_at - SERVER_LAG_S, reading.closed_at).hi
        learned, configured = self._limiter.learned, reading.max_sys
        return PoolSample(
            at=reading.closed_at,
            present=present,
            running=running,
            waiting=waiting,
            ours=ours,
            ceiling=None if learned.ceiling is None else learned.ceiling * configured,
            confirmed=learned.confirmed,
            endpoints=None if poll.per_endpoint is None else configured / poll.per_endpoint,
            per_endpoint=poll.per_endpoint,
            per_endpoint_from=poll.per_endpoint_from,
            capacity_known=reading.capacity_known,
        )

    def _polled(self, poll: SourcePoll) -> None:
        self._poll = poll
        self._limiter.poll(poll, _now())
        self._awake.set()

    async def _send(self, token: str) -> None:
        request = Request(id=token, deadline=int(time.time() + self._seconds) + 1, payload=self._payload)
        # The deadline is after the end of the probe, which cancels what still runs then.
        forwarded = await self._gateway.forward(
            request, token=token, deadline=self._ends_at + 1.0, may_send=lambda: self.ramp.may_send
        )
        at = forwarded.ended_at
        self._limiter.answered(token, at, forwarded.opened_s)
        self._ledger.answered(token, at)
        self._judge(forwarded)
        self._awake.set()

    def _judge(self, forwarded: Forwarded) -> None:
        """End the probe, unless the request was answered as it should be."""
        outcome = forwarded.outcome
        if isinstance(outcome, Delivered) and 200 <= outcome.status < 300:
            self._limiter.reached(forwarded.ended_at, forwarded.sent_at)
        elif isinstance(outcome, Overloaded):
            count = self._limiter.in_flight + 1
            self.ramp.stop(Stop.REFUSED, f"{told(outcome)}, with {_requests(count)} of the probe in flight")
        elif (why := _failure(outcome)) is not None:
            self.ramp.stop(Stop.FAILED, why)


def _failure(outcome: Outcome) -> str | None:
    """Why a request was not answered as it should be. `None` if it was only late, or was not sent."""
    match outcome:
        case Delivered(status, body):
            text = " ".join(body[: 4 * _ANSWER_CHARS].decode(errors="replace").split())
            return f"the gateway answered {status}: {shortened(plain(text), _ANSWER_CHARS)}"
        case Failed():
            return told(outcome)
        case Unreachable(why) | Refused(why):
            return why
        case TooLarge():
            return f"an answer is longer than gateway.max_response_bytes ({outcome.limit_bytes})"
        case _:
            return None


def _now() -> float:
    return asyncio.get_running_loop().time()
