"""Pool of the simulator on the real clock, with exact statistics for tests.

Service times are computed as in the simulator. Here the event loop advances the time, capacity and limits
change while requests run, and clients disconnect.
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
"""Number of newest times that are kept for quantiles."""


class Level:
    """Number of things over time: current value, maximum, and mean since the last `restart_measurement`."""

    __slots__ = ("_area", "_changed_at", "_since", "now", "peak")

    def __init__(self) -> None:
        self.now = 0
        self.restart()

    def restart(self) -> None:
        self.peak = self.now
        self._area = 0.0
        self._since = self._changed_at = time.monotonic()

    def add(self, by: int, at: float) -> None:
        # Integral of the value over time, from which the mean is computed.
        self._area += self.now * (at - self._changed_at)
        self._changed_at = at
        self.now += by
        if self.now > self.peak:
            self.peak = self.now

    def report(self) -> dict[str, float]:
        at = time.monotonic()
        # Brings the integral up to date.
        self.add(0, at)
        passed = at - self._since
        return {"now": self.now, "peak": self.peak, "mean": self._area / passed if passed > 0 else self.now}


class Job:
    """Request in the pool."""

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
        """Duration in an empty pool."""
        self.seconds = seconds
        """Duration whatever the load is. `None` if it is work_s × slowdown."""
        self.tokens = tokens
        self.on_finish = on_finish
        self.arrived_at = nan
        self.started_at = nan
        self.finished_at = nan
        self.timer: asyncio.TimerHandle | None = None


class Pool:
    """Pool with M slots and two queues: first come, first served in the pods, and realtime requests first in
    the picker.

    `admission_limit` is the number of requests that the picker lets into the pods; `None` if it lets in as
    many as run at once. `has_picker_queue` is True if the picker has a queue of its own. `queue_limit` bounds
    the requests that wait in the picker, or in the pods if the picker has no queue.
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
        """Requests that run."""
        self.queue = Level()
        """Requests that wait."""
        self.tokens = {"batch": 0, "realtime": 0}
        """Tokens of finished requests."""
        self.finished = {"batch": 0, "realtime": 0}
        self.refused = {"batch": 0, "realtime": 0}
        self.waits: dict[str, deque[float]] = {"batch": deque(maxlen=_KEPT), "realtime": deque(maxlen=_KEPT)}
        """Time for which finished requests waited for a slot."""
        self.times: dict[str, deque[float]] = {"batch": deque(maxlen=_KEPT), "realtime": deque(maxlen=_KEPT)}
        """Time from arrival to end of finished requests."""
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
        """Number of requests that wait in the pods."""
        return len(self._inside)

    def submit(self, job: Job) -> bool:
        """Take in a request. Returns False if there is no free slot and the queue is full."""
        kind = "batch" if job.batch else "realtime"
        let_in = self._lets_in_one
        free = self.running < self.slots and (let_in or self.lets_in is None)
        at_limit = self.queue_limit is not None and self._waiting_there >= self.queue_limit
        # A request that may enter the pods is not subject to a limit on the queue of the picker.
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
        """Remove a request whose client disconnected. No effect if it is not in the pool."""
        # A client can disconnect before its request arrives at the pool, or after it has ended.
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
        """Change the number of slots. Requests on removed slots run to their end."""
        self.slots = slots
        self._fill(time.monotonic())
        self._on_change()

    def restart(self) -> None:
        """Start a new measurement."""
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
        # The speed is fixed at the start, as in the simulator: later changes of the load do not count.
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
        # Statistics are complete before the answer is sent, so that a test that has it can read them.
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
            # Without a limit of the picker, requests in its queue start directly.
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
        """Number of waiting requests that `queue_limit` bounds."""
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
