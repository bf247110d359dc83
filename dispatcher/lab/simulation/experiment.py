"""Simulation of one policy in one scenario with one trace, in virtual time.

The result shows how many batch requests the policy got through, and what that cost the realtime requests.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import inf

from dispatcher.lab.simulation import policies, virtual_loop
from dispatcher.lab.simulation.dispatcher_policy import DispatcherPolicy
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.transport import JobEnd, SimulatedTransport
from dispatcher.lab.simulation.world import Job, PoolState, World, make_realtime_jobs
from dispatcher.lab.standin.scorer import StaleScorer
from dispatcher.lab.standin.trace import Trace
from dispatcher.limit.budget import Reason, round_down
from dispatcher.limit.utilization import UtilizationMeter
from dispatcher.signals.readings import PollReadings
from dispatcher.telemetry.events import divert_events

SETTLING_READINGS = 30
"""Number of readings after which a wrong capacity is expected to have been corrected."""


GC_THRESHOLD = 100_000
"""Number of new objects after which the garbage collector runs."""


class PolicyName(StrEnum):
    """Names of the policies, best known first."""

    ALL_KNOWING = "all-knowing"
    DISPATCHER = "dispatcher"
    WHOLE = "whole"
    """The dispatcher without slices, to compare with the scenario's slices."""
    POINT = "point"
    CAP = "cap"
    LITERAL = "literal"
    MULTIPLIER = "multiplier"
    NONE = "none"


@dataclass(slots=True)
class _BatchRequest:
    """Batch request of a policy other than the dispatcher."""

    context: int
    tokens: int
    generated_tokens: int = 0
    """Number of tokens that its slices have generated so far."""


@dataclass(frozen=True, slots=True)
class TimelineSample:
    """State of the pool and of the policy at one moment, for the picture."""

    state: PoolState
    limit: int | None
    closed_reason: Reason | None
    capacity: float | None = None
    """Capacity of the pool in requests, as the policy estimates it."""


@dataclass(slots=True)
class Run:
    """Figures of one simulation."""

    policy: PolicyName
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
    preempted: int = 0
    """Number of times that a request was preempted because the KV memory was full."""
    evicted: int = 0
    """Number of batch requests that were stopped for realtime requests."""
    overshoot_mean: float = 0.0
    overshoot_worst: float = 0.0
    peak_requests: int = 0
    """Maximum number of requests in the pool, running and waiting."""
    realtime_refused: int = 0
    realtime_unreachable: int = 0
    waits: list[float] = field(default_factory=list)
    """Time for which each realtime request waited for a slot, with those that still wait at the end."""
    latencies: list[float] = field(default_factory=list)
    """Time from arrival to answer of each realtime request."""
    closed_s: dict[str, float] = field(default_factory=dict)
    """Time for which the policy was closed, by reason, in multiples of the sample interval."""
    samples: list[TimelineSample] = field(default_factory=list)
    meters: Sequence[UtilizationMeter] = ()
    """Utilization that each dispatcher measured for itself."""


def run_scenario(
    scenario: Scenario,
    trace: Trace,
    policy: PolicyName,
    *,
    sample_interval_s: float = 0.0,
    progress: Callable[[float], None] = lambda now: None,
) -> Run:
    """Simulate `scenario.seconds` in virtual time, and record a sample every `sample_interval_s` (0:
    never)."""

    async def run_experiment() -> Run:
        async with asyncio.TaskGroup() as tasks:
            return await _Experiment(scenario, trace, policy, tasks, progress).run_to_end(sample_interval_s)

    with divert_events(lambda event, fields: None), _reduce_gc():  # simulated dispatchers do not log
        return virtual_loop.run_in_virtual_time(run_experiment())


@contextmanager
def _reduce_gc() -> Iterator[None]:
    """Make the garbage collector run rarely inside the block.

    The simulation creates few reference cycles, and a collection would visit all requests of the trace, of
    which there may be hundreds of thousands.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    # Frozen objects are not visited by collections at all.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


class _Experiment:
    """Policy and world, connected by the transport and the monitoring."""

    def __init__(
        self,
        scenario: Scenario,
        trace: Trace,
        policy: PolicyName,
        tasks: asyncio.TaskGroup,
        progress: Callable[[float], None],
    ) -> None:
        if policy is PolicyName.WHOLE:
            scenario = replace(scenario, slice_tokens=None, revokes_slices=False)
        world = World(
            scenario.real_slots,
            reserve=scenario.reserve,
            queue_limit=scenario.queue_limit,
            realtime=make_realtime_jobs(trace, holds_kv=scenario.kv_tokens is not None),
            slots_at=scenario.slots_at,
            pods=scenario.pods,
            pods_at=scenario.pods_at,
            get_admission_limit=scenario.get_admission_limit,
            full_threshold=scenario.full_threshold,
            metrics_refresh_s=scenario.metrics_refresh_s,
            metrics_refresh_phase_s=scenario.metrics_refresh_phase_s,
            outages=scenario.outages,
            time_step_s=scenario.effective_time_step_s,
            kv_tokens=scenario.kv_tokens,
            evicts=scenario.evicts,
            scorer=StaleScorer(scenario.scorer_scrape_s, scenario.seed) if scenario.scorer_scrape_s else None,
            on_pod_count=self._handle_pod_change,
        )
        self._scenario = scenario
        self._loop = asyncio.get_running_loop()
        send_s, answer_s = scenario.transit_times_s
        self._transport = SimulatedTransport(
            world,
            send_s=send_s,
            answer_s=answer_s,
            admit_s=scenario.admit_s,
            on_realtime=self._record_latency,
            on_change=self._send_allowed_requests if policy is PolicyName.ALL_KNOWING else None,
        )
        self._exporter = scenario.exporter
        self._run = Run(policy, scenario.seconds)
        self._policy = self._create_policy(policy, tasks)
        self._progress = progress
        self._token_rng = random.Random(f"{scenario.seed}/batch")
        self._returned: deque[_BatchRequest] = deque()
        """Requests that have to be sent again, next ones first."""
        self._slice_number = 0
        self._jitter_rng = random.Random(f"{scenario.seed}/scrapes")
        self._loss_rng = random.Random(f"{scenario.seed}/lost")
        self._scrape_count = 0
        self._check_at = inf

    def _create_policy(self, policy: PolicyName, tasks: asyncio.TaskGroup) -> policies.Policy:
        scenario = self._scenario
        budgeting, slots = scenario.budgeting, scenario.slots
        match policy:
            case PolicyName.ALL_KNOWING:
                return policies.AllKnowing(budgeting, slots, self._count_free_slots)
            case PolicyName.DISPATCHER | PolicyName.WHOLE:
                return DispatcherPolicy(scenario, self._transport, tasks)
            case PolicyName.POINT:
                return policies.Point(budgeting, slots)
            case PolicyName.CAP:
                return policies.Cap(budgeting, slots)
            case PolicyName.LITERAL:
                return policies.Literal(budgeting, slots)
            case PolicyName.MULTIPLIER:
                return policies.Multiplier(budgeting, slots)
            case PolicyName.NONE:
                return policies.NoBatch(budgeting, slots)

    async def run_to_end(self, sample_interval_s: float) -> Run:
        scenario, call_at = self._scenario, self._loop.call_at
        ended = self._loop.create_future()
        if scenario.flush_s:
            self._exporter.flush_averages(self._transport.world.observe_pool())
            call_at(scenario.first_flush_s, self._flush_averages, scenario.first_flush_s)
        self._start_scrape(0.0)
        if sample_interval_s:
            self._record_sample(0.0, sample_interval_s)
        for at in scenario.deaths:
            call_at(at, self._policy.kill_replica)
        call_at(scenario.seconds, ended.set_result, None)
        await ended
        self._run.meters = self._policy.get_meters()
        self._policy.stop()
        return self._build_run()

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────

    def _send_allowed_requests(self) -> None:
        now = self._loop.time()
        while (room := self._policy.count_sendable(now)) > 0:
            for _ in range(room):
                self._send_request(now)
        # Always later than now: at the same time the loop would call `_check_again` for ever.
        at = max(self._policy.next_check_at(now), now + 1e-6)
        # Only the earliest timer counts. Later ones still fire, and `_check_again` finds nothing to do.
        if at < self._check_at:
            self._check_at = at
            self._loop.call_at(at, self._check_again, at)

    def _check_again(self, at: float) -> None:
        if at >= self._check_at:
            self._check_at = inf
        self._send_allowed_requests()

    def _send_request(self, now: float) -> None:
        self._policy.record_sent(now)
        scenario, batch = self._scenario, self._scenario.batch
        request = (
            self._returned.popleft() if self._returned else _BatchRequest(*batch.draw_size(self._token_rng))
        )
        if scenario.slice_tokens is None:
            job = batch.make_job(request.context, request.tokens)
        else:
            # A build without the feature simulates whole requests.
            from dispatcher.features.slices.size import vary_tokens

            self._slice_number += 1
            max_tokens = vary_tokens(scenario.slice_tokens, self._slice_number)
            job = scenario.make_call(request.context, request.tokens, request.generated_tokens, max_tokens)
        self._transport.send_job(job, partial(self._handle_end, request, job))

    def _handle_end(self, request: _BatchRequest, job: Job, end: JobEnd) -> None:
        self._policy.record_end(self._loop.time(), end)
        if end is JobEnd.ANSWERED:
            request.generated_tokens += job.tokens
            must_continue = not job.is_last
        else:
            # Other requests that failed are replaced by new ones, which are like them.
            must_continue = request.generated_tokens > 0 or end is JobEnd.EVICTED
        if must_continue:
            self._returned.append(request)
        self._send_allowed_requests()

    def _record_latency(self, realtime: Job) -> None:
        self._run.waits.append(realtime.started_at - realtime.arrived_at - realtime.ran_s)
        self._run.latencies.append(realtime.finished_at - realtime.arrived_at)

    def _start_scrape(self, at: float) -> None:
        scenario, call_at = self._scenario, self._loop.call_at
        self._transport.advance_world()
        self._scrape_count += 1
        # Counts up to here; `_build_run` subtracts them from those at the end.
        if self._scrape_count == SETTLING_READINGS + 1:
            self._run.sent_settled, self._run.refused_settled = self._transport.sent, self._count_refused()
        is_lost = scenario.lost > 0 and self._loss_rng.random() < scenario.lost
        if is_lost or any(start <= at < end for start, end in scenario.gaps):
            call_at(at + scenario.lag_s, self._deliver_scrape_failure)
        else:
            call_at(
                at + scenario.lag_s,
                self._deliver_reading,
                self._exporter.scrape_pages(self._transport.world.observe_pool()),
            )
        jitter_s = self._jitter_rng.random() * scenario.jitter * scenario.scrape_s
        # Computed from the number of scrapes, so that jitter does not add up.
        next_at = self._scrape_count * scenario.scrape_s + jitter_s
        call_at(next_at, self._start_scrape, next_at)
        self._progress(at)

    def _deliver_reading(self, verdict: PollReadings) -> None:
        self._policy.handle_reading(verdict, self._loop.time())
        self._send_allowed_requests()

    def _deliver_scrape_failure(self) -> None:
        self._policy.handle_scrape_failure("the metrics endpoint does not answer", self._loop.time())
        self._send_allowed_requests()

    def _flush_averages(self, at: float) -> None:
        self._transport.advance_world()
        self._exporter.flush_averages(self._transport.world.observe_pool())
        next_at = at + self._scenario.flush_s
        # Slightly early, so that a scrape at the same moment sees the new averages.
        self._loop.call_at(next_at - 1e-6, self._flush_averages, next_at)

    def _handle_pod_change(self, pods: int) -> None:
        budgeting = self._scenario.budgeting
        per_pod = budgeting.initial_per_endpoint if budgeting.per_endpoint is None else budgeting.per_endpoint
        # Not called directly: the world is in the middle of changing its pods.
        self._loop.call_soon(self._deliver_capacity, pods * per_pod)

    def _deliver_capacity(self, slots: float) -> None:
        self._policy.handle_capacity(slots, self._loop.time())
        self._send_allowed_requests()

    def _count_free_slots(self) -> int:
        world = self._transport.world
        if world.is_down:
            return 0
        # Requests in transit count, too: they cannot be stopped any more.
        room = (
            round_down(world.slots * (1.0 - self._scenario.reserve))
            - world.in_system
            - self._transport.in_transit
        )
        return max(0, room)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────

    def _record_sample(self, at: float, interval_s: float) -> None:
        self._transport.advance_world()
        limit, closed = self._policy.get_limit_and_reason(self._loop.time())
        self._run.samples.append(
            TimelineSample(
                self._transport.world.observe_pool(), limit, closed, self._policy.get_estimated_capacity()
            )
        )
        if closed is not None:
            self._run.closed_s[closed.value] = self._run.closed_s.get(closed.value, 0.0) + interval_s
        self._loop.call_at(at + interval_s, self._record_sample, at + interval_s, interval_s)

    def _count_refused(self) -> int:
        return self._transport.ended[JobEnd.REFUSED]

    def _build_run(self) -> Run:
        run, transport, world = self._run, self._transport, self._transport.world
        now = transport.advance_world()
        run.tokens, run.sent, run.refused = transport.tokens, transport.sent, self._count_refused()
        run.answered, run.cut = transport.ended[JobEnd.ANSWERED], transport.ended[JobEnd.CUT]
        run.unreachable, run.evicted = transport.ended[JobEnd.UNREACHABLE], transport.ended[JobEnd.EVICTED]
        has_settled = self._scrape_count > SETTLING_READINGS
        run.sent_settled = run.sent - run.sent_settled if has_settled else 0
        run.refused_settled = run.refused - run.refused_settled if has_settled else 0
        run.overshoot_mean = world.overshoot.compute_mean(self._scenario.seconds)
        run.overshoot_worst, run.peak_requests = world.overshoot.worst, world.peak_requests
        run.realtime_refused = world.realtime_refused
        run.realtime_unreachable = world.realtime_unreachable
        # Requests that never got a slot would otherwise make the policy look better.
        run.waits += [now - job.arrived_at - job.ran_s for job in world.realtime_waiting]
        run.preempted = world.preempted
        return run
