"""Simulation of one policy in one scenario with one trace, in virtual time.

The result shows how many batch requests the policy got through, and what that cost the realtime requests.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from dispatcher.core.limit.budget import Reason, whole
from dispatcher.core.limit.utilization import Meter
from dispatcher.lab.simulation import policies, virtual_loop
from dispatcher.lab.simulation.fleet import Law
from dispatcher.lab.simulation.scenario import Setting
from dispatcher.lab.simulation.transport import End, Road
from dispatcher.lab.simulation.world import Job, PoolState, World, jobs_of
from dispatcher.lab.standin.trace import Trace
from dispatcher.signals.readings import Verdict
from dispatcher.telemetry.events import diverted

SETTLED_AFTER = 30
"""Number of readings after which a wrong capacity is expected to have been corrected."""


NEW_OBJECTS = 100_000
"""Number of new objects after which the garbage collector runs."""


class Name(StrEnum):
    """Names of the policies, best known first."""

    ALL_KNOWING = "all-knowing"
    LAW = "law"
    POINT = "point"
    CAP = "cap"
    LITERAL = "literal"
    MULTIPLIER = "multiplier"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Moment:
    """State of the pool and of the policy at one moment, for the picture."""

    state: PoolState
    limit: int | None
    closed: Reason | None
    capacity: float | None = None
    """Capacity of the pool in requests, as the policy estimates it."""


@dataclass(slots=True)
class Run:
    """Figures of one simulation."""

    name: Name
    seconds: float
    tokens: int = 0
    """Number of tokens generated for answered batch requests."""
    sent: int = 0
    answered: int = 0
    refused: int = 0
    """Number of batch requests answered with 429."""
    sent_settled: int = 0
    refused_settled: int = 0
    """`sent` and `refused` without the first SETTLING_READINGS readings."""
    unreachable: int = 0
    cut: int = 0
    over_mean: float = 0.0
    over_worst: float = 0.0
    most: int = 0
    """Maximum number of requests in the pool, running and waiting."""
    realtime_refused: int = 0
    realtime_unreachable: int = 0
    waits: list[float] = field(default_factory=list)
    """Time for which each realtime request waited for a slot, with those that still wait at the end."""
    latencies: list[float] = field(default_factory=list)
    """Time from arrival to answer of each realtime request."""
    closed_s: dict[str, float] = field(default_factory=dict)
    """Time for which the policy was closed, by reason, in multiples of the sample interval."""
    moments: list[Moment] = field(default_factory=list)
    meters: Sequence[Meter] = ()
    """Utilization that each dispatcher measured for itself."""


def play(
    setting: Setting,
    trace: Trace,
    name: Name,
    *,
    moment_s: float = 0.0,
    progress: Callable[[float], None] = lambda now: None,
) -> Run:
    """Simulate `scenario.seconds` in virtual time, and record a sample every `sample_interval_s` (0:
    never)."""

    async def live() -> Run:
        async with asyncio.TaskGroup() as tasks:
            return await _Experiment(setting, trace, name, tasks, progress).live(moment_s)

    with diverted(lambda event, fields: None), _seldom_searched():  # simulated dispatchers do not log
        return virtual_loop.run(live())


@contextmanager
def _seldom_searched() -> Iterator[None]:
    """Make the garbage collector run rarely inside the block.

    The simulation creates few reference cycles, and a collection would visit all requests of the trace, of
    which there may be hundreds of thousands.
    """
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    # Frozen objects are not visited by collections at all.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class _Experiment:
    """Policy and world, connected by the transport and the monitoring."""

    def __init__(
        self,
        setting: Setting,
        trace: Trace,
        name: Name,
        tasks: asyncio.TaskGroup,
        progress: Callable[[float], None],
    ) -> None:
        world = World(
            setting.real_slots,
            reserve=setting.reserve,
            queue_limit=setting.queue_limit,
            realtime=jobs_of(trace),
            slots_at=setting.slots_at,
            pods=setting.pods,
            pods_at=setting.pods_at,
            lets_in=setting.lets_in,
            full_at=setting.full_at,
            look_s=setting.look_s,
            look_phase_s=setting.look_phase_s,
            outages=setting.outages,
            step_s=setting.steps_s,
            on_pods=self._pods_changed,
        )
        self._setting = setting
        self._loop = asyncio.get_running_loop()
        send_s, answer_s = setting.ways_s
        self._road = Road(
            world,
            send_s=send_s,
            answer_s=answer_s,
            admit_s=setting.admit_s,
            on_realtime=self._answered,
            on_change=self._fill if name is Name.ALL_KNOWING else None,
        )
        self._exporter = setting.exporter
        self._run = Run(name, setting.seconds)
        self._policy = self._make(name, tasks)
        self._progress = progress
        self._sizes = random.Random(f"{setting.seed}/batch")
        self._jitters = random.Random(f"{setting.seed}/scrapes")
        self._losses = random.Random(f"{setting.seed}/lost")
        self._scrapes = 0
        self._check_at = inf

    def _make(self, name: Name, tasks: asyncio.TaskGroup) -> policies.Policy:
        setting = self._setting
        budgeting, slots = setting.budgeting, setting.slots
        match name:
            case Name.ALL_KNOWING:
                return policies.AllKnowing(budgeting, slots, self._true_room)
            case Name.LAW:
                return Law(setting, self._road, tasks)
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
            self._exporter.flush(self._road.world.observe())
            call_at(setting.first_flush_s, self._flush, setting.first_flush_s)
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
        # Always later than now: at the same time the loop would call `_check_again` for ever.
        at = max(self._policy.check_at(now), now + 1e-6)
        # Only the earliest timer counts. Later ones still fire, and `_check_again` finds nothing to do.
        if at < self._check_at:
            self._check_at = at
            self._loop.call_at(at, self._check, at)

    def _check(self, at: float) -> None:
        if at >= self._check_at:
            self._check_at = inf
        self._fill()

    def _send(self, now: float) -> None:
        self._policy.sent(now)
        batch = self._setting.batch
        self._road.send(batch.job(batch.draw(self._sizes)), self._back)

    def _back(self, how: End) -> None:
        self._policy.ended(self._loop.time(), how)
        self._fill()

    def _answered(self, realtime: Job) -> None:
        self._run.waits.append(realtime.started_at - realtime.arrived_at)
        self._run.latencies.append(realtime.finished_at - realtime.arrived_at)

    def _scrape(self, at: float) -> None:
        setting, call_at = self._setting, self._loop.call_at
        self._road.now()
        self._scrapes += 1
        # Counts up to here; `_build_run` subtracts them from those at the end.
        if self._scrapes == SETTLED_AFTER + 1:
            self._run.sent_settled, self._run.refused_settled = self._road.sent, self._refused()
        lost = setting.lost > 0 and self._losses.random() < setting.lost
        if lost or any(start <= at < end for start, end in setting.gaps):
            call_at(at + setting.lag_s, self._unread)
        else:
            call_at(at + setting.lag_s, self._read, self._exporter.read(self._road.world.observe()))
        late = self._jitters.random() * setting.jitter * setting.scrape_s
        # Computed from the number of scrapes, so that jitter does not add up.
        next_at = self._scrapes * setting.scrape_s + late
        call_at(next_at, self._scrape, next_at)
        self._progress(at)

    def _read(self, found: Verdict) -> None:
        self._policy.read(found, self._loop.time())
        self._fill()

    def _unread(self) -> None:
        self._policy.unread("the metrics endpoint does not answer", self._loop.time())
        self._fill()

    def _flush(self, at: float) -> None:
        self._road.now()
        self._exporter.flush(self._road.world.observe())
        next_at = at + self._setting.flush_s
        # Slightly early, so that a scrape at the same moment sees the new averages.
        self._loop.call_at(next_at - 1e-6, self._flush, next_at)

    def _pods_changed(self, pods: int) -> None:
        budgeting = self._setting.budgeting
        each = budgeting.initial_per_endpoint if budgeting.per_endpoint is None else budgeting.per_endpoint
        # Not called directly: the world is in the middle of changing its pods.
        self._loop.call_soon(self._capacity, pods * each)

    def _capacity(self, slots: float) -> None:
        self._policy.capacity(slots, self._loop.time())
        self._fill()

    def _true_room(self) -> int:
        world = self._road.world
        if world.down:
            return 0
        # Requests in transit count, too: they cannot be stopped any more.
        room = whole(world.slots * (1.0 - self._setting.reserve)) - world.in_system - self._road.travelling
        return max(0, room)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────

    def _keep(self, at: float, every_s: float) -> None:
        self._road.now()
        limit, closed = self._policy.shown(self._loop.time())
        self._run.moments.append(
            Moment(self._road.world.observe(), limit, closed, self._policy.capacity_seen())
        )
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
        run.over_worst, run.most = world.overshoot.worst, world.most
        run.realtime_refused = world.realtime_refused
        run.realtime_unreachable = world.realtime_unreachable
        # Requests that never got a slot would otherwise make the policy look better.
        run.waits += [now - job.arrived_at for job in world.realtime_waiting]
        return run
