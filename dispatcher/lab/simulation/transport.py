"""Transport between dispatchers and the simulated pool on a virtual event loop.

The transport advances the world to the time of the loop whenever the state of the world matters, and delivers
answers to the senders. `SimulatedGateway` is the transport as the dispatch loop sees it.

Most events of the world are arrivals and ends of realtime requests, which do not need a timer on the loop:
when a batch request starts, the time of its answer is known. The transport therefore sets timers for all
events of the world only while a batch request waits in the pool, if arriving realtime requests evict batch
requests, or if `on_change` is given.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from math import inf, isnan

from dispatcher.gateway.contract import AttemptResult
from dispatcher.lab.simulation import sliced_requests
from dispatcher.lab.simulation.world import Arrival, Job, World
from dispatcher.requests.outcomes.outcome import (
    EVICTED_REASON,
    Delivered,
    Evicted,
    Outcome,
    Overloaded,
    TooLate,
    Unreachable,
    Unsent,
)
from dispatcher.requests.request import Request

SEND_S = 0.002
ANSWER_S = 0.003


class JobEnd(Enum):
    """Kind of end of a request."""

    __hash__ = object.__hash__  # identity is enough; the hash of Enum hashes the name each time

    ANSWERED = "answered"
    REFUSED = "refused"
    """Answered with 429 `rejected-saturated`."""
    UNREACHABLE = "unreachable"
    CUT = "cut"
    """The connection was lost while the request was running."""
    EVICTED = "evicted"
    """Answered with 429 `evicted`: the request was stopped for a realtime request."""


class SimulatedTransport:
    """Delivers requests to the world, and answers to the senders.

    It must be the only caller that advances the world, and it replaces `on_start`, `on_finish`, `on_dropped`
    and `on_evicted` of the world. Call `advance_world` before reading its state.

    `admit_s` is the time that the gateway takes to admit each batch request, one after the other, which
    spreads a burst; 0 admits requests that arrive together at once. `on_realtime` is called for each answered
    realtime request, in order but possibly later. `on_change` is called at once when the world changes by
    itself.
    """

    def __init__(
        self,
        world: World,
        *,
        send_s: float = SEND_S,
        answer_s: float = ANSWER_S,
        admit_s: float = 0.0,
        on_realtime: Callable[[Job], None] = lambda job: None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.world = world
        self.in_transit = 0
        """Number of requests that were sent and have not arrived yet."""
        self.sent = 0
        self.ended: Counter[JobEnd] = Counter()
        """Number of batch requests by kind of end at the pool. Requests cancelled by their sender are not
        counted, and of a request in slices only the answer to the last one is."""
        self.tokens = 0
        """Tokens of answered batch requests."""
        self.answer_s = answer_s
        self._send_s, self._admit_s = send_s, admit_s
        self._gateway_free_at = -inf
        """Time at which the gateway has admitted all requests that arrived."""
        self.round_trip_s = send_s + answer_s
        self._on_realtime, self._on_change = on_realtime, on_change
        self._loop = asyncio.get_running_loop()
        self._end_callbacks: dict[Job, Callable[[JobEnd], None]] = {}
        self._sent_last: tuple[float, list[Job]] = (-inf, [])
        """Requests sent most recently, all at the same time. They arrive together, with one timer."""
        self._answers: dict[float, list[Job]] = {}
        """Running requests by the time of their end. Answers with the same time arrive together."""
        self._wake_at = inf
        world.on_start, world.on_finish, world.on_dropped = (
            self._schedule_answer,
            self._record_finish,
            self._record_drop,
        )
        world.on_evicted = partial(self._send_end, end=JobEnd.EVICTED)
        self._schedule_wake()

    def advance_world(self) -> float:
        """Advance the world to the time of the loop, and return that time."""
        self.world.advance(self._loop.time())
        return self.world.now

    def send_job(self, job: Job, on_end: Callable[[JobEnd], None]) -> None:
        """Send a request. `on_end` is called once with the kind of end, unless the sender cancels the request
        before."""
        # A job stands for several identical requests.
        self.sent += job.request_count
        self.in_transit += job.request_count
        self._end_callbacks[job] = on_end
        at, jobs = self._sent_last
        if at == (now := self._loop.time()) and jobs:
            jobs.append(job)
        else:
            jobs = [job]
            self._sent_last = now, jobs
            self._loop.call_at(
                now + self._send_s, self._admit_in_order if self._admit_s else self._deliver_jobs, jobs
            )

    def cancel_job(self, job: Job) -> None:
        """Cancel a request: the sender closes the connection, and the request stops. No effect if it has
        ended."""
        if self._end_callbacks.pop(job, None) is not None:
            # A job in transit is not in the world yet: `_deliver_jobs` skips it because of this mark.
            self.world.remove_job(job, self._loop.time())
            job.is_gone = True
            self._schedule_wake()

    def _admit_in_order(self, jobs: list[Job]) -> None:
        """Admit requests one after the other."""
        now = self._loop.time()
        for job in jobs:
            self._gateway_free_at = max(now, self._gateway_free_at) + self._admit_s
            self._loop.call_at(self._gateway_free_at, self._deliver_jobs, [job])
        jobs.clear()

    def _deliver_jobs(self, jobs: list[Job]) -> None:
        self.in_transit -= sum([job.request_count for job in jobs])
        self.world.advance(self._loop.time())
        for job in jobs:
            if job.is_gone:  # cancelled in transit
                continue
            arrival = self.world.admit_job(job)
            if arrival is not Arrival.ACCEPTED:
                self._send_end(job, JobEnd.REFUSED if arrival is Arrival.REFUSED else JobEnd.UNREACHABLE)
        jobs.clear()
        self._schedule_wake()

    def _schedule_answer(self, job: Job, ends_at: float) -> None:
        jobs = self._answers.get(ends_at)
        if jobs is not None:
            jobs.append(job)
        else:
            self._answers[ends_at] = [job]
            self._loop.call_at(ends_at + self.answer_s, self._deliver_answers, ends_at)

    def _deliver_answers(self, at: float) -> None:
        """Deliver the answers of requests that ended at this time, except those that were cancelled or
        dropped."""
        self.world.advance(at)
        for job in self._answers.pop(at):
            if not job.is_gone and job.finished_at == at:  # or it was preempted, and ends later
                self._deliver_end(job, JobEnd.ANSWERED)

    def _record_finish(self, job: Job) -> None:
        if job.is_batch:
            if job.is_last:
                self.tokens += (job.earlier_tokens + job.tokens) * job.request_count
                self.ended[JobEnd.ANSWERED] += job.request_count
        else:
            self._on_realtime(job)

    def _record_drop(self, job: Job) -> None:
        if job.is_batch:
            self._send_end(job, JobEnd.CUT)

    def _send_end(self, job: Job, end: JobEnd) -> None:
        self.ended[end] += job.request_count
        self._loop.call_at(self.world.now + self.answer_s, self._deliver_end, job, end)

    def _deliver_end(self, job: Job, end: JobEnd) -> None:
        on_end = self._end_callbacks.pop(job, None)
        if on_end is not None:
            on_end(end)

    def _schedule_wake(self) -> None:
        """Set a timer for the next event of the world, if it matters."""
        world = self.world
        at = (
            world.next_change_at()
            if self._on_change is None
            and not world.has_batch_waiting
            and not world.evicts
            and world.kv_per_pod == inf
            else world.next_event_at()
        )
        # Later timers are not cancelled; they find nothing to do.
        if at < self._wake_at:
            self._wake_at = at
            self._loop.call_at(at, self._handle_wake, at)

    def _handle_wake(self, at: float) -> None:
        if at >= self._wake_at:
            self._wake_at = inf
        self.world.advance(at)
        if self._on_change is not None:
            self._on_change()
        self._schedule_wake()


class SimulatedGateway:
    """Gateway behind a simulated transport. Implements `ports.Gateway`; several dispatchers may share it.

    `make_job` turns a request into a job of the world. Deadlines after `ends_at`, when the simulation has
    ended, are ignored. With `writes_text`, answers have the text of `sliced_requests`, and with
    `writes_usage` they have their number of tokens; otherwise nobody reads them.
    """

    def __init__(
        self,
        transport: SimulatedTransport,
        make_job: Callable[[Request], Job],
        ends_at: float = inf,
        *,
        writes_text: bool = False,
        writes_usage: bool = False,
    ) -> None:
        self.transport = transport
        self._make_job = make_job
        self._writes_text = writes_text
        self._writes_usage = writes_usage
        self._ends_at = ends_at
        self._jobs: dict[str, Job] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> AttemptResult:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        # The lease may have become invalid since the request was admitted.
        if not may_send():
            return AttemptResult(Unsent(), sent_at, sent_at)
        job = self._jobs[token] = self._make_job(request)
        ended: asyncio.Future[JobEnd | None] = loop.create_future()
        self.transport.send_job(job, ended.set_result)
        expiry = loop.call_at(deadline, _expire_wait, ended) if deadline <= self._ends_at else None
        try:
            end = await ended
            if end is JobEnd.ANSWERED and self._writes_text:
                outcome: Outcome = Delivered(200, sliced_requests.build_answer(request, job))
            elif end is JobEnd.ANSWERED and self._writes_usage:
                outcome = Delivered(200, b'{"usage":{"completion_tokens":%d}}' % job.tokens)
            else:
                outcome = _make_outcome(end, request)
        finally:
            if expiry is not None:
                expiry.cancel()
            self.transport.cancel_job(job)
            del self._jobs[token]
            if request.received is not None:
                received_until = loop.time() - self.transport.answer_s
                request.received.extend(sliced_requests.build_events(request, job, received_until))
        # A request that never arrived was not sent, as with a refused connection.
        never_there = isinstance(outcome, Unreachable) and isnan(job.arrived_at)
        ended_at = loop.time()
        if never_there:
            return AttemptResult(outcome, ended_at, ended_at)
        return AttemptResult(outcome, sent_at, ended_at, self.transport.round_trip_s)

    def get_connected_at(self, token: str) -> float | None:
        job = self._jobs.get(token)
        return None if job is None or isnan(job.arrived_at) or job.is_gone else job.arrived_at

    def resize_connection_pool(self, max_requests: int) -> None:
        """Do nothing: there are no connections."""


def _expire_wait(waited_for: asyncio.Future[JobEnd | None]) -> None:
    """End the wait of a request that has no answer by its deadline."""
    if not waited_for.done():
        waited_for.set_result(None)


def _make_outcome(end: JobEnd | None, request: Request) -> Outcome:
    match end:
        case JobEnd.ANSWERED:  # first, since it is the most frequent
            return Delivered(200, b'{"id":"%s"}' % request.id.encode())
        case None:
            return TooLate()
        case JobEnd.REFUSED:
            return Overloaded(429, "rejected-saturated", is_out_of_capacity=True)
        case JobEnd.EVICTED:
            return Evicted(429, EVICTED_REASON)
        case JobEnd.UNREACHABLE:
            return Unreachable("connection refused")
        case JobEnd.CUT:
            return Unreachable("the gateway went away with the request")
