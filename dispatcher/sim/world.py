"""An inference pool as a state machine: requests arrive, wait, run, finish; nobody's clock is asked.

    M slots; above M requests wait, realtime before batch. A request that starts as one of `running` holds
    its slot for work × f seconds, f = 1 + (running − 1) / (M − 1): a full pool is half as fast as an empty
    one. work = 0.03 + 0.00025 × context tokens + 0.012 × generated tokens.

The world does not know who drives it. A driver tells it what arrives (`arrive`), moves it on (`advance`, no
further than `next_event_at` if it wants to react to everything), and looks at it (`observe`); the world
calls back when a request leaves. Realtime traffic, changes of capacity and gateway outages are given at the
start and are its own events. The same input gives the same history, to the last bit.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, nan
from operator import itemgetter
from random import Random

BATCH_CONTEXT = 500
"""Context tokens of a batch request."""
TOKEN_S = 0.012
"""What each generated token takes in a pool that is otherwise empty."""


def work_s(context: int, generated: int) -> float:
    """How long a request of so many tokens runs in a pool that is otherwise empty."""
    return 0.03 + 0.00025 * context + TOKEN_S * generated


def slowdown(running: int, slots: int) -> float:
    """f: how much slower a request runs that starts as one of `running`; from 1, in an empty pool, to 2."""
    return 1.0 + (running - 1) / (slots - 1) if slots > 1 else 1.0


@dataclass(slots=True, eq=False)
class Job:
    """A request as the pool sees it."""

    work_s: float
    """How long it runs in an empty pool."""
    tokens: int
    batch: bool
    arrived_at: float = nan
    started_at: float = nan
    """NaN while it waits."""
    finished_at: float = nan
    """When it left: answered, or gone before."""
    gone: bool = False
    """It left without an answer: its client or the gateway closed the connection."""


def batch_tokens(draws: Random) -> int:
    """How many tokens the next batch request generates."""
    return max(8, round(draws.lognormvariate(4.8, 0.6)))


def batch_job(generated: int) -> Job:
    """A batch request that generates so many tokens."""
    return Job(work_s(BATCH_CONTEXT, generated), generated, batch=True)


class Arrival(Enum):
    """What the gateway does with a request that reaches it."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """429 `rejected-saturated`: the EPP's queue is full."""
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool at one moment."""

    at: float
    slots: int
    realtime_running: int
    realtime_waiting: int
    batch_running: int
    batch_waiting: int

    @property
    def running(self) -> int:
        return self.realtime_running + self.batch_running

    @property
    def waiting(self) -> int:
        return self.realtime_waiting + self.batch_waiting


@dataclass(slots=True)
class Overshoot:
    """Requests in the system above (1 − B) × M, over time."""

    request_seconds: float = 0.0
    worst: float = 0.0

    def mean(self, seconds: float) -> float:
        return self.request_seconds / seconds if seconds > 0 else 0.0


class World:
    """The pool and the gateway before it.

    `realtime`: (arrival time, job), ascending. `slots_at`: (time, slots) changes of capacity; what runs on
    slots that go away runs on to its end. `outages`: (from, until) in which the gateway accepts nobody; at
    its start it drops every connection, and the pool stops what was running for them.
    """

    def __init__(
        self,
        slots: int,
        *,
        reserve: float = 0.05,
        queue_limit: int | None = None,
        realtime: Iterable[tuple[float, Job]] = (),
        slots_at: Sequence[tuple[float, int]] = (),
        outages: Sequence[tuple[float, float]] = (),
        on_finish: Callable[[Job], None] = lambda job: None,
        on_gone: Callable[[Job], None] = lambda job: None,
        on_slots: Callable[[int], None] = lambda slots: None,
    ) -> None:
        self.now = 0.0
        self.slots = slots
        self.overshoot = Overshoot()
        self.realtime_refused = 0
        self.realtime_unreachable = 0
        self._reserve = reserve
        self._queue_limit = inf if queue_limit is None else queue_limit
        self.on_finish, self.on_gone = on_finish, on_gone
        self._on_slots = on_slots
        self._realtime = iter(realtime)
        self._next_realtime = next(self._realtime, None)
        self._changes: list[tuple[float, Callable[[], None]]] = [
            *((at, self._becomes(to)) for at, to in slots_at),
            *((start, self._goes_down) for start, _ in outages),
            *((end, self._comes_up) for _, end in outages),
        ]
        self._changes.sort(key=itemgetter(0), reverse=True)
        self.down = False
        """Whether the gateway is away."""
        self._running = {False: 0, True: 0}  # by Job.batch
        self._waiting: dict[bool, deque[Job]] = {False: deque(), True: deque()}
        self._ends: list[tuple[float, int, Job]] = []
        self._starts = 0
        self._room = slots * (1.0 - reserve)

    def __repr__(self) -> str:
        return f"<World t={self.now:.3f} {self.observe()}>"

    @property
    def in_system(self) -> int:
        return self._running[False] + self._running[True] + self.waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting[False]) + len(self._waiting[True])

    @property
    def realtime_waiting(self) -> Iterable[Job]:
        return self._waiting[False]

    def observe(self) -> PoolState:
        """The pool as it is at `now`; a driver that wants another moment advances to it first."""
        return PoolState(
            at=self.now,
            slots=self.slots,
            realtime_running=self._running[False],
            realtime_waiting=len(self._waiting[False]),
            batch_running=self._running[True],
            batch_waiting=len(self._waiting[True]),
        )

    def next_event_at(self) -> float:
        """When the world next changes by itself; infinite when it has nothing to do."""
        at = self._ends[0][0] if self._ends else inf
        if self._next_realtime is not None and self._next_realtime[0] < at:
            at = self._next_realtime[0]
        if self._changes and self._changes[-1][0] < at:
            at = self._changes[-1][0]
        return at

    def advance(self, to: float) -> None:
        """Live through everything that happens until `to`, and be there."""
        while (at := self.next_event_at()) <= to:
            self._pass_time(at)
            if self._changes and self._changes[-1][0] == at:
                self._changes.pop()[1]()
            elif self._ends and self._ends[0][0] == at:
                self._finish(heapq.heappop(self._ends)[2])
            elif self._next_realtime is not None:
                job = self._next_realtime[1]
                self._next_realtime = next(self._realtime, None)
                self._realtime_arrives(job)
        self._pass_time(to)

    def arrive(self, job: Job, now: float) -> Arrival:
        """A request reaches the gateway."""
        self.advance(now)
        return self._admit(job)

    def leave(self, job: Job, now: float) -> None:
        """The client closes the connection: the request stops running, or waiting. Nothing if it has left."""
        self.advance(now)
        if job.finished_at == job.finished_at or job.arrived_at != job.arrived_at:  # NaN: not yet
            return
        job.finished_at, job.gone = now, True
        if job.started_at == job.started_at:
            self._running[job.batch] -= 1  # its entry among the ends is skipped when it comes up
            self._start_waiting()
        else:
            self._waiting[job.batch].remove(job)

    def _admit(self, job: Job) -> Arrival:
        if self.down:
            return Arrival.UNREACHABLE
        if self._running[False] + self._running[True] < self.slots:
            job.arrived_at = self.now
            self._start(job)
        elif self.waiting >= self._queue_limit:
            return Arrival.REFUSED
        else:
            job.arrived_at = self.now
            self._waiting[job.batch].append(job)
            self._mark_worst()
        return Arrival.ACCEPTED

    def _pass_time(self, to: float) -> None:
        passed = to - self.now
        if passed > 0:
            over = self.in_system - self._room
            if over > 0:
                self.overshoot.request_seconds += over * passed
            self.now = to

    def _mark_worst(self) -> None:
        over = self.in_system - self._room
        if over > self.overshoot.worst:
            self.overshoot.worst = over

    def _start(self, job: Job) -> None:
        self._running[job.batch] += 1
        running = self._running[False] + self._running[True]
        job.started_at = self.now
        self._starts += 1  # equal ends leave in the order of their starts
        end = self.now + job.work_s * slowdown(running, self.slots)
        heapq.heappush(self._ends, (end, self._starts, job))
        self._mark_worst()

    def _start_waiting(self) -> None:
        while self._running[False] + self._running[True] < self.slots:
            queue = self._waiting[False] or self._waiting[True]
            if not queue:
                return
            self._start(queue.popleft())

    def _finish(self, job: Job) -> None:
        if job.gone:
            return
        job.finished_at = self.now
        self._running[job.batch] -= 1
        self._start_waiting()
        self.on_finish(job)

    def _realtime_arrives(self, job: Job) -> None:
        match self._admit(job):
            case Arrival.REFUSED:
                self.realtime_refused += 1
            case Arrival.UNREACHABLE:
                self.realtime_unreachable += 1

    def _becomes(self, slots: int) -> Callable[[], None]:
        def change() -> None:
            self.slots = slots
            self._room = slots * (1.0 - self._reserve)
            self._start_waiting()
            self._mark_worst()
            self._on_slots(slots)

        return change

    def _goes_down(self) -> None:
        self.down = True
        lost = [job for _, _, job in sorted(self._ends) if not job.gone]
        lost += [*self._waiting[False], *self._waiting[True]]
        self._ends.clear()
        for queue in self._waiting.values():
            queue.clear()
        self._running = {False: 0, True: 0}
        for job in lost:
            job.finished_at, job.gone = self.now, True
            self.on_gone(job)

    def _comes_up(self) -> None:
        self.down = False
