"""The pool of `world.py` on the real clock, and what an observer who sees everything writes down.

The arithmetic of service times is the simulator's. What is apart is who moves time on: here the event loop
does, capacity and limits change while requests run, and clients go away.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from math import isnan, nan
from typing import Any

from dispatcher.lab.standin.model import slowdown

_KEPT = 20_000
"""So many of the newest times are kept for quantiles."""


class Level:
    """A number of things over time: now, at most, and on average since the last `restart`."""

    __slots__ = ("_area", "_changed_at", "_since", "now", "peak")

    def __init__(self) -> None:
        self.now = 0
        self.restart()

    def restart(self) -> None:
        self.peak = self.now
        self._area = 0.0
        self._since = self._changed_at = time.monotonic()

    def add(self, by: int, at: float) -> None:
        self._area += self.now * (at - self._changed_at)
        self._changed_at = at
        self.now += by
        if self.now > self.peak:
            self.peak = self.now

    def report(self) -> dict[str, float]:
        at = time.monotonic()
        self.add(0, at)
        passed = at - self._since
        return {"now": self.now, "peak": self.peak, "mean": self._area / passed if passed > 0 else self.now}


class Job:
    """A request as the pool sees it."""

    __slots__ = (
        "arrived_at",
        "batch",
        "finished_at",
        "on_finish",
        "seconds",
        "started_at",
        "timer",
        "tokens",
        "work_s",
    )

    def __init__(
        self, *, batch: bool, work_s: float, seconds: float | None, tokens: int, on_finish: Callable[[], None]
    ) -> None:
        self.batch = batch
        self.work_s = work_s
        """How long it runs in an empty pool."""
        self.seconds = seconds
        """How long it runs, whatever the pool does; None: work_s × slowdown."""
        self.tokens = tokens
        self.on_finish = on_finish
        self.arrived_at = nan
        self.started_at = nan
        self.finished_at = nan
        self.timer: asyncio.TimerHandle | None = None


class Pool:
    """M slots, and two queues: in the pods, first come, first served; before them realtime goes before batch.

    `lets_in`: the picker lets so many requests into the pods; None: as many as run at once. `held_back`:
    the picker has a queue of its own. `queue_limit`: so many may wait before the pods, or in them where the
    picker has no queue.
    """

    def __init__(
        self,
        slots: int,
        queue_limit: int | None,
        on_change: Callable[[], None],
        on_answer: Callable[[Job], None] = lambda _: None,
    ) -> None:
        self.slots = slots
        self.queue_limit = queue_limit
        self.lets_in: float | None = None
        self.held_back = True
        self.levels = {"batch": Level(), "realtime": Level(), "all": Level()}
        """Requests in the pool, running or waiting."""
        self.busy = Level()
        """Those that run."""
        self.queue = Level()
        """Those that wait."""
        self.tokens = {"batch": 0, "realtime": 0}
        """Of finished requests."""
        self.finished = {"batch": 0, "realtime": 0}
        self.refused = {"batch": 0, "realtime": 0}
        self.waits: dict[str, deque[float]] = {"batch": deque(maxlen=_KEPT), "realtime": deque(maxlen=_KEPT)}
        """How long the finished ones had waited for a slot."""
        self.times: dict[str, deque[float]] = {"batch": deque(maxlen=_KEPT), "realtime": deque(maxlen=_KEPT)}
        """How long they took, waiting included."""
        self._on_change = on_change
        self._on_answer = on_answer
        self._inside: deque[Job] = deque()
        self._outside: dict[bool, deque[Job]] = {False: deque(), True: deque()}
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Pool {self.running} of {self.slots} running, {self.waiting} waiting>"

    @property
    def running(self) -> int:
        return self.busy.now

    @property
    def waiting(self) -> int:
        return self.queue.now

    @property
    def waiting_inside(self) -> int:
        """Those that wait in the pods."""
        return len(self._inside)

    def submit(self, job: Job) -> bool:
        """Take a request in; False: there is no slot and the queue is full."""
        kind = "batch" if job.batch else "realtime"
        let_in = self._lets_in_one
        free = self.running < self.slots and (let_in or self.lets_in is None)
        at_limit = self.queue_limit is not None and self._waiting_there >= self.queue_limit
        if not free and at_limit and not (let_in and self.held_back):
            self.refused[kind] += 1
            return False
        now = job.arrived_at = time.monotonic()
        self.levels[kind].add(1, now)
        self.levels["all"].add(1, now)
        if free:
            self._start(job, now)
        else:
            self.queue.add(1, now)
            (self._inside if let_in else self._outside[job.batch]).append(job)
        self._on_change()
        return True

    def leave(self, job: Job) -> None:
        """The client has gone: the request stops running, or waiting. Nothing when it is not in the pool."""
        if isnan(job.arrived_at) or not isnan(job.finished_at):
            return
        now = time.monotonic()
        if job.timer is None:
            (self._inside if job in self._inside else self._outside[job.batch]).remove(job)
            self.queue.add(-1, now)
        else:
            job.timer.cancel()
            self.busy.add(-1, now)
        self._depart(job, now)

    def resize(self, slots: int) -> None:
        """What runs on slots that go away runs on to its end."""
        self.slots = slots
        self._fill(time.monotonic())
        self._on_change()

    def restart(self) -> None:
        """Begin a new measurement."""
        for level in (*self.levels.values(), self.busy, self.queue):
            level.restart()
        for kind in self.finished:
            self.finished[kind] = self.refused[kind] = self.tokens[kind] = 0
            self.waits[kind].clear()
            self.times[kind].clear()

    def report(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "running": self.busy.report(),
            "waiting": self.queue.report(),
            **{kind: level.report() for kind, level in self.levels.items()},
            "finished": dict(self.finished),
            "refused": dict(self.refused),
            "tokens": dict(self.tokens),
            "wait_s": {kind: _quantiles(values) for kind, values in self.waits.items()},
            "time_s": {kind: _quantiles(values) for kind, values in self.times.items()},
        }

    def _start(self, job: Job, now: float) -> None:
        self.busy.add(1, now)
        job.started_at = now
        seconds = job.work_s * slowdown(self.running, self.slots) if job.seconds is None else job.seconds
        job.timer = self._loop.call_later(seconds, self._finish, job)

    def _finish(self, job: Job) -> None:
        now = time.monotonic()
        kind = "batch" if job.batch else "realtime"
        self.busy.add(-1, now)
        self.finished[kind] += 1
        self.tokens[kind] += job.tokens
        self.waits[kind].append(job.started_at - job.arrived_at)
        self.times[kind].append(now - job.arrived_at)
        self._depart(job, now)
        self._on_answer(job)
        job.on_finish()

    def _depart(self, job: Job, now: float) -> None:
        job.finished_at = now
        self.levels["batch" if job.batch else "realtime"].add(-1, now)
        self.levels["all"].add(-1, now)
        self._fill(now)
        self._on_change()

    def _fill(self, now: float) -> None:
        while True:
            while self._lets_in_one and (queue := self._next_outside):
                self._inside.append(queue.popleft())
            # Without a picker that decides, whoever waits outside starts straight away.
            startable = self._inside or (self._next_outside if self.lets_in is None else None)
            if not startable or self.running >= self.slots:
                return
            self.queue.add(-1, now)
            self._start(startable.popleft(), now)

    @property
    def _next_outside(self) -> deque[Job]:
        return self._outside[False] or self._outside[True]

    @property
    def _lets_in_one(self) -> bool:
        return self.lets_in is not None and self.running + len(self._inside) < self.lets_in

    @property
    def _waiting_there(self) -> int:
        """Where the limit holds."""
        return self.waiting - len(self._inside) if self.held_back else len(self._inside)


def _quantiles(values: deque[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "p50": None, "p99": None, "max": None}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": ordered[round(last * 0.5)],
        "p99": ordered[round(last * 0.99)],
        "max": ordered[-1],
    }
