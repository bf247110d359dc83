"""Environment of the virtual scenarios: the real dispatch loop, a queue in memory, and a simulated pool.

A scenario is a coroutine that runs in virtual time, so waiting costs nothing. All scenarios end in the same
way: the dispatchers drain, and then every request must have exactly one result or be stored in the queue.
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

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Journal, Options
from dispatcher.lab.simulation import virtual_loop
from dispatcher.lab.simulation.dispatcher_policy import EPOCH, Replica
from dispatcher.lab.simulation.metrics import Exporter, Signals
from dispatcher.lab.simulation.transport import SimulatedGateway, SimulatedTransport
from dispatcher.lab.simulation.world import Job, World
from dispatcher.lab.standin.scorer import StaleScorer
from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.poll import Poll
from dispatcher.requests.outcomes.outcome import Outcome, RetryPolicy, Unreachable
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.requests.units import compute_units
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics as Counters
from dispatcher.wire_format import PoppedResult
from tests.memory_queue import MemoryStore

TOKEN = "0" * 32


class MetricsState(Enum):
    """State of the metrics page of the pool."""

    OK = "fine"
    GONE = "gone"
    """Every scrape fails."""
    FROZEN = "frozen"
    """The last sample is returned again and again."""
    GARBAGE = "garbage"
    """Values are not numbers."""
    ABSENT = "absent"
    """The poller itself hangs, so that nothing is reported at all."""


@dataclass(frozen=True)
class StageSettings:
    """Settings with which a scenario starts."""

    slots: int = 32
    """Configured slots of the pool; the pool has as many unless `true_slots` is set."""
    true_slots: int | None = None
    pods: int = 1
    scorer_scrape_s: float = 0.0
    """Interval at which the scorers of the picker learn the load of each pod. 0 if they see every change."""
    capacity_is_set: bool = True
    replicas: int = 1
    scrape_s: float = 1.0
    lag_s: float = 0.01
    transit_s: float = 0.003
    """Transit time of requests and answers."""
    answer_s: float | None = None
    """Transit time of answers, if it differs from that of requests."""
    loop_delay_s: float = 0.0
    """Delay that the dispatchers' event loops report."""
    journal: bool = False
    """Whether attempts are counted, which the health assessment needs."""
    call_s: float = 0.0
    """Duration of calls to the queue."""
    work_s: float = 0.5
    """Duration of a request in an empty pool. In a full pool it takes twice as long."""
    queue_limit: int | None = None
    realtime: Sequence[tuple[float, float]] = ()
    """Arrival time and work in seconds of each realtime request."""
    outages: Sequence[tuple[float, float]] = ()
    lease_s: float = 30.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_age_s: float = 10.0
    fairness_attribute: str = ""
    observe: bool = False
    weigh_request: Callable[[Request], int] = compute_units
    """Weight of a request in the limit. The pool and its metrics count each request once."""

    @property
    def policy(self) -> Policy:
        return Policy(
            reserve=0.05,
            per_endpoint=self.slots / self.pods if self.capacity_is_set else None,
            max_age_s=self.max_age_s,
            retry_after_max_s=self.retry.max_s,
        )

    @property
    def options(self) -> Options:
        return Options(
            retry=self.retry,
            lease_s=self.lease_s,
            fairness_attribute=self.fairness_attribute,
            observe=self.observe,
        )

    @property
    def max_limit(self) -> int:
        """Largest possible number of batch requests in flight: floor(slots × (1 − reserve))."""
        return int(self.slots * 0.95 + 1e-9)


@dataclass(eq=False)
class Attempt:
    """One attempt to forward a request, as seen at the gateway."""

    id: str
    replica: int
    began_at: float
    ended_at: float = nan
    outcome: Outcome | None = None
    """`None` if the attempt has not ended or its sender was killed."""


Fault = Callable[[Request], Awaitable[Outcome | None]]
"""Outcome of a request at a broken gateway; `None` if the gateway forwards the request."""


class Gateway(SimulatedGateway):
    """Gateway of one replica, which logs attempts and applies the fault of the stage."""

    def __init__(self, stage: Stage, replica: int) -> None:
        super().__init__(stage.transport, stage.make_job)
        self._stage = stage
        self._replica = replica
        self._ids: dict[str, str] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool] = lambda: True
    ) -> AttemptResult:
        stage = self._stage
        self._ids[token] = request.id
        attempt = Attempt(request.id, self._replica, stage.now)
        stage.attempts.append(attempt)
        try:
            outcome = None if stage.fault is None else await stage.fault(request)
            if outcome is None:
                result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            else:
                sent_at = stage.now if isinstance(outcome, Unreachable) else attempt.began_at
                result = AttemptResult(outcome, sent_at, stage.now)
            attempt.outcome = result.outcome
        finally:
            attempt.ended_at = stage.now
            del self._ids[token]
        return result

    def get_connected_at(self, token: str) -> float | None:
        held_open = self._stage.connected_since.get(self._ids.get(token, ""))
        return super().get_connected_at(token) if held_open is None else held_open


class Stage:
    """Everything that a scenario can inspect and change."""

    def __init__(self, tasks: asyncio.TaskGroup, setting: StageSettings) -> None:
        self.setting = setting
        self.attempts: list[Attempt] = []
        self.fault: Fault | None = None
        self.connected_since: dict[str, float] = {}
        """Time since when a fault has kept a request connected, by request id."""
        self.metrics = MetricsState.OK
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.submitted: list[str] = []
        self.capacity: float | None = None
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        true_slots = setting.true_slots or setting.slots
        self.world = World(
            true_slots,
            reserve=1.0,  # so every request in the system counts as overshoot
            queue_limit=setting.queue_limit,
            realtime=[(at, Job(work_s, 1, is_batch=False)) for at, work_s in setting.realtime],
            outages=setting.outages,
            pods=setting.pods,
            scorer=StaleScorer(setting.scorer_scrape_s) if setting.scorer_scrape_s else None,
        )
        answer_s = setting.transit_s if setting.answer_s is None else setting.answer_s
        self.transport = SimulatedTransport(self.world, send_s=setting.transit_s, answer_s=answer_s)
        self.store = MemoryStore(self._loop.time, unix_origin=EPOCH, lease_s=setting.lease_s)
        self._exporter = Exporter(
            Signals.SATURATION, policy=setting.policy, picker_per_pod=true_slots / setting.pods
        )
        self._frozen: list[Reading] = []
        self._start_count = 0
        self.replicas: list[Replica | None] = [None] * setting.replicas
        for index in range(setting.replicas):
            self.start(index)

    # Replicas.

    def start(self, index: int) -> Replica:
        """Start a replica without any state."""
        assert self.replicas[index] is None
        self._start_count += 1
        replica = self.replicas[index] = Replica(
            self._tasks,
            self.store,
            f"owner-{self._start_count}",
            Gateway(self, index),
            self.setting.policy,
            [Signal.SATURATION],
            self.setting.options,
            call_s=self.setting.call_s,
            weigh=self.setting.weigh_request,
            journal=Journal(Counters()) if self.setting.journal else None,
        )
        replica.limiter.set_loop_delay(self.setting.loop_delay_s)
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
        scrape_number = int((self.now - phase_s) / setting.scrape_s) + 1 if self.now > phase_s else 0
        while not replica.task.done():
            await asyncio.sleep(phase_s + scrape_number * setting.scrape_s - self.now)
            scrape_number += 1
            self.transport.advance_world()
            found = self._exporter.scrape_pages(self.world.observe_pool()).readings
            readings = [replace(reading, is_request_count=True, items_beyond_calls=0.0) for reading in found]
            self._loop.call_later(setting.lag_s, self._deliver_readings, replica, readings, self.metrics)

    def _poll(self, readings: list[Reading]) -> Poll:
        return Poll(
            completed_at=self.now, signals=tuple(r.signal for r in readings), readings=tuple(readings)
        )

    def _deliver_readings(self, replica: Replica, readings: list[Reading], metrics: MetricsState) -> None:
        match metrics:
            case MetricsState.OK:
                self._frozen = readings
                replica.handle_poll(self._poll(readings))
            case MetricsState.FROZEN:
                replica.handle_poll(self._poll(self._frozen))
            case MetricsState.GONE:
                replica.handle_scrape_failure("the metrics endpoint does not answer", self.now)
            case MetricsState.GARBAGE:
                replica.handle_poll(self._poll([_make_garbage(reading) for reading in readings]))
            case MetricsState.ABSENT:
                pass

    # Producers.

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

    def make_job(self, request: Request) -> Job:
        return Job(self.setting.work_s, 1, is_batch=True)

    @property
    def results(self) -> list[PoppedResult]:
        return [
            decode_result(each) for each in self.store.result_lists.get(self.store.default_result_list, ())
        ]

    @property
    def answered_count(self) -> int:
        return len(self.store.result_lists.get(self.store.default_result_list, ()))

    def count_statuses(self) -> Counter[int | str | None]:
        """Count the results by status code or error code."""
        return Counter(result.status_code or result.error_code for result in self.results)

    # Observations.

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def in_flight(self) -> int:
        """Number of batch requests in the pool."""
        self.transport.advance_world()
        state = self.world.observe_pool()
        return state.batch_running + state.batch_waiting

    def reasons(self) -> set[Reason]:
        return {replica.dispatcher.get_allowance().reason for replica in self.alive}

    def find_attempts(self, since: float = -inf, wait_until: float = inf) -> list[Attempt]:
        """Return the attempts that started in this time."""
        return [attempt for attempt in self.attempts if since < attempt.began_at < wait_until]

    def reset_peak(self) -> None:
        self.transport.advance_world()
        self.world.overshoot.worst = self.world.in_system

    @property
    def peak(self) -> float:
        """Largest number of requests in the system since `reset_peak`, including realtime requests."""
        self.transport.advance_world()
        return self.world.overshoot.worst

    async def measure_mean_load(self, seconds: float) -> float:
        """Return the mean number of requests in the system over the next seconds."""
        self.transport.advance_world()
        request_seconds_before = self.world.overshoot.request_seconds
        await asyncio.sleep(seconds)
        self.transport.advance_world()
        return (self.world.overshoot.request_seconds - request_seconds_before) / seconds

    async def wait_until(self, condition: Callable[[], object], within_s: float, what: str = "") -> float:
        """Wait for a condition, and return how long that took."""
        started_at = self.now
        while not condition():
            assert self.now < started_at + within_s, f"not within {within_s:g} s: {what or condition}"
            await asyncio.sleep(0.01)
        return self.now - started_at

    async def wait_until_answered(self, within_s: float, names: Sequence[str] | None = None) -> float:
        wanted = set(self.submitted if names is None else names)
        return await self.wait_until(
            lambda: self.answered_count >= len(wanted) and wanted <= {r.id for r in self.results},
            within_s,
            "all answers",
        )

    async def close(self, drain_s: float = 1000.0) -> None:
        """Drain all replicas and check that no request is lost. Called at the end of each scenario."""
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


def _make_garbage(reading: Reading) -> Reading:
    return Reading(
        reading.signal, reading.opened_at, reading.closed_at, f_sys=nan, f_epp=0.0, max_sys=reading.max_sys
    )


ScenarioBody = Callable[..., Awaitable[None]]


def run_scenario(body: ScenarioBody, **setting: Any) -> None:
    """Run `body(stage)` in virtual time, and the checks of `Stage.close`."""

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            stage = Stage(tasks, StageSettings(**setting))
            stage.events = events
            await body(stage)
            await stage.close()

    events: list[tuple[Event, Mapping[str, Any]]] = []
    with divert_events(lambda event, fields: events.append((event, fields))):
        virtual_loop.run_in_virtual_time(run())


def scenario(**setting: Any) -> Callable[[ScenarioBody], Callable[..., None]]:
    """Turn a coroutine `body(stage, **parameters)` into a test.

    Parameters that are named like a field of StageSettings also set this field.
    """

    def decorate(body: ScenarioBody) -> Callable[..., None]:
        parameters = list(inspect.signature(body).parameters.values())[1:]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            fields = {
                name: value for name, value in arguments.items() if name in StageSettings.__dataclass_fields__
            }
            run_scenario(lambda stage: body(stage, **arguments), **{**setting, **fields})

        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del test.__wrapped__  # otherwise pytest would find the coroutine and run it
        return test

    return decorate
