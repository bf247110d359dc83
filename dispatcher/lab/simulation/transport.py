"""The way between a dispatcher and the simulated pool, on the running loop: requests and answers travel.

The loop is a virtual one (`virtual.run`): the road brings the world up to the loop's time where it has to be
looked at, and carries what happens there back to whoever sent the request. `RoadGateway` is that road as the
dispatch loop knows it.

What happens in the world by itself is mostly realtime's coming and going, and then nobody need wake for it:
when a batch request starts it is known when its answer will be back. So the road wakes at each change of the
world only while a batch request waits there, or somebody wants to hear of every change.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from enum import Enum
from math import inf, isnan

from dispatcher.core.gateway.outcome import Delivered, Outcome, Overloaded, TooLate, Unreachable, Unsent
from dispatcher.core.requests.request import Request
from dispatcher.lab.simulation.world import Arrival, Job, World
from dispatcher.ports import Forwarded

SEND_S = 0.002
ANSWER_S = 0.003


class End(Enum):
    """How a request came back."""

    __hash__ = object.__hash__  # each is there once; Enum's own hashes its name, each time

    ANSWERED = "answered"
    REFUSED = "refused"
    """429 `rejected-saturated`."""
    UNREACHABLE = "unreachable"
    CUT = "cut"
    """The connection broke while it ran."""


class Road:
    """Takes requests to the world, and answers back. It drives the world: nobody else advances it into the
    future, and its `on_start`, `on_finish` and `on_gone` are taken. Ask for `now` before you look at it.

    `admit_s`: the gateway takes this long to admit each batch request, one after the other, so that a burst
    is spread out; 0: it admits all that arrive together at once. `on_realtime`: a realtime request was
    answered; told some time after it was, in the order in which they were. `on_change`: the world has
    changed by itself, told at once.
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
        self.travelling = 0
        """Requests that were sent and have not arrived."""
        self.sent = 0
        self.ended: Counter[End] = Counter()
        """Batch requests by how they ended at the pool; those whose sender left are in none."""
        self.tokens = 0
        """Of batch requests that were answered."""
        self._send_s, self._answer_s, self._admit_s = send_s, answer_s, admit_s
        self._admitted_at = -inf
        """When the gateway is done with the newest request that it was given."""
        self.round_trip_s = send_s + answer_s
        self._on_realtime, self._on_change = on_realtime, on_change
        self._loop = asyncio.get_running_loop()
        self._backs: dict[Job, Callable[[End], None]] = {}
        self._arriving: tuple[float, list[Job]] = (-inf, [])
        """Those that were sent last, at one time: they arrive together."""
        self._answers: dict[float, list[Job]] = {}
        """Those that run, by when they end: their answers are back together."""
        self._wakes_at = inf
        world.on_start, world.on_finish, world.on_gone = self._started, self._finished, self._gone
        self._wind()

    def now(self) -> float:
        """The world's time, brought up to the loop's."""
        self.world.advance(self._loop.time())
        return self.world.now

    def send(self, job: Job, back: Callable[[End], None]) -> None:
        """Send a request; `back` hears how it ended, once, unless the sender leaves before."""
        self.sent += job.grain
        self.travelling += job.grain
        self._backs[job] = back
        at, jobs = self._arriving
        if at == (now := self._loop.time()) and jobs:
            jobs.append(job)
        else:
            jobs = [job]
            self._arriving = now, jobs
            self._loop.call_at(now + self._send_s, self._queue_up if self._admit_s else self._arrive, jobs)

    def leave(self, job: Job) -> None:
        """The sender closes the connection: the request stops, wherever it is. Nothing if it has ended."""
        if self._backs.pop(job, None) is not None:
            self.world.leave(job, self._loop.time())
            job.gone = True
            self._wind()

    def _queue_up(self, jobs: list[Job]) -> None:
        """The gateway admits one request after the other."""
        now = self._loop.time()
        for job in jobs:
            self._admitted_at = max(now, self._admitted_at) + self._admit_s
            self._loop.call_at(self._admitted_at, self._arrive, [job])
        jobs.clear()

    def _arrive(self, jobs: list[Job]) -> None:
        self.travelling -= sum([job.grain for job in jobs])
        self.world.advance(self._loop.time())
        for job in jobs:
            if job.gone:  # its sender left while it was on the way
                continue
            arrival = self.world.admit(job)
            if arrival is not Arrival.ACCEPTED:
                self._answer(job, End.REFUSED if arrival is Arrival.REFUSED else End.UNREACHABLE)
        jobs.clear()
        self._wind()

    def _started(self, job: Job, ends_at: float) -> None:
        jobs = self._answers.get(ends_at)
        if jobs is not None:
            jobs.append(job)
        else:
            self._answers[ends_at] = [job]
            self._loop.call_at(ends_at + self._answer_s, self._answered, ends_at)

    def _answered(self, at: float) -> None:
        """The answers to the requests that ended at that time are back, of those that did."""
        self.world.advance(at)
        for job in self._answers.pop(at):
            if not job.gone:
                self._arrived_back(job, End.ANSWERED)

    def _finished(self, job: Job) -> None:
        if job.batch:
            self.tokens += job.tokens * job.grain
            self.ended[End.ANSWERED] += job.grain
        else:
            self._on_realtime(job)

    def _gone(self, job: Job) -> None:
        if job.batch:
            self._answer(job, End.CUT)

    def _answer(self, job: Job, how: End) -> None:
        self.ended[how] += job.grain
        self._loop.call_at(self.world.now + self._answer_s, self._arrived_back, job, how)

    def _arrived_back(self, job: Job, how: End) -> None:
        back = self._backs.pop(job, None)
        if back is not None:
            back(how)

    def _wind(self) -> None:
        """Wake when the world next changes by itself, if that is of use to anybody."""
        world = self.world
        at = (
            world.next_change_at()
            if self._on_change is None and not world.batch_waiting
            else world.next_event_at()
        )
        if at < self._wakes_at:
            self._wakes_at = at
            self._loop.call_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at >= self._wakes_at:
            self._wakes_at = inf
        self.world.advance(at)
        if self._on_change is not None:
            self._on_change()
        self._wind()


class RoadGateway:
    """The gateway at the end of a road; implements `ports.Gateway`. Several dispatchers may share it.

    `job_of`: the work that a request is. `until`: nobody looks any more, so a deadline after that is none.
    """

    def __init__(self, road: Road, job_of: Callable[[Request], Job], until: float = inf) -> None:
        self.road = road
        self._job_of = job_of
        self._until = until
        self._jobs: dict[str, Job] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> Forwarded:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        if not may_send():
            return Forwarded(Unsent(), sent_at, sent_at)
        job = self._jobs[token] = self._job_of(request)
        ended: asyncio.Future[End | None] = loop.create_future()
        self.road.send(job, ended.set_result)
        too_late = loop.call_at(deadline, _ends, ended) if deadline <= self._until else None
        try:
            outcome = _outcome(await ended, request)
        finally:
            if too_late is not None:
                too_late.cancel()
            self.road.leave(job)
            del self._jobs[token]
        never_there = isinstance(outcome, Unreachable) and isnan(job.arrived_at)
        ended_at = loop.time()
        if never_there:
            return Forwarded(outcome, ended_at, ended_at)
        return Forwarded(outcome, sent_at, ended_at, self.road.round_trip_s)

    def connected(self, token: str) -> float | None:
        job = self._jobs.get(token)
        return None if job is None or isnan(job.arrived_at) or job.gone else job.arrived_at

    def resize(self, limit: int) -> None:
        """A road has no connections to keep."""


def _ends(waited_for: asyncio.Future[End | None]) -> None:
    """Nobody waits any longer."""
    if not waited_for.done():
        waited_for.set_result(None)


def _outcome(end: End | None, request: Request) -> Outcome:
    match end:
        case End.ANSWERED:  # first, for most are
            return Delivered(200, b'{"id":"%s"}' % request.id.encode())
        case None:
            return TooLate()
        case End.REFUSED:
            return Overloaded(429, "rejected-saturated", capacity=True)
        case End.UNREACHABLE:
            return Unreachable("connection refused")
        case End.CUT:
            return Unreachable("the gateway went away with the request")
