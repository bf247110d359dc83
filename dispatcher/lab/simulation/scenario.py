"""What an experiment is set in: a pool, its monitoring, the batch requests, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf

from dispatcher.core.limit.budget import Policy as Budgeting
from dispatcher.core.limit.budget import Signal
from dispatcher.lab.simulation.metrics import POD_TOKENS, REQUEST_TOKENS, Detector, Exporter, Signals
from dispatcher.lab.simulation.transport import ANSWER_S, SEND_S
from dispatcher.lab.simulation.world import Batch
from dispatcher.lab.standin.model import WAITING_AT_FULL

EXACT_S = 1_800.0
"""What is longer is played in steps, unless asked otherwise."""
STEP_S = 0.2
STEPS = 8
"""So many steps at least are in what a batch request takes in an empty pool."""
GRAINS = 100
"""So many grains at least are in what a pod runs at once, where nobody asked for a grain."""
GRAINS_LEAST = 10
"""The same where somebody did: what starts at a slot takes the slots of others."""


class Order(StrEnum):
    """Who goes first of those that wait."""

    AUTO = "auto"
    """In the picker realtime, in the pods whoever came first; where they wait is the picker's matter."""
    REALTIME_FIRST = "realtime-first"
    """As with priorities in the model servers."""
    FIRST_COME = "first-come"


@dataclass(frozen=True, slots=True)
class Setting:
    """A pool, its monitoring, and what goes wrong."""

    slots: int = 64
    """As the configuration says."""
    capacity_set: bool = True
    """The configuration names the capacity; otherwise the dispatcher has to find it."""
    true_slots: int | None = None
    """As the pool has them; None: the configuration is right."""
    slots_at: Sequence[tuple[float, int]] = ()
    """Changes of what the pool truly has, which nobody tells."""
    picker_slots: int | None = None
    """What the concurrency detector takes the pool for (its maxConcurrency × pods); None: what it was at the
    start."""
    order: Order = Order.AUTO
    scrape_s: float = 1.0
    lag_s: float = 0.05
    """From a scrape until its reading is known."""
    jitter: float = 0.0
    """Each scrape comes up to this share of its interval later."""
    stamp_s: float = 0.0
    """A sample is dated so much later than it was taken."""
    flush_s: float = 5.0
    """The picker renews its averages this often; 0: they are always fresh."""
    flush_phase_s: float | None = None
    """When it does so for the first time; None: by the seed."""
    look_s: float = 0.5
    """The picker reads the metrics of its model servers this often; 0: it sees every change at once."""
    shows_running: bool = True
    """The picker shows what it sent and saw no answer of."""
    shows_server_queues: bool = True
    """The picker shows the queue of each model server, as of when it last read the servers' metrics."""
    detector: Detector = Detector.UTILIZATION
    signals: Signals = Signals.AUTO
    pickers: int = 1
    """Active replicas of the picker, each with an even share of the requests."""
    kv_full: float = 0.1
    reserve: float = 0.05
    max_age_s: float | None = None
    """None: as the configuration has it, 10 for direct scrapes and 60 for older readings."""
    seconds: float = 900.0
    seed: int = 0
    batch: Batch = field(default_factory=Batch)
    travel_s: float | None = None
    """What requests travel, and answers; None: 2 ms and 3 ms."""
    admit_s: float = 0.0
    """The gateway takes this long to admit each batch request, one after the other."""
    queue_limit: int | None = None
    pods: int = 1
    pods_at: Sequence[tuple[float, int]] = ()
    outages: Sequence[tuple[float, float]] = ()
    gaps: Sequence[tuple[float, float]] = ()
    """Stretches in which scrapes fail."""
    lost: float = 0.0
    """The share of scrapes that fail besides."""
    clock_steps: Sequence[tuple[float, float]] = ()
    """(when, by how many seconds) the queue's clock steps."""
    replicas: int = 1
    deaths: Sequence[float] = ()
    """When one of the replicas is killed."""
    lease_s: float = 30.0
    step_s: float = 0.0
    """Batch requests end together, at most so far apart (`steps_s`); 0: each for itself."""
    grain: int = 1
    """The dispatcher's batch requests go by so many that are alike, as one that weighs as much."""

    @property
    def steps_s(self) -> float:
        """How far apart batch requests end together: a whole number of steps lies between two scrapes, so
        that each sees the same moment of one, and several are in what a request takes."""
        if not self.step_s:
            return 0.0
        most = min(self.step_s, self.batch.mean_s / STEPS)
        return self.scrape_s / ceil(self.scrape_s / most)

    @property
    def fine_grain(self) -> int:
        """A grain that is small beside a pod."""
        return max(1, min(self.slots, self.real_slots) // self.pods // GRAINS)

    @property
    def real_slots(self) -> int:
        return self.slots if self.true_slots is None else self.true_slots

    @property
    def flow_control(self) -> bool:
        """Whether requests wait in the picker; where only requests are counted it has none."""
        return self.detector.flow_control and self.signals is not Signals.REQUESTS

    @property
    def pressure_score_alone(self) -> bool:
        """Whether the dispatcher follows nothing but a score that cannot show how full the pool is."""
        return self.detector is not Detector.CONCURRENCY and self.signals is Signals.SATURATION

    @property
    def ways_s(self) -> tuple[float, float]:
        """What requests travel, and answers."""
        return (SEND_S, ANSWER_S) if self.travel_s is None else (self.travel_s, self.travel_s)

    @property
    def first_flush_s(self) -> float:
        if self.flush_phase_s is not None:
            return self.flush_phase_s
        return random.Random(f"{self.seed}/flush").random() * self.flush_s

    @property
    def budgeting(self) -> Budgeting:
        aged = self.scrape_s + self.lag_s > 2.0
        return Budgeting(
            reserve=self.reserve,
            per_endpoint=self.slots / self.pods if self.capacity_set else None,
            max_age_s=self.max_age_s if self.max_age_s is not None else 60.0 if aged else 10.0,
        )

    @property
    def at_start(self) -> Sequence[Signal]:
        """The signals that a dispatcher waits for when it starts."""
        return self.signals.at_most

    @property
    def exporter(self) -> Exporter:
        """The picker's page."""
        return Exporter(
            self.signals,
            policy=self.budgeting,
            picker_per_pod=self._believed / self.pods,
            detector=self.detector
            if self.flow_control or self.detector is Detector.SERVERS
            else Detector.NONE,
            kv_full=self.kv_full,
            flush_s=self.flush_s,
            stamp_s=self.stamp_s,
            shows_running=self.shows_running,
            shows_server_queues=self.shows_server_queues,
            pickers=self.pickers,
        )

    @property
    def _believed(self) -> int:
        return self.real_slots if self.picker_slots is None else self.picker_slots

    @property
    def full_at(self) -> Callable[[int], float] | None:
        """Requests waiting in so many pods at which the utilization detector calls the pool full; None where
        the picker does not decide by that."""
        by_queues = self.flow_control and self.detector.by_queues and self.order is Order.AUTO
        return (lambda pods: WAITING_AT_FULL * pods) if by_queues else None

    @property
    def look_phase_s(self) -> float:
        """When the picker first reads the metrics of its model servers."""
        return random.Random(f"{self.seed}/look").random() * self.look_s

    def lets_in(self, slots: int, pods: int) -> float:
        """How many requests the picker lets into the pods: the rest wait in it."""
        if self.order is Order.REALTIME_FIRST:
            return slots
        if self.order is Order.FIRST_COME or not self.flow_control:
            return inf
        if self.detector is Detector.TOKENS:
            return POD_TOKENS * pods * self.pickers / REQUEST_TOKENS
        # Each replica counts what it sent itself.
        return self._believed / self.pods * pods * self.pickers
