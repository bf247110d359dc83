"""Pool of the simulator on the real clock, with exact statistics for tests.

Service times are computed as in the simulator. Here the event loop advances the time, capacity and limits
change while requests run, and clients disconnect.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.model import compute_slowdown
from dispatcher.lab.standin.scorer import StaleScorer

_MAX_SAMPLES = 20_000
"""Number of newest times that are kept for quantiles."""


class Level:
    """Number of things over time: current value, maximum, and mean since the last `restart_measurement`."""

    __slots__ = ("_area", "_changed_at", "_since", "now", "peak")

    def __init__(self) -> None:
        self.now = 0
        self.restart_measurement()

    def restart_measurement(self) -> None:
        self.peak = self.now
        self._area = 0.0
        self._since = self._changed_at = time.monotonic()

    def change_by(self, change: int, at: float) -> None:
        # Integral of the value over time, from which the mean is computed.
        self._area += self.now * (at - self._changed_at)
        self._changed_at = at
        self.now += change
        if self.now > self.peak:
            self.peak = self.now

    def build_report(self) -> dict[str, float]:
        at = time.monotonic()
        # Brings the integral up to date.
        self.change_by(0, at)
        passed = at - self._since
        return {"now": self.now, "peak": self.peak, "mean": self._area / passed if passed > 0 else self.now}


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """Request in the pool."""

    is_batch: bool
    work_s: float
    """Duration in an empty pool."""
    seconds: float | None
    """Duration whatever the load is. `None` if it is work_s × slowdown."""
    tokens: int
    on_finish: Callable[[], None]
    on_start: Callable[[float], None] | None = None
    """Function that is called with the duration when the request gets a slot."""
    arrived_at: float = nan
    started_at: float = nan
    ends_at: float = nan
    """Time at which the request ends if the event loop is in time."""
    finished_at: float = nan
    timer: asyncio.TimerHandle | None = None
    server: _Server | None = None
    """Server in which the request runs or waits. `None` while it is in no server."""


@dataclass(slots=True, eq=False)
class _Server:
    """Part of the slots, with the requests that wait for them."""

    slots: int
    running: int = 0
    waiting: deque[Job] = field(default_factory=deque)

    @property
    def load(self) -> float:
        return (self.running + len(self.waiting)) / self.slots if self.slots else float("inf")


class Pool:
    """Pool with M slots and two queues: first come, first served in the pods, and realtime requests first in
    the picker.

    With a `scorer`, the slots are those of `servers`, and the scorer chooses one for each request, which
    waits there even while another server has a free slot. Without it, the pods are like one server.

    `admission_limit` is the number of requests that the picker lets into the pods; `None` if it lets in as
    many as run at once. `queue_limit` bounds the requests that wait in the picker, or in the pods if the
    picker has no queue.
    """

    def __init__(
        self, config: Config, on_change: Callable[[Pool], None], on_answer: Callable[[Job], None]
    ) -> None:
        self.slots = config.slots
        self.admission_limit: float | None = None
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
        self.waits: dict[str, deque[float]] = {
            "batch": deque(maxlen=_MAX_SAMPLES),
            "realtime": deque(maxlen=_MAX_SAMPLES),
        }
        """Time for which finished requests waited for a slot."""
        self.times: dict[str, deque[float]] = {
            "batch": deque(maxlen=_MAX_SAMPLES),
            "realtime": deque(maxlen=_MAX_SAMPLES),
        }
        """Time from arrival to end of finished requests."""
        self.delays: deque[float] = deque(maxlen=_MAX_SAMPLES)
        """Delay with which the event loop ended a request. It shows whether the machine was too busy
        to play the pool in real time."""
        self._config = config
        self._on_change, self._on_answer = on_change, on_answer
        self._scorer = StaleScorer(config.scorer_scrape_s, config.seed) if config.scorer_scrape_s else None
        self._servers: list[_Server] = []
        self._distribute_slots(config.endpoints)
        self._waiting_in_picker: dict[bool, deque[Job]] = {False: deque(), True: deque()}
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
        return sum(len(server.waiting) for server in self._servers)

    @property
    def waiting_in_picker(self) -> tuple[int, int]:
        """Number of realtime and of batch requests that wait in the picker."""
        return len(self._waiting_in_picker[False]), len(self._waiting_in_picker[True])

    @property
    def sent(self) -> tuple[int, int]:
        """Number of realtime and of batch requests that are in the pods."""
        realtime, batch = self.waiting_in_picker
        return self.levels["realtime"].now - realtime, self.levels["batch"].now - batch

    def list_server_counts(self, servers: int) -> list[tuple[int, int]]:
        """Return the running and the waiting requests of each of this many servers. Without a scorer they are
        spread evenly."""
        if self._scorer is not None:
            return [(each.running, len(each.waiting)) for each in self._servers]
        return [
            (take_share(self.running, number, servers), take_share(self.waiting_inside, number, servers))
            for number in range(servers)
        ]

    def submit_job(self, job: Job) -> bool:
        """Take in a request. Returns False if there is no free slot and the queue is full."""
        kind = "batch" if job.is_batch else "realtime"
        self._record_loads()
        can_admit = self._can_admit
        server = self._choose_server() if can_admit or self.admission_limit is None else None
        can_start = server is not None and server.running < server.slots
        queue_limit = self._config.queue_limit
        at_limit = queue_limit is not None and self._limited_waiting_count >= queue_limit
        # A request that may enter the pods is not subject to a limit on the queue of the picker.
        if not can_start and at_limit and not (can_admit and self._config.flow_control):
            self.refused[kind] += 1
            return False
        now = job.arrived_at = time.monotonic()
        self.levels[kind].change_by(1, now)
        self.levels["all"].change_by(1, now)
        if can_start and server is not None:
            self._start_job(job, server, now)
        else:
            self.queue.change_by(1, now)
            self._add_to_queue(job, server if can_admit else None)
        self._on_change(self)
        return True

    def remove_job(self, job: Job) -> None:
        """Remove a request whose client disconnected. No effect if it is not in the pool."""
        # A client can disconnect before its request arrives at the pool, or after it has ended.
        if isnan(job.arrived_at) or not isnan(job.finished_at):
            return
        now = time.monotonic()
        self._record_loads()
        if job.timer is None:
            queue = self._waiting_in_picker[job.is_batch] if job.server is None else job.server.waiting
            queue.remove(job)
            self.queue.change_by(-1, now)
        else:
            job.timer.cancel()
            self._free_slot(job, now)
        self._record_departure(job, now)

    def resize(self, slots: int, servers: int) -> None:
        """Change the number of slots. Requests on removed slots run to their end."""
        self._record_loads()
        self.slots = slots
        self._distribute_slots(servers)
        self._start_waiting_jobs(time.monotonic())
        self._on_change(self)

    def restart_measurement(self) -> None:
        """Start a new measurement."""
        for level in (*self.levels.values(), self.busy, self.queue):
            level.restart_measurement()
        for kind in self.finished:
            self.finished[kind] = self.refused[kind] = self.tokens[kind] = 0
            self.waits[kind].clear()
            self.times[kind].clear()
        self.delays.clear()

    def build_report(self) -> dict[str, Any]:
        return {
            "slots": self.slots,
            "running": self.busy.build_report(),
            "waiting": self.queue.build_report(),
            **{kind: level.build_report() for kind, level in self.levels.items()},
            "finished": dict(self.finished),
            "refused": dict(self.refused),
            "tokens": dict(self.tokens),
            "wait_s": {kind: _compute_quantiles(values) for kind, values in self.waits.items()},
            "time_s": {kind: _compute_quantiles(values) for kind, values in self.times.items()},
            "delay_s": _compute_quantiles(self.delays),
        }

    def _distribute_slots(self, servers: int) -> None:
        """Distribute the slots over the servers. Requests that wait in a server that is gone go elsewhere."""
        servers = 1 if self._scorer is None else servers
        leaving, self._servers = self._servers[servers:], self._servers[:servers]
        self._servers += [_Server(0) for _ in range(servers - len(self._servers))]
        for number, server in enumerate(self._servers):
            server.slots = take_share(self.slots, number, servers)
        for job in [job for server in leaving for job in server.waiting]:
            self._add_to_queue(job, self._choose_server())

    def _record_loads(self) -> None:
        if self._scorer is not None:
            self._scorer.record_loads(time.monotonic(), [server.load for server in self._servers])

    def _choose_server(self) -> _Server | None:
        """Return the server for the next request. `None` if there is none."""
        if self._scorer is None or not self._servers:
            return self._servers[0] if self._servers else None
        return self._servers[self._scorer.choose_endpoint(range(len(self._servers)))]

    def _add_to_queue(self, job: Job, server: _Server | None) -> None:
        job.server = server
        (self._waiting_in_picker[job.is_batch] if server is None else server.waiting).append(job)

    def _free_slot(self, job: Job, now: float) -> None:
        self.busy.change_by(-1, now)
        if job.server is not None:
            job.server.running -= 1

    def _start_job(self, job: Job, server: _Server, now: float) -> None:
        job.server = server
        server.running += 1
        self.busy.change_by(1, now)
        job.started_at = now
        # The speed is fixed at the start, as in the simulator: later changes of the load do not count.
        seconds = (
            job.work_s * compute_slowdown(server.running, server.slots)
            if job.seconds is None
            else job.seconds
        )
        job.ends_at = now + seconds
        job.timer = self._loop.call_later(seconds, self._finish_job, job)
        if job.on_start is not None:
            job.on_start(seconds)

    def _finish_job(self, job: Job) -> None:
        now = time.monotonic()
        kind = "batch" if job.is_batch else "realtime"
        self._record_loads()
        self._free_slot(job, now)
        self.finished[kind] += 1
        self.tokens[kind] += job.tokens
        self.waits[kind].append(job.started_at - job.arrived_at)
        self.times[kind].append(now - job.arrived_at)
        self.delays.append(now - job.ends_at)
        self._record_departure(job, now)
        # Statistics are complete before the answer is sent, so that a test that has it can read them.
        self._on_answer(job)
        job.on_finish()

    def _record_departure(self, job: Job, now: float) -> None:
        job.finished_at = now
        self.levels["batch" if job.is_batch else "realtime"].change_by(-1, now)
        self.levels["all"].change_by(-1, now)
        self._start_waiting_jobs(now)
        self._on_change(self)

    def _start_waiting_jobs(self, now: float) -> None:
        while self._can_admit and (queue := self._next_picker_queue):
            self._add_to_queue(queue.popleft(), self._choose_server())
        for server in self._servers:
            while server.waiting and server.running < server.slots:
                self.queue.change_by(-1, now)
                self._start_job(server.waiting.popleft(), server, now)
            # Without a limit of the picker, requests in its queue start directly.
            while self.admission_limit is None and server.running < server.slots and self._next_picker_queue:
                self.queue.change_by(-1, now)
                self._start_job(self._next_picker_queue.popleft(), server, now)

    @property
    def _next_picker_queue(self) -> deque[Job]:
        return self._waiting_in_picker[False] or self._waiting_in_picker[True]

    @property
    def _can_admit(self) -> bool:
        return self.admission_limit is not None and self.running + self.waiting_inside < self.admission_limit

    @property
    def _limited_waiting_count(self) -> int:
        """Number of waiting requests that `queue_limit` bounds."""
        return self.waiting - self.waiting_inside if self._config.flow_control else self.waiting_inside


def take_share(whole: int, number: int, parts: int) -> int:
    """Return the part with this number of a whole that is split evenly. The first parts get the remainder."""
    return whole // parts + (number < whole % parts)


def _compute_quantiles(values: deque[float]) -> dict[str, float | None]:
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
