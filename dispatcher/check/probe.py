"""Measure how many requests the pool runs at once: a short and bounded ramp of real requests at a quiet hour.

The probe uses the parts of a running dispatcher: the poller reads the signals, the limiter says how many
requests may be in flight, and the gateway adapter sends them. Capacities from the settings are left out,
because the capacity is what the probe measures. `Ramp` decides when to send, when to stop and what to report.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from dispatcher.check.finding import Finding
from dispatcher.check.ramp import OBSERVE_S, WHERE, PoolSample, ProbeEnd, Ramp, extract_counts
from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.gateway.contract import AttemptResult
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import MAX_SERVER_METRICS_AGE_S, Reading, Reason
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import LoadLedger
from dispatcher.limit.picker_inference import FLUSH_S
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    Unreachable,
    describe_outcome,
)
from dispatcher.requests.request import Request
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.readings import list_possible_signals
from dispatcher.signals.sources import build_sources
from dispatcher.telemetry.events import divert_events

POLL_INTERVAL_S = 1.0
MAX_TOKENS = 64
"""Tokens that each request generates at most, so that it holds its slot for about a second."""
_ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Options of the probe that the operator chose."""

    model: str
    duration_s: float = 60.0
    max_in_flight: int = 256
    """Largest number of the probe's requests in flight."""


def build_payload(path: str, model: str) -> bytes:
    """Return the body of each request, in the format that the gateway's default path expects."""
    text = "capacity probe"
    if path.rstrip("/").endswith("/chat/completions"):
        prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    else:
        prompt = {"prompt": text}
    return json.dumps({"model": model, **prompt, "max_tokens": MAX_TOKENS}).encode()


async def measure_capacity(settings: Settings, plan: ProbePlan) -> Finding:
    """Run the probe and return what it found. No request of the probe is left when this returns or raises."""
    if settings.signals.source == "fixed":
        what = "cannot be measured: signals.source is fixed, so nothing shows what runs and what waits"
        return Finding("failed", WHERE, what)
    # The ramp needs several readings of each load, whatever interval a running dispatcher uses.
    signals = settings.signals.model_copy(update={"interval_s": POLL_INTERVAL_S})
    settings = settings.model_copy(update={"signals": signals})
    # The poller emits the events of a dispatcher's log. The operator of `check` gets the finding instead.
    with divert_events(lambda event, fields: None):
        replicas = await _find_picker_addresses(settings)
        try:
            driver = _ProbeDriver(settings, plan)
        except OSError as error:
            return Finding("failed", WHERE, f"the probe cannot start: {error}")
        driver.poller.update_from_watch(replicas)
        await driver.run()
    return driver.ramp.build_finding()


async def _find_picker_addresses(settings: Settings) -> tuple[str, ...] | None:
    """Return the addresses of the picker's pods. `None` if Kubernetes does not know them."""
    if not settings.signals.watches_pool or not ClusterAccess():
        return None
    from dispatcher.check import kubernetes  # its client library takes long to import

    _, replicas = await kubernetes.build_lookup(settings)()
    return replicas


class _ProbeDriver:
    """Keeps as many requests in flight as the limiter allows, until the ramp ends."""

    def __init__(self, settings: Settings, plan: ProbePlan) -> None:
        configured = settings.budget.max_in_flight
        by_setting = configured is not None and configured < plan.max_in_flight
        max_in_flight = configured if by_setting and configured is not None else plan.max_in_flight
        # A configured capacity would bound the ramp by the number that the operator wants to find out.
        policy = replace(
            settings.limit_policy(), per_endpoint=None, max_sys=None, max_in_flight=max_in_flight
        )
        self.ramp = Ramp(
            max_in_flight,
            bound="budget.max_in_flight" if by_setting else "--probe-most",
            observe_s=min(OBSERVE_S, plan.duration_s / 4),
        )
        self.poller = Poller(build_sources(settings), settings.signals, policy, self._record_poll)
        self._gateway = HttpGateway(settings.gateway, subset_header=settings.endpoints_header)
        self._payload = build_payload(settings.gateway.path, plan.model)
        self._duration_s = plan.duration_s
        self._limiter = Limiter(policy, list_possible_signals(settings.signals.use))
        self._ledger = LoadLedger(horizon_s=policy.max_age_s + 2 * FLUSH_S)
        """Requests of the probe, to separate them from those of others in a reading."""
        self._poll: SourcePoll | None = None
        self._read_at = float("-inf")
        """Time of the newest reading that was passed to the ramp."""
        self._wake_event = asyncio.Event()
        self._ends_at = 0.0

    async def run(self) -> None:
        """Send until the ramp ends, then cancel every request and close all connections."""
        self._ends_at = _get_loop_time() + self._duration_s
        try:
            await self._gateway.prepare()
            async with asyncio.TaskGroup() as tasks:
                polling = tasks.create_task(self.poller.run())
                sending: set[asyncio.Task[None]] = set()
                try:
                    async with asyncio.timeout_at(self._ends_at):
                        await self._send_until_stopped(tasks, sending)
                except TimeoutError:
                    self.ramp.stop(ProbeEnd.TIME, self._limiter.get_allowance(_get_loop_time()).detail)
                finally:
                    # `may_send` is asked again right before the first byte of each request, so that a request
                    # that waits for a connection is not sent any more.
                    self.ramp.may_send = False
                    for task in (*sending, polling):
                        task.cancel()
        finally:
            await self._gateway.aclose()

    async def _send_until_stopped(self, tasks: asyncio.TaskGroup, sending: set[asyncio.Task[None]]) -> None:
        while True:
            now = _get_loop_time()
            allowance = self._limiter.get_allowance(now)
            self._update_ramp(allowance)
            if self.ramp.end is not None:
                return
            while self.ramp.may_send and self._ledger.own_units < min(
                allowance.limit, self.ramp.max_in_flight
            ):
                self.ramp.sent_count += 1
                token = f"capacity-probe-{self.ramp.sent_count}"
                # Counted here and not in the task, so that this loop does not start too many.
                self._limiter.record_send(token, now)
                self._ledger.record_send(token, now)
                task = tasks.create_task(self._send_request(token))
                sending.add(task)
                task.add_done_callback(sending.discard)
            # A reading counts only some milliseconds after it arrived, at `next_check_at`.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(allowance.next_check_at):
                    await self._wake_event.wait()
            self._wake_event.clear()

    def _update_ramp(self, allowance: Allowance) -> None:
        """Pass a new reading to the ramp, or stop the ramp if the gate is closed."""
        if allowance.read_at > self._read_at and self._poll is not None:
            self._read_at = allowance.read_at
            self.ramp.observe_sample(self._build_sample(self._limiter.newest_readings, self._poll))
        match allowance.reason:
            case Reason.NO_ROOM:
                pass  # the first estimate may be less than what others run; it grows with the next readings
            case Reason.STARTING:
                # No poll has succeeded yet. The probe only gives up if one has failed.
                if self._poll is not None and self._poll.worst_failure is not None:
                    self.ramp.stop(ProbeEnd.CLOSED, allowance.detail)
            case reason if reason.is_closed:
                self.ramp.stop(ProbeEnd.CLOSED, f"{reason}: {allowance.detail or reason.meaning}")
            case _:
                pass

    def _build_sample(self, readings: Sequence[Reading], poll: SourcePoll) -> PoolSample:
        exact = [each for each in readings if each.is_request_count]
        reading = max(exact or readings, key=lambda each: each.closed_at)
        present, running, waiting = extract_counts(reading)
        ours = self._ledger.bounds_between(reading.opened_at - MAX_SERVER_METRICS_AGE_S, reading.closed_at).hi
        learned, configured = self._limiter.capacity_estimate, reading.max_sys
        return PoolSample(
            sampled_at=reading.closed_at,
            present=present,
            running=running,
            waiting=waiting,
            max_probe_requests=ours,
            ceiling=None if learned.ceiling is None else learned.ceiling * configured,
            confirmations=learned.confirmations,
            endpoints=None if poll.per_endpoint is None else configured / poll.per_endpoint,
            per_endpoint=poll.per_endpoint,
            per_endpoint_source=poll.per_endpoint_source,
            is_capacity_known=reading.is_capacity_known,
        )

    def _record_poll(self, poll: SourcePoll) -> None:
        self._poll = poll
        self._limiter.apply_poll(poll, _get_loop_time())
        self._wake_event.set()

    async def _send_request(self, token: str) -> None:
        request = Request(id=token, deadline=int(time.time() + self._duration_s) + 1, payload=self._payload)
        # The deadline is after the end of the probe, which cancels all requests that still run then.
        forwarded = await self._gateway.forward(
            request, token=token, deadline=self._ends_at + 1.0, may_send=lambda: self.ramp.may_send
        )
        if forwarded.memory is not None:
            forwarded.memory.free_share()
        at = forwarded.ended_at
        self._limiter.record_answer(token, at, forwarded.connect_s)
        self._ledger.record_answer(token, at)
        self._check_outcome(forwarded)
        self._wake_event.set()

    def _check_outcome(self, forwarded: AttemptResult) -> None:
        """End the probe unless the request was answered with 2xx."""
        outcome = forwarded.outcome
        if isinstance(outcome, Delivered) and 200 <= outcome.status < 300:
            self._limiter.record_gateway_answer(forwarded.ended_at, forwarded.sent_at)
        elif isinstance(outcome, Overloaded | Evicted):
            self.ramp.stop(
                ProbeEnd.REFUSED,
                f"{describe_outcome(outcome)}, with {self._limiter.in_flight + 1} of the probe in flight",
            )
        elif (why := _describe_failure(outcome)) is not None:
            self.ramp.stop(ProbeEnd.FAILED, why)


def _describe_failure(outcome: Outcome) -> str | None:
    """Return why a request failed. `None` if it was only late, or was not sent."""
    match outcome:
        case Delivered(status, body):
            text = " ".join(body[: 4 * _ANSWER_CHARS].decode(errors="replace").split())
            return f"the gateway answered {status}: {truncate_text(escape_unprintable(text), _ANSWER_CHARS)}"
        case Failed():
            return describe_outcome(outcome)
        case Unreachable(why) | Refused(why):
            return why
        case TooLarge():
            return f"an answer is longer than gateway.max_response_bytes ({outcome.limit_bytes})"
        case _:
            return None


def _get_loop_time() -> float:
    return asyncio.get_running_loop().time()
