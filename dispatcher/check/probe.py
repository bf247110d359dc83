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
from dispatcher.check.ramp import LOOK_S, WHERE, PoolSample, ProbeEnd, Ramp, counts_of
from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    Refused,
    TooLarge,
    Unreachable,
    told,
)
from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.budget import SERVER_LAG_S, Reading, Reason
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.load_ledger import LoadLedger
from dispatcher.core.limit.picker_inference import FLUSH_S
from dispatcher.core.printable import plain, shortened
from dispatcher.core.requests.request import Request
from dispatcher.forward import HttpGateway
from dispatcher.ports import Forwarded
from dispatcher.settings import Settings
from dispatcher.signals.kubernetes.cluster import ClusterAccess
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.readings import at_most
from dispatcher.signals.sources import sources
from dispatcher.telemetry.events import diverted

INTERVAL_S = 1.0
MAX_TOKENS = 64
"""Tokens that each request generates at most, so that it holds its slot for about a second."""
_ANSWER_CHARS = 200


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Options of the probe that the operator chose."""

    model: str
    seconds: float = 60.0
    most: int = 256
    """Largest number of the probe's requests in flight."""


def payload_for(path: str, model: str) -> bytes:
    """Return the body of each request, in the format that the gateway's default path expects."""
    text = "capacity probe"
    if path.rstrip("/").endswith("/chat/completions"):
        prompt: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    else:
        prompt = {"prompt": text}
    return json.dumps({"model": model, **prompt, "max_tokens": MAX_TOKENS}).encode()


async def measure(settings: Settings, plan: ProbePlan) -> Finding:
    """Run the probe and return what it found. No request of the probe is left when this returns or raises."""
    if settings.signals.source == "fixed":
        what = "cannot be measured: signals.source is fixed, so nothing shows what runs and what waits"
        return Finding("failed", WHERE, what)
    # The ramp needs several readings of each load, whatever interval a running dispatcher uses.
    signals = settings.signals.model_copy(update={"interval_s": INTERVAL_S})
    settings = settings.model_copy(update={"signals": signals})
    # The poller emits the events of a dispatcher's log. The operator of `check` gets the finding instead.
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
    """Return the addresses of the picker's pods. `None` if Kubernetes does not know them."""
    if not settings.signals.watches_pool or not ClusterAccess():
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
        # A configured capacity would bound the ramp by the number that the operator wants to find out.
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
        """Requests of the probe, to separate them from those of others in a reading."""
        self._poll: SourcePoll | None = None
        self._read_at = float("-inf")
        """Time of the newest reading that was passed to the ramp."""
        self._awake = asyncio.Event()
        self._ends_at = 0.0

    async def run(self) -> None:
        """Send until the ramp ends, then cancel every request and close all connections."""
        self._ends_at = _now() + self._seconds
        try:
            await self._gateway.prepare()
            async with asyncio.TaskGroup() as tasks:
                polling = tasks.create_task(self.poller.run())
                sending: set[asyncio.Task[None]] = set()
                try:
                    async with asyncio.timeout_at(self._ends_at):
                        await self._until_stopped(tasks, sending)
                except TimeoutError:
                    self.ramp.stop(ProbeEnd.TIME, self._limiter.allowance(_now()).because)
                finally:
                    # `may_send` is asked again right before the first byte of each request, so that a request
                    # that waits for a connection is not sent any more.
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
                # Counted here and not in the task, so that this loop does not start too many.
                self._limiter.sent(token, now)
                self._ledger.sent(token, now)
                task = tasks.create_task(self._send(token))
                sending.add(task)
                task.add_done_callback(sending.discard)
            # A reading counts only some milliseconds after it arrived, at `next_check_at`.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(allowance.next_check_at):
                    await self._awake.wait()
            self._awake.clear()

    def _look(self, allowance: Allowance) -> None:
        """Pass a new reading to the ramp, or stop the ramp if the gate is closed."""
        if allowance.read_at > self._read_at and self._poll is not None:
            self._read_at = allowance.read_at
            self.ramp.observe(self._sample(self._limiter.readings, self._poll))
        match allowance.reason:
            case Reason.NO_ROOM:
                pass  # the first estimate may be less than what others run; it grows with the next readings
            case Reason.STARTING:
                # No poll has succeeded yet. The probe only gives up if one has failed.
                if self._poll is not None and self._poll.worst is not None:
                    self.ramp.stop(ProbeEnd.CLOSED, allowance.because)
            case reason if reason.closed:
                self.ramp.stop(ProbeEnd.CLOSED, f"{reason}: {allowance.because or reason.meaning}")
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
        # The deadline is after the end of the probe, which cancels all requests that still run then.
        forwarded = await self._gateway.forward(
            request, token=token, deadline=self._ends_at + 1.0, may_send=lambda: self.ramp.may_send
        )
        if forwarded.held is not None:
            forwarded.held.free()
        at = forwarded.ended_at
        self._limiter.answered(token, at, forwarded.opened_s)
        self._ledger.answered(token, at)
        self._judge(forwarded)
        self._awake.set()

    def _judge(self, forwarded: Forwarded) -> None:
        """End the probe unless the request was answered with 2xx."""
        outcome = forwarded.outcome
        if isinstance(outcome, Delivered) and 200 <= outcome.status < 300:
            self._limiter.reached(forwarded.ended_at, forwarded.sent_at)
        elif isinstance(outcome, Overloaded | Evicted):
            self.ramp.stop(
                ProbeEnd.REFUSED,
                f"{told(outcome)}, with {self._limiter.in_flight + 1} of the probe in flight",
            )
        elif (why := _failure(outcome)) is not None:
            self.ramp.stop(ProbeEnd.FAILED, why)


def _failure(outcome: Outcome) -> str | None:
    """Return why a request failed. `None` if it was only late, or was not sent."""
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
