"""The stage of the virtual scenarios: the real dispatch loop, a queue in memory, a simulated pool.

A scenario is a coroutine that lives in virtual time: an hour costs what happens in it. Each ends in the same
way: the dispatchers drain, and then every request must have exactly one result or lie in the queue.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf, nan
from typing import Any

from dispatcher.core.gateway.outcome import Outcome, RetryPolicy, Unreachable
from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.poll import Poll
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.core.requests.result import PoppedResult, decode_result
from dispatcher.core.requests.score import compute_score
from dispatcher.core.requests.units import compute_units
from dispatcher.dispatch import Journal, Options
from dispatcher.lab.memory_queue import MemoryStore
from dispatcher.lab.simulation import virtual_loop
from dispatcher.lab.simulation.dispatcher_policy import EPOCH, Replica
from dispatcher.lab.simulation.metrics import Exporter, Signals
from dispatcher.lab.simulation.transport import SimulatedGateway, SimulatedTransport
from dispatcher.lab.simulation.world import Job, World
from dispatcher.ports import AttemptResult, Submission
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics as Counters

TOKEN = "0" * 32


class Metrics(Enum):
    """What the pool's metrics page does."""

    FINE = "fine"
    GONE = "gone"
    """No scrape succeeds."""
    FROZEN = "frozen"
    """The last sample is told again and again."""
    GARBAGE = "garbage"
    """Values that are no numbers."""
    ABSENT = "absent"
    """The poller itself hangs: nothing is told at all."""


@dataclass(frozen=True)
class Setting:
    """What a scenario starts from."""

    slots: int = 32
    """As the configuration says, and as the pool has them but for `true_slots`."""
    true_slots: int | None = None
    replicas: int = 1
    scrape_s: float = 1.0
    lag_s: float = 0.01
    way_s: float = 0.003
    """Transit time of requests and answers."""
    answer_s: float | None = None
    """Transit time of answers, if it differs from that of requests."""
    late_s: float = 0.0
    """Delay that the dispatchers' event loops report."""
    journal: bool = False
    """Whether tries are counted, which the health needs."""
    call_s: float = 0.0
    """Duration of calls to the queue."""
    work_s: float = 0.5
    """Duration of a request in an empty pool. In a full pool it takes twice as long."""
    queue_limit: int | None = None
    realtime: Sequence[tuple[float, float]] = ()
    """(when, work in seconds) of realtime requests."""
    outages: Sequence[tuple[float, float]] = ()
    lease_s: float = 30.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_age_s: float = 10.0
    tenant_from: str = ""
    observe: bool = False
    weigh_request: Callable[[Request], int] = compute_units
    """Weight of a request in the limit. The pool and its metrics count each request once."""

    @property
    def policy(self) -> Policy:
        return Policy(
            reserve=0.05,
            per_endpoint=self.slots,
            max_age_s=self.max_age_s,
            retry_after_max_s=self.retry.max_s,
        )

    @property
    def options(self) -> Options:
        return Options(
            retry=self.retry, lease_s=self.lease_s, tenant_attribute=self.tenant_from, observe=self.observe
        )

    @property
    def max_limit(self) -> int:
        """What ours may be at the most: floor(slots × (1 − reserve))."""
        return int(self.slots * 0.95 + 1e-9)


@dataclass(eq=False)
class Try:
    """One request on its way, as the gateway's side sees it."""

    id: str
    replica: int
    began_at: float
    ended_at: float = nan
    outcome: Outcome | None = None
    """None: it has not ended, or its sender left."""


Fault = Callable[[Request], Awaitable[Outcome | None]]
"""What a broken gateway does with a request; None: it takes it after all."""


class Gateway(SimulatedGateway):
    """One replica's way to the pool, with a log and the faults of the stage."""

    def __init__(self, stage: Stage, replica: int) -> None:
        super().__init__(stage.road, stage.job_of)
        self._stage = stage
        self._replica = replica
        self._ids: dict[str, str] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> AttemptResult:
        stage = self._stage
        self._ids[token] = request.id
        one = Try(request.id, self._replica, stage.now)
        stage.tries.append(one)
        try:
            outcome = None if stage.fault is None else await stage.fault(request)
            if outcome is None:
                forwarded = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            else:
                sent_at = stage.now if isinstance(outcome, Unreachable) else one.began_at
                forwarded = AttemptResult(outcome, sent_at, stage.now)
            one.outcome = forwarded.outcome
        finally:
            one.ended_at = stage.now
            del self._ids[token]
        return forwarded

    def get_connected_at(self, token: str) -> float | None:
        held_open = self._stage.held_open.get(self._ids.get(token, ""))
        return super().get_connected_at(token) if held_open is None else held_open


class Stage:
    """Everything that a scenario can look at and tamper with."""

    def __init__(self, tasks: asyncio.TaskGroup, setting: Setting) -> None:
        self.setting = setting
        self.tries: list[Try] = []
        self.fault: Fault | None = None
        self.held_open: dict[str, float] = {}
        """Requests that a fault keeps connected, and since when."""
        self.metrics = Metrics.FINE
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.submitted: list[str] = []
        self.capacity: float | None = None
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        true_slots = setting.true_slots or setting.slots
        self.world = World(
            true_slots,
            reserve=1.0,  # so that every request in the system counts as overshoot
            queue_limit=setting.queue_limit,
            realtime=[(at, Job(work_s, 1, is_batch=False)) for at, work_s in setting.realtime],
            outages=setting.outages,
        )
        answer_s = setting.way_s if setting.answer_s is None else setting.answer_s
        self.road = SimulatedTransport(self.world, send_s=setting.way_s, answer_s=answer_s)
        self.store = MemoryStore(self._loop.time, unix_origin=EPOCH, lease_s=setting.lease_s)
        self._exporter = Exporter(
            Signals.SATURATION, policy=Policy(per_endpoint=setting.slots), picker_per_pod=true_slots
        )
        self._frozen: list[Reading] = []
        self._made = 0
        self.replicas: list[Replica | None] = [None] * setting.replicas
        for index in range(setting.replicas):
            self.start(index)

    # The cast.

    def start(self, index: int) -> Replica:
        """A process comes up, knowing nothing."""
        assert self.replicas[index] is None
        self._made += 1
        replica = self.replicas[index] = Replica(
            self._tasks,
            self.store,
            f"owner-{self._made}",
            Gateway(self, index),
            self.setting.policy,
            [Signal.SATURATION],
            self.setting.options,
            call_s=self.setting.call_s,
            weigh=self.setting.weigh_request,
            journal=Journal(Counters()) if self.setting.journal else None,
        )
        replica.limiter.set_loop_delay(self.setting.late_s)
        # No two replicas scrape at the same moment.
        phase_s = self.setting.scrape_s * index / len(self.replicas)
        self._tasks.create_task(self._scrape(replica, phase_s))
        return replica

    def kill(self, index: int) -> None:
        replica, self.replicas[index] = self.replicas[index], None
        assert replica is not None
        replica.kill()

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica is not None]

    async def _scrape(self, replica: Replica, phase_s: float) -> None:
        setting = self.setting
        nth = int((self.now - phase_s) / setting.scrape_s) + 1 if self.now > phase_s else 0
        while not replica.task.done():
            await asyncio.sleep(phase_s + nth * setting.scrape_s - self.now)
            nth += 1
            self.road.advance_world()
            found = self._exporter.scrape_pages(self.world.observe_pool()).readings
            readings = [replace(reading, is_request_count=True, items_beyond_calls=0.0) for reading in found]
            self._loop.call_later(setting.lag_s, self._tell, replica, readings, self.metrics)

    def _poll(self, readings: list[Reading]) -> Poll:
        return Poll(
            completed_at=self.now, signals=tuple(r.signal for r in readings), readings=tuple(readings)
        )

    def _tell(self, replica: Replica, readings: list[Reading], metrics: Metrics) -> None:
        match metrics:
            case Metrics.FINE:
                self._frozen = readings
                replica.handle_poll(self._poll(readings))
            case Metrics.FROZEN:
                replica.handle_poll(self._poll(self._frozen))
            case Metrics.GONE:
                replica.handle_scrape_failure("the metrics endpoint does not answer", self.now)
            case Metrics.GARBAGE:
                replica.handle_poll(self._poll([_garbage(reading) for reading in readings]))
            case Metrics.ABSENT:
                pass

    # The producers.

    async def submit(
        self,
        count: int,
        prefix: str = "r",
        *,
        deadline_s: float = 1e6,
        model: str = "",
        **metadata: str,
    ) -> list[str]:
        """Put requests into the queue and wake the dispatchers."""
        deadline = int(EPOCH + self.now + deadline_s)
        first = len(self.submitted)
        payload = b'{"model": "%b"}' % model.encode() if model else b"{}"
        names = [f"{prefix}-{first + i:06d}" for i in range(count)]
        submissions = [
            Submission(
                encode_member(name, payload, deadline, created=0, token=TOKEN, metadata=metadata),
                compute_score(deadline),
                name,
                TOKEN,
                deadline,
            )
            for name in names
        ]
        await self.store.submit(submissions)
        self.submitted += names
        return names

    def job_of(self, request: Request) -> Job:
        return Job(self.setting.work_s, 1, is_batch=True)

    @property
    def results(self) -> list[PoppedResult]:
        return [
            decode_result(each) for each in self.store.result_lists.get(self.store.default_result_list, ())
        ]

    @property
    def answered(self) -> int:
        return len(self.store.result_lists.get(self.store.default_result_list, ()))

    def statuses(self) -> Counter[int | str | None]:
        """How many results there are, by status or error code."""
        return Counter(result.status_code or result.error_code for result in self.results)

    # Looking.

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def in_flight(self) -> int:
        """Of ours, in the pool."""
        self.road.advance_world()
        state = self.world.observe_pool()
        return state.batch_running + state.batch_waiting

    def reasons(self) -> set[Reason]:
        return {replica.dispatcher.get_allowance().reason for replica in self.alive}

    def sent(self, since: float = -inf, until: float = inf) -> list[Try]:
        """What set out for the gateway in that time."""
        return [one for one in self.tries if since < one.began_at < until]

    def restart_peak(self) -> None:
        self.road.advance_world()
        self.world.overshoot.worst = self.world.in_system

    @property
    def peak(self) -> float:
        """The most requests in the system since `restart_peak`, realtime included."""
        self.road.advance_world()
        return self.world.overshoot.worst

    async def mean_over(self, seconds: float) -> float:
        """Requests in the system on average over the next seconds."""
        self.road.advance_world()
        before = self.world.overshoot.request_seconds
        await asyncio.sleep(seconds)
        self.road.advance_world()
        return (self.world.overshoot.request_seconds - before) / seconds

    async def until(self, condition: Callable[[], object], within_s: float, what: str = "") -> float:
        """Wait for it, and return how long that took."""
        began = self.now
        while not condition():
            assert self.now < began + within_s, f"not within {within_s:g} s: {what or condition}"
            await asyncio.sleep(0.01)
        return self.now - began

    async def until_answered(self, within_s: float, names: Sequence[str] | None = None) -> float:
        wanted = set(self.submitted if names is None else names)
        return await self.until(
            lambda: self.answered >= len(wanted) and wanted <= {r.id for r in self.results},
            within_s,
            "every answer",
        )

    async def close(self, drain_s: float = 1000.0) -> None:
        """The end of each scenario: drain, and account for every request."""
        for replica in self.alive:
            replica.dispatcher.drain(drain_s)
        await asyncio.gather(*(replica.task for replica in self.alive))
        results = Counter(result.id for result in self.results)
        assert set(results) <= set(self.submitted)
        assert not [name for name, count in results.items() if count > 1], "one result each"
        counts = await self.store.count_requests()
        assert counts.leased == 0
        waiting = len(self.submitted) - len(results)
        assert counts.pending + counts.delayed == waiting, "no result and not in the queue: lost"
        assert not [fields for event, fields in self.events if event is Event.INTERNAL_ERROR]


def _garbage(reading: Reading) -> Reading:
    return Reading(
        reading.signal, reading.opened_at, reading.closed_at, f_sys=nan, f_epp=0.0, max_sys=reading.max_sys
    )


Scene = Callable[..., Awaitable[None]]


def perform(scene: Scene, **setting: Any) -> None:
    """Live through `scene(stage)` and its end."""

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            stage = Stage(tasks, Setting(**setting))
            stage.events = events
            await scene(stage)
            await stage.close()

    events: list[tuple[Event, Mapping[str, Any]]] = []
    with divert_events(lambda event, told: events.append((event, told))):
        virtual_loop.run_in_virtual_time(live())


def scenario(**setting: Any) -> Callable[[Scene], Callable[..., None]]:
    """Make a test of a coroutine `scene(stage, **parameters)`; parameters named as in Setting set it."""

    def decorate(scene: Scene) -> Callable[..., None]:
        parameters = list(inspect.signature(scene).parameters.values())[1:]

        @functools.wraps(scene)
        def test(**given: Any) -> None:
            fields = {name: value for name, value in given.items() if name in Setting.__dataclass_fields__}
            perform(lambda stage: scene(stage, **given), **{**setting, **fields})

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del test.__wrapped__  # pytest would see a coroutine in it
        return test

    return decorate
