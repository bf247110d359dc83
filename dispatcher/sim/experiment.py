"""One policy against one world and one trace, in virtual time: what it harvested, and at whose cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from dispatcher.core.budget import Policy as Budgeting
from dispatcher.core.budget import Reading, Reason, Signal, whole
from dispatcher.core.harvest import Meter
from dispatcher.sim import policies, virtual
from dispatcher.sim.fleet import Law
from dispatcher.sim.metrics import Detector, Exporter
from dispatcher.sim.road import End, Road
from dispatcher.sim.trace import Trace
from dispatcher.sim.world import Job, PoolState, World, batch_job, batch_tokens
from dispatcher.telemetry.events import diverted

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
    shows_running: bool = True
    """The picker shows what it sent and saw no answer of."""
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
    batch_tokens: int | None = None
    """Every batch request generates so many; None: they differ."""
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
    meters: Sequence[Meter] = ()
    """What the dispatchers themselves made of it."""


def play(
    setting: Setting,
    trace: Trace,
    name: Name,
    *,
    moment_s: float = 0.0,
    progress: Callable[[float], None] = lambda now: None,
) -> Run:
    """Live through setting.seconds in virtual time; keep a moment each moment_s (0: none)."""

    async def live() -> Run:
        async with asyncio.TaskGroup() as tasks:
            return await _Experiment(setting, trace, name, tasks, progress).live(moment_s)

    with diverted(lambda event, fields: None):  # the dispatchers in it have no log
        return virtual.run(live())


class _Experiment:
    """A policy, a world, and between them the road and the monitoring."""

    def __init__(
        self,
        setting: Setting,
        trace: Trace,
        name: Name,
        tasks: asyncio.TaskGroup,
        progress: Callable[[float], None],
    ) -> None:
        per_pod = setting.real_slots / setting.pods
        world = World(
            setting.real_slots,
            reserve=setting.reserve,
            queue_limit=setting.queue_limit,
            realtime=trace.jobs(),
            slots_at=[(at, round(pods * per_pod)) for at, pods in setting.pods_at],
            outages=setting.outages,
            on_slots=self._slots_changed,
        )
        self._setting = setting
        self._loop = asyncio.get_running_loop()
        self._road = Road(world, on_realtime=self._answered, on_change=self._changed)
        self._exporter = Exporter(
            setting.uses,
            slots_per_pod=setting.slots / setting.pods,
            true_slots_per_pod=per_pod,
            detector=setting.detector,
            kv_full=setting.kv_full,
            flush_s=setting.flush_s,
            shows_running=setting.shows_running,
        )
        self._run = Run(name, setting.seconds)
        self._policy = self._make(name, tasks)
        self._progress = progress
        self._sizes = random.Random(f"{setting.seed}/batch")
        self._jitters = random.Random(f"{setting.seed}/scrapes")
        self._scrapes = 0
        self._check_at = inf

    def _make(self, name: Name, tasks: asyncio.TaskGroup) -> policies.Policy:
        setting = self._setting
        budgeting, slots = setting.budgeting, setting.slots
        match name:
            case Name.ALL_KNOWING:
                return policies.AllKnowing(budgeting, slots, self._true_room)
            case Name.LAW:
                return Law(
                    budgeting, slots, setting.uses, self._road, tasks,
                    replicas=setting.replicas, lease_s=setting.lease_s, seed=setting.seed,
                    tokens=setting.batch_tokens,
                )  # fmt: skip
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

    async def live(self, moment_s: float) -> Run:
        setting, call_at = self._setting, self._loop.call_at
        ended = self._loop.create_future()
        if setting.flush_s:
            self._flush(0.0)
        self._scrape(0.0)
        if moment_s:
            self._keep(0.0, moment_s)
        for at in setting.deaths:
            call_at(at, self._policy.kill)
        call_at(setting.seconds, ended.set_result, None)
        await ended
        self._run.meters = self._policy.meters()
        self._policy.stop()
        return self._settle()

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────

    def _fill(self) -> None:
        now = self._loop.time()
        while (room := self._policy.room(now)) > 0:
            for _ in range(room):
                self._send(now)
        at = max(self._policy.check_at(now), now + 1e-6)
        if at < self._check_at:
            self._check_at = at
            self._loop.call_at(at, self._check, at)

    def _check(self, at: float) -> None:
        if at >= self._check_at:
            self._check_at = inf
        self._fill()

    def _send(self, now: float) -> None:
        self._policy.sent(now)
        self._road.send(batch_job(self._setting.batch_tokens or batch_tokens(self._sizes)), self._back)

    def _back(self, how: End) -> None:
        self._policy.ended(self._loop.time(), how)
        self._fill()

    def _answered(self, realtime: Job) -> None:
        self._run.waits.append(realtime.started_at - realtime.arrived_at)
        self._run.latencies.append(realtime.finished_at - realtime.arrived_at)

    def _changed(self) -> None:
        if self._policy.all_knowing:
            self._fill()

    def _scrape(self, at: float) -> None:
        setting, call_at = self._setting, self._loop.call_at
        self._road.now()
        self._scrapes += 1
        if self._scrapes == SETTLED_AFTER + 1:
            self._run.sent_settled, self._run.refused_settled = self._road.sent, self._refused()
        if any(start <= at < end for start, end in setting.gaps):
            call_at(at + setting.lag_s, self._unread)
        else:
            call_at(at + setting.lag_s, self._read, self._exporter.read(self._road.world.observe()))
        late = self._jitters.random() * setting.jitter * setting.scrape_s
        next_at = self._scrapes * setting.scrape_s + late
        call_at(next_at, self._scrape, next_at)
        self._progress(at)

    def _read(self, readings: list[Reading]) -> None:
        self._policy.read(readings, self._loop.time())
        self._fill()

    def _unread(self) -> None:
        self._policy.unread("the metrics endpoint does not answer", self._loop.time())
        self._fill()

    def _flush(self, at: float) -> None:
        self._road.now()
        self._exporter.flush(self._road.world.observe())
        next_at = at + self._setting.flush_s
        # A hair early: a scrape at the same moment sees it.
        self._loop.call_at(next_at - 1e-6, self._flush, next_at)

    def _slots_changed(self, slots: int) -> None:
        known = slots * self._setting.slots / self._setting.real_slots
        self._loop.call_soon(self._capacity, known)

    def _capacity(self, slots: float) -> None:
        self._policy.capacity(slots, self._loop.time())
        self._fill()

    def _true_room(self) -> int:
        world = self._road.world
        if world.down:
            return 0
        room = whole(world.slots * (1.0 - self._setting.reserve)) - world.in_system - self._road.travelling
        return max(0, room)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, at: float, every_s: float) -> None:
        self._road.now()
        limit, closed = self._policy.shown(self._loop.time())
        self._run.moments.append(Moment(self._road.world.observe(), limit, closed))
        if closed is not None:
            self._run.closed_s[closed.value] = self._run.closed_s.get(closed.value, 0.0) + every_s
        self._loop.call_at(at + every_s, self._keep, at + every_s, every_s)

    def _refused(self) -> int:
        return self._road.ended[End.REFUSED]

    def _settle(self) -> Run:
        run, road, world = self._run, self._road, self._road.world
        now = road.now()
        run.tokens, run.sent, run.refused = road.tokens, road.sent, self._refused()
        run.answered, run.cut = road.ended[End.ANSWERED], road.ended[End.CUT]
        run.unreachable = road.ended[End.UNREACHABLE]
        settled = self._scrapes > SETTLED_AFTER
        run.sent_settled = run.sent - run.sent_settled if settled else 0
        run.refused_settled = run.refused - run.refused_settled if settled else 0
        run.over_mean = world.overshoot.mean(self._setting.seconds)
        run.over_worst = world.overshoot.worst
        run.realtime_refused = world.realtime_refused
        run.realtime_unreachable = world.realtime_unreachable
        run.waits += [now - job.arrived_at for job in world.realtime_waiting]
        return run
