"""One policy against one world and one trace, in virtual time: what it harvested, and at whose cost."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from dispatcher.core.budget import Policy as Budgeting
from dispatcher.core.budget import Reading, Reason, Signal, whole
from dispatcher.sim import policies
from dispatcher.sim.metrics import Detector, Exporter
from dispatcher.sim.policies import End
from dispatcher.sim.trace import Trace
from dispatcher.sim.world import Arrival, Job, PoolState, World, work_s

SEND_S = 0.002
ANSWER_S = 0.003
BATCH_CONTEXT = 500
SETTLED_AFTER = 30
"""Readings after which a ceiling is expected to have been learned."""


class Name(StrEnum):
    """The policies by name, best known first."""

    ALL_KNOWING = "all-knowing"
    LAW = "law"
    POINT = "point"
    CAP = "cap"
    LITERAL = "literal"
    MULTIPLIER = "multiplier"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """A pool, its monitoring, and what goes wrong."""

    slots: int = 64
    """As the configuration says."""
    true_slots: int | None = None
    """As the pool has them; None: the configuration is right."""
    scrape_s: float = 1.0
    lag_s: float = 0.05
    """From a scrape until its reading is known."""
    jitter: float = 0.0
    """Each scrape comes up to this share of its interval later."""
    flush_s: float = 0.0
    detector: Detector = Detector.CONCURRENCY
    signals: Sequence[Signal] | None = None
    """None: `saturation`; both where the detector is no true count; `requests` where averages are flushed
    (no flow control)."""
    kv_full: float = 0.1
    reserve: float = 0.05
    max_age_s: float | None = None
    """None: as the configuration has it, 10 for direct scrapes and 60 for older readings."""
    seconds: float = 900.0
    seed: int = 0
    queue_limit: int | None = None
    pods: int = 1
    pods_at: Sequence[tuple[float, int]] = ()
    outages: Sequence[tuple[float, float]] = ()
    gaps: Sequence[tuple[float, float]] = ()
    """Stretches in which scrapes fail."""
    replicas: int = 1
    deaths: Sequence[float] = ()
    """When one of the replicas is killed."""
    lease_s: float = 30.0

    @property
    def real_slots(self) -> int:
        return self.slots if self.true_slots is None else self.true_slots

    @property
    def uses(self) -> Sequence[Signal]:
        if self.signals is not None:
            return self.signals
        if self.detector is Detector.UTILIZATION:
            return (Signal.SATURATION, Signal.REQUESTS)
        return (Signal.REQUESTS,) if self.flush_s else (Signal.SATURATION,)

    @property
    def budgeting(self) -> Budgeting:
        aged = self.scrape_s + self.lag_s > 2.0
        return Budgeting(
            reserve=self.reserve,
            per_endpoint=self.slots / self.pods,
            max_age_s=self.max_age_s if self.max_age_s is not None else 60.0 if aged else 10.0,
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """The pool and what the policy thought of it, for the picture."""

    state: PoolState
    limit: int | None
    closed: Reason | None


@dataclass(slots=True)
class Run:
    """What came of it."""

    name: Name
    seconds: float
    tokens: int = 0
    """Generated for batch requests that were answered."""
    sent: int = 0
    answered: int = 0
    refused: int = 0
    """Batch requests answered with 429."""
    sent_settled: int = 0
    refused_settled: int = 0
    """The same after SETTLED_AFTER readings."""
    unreachable: int = 0
    cut: int = 0
    over_mean: float = 0.0
    over_worst: float = 0.0
    realtime_refused: int = 0
    realtime_unreachable: int = 0
    waits: list[float] = field(default_factory=list)
    """Of realtime requests for a slot, seconds; those still waiting at the end included."""
    latencies: list[float] = field(default_factory=list)
    """Of realtime requests from arrival to answer."""
    closed_s: dict[str, float] = field(default_factory=dict)
    """How long the policy was closed, by reason, to the grid of the moments."""
    moments: list[Moment] = field(default_factory=list)


class Experiment:
    """A policy, a world, and between them the time that requests and answers take to travel."""

    def __init__(
        self, setting: Setting, trace: Trace, name: Name, *, progress: Callable[[float], None] | None = None
    ) -> None:
        self.setting = setting
        per_pod = setting.real_slots / setting.pods
        self.world = World(
            setting.real_slots,
            reserve=setting.reserve,
            queue_limit=setting.queue_limit,
            realtime=trace.jobs(),
            slots_at=[(at, round(pods * per_pod)) for at, pods in setting.pods_at],
            outages=setting.outages,
            on_finish=self._finished,
            on_gone=self._gone,
            on_slots=self._slots_changed,
        )
        self.exporter = Exporter(
            setting.uses,
            slots_per_pod=setting.slots / setting.pods,
            true_slots_per_pod=per_pod,
            detector=setting.detector,
            kv_full=setting.kv_full,
            flush_s=setting.flush_s,
        )
        self.policy = self._policy(name)
        self.run = Run(name, setting.seconds)
        self._progress = progress
        self._sizes = random.Random(f"{setting.seed}/batch")
        self._jitters = random.Random(f"{setting.seed}/scrapes")
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0
        self._scrapes = 0
        self._jobs: dict[int, Job] = {}
        self._keys: dict[Job, int] = {}
        self._travelling = 0
        self._check_at = inf

    def _policy(self, name: Name) -> policies.Policy:
        setting = self.setting
        budgeting, slots = setting.budgeting, setting.slots
        match name:
            case Name.ALL_KNOWING:
                return policies.AllKnowing(budgeting, slots, self._true_room)
            case Name.LAW:
                return policies.Law(
                    budgeting, slots, setting.uses, replicas=setting.replicas, lease_s=setting.lease_s
                )
            case Name.POINT:
                return policies.Point(budgeting, slots)
            case Name.CAP:
                return policies.Cap(budgeting, slots)
            case Name.LITERAL:
                return policies.Literal(budgeting, slots)
            case Name.MULTIPLIER:
                return policies.Multiplier(budgeting, slots)
            case Name.NONE:
                return policies.NoBatch(budgeting, slots)

    def play(self, *, moment_s: float = 0.0) -> Run:
        """Live through setting.seconds; keep a moment each moment_s (0: none)."""
        setting, world, policy = self.setting, self.world, self.policy
        self._at(0.0, self._scrape)
        if setting.flush_s:
            self._at(0.0, self._flush)
        if moment_s:
            self._at(0.0, lambda now: self._keep(now, moment_s))
        for at in setting.deaths:
            self._at(at, self._die)
        heap, end = self._heap, setting.seconds
        while True:
            world_at = world.next_event_at()
            at = heap[0][0] if heap else inf
            if min(world_at, at) > end:
                break
            if world_at <= at:
                world.advance(world_at)
                if policy.all_knowing:
                    self._fill(world_at)
            else:
                heapq.heappop(heap)[2](at)
        world.advance(end)
        return self._settle()

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────

    def _at(self, at: float, action: Callable[[float], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (at, self._events, action))

    def _fill(self, now: float) -> None:
        while (room := self.policy.room(now)) > 0:
            for _ in range(room):
                self._send(now)
        at = max(self.policy.check_at(now), now + 1e-6)
        if at < self._check_at:
            self._check_at = at
            self._at(at, self._check)

    def _check(self, now: float) -> None:
        if now >= self._check_at:
            self._check_at = inf
        self._fill(now)

    def _send(self, now: float) -> None:
        generated = max(8, round(self._sizes.lognormvariate(4.8, 0.6)))
        run = self.run
        run.sent += 1
        key = run.sent
        if self._scrapes > SETTLED_AFTER:
            run.sent_settled += 1
        job = self._jobs[key] = Job(work_s(BATCH_CONTEXT, generated), generated, batch=True)
        self._keys[job] = key
        self._travelling += 1
        self.policy.sent(key, now)
        self._at(now + SEND_S, lambda at: self._arrive(key, job, at))

    def _arrive(self, key: int, job: Job, now: float) -> None:
        self._travelling -= 1
        if job.gone:  # its sender died on the way
            return
        arrival = self.world.arrive(job, now)
        if arrival is Arrival.ACCEPTED:
            return
        run = self.run
        if arrival is Arrival.REFUSED:
            run.refused += 1
            run.refused_settled += self._scrapes > SETTLED_AFTER
        else:
            run.unreachable += 1
        how = End.REFUSED if arrival is Arrival.REFUSED else End.UNREACHABLE
        self._at(now + ANSWER_S, lambda at: self._back(key, at, how))

    def _finished(self, job: Job) -> None:
        if not job.batch:
            self.run.waits.append(job.started_at - job.arrived_at)
            self.run.latencies.append(job.finished_at - job.arrived_at)
            return
        self.run.tokens += job.tokens
        self.run.answered += 1
        key = self._keys[job]
        self._at(job.finished_at + ANSWER_S, lambda at: self._back(key, at, End.ANSWERED))

    def _gone(self, job: Job) -> None:
        if job.batch:
            self.run.cut += 1
            key = self._keys[job]
            self._at(self.world.now + ANSWER_S, lambda at: self._back(key, at, End.CUT))

    def _back(self, key: int, now: float, how: End) -> None:
        job = self._jobs.pop(key, None)
        if job is None:  # it died with its process
            return
        del self._keys[job]
        self.policy.ended(key, now, how)
        self._fill(now)

    def _scrape(self, now: float) -> None:
        self.world.advance(now)
        setting = self.setting
        self._scrapes += 1
        if any(start <= now < end for start, end in setting.gaps):
            self._at(now + setting.lag_s, self._unread)
        else:
            readings = self.exporter.read(self.world.observe())
            self._at(now + setting.lag_s, lambda at: self._read(at, readings))
        late = self._jitters.random() * setting.jitter * setting.scrape_s
        self._at(self._scrapes * setting.scrape_s + late, self._scrape)
        if self._progress is not None:
            self._progress(now)

    def _read(self, now: float, readings: list[Reading]) -> None:
        self.policy.read(readings, now)
        self._fill(now)

    def _unread(self, now: float) -> None:
        self.policy.unread("the metrics endpoint does not answer", now)
        self._fill(now)

    def _flush(self, now: float) -> None:
        self.world.advance(now)
        self.exporter.flush(self.world.observe())
        self._at(now + self.setting.flush_s, self._flush)

    def _slots_changed(self, slots: int) -> None:
        known = slots * self.setting.slots / self.setting.real_slots
        self._at(self.world.now, lambda at: self._capacity(known, at))

    def _capacity(self, slots: float, now: float) -> None:
        self.policy.capacity(slots, now)
        self._fill(now)

    def _die(self, now: float) -> None:
        for key in self.policy.kill(now):
            job = self._jobs.pop(key)
            del self._keys[job]
            self.world.leave(job, now)
            job.gone = True
        self._fill(now)

    def _true_room(self) -> int:
        world = self.world
        if world.down:
            return 0
        room = whole(world.slots * (1.0 - self.setting.reserve)) - world.in_system - self._travelling
        return max(0, room)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, now: float, every_s: float) -> None:
        self.world.advance(now)
        limit, closed = self.policy.shown(now)
        self.run.moments.append(Moment(self.world.observe(), limit, closed))
        if closed is not None:
            self.run.closed_s[closed.value] = self.run.closed_s.get(closed.value, 0.0) + every_s
        self._at(now + every_s, lambda at: self._keep(at, every_s))

    def _settle(self) -> Run:
        run, world = self.run, self.world
        run.over_mean = world.overshoot.mean(self.setting.seconds)
        run.over_worst = world.overshoot.worst
        run.realtime_refused = world.realtime_refused
        run.realtime_unreachable = world.realtime_unreachable
        run.waits += [world.now - job.arrived_at for job in world.realtime_waiting]
        return run
