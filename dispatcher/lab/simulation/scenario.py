"""Scenario of a simulation: the pool, its monitoring, the batch requests, and the faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf

from dispatcher.lab.simulation.metrics import POD_TOKENS, REQUEST_TOKENS, Detector, Exporter, Signals
from dispatcher.lab.simulation.transport import ANSWER_S, SEND_S
from dispatcher.lab.simulation.world import BatchProfile, Job
from dispatcher.lab.standin.model import TOKEN_S, WAITING_AT_FULL, compute_work_s
from dispatcher.limit.budget import Policy as Budgeting
from dispatcher.limit.budget import Signal

MAX_EXACT_S = 1_800.0
"""Duration up to which a simulation is exact. Longer ones use time steps, unless the caller asks
otherwise."""
TIME_STEP_S = 0.2
SLICE_OVERHEAD_S = 0.04
"""Default of the time that a continued slice takes to its first token in an empty pool."""
MIN_STEPS_PER_REQUEST = 8
"""Minimum number of time steps in the time that a batch request takes in an empty pool."""
MIN_JOBS_PER_POD = 100
"""Minimum number of simulated jobs that fill one pod, if the caller did not choose the number of requests per
job."""
MIN_JOBS_PER_POD_WHEN_SET = 10
"""Minimum number of jobs per pod if the caller chose the number of requests per job. A job takes that many
slots at once."""


class Order(StrEnum):
    """Order in which waiting requests start."""

    AUTO = "auto"
    """Realtime requests first in the picker, and first come, first served in the pods. The picker decides
    where they wait."""
    REALTIME_FIRST = "realtime-first"
    """Realtime requests first everywhere, as with priorities in the model servers."""
    FIRST_COME = "first-come"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Pool, monitoring, batch requests and faults of a simulation.

    `scenario_file.ScenarioFile` describes the fields that are keys of scenario files.
    """

    slots: int = 64
    has_capacity_setting: bool = True
    learns_capacity: bool = False
    true_slots: int | None = None
    slots_at: Sequence[tuple[float, int]] = ()
    picker_slots: int | None = None
    order: Order = Order.AUTO
    scrape_s: float = 1.0
    lag_s: float = 0.05
    jitter: float = 0.0
    stamp_s: float = 0.0
    flush_s: float = 5.0
    flush_phase_s: float | None = None
    metrics_refresh_s: float = 0.5
    """Interval at which the picker reads the metrics of its model servers. 0 if it sees every change at
    once."""
    scorer_scrape_s: float = 0.0
    shows_running: bool = True
    shows_in_flight: bool = False
    shows_server_queues: bool = True
    """True if the picker shows the queue of each model server, as of its last reading of their metrics."""
    detector: Detector = Detector.UTILIZATION
    signals: Signals = Signals.AUTO
    pickers: int = 1
    reserve: float = 0.05
    max_age_s: float | None = None
    seconds: float = 900.0
    seed: int = 0
    batch: BatchProfile = field(default_factory=BatchProfile)
    transit_s: float | None = None
    admit_s: float = 0.0
    """Time that the gateway takes to admit each batch request, one after the other."""
    queue_limit: int | None = None
    kv_tokens: int | None = None
    counts_tokens: bool = False
    token_factor: float = 1.0
    """Factor by which the dispatcher estimates the tokens of batch requests wrong."""
    pods: int = 1
    pods_at: Sequence[tuple[float, int]] = ()
    outages: Sequence[tuple[float, float]] = ()
    gaps: Sequence[tuple[float, float]] = ()
    lost: float = 0.0
    clock_steps: Sequence[tuple[float, float]] = ()
    replicas: int = 1
    deaths: Sequence[float] = ()
    lease_s: float = 30.0
    time_step_s: float = 0.0
    """Maximum time step. Batch requests that end within one step end together. 0 to let each end at its own
    time."""
    requests_per_job: int = 1
    """Number of identical batch requests that are simulated as one request of that weight."""
    slice_tokens: int | None = None
    slice_overhead_s: float = SLICE_OVERHEAD_S
    revokes_slices: bool = False
    evicts: bool = False

    @property
    def effective_time_step_s(self) -> float:
        """Time step in use: a divisor of the scrape interval, so that all scrapes see the same phase of a
        step, and small enough that a request takes several steps."""
        if not self.time_step_s:
            return 0.0
        max_step_s = min(self.time_step_s, self._mean_call_s / MIN_STEPS_PER_REQUEST)
        return self.scrape_s / ceil(self.scrape_s / max_step_s)

    @property
    def _mean_call_s(self) -> float:
        """Average duration of a call in an empty pool, or that of a whole slice if it is shorter."""
        if self.slice_tokens is None:
            return self.batch.mean_s
        return min(self.batch.mean_s, self.slice_overhead_s + TOKEN_S * self.slice_tokens)

    @property
    def default_requests_per_job(self) -> int:
        """Number of requests per job that is small compared to a pod."""
        return max(1, min(self.slots, self.real_slots) // self.pods // MIN_JOBS_PER_POD)

    @property
    def real_slots(self) -> int:
        return self.slots if self.true_slots is None else self.true_slots

    @property
    def has_flow_control(self) -> bool:
        """True if requests wait in the picker. A picker without flow control is simulated if only requests
        are read."""
        return self.detector.has_flow_control and self.signals is not Signals.REQUESTS

    @property
    def uses_pressure_score_only(self) -> bool:
        """True if the dispatcher reads only a pressure score, which cannot show how full the pool is."""
        return self.detector is not Detector.CONCURRENCY and self.signals is Signals.SATURATION

    @property
    def transit_times_s(self) -> tuple[float, float]:
        """Transit times of requests and of answers."""
        return (SEND_S, ANSWER_S) if self.transit_s is None else (self.transit_s, self.transit_s)

    @property
    def first_flush_s(self) -> float:
        if self.flush_phase_s is not None:
            return self.flush_phase_s
        return random.Random(f"{self.seed}/flush").random() * self.flush_s

    @property
    def budgeting(self) -> Budgeting:
        # Readings older than this come through Prometheus, for which the defaults are larger.
        aged = self.scrape_s + self.lag_s > 2.0
        return Budgeting(
            reserve=self.reserve,
            per_endpoint=self.slots / self.pods if self.has_capacity_setting else None,
            learns_capacity=self.learns_capacity,
            max_age_s=self.max_age_s if self.max_age_s is not None else 60.0 if aged else 10.0,
        )

    @property
    def initial_signals(self) -> Sequence[Signal]:
        """Signals that a dispatcher waits for when it starts."""
        return self.signals.possible_signals

    @property
    def exporter(self) -> Exporter:
        """Metrics of the picker."""
        return Exporter(
            self.signals,
            policy=self.budgeting,
            picker_per_pod=self._slots_known_to_picker / self.pods,
            detector=self.detector
            if self.has_flow_control or self.detector is Detector.SERVERS
            else Detector.NONE,
            flush_s=self.flush_s,
            stamp_s=self.stamp_s,
            shows_running=self.shows_running,
            shows_in_flight=self.shows_in_flight,
            shows_server_queues=self.shows_server_queues,
            pickers=self.pickers,
        )

    @property
    def _slots_known_to_picker(self) -> int:
        return self.real_slots if self.picker_slots is None else self.picker_slots

    @property
    def full_threshold(self) -> Callable[[int], float] | None:
        """Number of requests waiting in a number of pods at which the utilization detector considers the pool
        full. `None` if the picker does not decide by this number."""
        uses_server_queues = (
            self.has_flow_control and self.detector.uses_server_queues and self.order is Order.AUTO
        )
        return (lambda pods: WAITING_AT_FULL * pods) if uses_server_queues else None

    @property
    def metrics_refresh_phase_s(self) -> float:
        """Time at which the picker first reads the metrics of its model servers."""
        # A generator per purpose: another option does not change the other random numbers.
        return random.Random(f"{self.seed}/look").random() * self.metrics_refresh_s

    def make_call(
        self, context: int, tokens: int, generated_tokens: int, max_tokens: int, *, request_count: int = 1
    ) -> Job:
        """Make the job of a call that generates at most `max_tokens` tokens of a batch request.

        The request has `tokens` tokens, and earlier slices have generated `generated_tokens` of them. A first
        slice processes the context, a later one finds it in the prefix cache.
        """
        new_tokens = min(max_tokens, tokens - generated_tokens)
        work_s = (
            self.slice_overhead_s + TOKEN_S * new_tokens
            if generated_tokens
            else compute_work_s(context, new_tokens)
        )
        return Job(
            work_s,
            new_tokens,
            is_batch=True,
            request_count=request_count,
            earlier_tokens=generated_tokens,
            context_tokens=context,
            is_last=generated_tokens + new_tokens >= tokens,
        )

    def get_admission_limit(self, slots: int, pods: int) -> float:
        """Return the number of requests that the picker lets into the pods. The others wait in the picker."""
        if self.order is Order.REALTIME_FIRST:
            return slots
        if self.order is Order.FIRST_COME or not self.has_flow_control:
            return inf
        if self.detector is Detector.TOKENS:
            return POD_TOKENS * pods * self.pickers / REQUEST_TOKENS
        # Each replica of the picker counts only its own requests, so that the limits add up.
        return self._slots_known_to_picker / self.pods * pods * self.pickers
