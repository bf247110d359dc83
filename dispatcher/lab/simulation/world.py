"""Inference pool as a state machine: requests arrive, wait, run and finish. It reads no clock.

    Pods have M slots each. A request that starts as the n-th running one of its pod holds its slot for
    work × f seconds, f = 1 + (n − 1) / (M − 1): a full pod is half as fast as an empty one.
    work = 0.03 + 0.00025 × context tokens + 0.012 × generated tokens.

A request without a free slot waits either in the picker, where realtime requests go first, or in the pod with
the lowest load, first come, first served. The picker decides how many requests it lets into the pods.

The KV memory of a pod may be bounded. A running request holds its context and the tokens generated so far.
The next request starts if there is room for its context. When the memory is full, the newest running request
is preempted: it waits as the first of its pod, and what it had generated is then processed again as context.

A driver passes arrivals (`advance_and_admit`), advances the time (`advance`, not beyond `next_event_at` if it
reacts to everything) and reads the state (`observe_pool`). The world calls back when a request leaves.
Realtime requests, changes of the capacity and outages of the gateway are given at the start. The same input
gives exactly the same history.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from math import floor, inf, nan
from operator import itemgetter
from random import Random
from statistics import pstdev
from typing import NamedTuple

import msgspec

from dispatcher.lab.standin.model import (
    BATCH_CONTEXT,
    BATCH_SPREAD,
    BATCH_TOKENS,
    compute_context,
    compute_slowdown,
    compute_work_s,
    draw_tokens,
)
from dispatcher.lab.standin.scorer import StaleScorer
from dispatcher.lab.standin.trace import Trace

KV_WATERMARK = 0.01
"""Share of the KV memory that the start of a request leaves free, as in vLLM. Otherwise it could be preempted
at once."""


class Job(msgspec.Struct, eq=False):
    """Request in the pool."""

    work_s: float
    """Duration in an empty pool."""
    tokens: int
    """Generated tokens of each of the requests."""
    is_batch: bool
    request_count: int = 1
    """Number of identical requests that this job stands for. They start together, as soon as one slot is
    free."""
    earlier_tokens: int = 0
    """Number of tokens that earlier slices of each request have generated."""
    is_last: bool = True
    """False if the request goes on with another slice."""
    context_tokens: int = BATCH_CONTEXT
    recomputed_tokens: int = 0
    """Number of tokens that were generated before a preemption, and are processed again as context."""
    ran_s: float = 0.0
    """Time for which the request ran before it was preempted."""
    arrived_at: float = nan
    started_at: float = nan
    """Time of the start. NaN while the request waits."""
    ends_at: float = nan
    """Time at which the request ends if nothing stops it. NaN while it waits."""
    finished_at: float = nan
    """Time at which the request left, answered or not."""
    is_gone: bool = False
    """True if the request left without an answer because its client or the gateway closed the connection."""
    pod: Pod | None = None
    """Pod in which the request runs or waits. `None` if it is in the picker or not in the pool."""

    @property
    def kv_at_start(self) -> int:
        """Tokens that the request holds in the KV memory when it starts."""
        return (self.context_tokens + self.earlier_tokens + self.recomputed_tokens) * self.request_count

    @property
    def kv_growth(self) -> int:
        """Tokens by which this number grows until the end."""
        return (self.tokens - self.recomputed_tokens) * self.request_count

    def compute_progress(self, at: float) -> float:
        """Return the part of the run that has passed. Tokens are assumed to be generated evenly."""
        return (at - self.started_at) / (self.ends_at - self.started_at)


class BatchMix(NamedTuple):
    """Share of the batch requests that has a size of its own."""

    share: float
    context: int
    tokens: float


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Properties of batch requests."""

    tokens: float = BATCH_TOKENS
    spread: float = BATCH_SPREAD
    """Spread of the number of tokens. 0 if all requests are equal."""
    seconds: float | None = None
    """Duration of each request in an empty pool. `None` if it follows from the tokens."""
    context: int = BATCH_CONTEXT
    """Context tokens of each request."""
    mix: BatchMix | None = None
    """Requests of another size among them. `None` if there are none."""

    @property
    def mean_s(self) -> float:
        """Average duration of a request in an empty pool: of the shorter ones, if there are two sizes."""
        if self.seconds is not None:
            return self.seconds
        mean_s = compute_work_s(self.context, self.tokens)
        return mean_s if self.mix is None else min(mean_s, compute_work_s(self.mix.context, self.mix.tokens))

    def draw_size(self, draws: Random) -> tuple[int, int]:
        """Draw the context and the number of generated tokens of the next request."""
        # Without a mix nothing more is drawn, so a seed gives the same requests as before there were mixes.
        if self.mix is not None and draws.random() < self.mix.share:
            return self.mix.context, draw_tokens(draws, self.mix.tokens, self.spread)
        return self.context, draw_tokens(draws, self.tokens, self.spread)

    def make_job(self, context: int, tokens: int, request_count: int = 1) -> Job:
        """Make a job that generates this number of tokens, for one request or for several identical ones."""
        work = compute_work_s(context, tokens) if self.seconds is None else self.seconds
        return Job(work, tokens, True, request_count, context_tokens=context)


def make_realtime_jobs(trace: Trace, *, holds_kv: bool = False) -> Iterator[tuple[float, Job]]:
    """Yield the realtime requests of a trace with their arrival times. Each world needs new jobs, since jobs
    have state. With `holds_kv` they have their context, which nothing else needs."""
    for each in trace.arrivals:
        job = Job(each.work_s, each.tokens, is_batch=False)
        if holds_kv:
            job.context_tokens = compute_context(each.work_s, each.tokens)
        yield each.arrives_at, job


class Arrival(Enum):
    """Decision of the gateway about an arriving request."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    """Answered with 429 `rejected-saturated`: the queue of the picker is full."""
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of the pool at one moment."""

    at: float
    slots: int
    realtime_running: int
    realtime_waiting: int
    batch_running: int
    batch_waiting: int
    waiting_in_pods: int = 0
    """Number of waiting requests that wait in the pods."""
    batch_waiting_in_pods: int = 0
    """Number of batch requests among them."""
    pods: int = 1
    last_read_waiting_in_pods: int = 0
    """Number of requests that waited in the pods when the picker last read their metrics."""
    last_read_pods_with_room: int = 0
    """Number of pods in which no request waited then."""
    running_deviation: float = 0.0
    """Standard deviation of the running requests of a pod."""
    kv_usage: float | None = None
    """Share of the KV memory in use, as a mean over the pods. `None` if it is not bounded."""

    @property
    def running(self) -> int:
        return self.realtime_running + self.batch_running

    @property
    def waiting(self) -> int:
        return self.realtime_waiting + self.batch_waiting


@dataclass(slots=True)
class Overshoot:
    """Requests in the pool above (1 − B) × M, over time."""

    request_seconds: float = 0.0
    worst: float = 0.0

    def compute_mean(self, seconds: float) -> float:
        return self.request_seconds / seconds if seconds > 0 else 0.0


@dataclass(slots=True, eq=False)
class Pod:
    """Model server. A pod that was removed has no slots, and its running requests run to their end."""

    slots: int
    running: int = 0
    queue: deque[Job] = field(default_factory=deque)
    waiting: int = 0
    """Number of requests in the queue, which may be more than its jobs."""
    step_ended_at: float = nan
    """Time at which batch requests last ended at a time step here."""
    running_before_step: int = 0
    """Number of requests that were running just before that."""
    running_batch: dict[Job, None] = field(default_factory=dict)
    """Running batch requests in the order of their starts, if the picker evicts."""
    kv_running: dict[Job, None] = field(default_factory=dict)
    """All running requests in the order of their starts, if the KV memory is bounded."""
    kv_full_at: float = inf
    """Time at which the running requests fill the KV memory."""

    @property
    def load(self) -> float:
        """Load that the picker compares to choose a pod."""
        return (self.running + self.waiting) / self.slots if self.slots else inf

    def count_kv_tokens(self, at: float) -> float:
        """Return the tokens in the KV memory."""
        return sum(job.kv_at_start + job.kv_growth * job.compute_progress(at) for job in self.kv_running)


class World:
    """Pool and its gateway.

    `realtime` yields (arrival time, job) in ascending order. `slots_at` are changes of the capacity as (time,
    slots); requests on removed slots run to their end. `pods_at` are changes of the number of pods as (time,
    pods), all with the same number of slots.

    `get_admission_limit` returns for (slots, pods) how many requests the picker lets into the pods; by
    default as many as run at once. `full_threshold` returns for a number of pods how many requests must wait
    in them for the picker to hold all others back; below it the picker lets everything in, whatever
    `get_admission_limit` returns. The picker reads the metrics of the pods every `metrics_refresh_s`, first
    at `metrics_refresh_phase_s`, and acts on what it read, so that a burst passes before the pods are seen to
    be full; 0 lets it see every change at once.

    `scorer` chooses the pod for each request, by the loads of its last scrape. Without it, the pod with the
    lowest load is chosen.

    `kv_tokens` bounds the KV memory of all pods at the start together, in tokens.

    With `evicts` the picker stops the newest running batch request of a pod for each realtime request that
    finds no free slot there. What the batch request has generated is lost.

    `queue_limit` bounds the requests that wait in the picker, or in the pods if the picker has no queue.
    `outages` are periods as (from, until) in which the gateway is down; at the start of one all connections
    close and their requests stop. With `time_step_s` batch requests end in the middle of time steps, at the
    one nearest to their end, so that many end together; 0 lets each end at its own time. `on_start` is called
    with the time at which a batch request that got a slot will end, unless it is cancelled or dropped before.
    """

    def __init__(
        self,
        slots: int,
        *,
        reserve: float = 0.05,
        queue_limit: int | None = None,
        realtime: Iterable[tuple[float, Job]] = (),
        slots_at: Sequence[tuple[float, int]] = (),
        pods: int = 1,
        pods_at: Sequence[tuple[float, int]] = (),
        get_admission_limit: Callable[[int, int], float] = lambda slots, pods: slots,
        full_threshold: Callable[[int], float] | None = None,
        metrics_refresh_s: float = 0.0,
        metrics_refresh_phase_s: float = 0.0,
        outages: Sequence[tuple[float, float]] = (),
        time_step_s: float = 0.0,
        kv_tokens: int | None = None,
        evicts: bool = False,
        scorer: StaleScorer | None = None,
        on_start: Callable[[Job, float], None] = lambda job, ends_at: None,
        on_finish: Callable[[Job], None] = lambda job: None,
        on_dropped: Callable[[Job], None] = lambda job: None,
        on_evicted: Callable[[Job], None] = lambda job: None,
        on_pod_count: Callable[[int], None] = lambda pods: None,
    ) -> None:
        self.now = 0.0
        self.slots = slots
        self.overshoot = Overshoot()
        self.realtime_refused = 0
        self.realtime_unreachable = 0
        self.peak_requests = 0
        """Maximum number of requests in the pool so far, running and waiting."""
        self.preempted = 0
        """Number of times that a request was preempted because the KV memory was full."""
        self.evicts = evicts
        self.kv_per_pod = inf if kv_tokens is None else kv_tokens / pods
        self._scorer = scorer
        self._reserve = reserve
        self._time_step_s = time_step_s
        self._queue_limit = inf if queue_limit is None else queue_limit
        self.on_start, self.on_finish, self.on_dropped = on_start, on_finish, on_dropped
        self.on_evicted = on_evicted
        self._on_pod_count = on_pod_count
        self._get_admission_limit = get_admission_limit
        self._full_threshold = full_threshold
        self._metrics_refresh_s, self._metrics_refresh_phase_s = metrics_refresh_s, metrics_refresh_phase_s
        self._refresh_at = inf
        """Time at which the picker next reads the metrics of the pods. Infinite while reading them would
        change nothing."""
        self._last_read_waiting = 0
        self._last_read_pods_with_room = pods
        self._realtime = iter(realtime)
        self._next_realtime = next(self._realtime, None)
        self._changes: list[tuple[float, Callable[[], None]]] = [
            *((at, partial(self._set_slots, to)) for at, to in slots_at),
            *((at, partial(self._set_pods, to)) for at, to in pods_at),
            *((start, self._start_outage) for start, _ in outages),
            *((end, self._end_outage) for _, end in outages),
        ]
        self._changes.sort(key=itemgetter(0), reverse=True)
        self.is_down = False
        """True while the gateway is down."""
        self.in_system = 0
        """Number of requests in the pool, running and waiting."""
        self._running = {False: 0, True: 0}  # by whether they are batch requests
        self._waiting_in_pods = {False: 0, True: 0}
        self._waiting_in_picker = {False: 0, True: 0}
        self._queue: dict[bool, deque[Job]] = {False: deque(), True: deque()}
        self._ends: list[tuple[float, int, Job]] = []
        """Times at which a request ends, or fills the KV memory of its pod together with the others. An entry
        whose time has changed since is skipped."""
        self._starts = 0
        self._per_pod = slots / pods
        self._pods = [Pod(0) for _ in range(pods)]
        self._distribute_slots()

    def __repr__(self) -> str:
        return f"<World t={self.now:.3f} {self.observe_pool()}>"

    @property
    def _pods_waiting_count(self) -> int:
        return self._waiting_in_pods[False] + self._waiting_in_pods[True]

    @property
    def _pods_with_room_count(self) -> int:
        return len([pod for pod in self._pods if not pod.waiting])

    @property
    def _picker_waiting_count(self) -> int:
        return self._waiting_in_picker[False] + self._waiting_in_picker[True]

    @property
    def pod_loads(self) -> list[int]:
        """Running and waiting requests of each pod."""
        return [pod.running + pod.waiting for pod in self._pods]

    @property
    def realtime_waiting(self) -> Iterable[Job]:
        inside = (job for pod in self._pods for job in pod.queue if not job.is_batch)
        return chain(inside, self._queue[False])

    def observe_pool(self) -> PoolState:
        """Return the state of the pool at `now`. Advance first to observe another time."""
        return PoolState(
            at=self.now,
            slots=self.slots,
            realtime_running=self._running[False],
            realtime_waiting=self._waiting_in_pods[False] + self._waiting_in_picker[False],
            batch_running=self._running[True],
            batch_waiting=self._waiting_in_pods[True] + self._waiting_in_picker[True],
            waiting_in_pods=self._pods_waiting_count,
            batch_waiting_in_pods=self._waiting_in_pods[True],
            pods=len(self._pods),
            last_read_waiting_in_pods=self._last_read_waiting
            if self._metrics_refresh_s
            else self._pods_waiting_count,
            last_read_pods_with_room=self._last_read_pods_with_room
            if self._metrics_refresh_s
            else self._pods_with_room_count,
            running_deviation=pstdev([pod.running for pod in self._pods]) if len(self._pods) > 1 else 0.0,
            kv_usage=None if self.kv_per_pod == inf else self._compute_kv_usage(),
        )

    def _compute_kv_usage(self) -> float:
        used = sum(pod.count_kv_tokens(self.now) for pod in self._pods)
        return used / (self.kv_per_pod * len(self._pods)) if self._pods else 1.0

    def next_event_at(self) -> float:
        """Return the time of the next event of the world, or infinity."""
        at = self._ends[0][0] if self._ends else inf
        if self._next_realtime is not None and self._next_realtime[0] < at:
            at = self._next_realtime[0]
        if self._changes and self._changes[-1][0] < at:
            at = self._changes[-1][0]
        return self._refresh_at if self._refresh_at < at else at  # noqa: FURB136 -- saves a call per event

    def next_change_at(self) -> float:
        """Return the time of the next change of slots, pods or gateway, or infinity."""
        return self._changes[-1][0] if self._changes else inf

    @property
    def has_batch_waiting(self) -> bool:
        return bool(self._waiting_in_pods[True] or self._waiting_in_picker[True])

    def advance(self, to: float) -> None:
        """Process all events until `to`, and set the time to it."""
        ends, changes = self._ends, self._changes
        while True:
            # Inlined `next_event_at`: the call would be the most expensive part of this loop.
            at, realtime = ends[0][0] if ends else inf, self._next_realtime
            if realtime is not None and realtime[0] < at:
                at = realtime[0]
            if changes and changes[-1][0] < at:
                at = changes[-1][0]
            if self._refresh_at < at:
                at = self._refresh_at
            if at > to:
                break
            if at > self.now:
                self._pass_time(at)
            # At equal times: metrics, then changes, then ends, then arrivals. A freed slot is available at
            # once.
            if self._refresh_at == at:
                self._refresh_metrics()
            elif changes and changes[-1][0] == at:
                changes.pop()[1]()
            elif ends and ends[0][0] == at:
                self._finish_job(heapq.heappop(ends)[2])
            elif realtime is not None:
                self._next_realtime = next(self._realtime, None)
                self._admit_realtime(realtime[1])
        if to > self.now:
            self._pass_time(to)

    def advance_and_admit(self, job: Job, now: float) -> Arrival:
        """Advance to `now` and admit a request that reaches the gateway then."""
        self.advance(now)
        return self.admit_job(job)

    def remove_job(self, job: Job, now: float) -> None:
        """Remove a request whose client closed the connection. No effect if it has left already."""
        self.advance(now)
        if job.finished_at == job.finished_at or job.arrived_at != job.arrived_at:  # NaN: not yet
            return
        job.finished_at, job.is_gone = now, True
        self.in_system -= job.request_count
        if job.pod is None:
            self._queue[job.is_batch].remove(job)
            self._waiting_in_picker[job.is_batch] -= job.request_count
        elif job.started_at == job.started_at:
            self._release_slot(job.pod, job)  # `_finish_job` skips its entry in the heap later
        else:
            job.pod.queue.remove(job)
            self._change_pod_waiting(job.pod, job, -job.request_count)
            self._start_queued_jobs(job.pod)  # the next ones may need less KV memory
            self._admit_waiting_jobs()

    def admit_job(self, job: Job) -> Arrival:
        """Admit a request that reaches the gateway now."""
        if self.is_down:
            return Arrival.UNREACHABLE
        pod = self._choose_pod()
        if self.evicts and not job.is_batch and (pod is None or pod.running >= pod.slots):
            pod = self._evict_newest(self._pods if pod is None else (pod,)) or pod
        if pod is None:
            if self._picker_waiting_count >= self._queue_limit:
                return Arrival.REFUSED
        elif (
            self._full_threshold is None
            and self._admission_limit == inf
            and pod.running >= pod.slots
            and self._pods_waiting_count >= self._queue_limit
        ):
            return Arrival.REFUSED  # no queue in the picker: the pods refuse
        job.arrived_at = self.now
        self.in_system += job.request_count
        if pod is None:
            self._queue_in_picker(job)
        else:
            self._enter_pod(pod, job)
        self._update_peaks()
        return Arrival.ACCEPTED

    def _evict_newest(self, pods: Sequence[Pod]) -> Pod | None:
        """Stop the newest running batch request of the pod with the lowest load, whose slot the next request
        takes. Return the pod, or `None` if no batch request runs in these pods."""
        # A pod that lost slots may have more running requests than slots, so that no slot would come free.
        candidates = [pod for pod in pods if pod.running_batch and pod.running <= pod.slots]
        pod = min(candidates, key=lambda each: each.load, default=None)
        if pod is None:
            return None
        job = next(reversed(pod.running_batch))
        job.finished_at, job.is_gone = self.now, True  # `_finish_job` skips its entry in the heap later
        self.in_system -= job.request_count
        self._leave_slot(pod, job)
        self.on_evicted(job)
        return pod

    def _predict_full_kv(self, pod: Pod) -> None:
        """Compute the time at which the running requests of a pod fill its KV memory."""
        rate = sum(job.kv_growth / (job.ends_at - job.started_at) for job in pod.kv_running)
        free = self.kv_per_pod - pod.count_kv_tokens(self.now)
        # A request that fills the memory alone runs on: there is nothing to preempt.
        is_shared = rate > 0 and len(pod.kv_running) > 1
        pod.kv_full_at = self.now + max(0.0, free) / rate if is_shared else inf
        if is_shared:
            self._starts += 1
            heapq.heappush(self._ends, (pod.kv_full_at, self._starts, next(iter(pod.kv_running))))

    def _preempt_newest(self, pod: Pod) -> None:
        """Let the newest running request of a pod wait again. Nothing else starts, because it is the first to
        wait."""
        job = next(reversed(pod.kv_running))
        generated = floor(job.kv_growth // job.request_count * job.compute_progress(self.now))
        job.recomputed_tokens += generated
        job.ran_s += self.now - job.started_at
        job.work_s = compute_work_s(
            job.context_tokens + job.earlier_tokens + job.recomputed_tokens,
            job.tokens - job.recomputed_tokens,
        )
        self._leave_slot(pod, job)
        job.started_at = job.ends_at = nan  # its entry in the heap is skipped
        self.preempted += job.request_count
        pod.queue.appendleft(job)
        self._change_pod_waiting(pod, job, job.request_count)
        if not pod.slots:
            self._return_waiting_jobs(pod)
            self._admit_waiting_jobs()

    def _fits_in_kv(self, pod: Pod, job: Job) -> bool:
        """Return whether the KV memory has room for a request to start."""
        if not pod.kv_running:
            return True
        used = pod.count_kv_tokens(self.now) + job.kv_at_start
        return used <= (1.0 - KV_WATERMARK) * self.kv_per_pod

    def _choose_pod(self) -> Pod | None:
        """Return the pod to which the picker sends the next request, or `None` if it lets none in."""
        if len(self._pods) == 1:  # the usual case, and called for each request
            pod = self._pods[0]
            return pod if pod.slots and pod.running + pod.waiting < self._admission_limit else None
        if sum(pod.running + pod.waiting for pod in self._pods) >= self._admission_limit:
            return None
        if self._scorer is not None and (present := [n for n, pod in enumerate(self._pods) if pod.slots]):
            self._scorer.record_loads(self.now, [pod.load for pod in self._pods])
            return self._pods[self._scorer.choose_endpoint(present)]
        least = min(self._pods, key=lambda each: each.load, default=None)
        return least if least is not None and least.slots else None

    def _enter_pod(self, pod: Pod, job: Job) -> None:
        job.pod = pod
        if pod.running < pod.slots and (
            self.kv_per_pod == inf or (not pod.queue and self._fits_in_kv(pod, job))
        ):
            self._start_job(pod, job)
        else:
            pod.queue.append(job)
            self._change_pod_waiting(pod, job, job.request_count)
            if self.kv_per_pod != inf:  # an eviction may have made room for the first one
                self._start_queued_jobs(pod)

    def _change_pod_waiting(self, pod: Pod, job: Job, change: int) -> None:
        pod.waiting += change
        self._waiting_in_pods[job.is_batch] += change
        # The next reading on the fixed grid of readings, as if it had never paused.
        if self._metrics_refresh_s and self._refresh_at == inf:
            passed = floor((self.now - self._metrics_refresh_phase_s) / self._metrics_refresh_s)
            self._refresh_at = self._metrics_refresh_phase_s + (passed + 1) * self._metrics_refresh_s
        elif not self._metrics_refresh_s:
            self._update_admission_limit()

    def _refresh_metrics(self) -> None:
        """Let the picker read the metrics of the pods."""
        self._last_read_waiting = self._pods_waiting_count
        self._last_read_pods_with_room = self._pods_with_room_count
        waits = self._last_read_waiting or self._picker_waiting_count
        # Pauses while nothing waits, to save events.
        self._refresh_at = self._refresh_at + self._metrics_refresh_s if waits else inf
        self._update_admission_limit()
        self._admit_waiting_jobs()

    def _update_admission_limit(self) -> None:
        if self._full_threshold is not None:
            last_read_waiting = (
                self._last_read_waiting if self._metrics_refresh_s else self._pods_waiting_count
            )
            self._admission_limit = 0.0 if last_read_waiting >= self._full_threshold(len(self._pods)) else inf

    def _queue_in_picker(self, job: Job) -> None:
        self._queue[job.is_batch].append(job)
        self._waiting_in_picker[job.is_batch] += job.request_count

    def _pass_time(self, to: float) -> None:
        over = self.in_system - self._allowed_requests
        if over > 0:
            self.overshoot.request_seconds += over * (to - self.now)
        self.now = to
        if self._scorer is not None and to >= self._scorer.scrape_at:
            self._scorer.record_loads(to, [pod.load for pod in self._pods])

    def _update_peaks(self) -> None:
        if self.in_system > self.peak_requests:
            self.peak_requests = self.in_system
        over = self.in_system - self._allowed_requests
        if over > self.overshoot.worst:
            self.overshoot.worst = over

    def _start_job(self, pod: Pod, job: Job) -> None:
        self._running[job.is_batch] += job.request_count
        pod.running += job.request_count
        job.started_at = self.now
        self._starts += 1  # breaks ties: equal ends leave in the order of their starts
        if self._time_step_s and job.is_batch:
            end = self._find_step_end(job, pod)
        else:
            end = self.now + job.work_s * compute_slowdown(min(pod.running, pod.slots), pod.slots)
        job.ends_at = end
        heapq.heappush(self._ends, (end, self._starts, job))
        if self.kv_per_pod != inf:
            pod.kv_running[job] = None
            self._predict_full_kv(pod)
        if job.is_batch:
            if self.evicts:
                pod.running_batch[job] = None
            self.on_start(job, end)

    def _find_step_end(self, job: Job, pod: Pod) -> float:
        """Return the time at which a batch request ends with time steps.

        It is early as often as late. It is in the middle of a step because scrapes are at whole seconds, and
        must not all see the slots that become free at a step. A request that takes one of these slots is as
        slow as if the others had ended one by one.
        """
        step_s = self._time_step_s
        running = (
            max(pod.running, pod.running_before_step)
            if self.now < pod.step_ended_at + step_s
            else pod.running
        )
        end = self.now + job.work_s * compute_slowdown(min(running, pod.slots), pod.slots)
        middle = (floor(end / step_s) + 0.5) * step_s
        return middle if middle > self.now else middle + step_s

    def _leave_slot(self, pod: Pod, job: Job) -> None:
        """Take a running request out of its slot and the KV memory."""
        if self.evicts:
            pod.running_batch.pop(job, None)
        self._running[job.is_batch] -= job.request_count
        pod.running -= job.request_count
        if self.kv_per_pod != inf:
            del pod.kv_running[job]
            self._predict_full_kv(pod)

    def _release_slot(self, pod: Pod, job: Job) -> None:
        self._leave_slot(pod, job)
        self._start_queued_jobs(pod)
        self._admit_waiting_jobs()

    def _start_queued_jobs(self, pod: Pod) -> None:
        while (
            pod.queue
            and pod.running < pod.slots
            and (self.kv_per_pod == inf or self._fits_in_kv(pod, pod.queue[0]))
        ):
            job = pod.queue.popleft()
            self._change_pod_waiting(pod, job, -job.request_count)
            self._start_job(pod, job)

    def _admit_waiting_jobs(self) -> None:
        """Let requests from the picker into the pods as far as they have room."""
        while queue := self._queue[False] or self._queue[True]:
            pod = self._choose_pod()
            if pod is None:
                return
            job = queue.popleft()
            self._waiting_in_picker[job.is_batch] -= job.request_count
            self._enter_pod(pod, job)

    def _finish_job(self, job: Job) -> None:
        if job.is_gone or job.pod is None or job.finished_at == job.finished_at:  # NaN: not yet
            return
        if job.ends_at != self.now:  # it was preempted, or stands for its pod
            if job.pod.kv_full_at == self.now:
                self._preempt_newest(job.pod)
            return
        job.finished_at = self.now
        self.in_system -= job.request_count
        # Only the first of the requests that end together saw the full pod.
        if job.is_batch and job.pod.step_ended_at != self.now:
            job.pod.step_ended_at, job.pod.running_before_step = self.now, job.pod.running
        self._release_slot(job.pod, job)
        self.on_finish(job)

    def _admit_realtime(self, job: Job) -> None:
        arrival = self.admit_job(job)
        if arrival is Arrival.REFUSED:
            self.realtime_refused += 1
        elif arrival is Arrival.UNREACHABLE:
            self.realtime_unreachable += 1

    def _set_slots(self, slots: int) -> None:
        # A fraction, so that later changes of the number of pods keep the capacity per pod.
        self._per_pod = slots / max(1, len(self._pods))
        self._distribute_slots()

    def _set_pods(self, pods: int) -> None:
        leaving = self._pods[pods:]
        self._pods = self._pods[:pods] + [Pod(0) for _ in range(pods - len(self._pods))]
        for pod in leaving:
            pod.slots = 0
            self._return_waiting_jobs(pod)
        self._distribute_slots()
        self._on_pod_count(pods)

    def _return_waiting_jobs(self, pod: Pod) -> None:
        """Let the picker send the requests that wait in a pod without slots to other pods."""
        for job in pod.queue:
            job.pod = None
            self._change_pod_waiting(pod, job, -job.request_count)
            self._queue_in_picker(job)
        pod.queue.clear()

    def _distribute_slots(self) -> None:
        """Distribute the slots over the pods."""
        pods = len(self._pods)
        self.slots = round(self._per_pod * pods)
        for number, pod in enumerate(self._pods):
            pod.slots = self.slots // pods + (number < self.slots % pods)
            if not pod.slots:
                self._return_waiting_jobs(pod)
        self._allowed_requests = self.slots * (1.0 - self._reserve)
        self._admission_limit = self._get_admission_limit(self.slots, pods)
        self._update_admission_limit()
        for pod in self._pods:
            self._start_queued_jobs(pod)
        self._admit_waiting_jobs()
        self._update_peaks()

    def _start_outage(self) -> None:
        self.is_down = True
        # Sorted, since the order of a heap is not the order of the ends.
        lost = [job for at, _, job in sorted(self._ends) if job.ends_at == at and not job.is_gone]
        lost += [job for pod in self._pods for job in pod.queue]
        lost += [*self._queue[False], *self._queue[True]]
        self._ends.clear()
        for pod in self._pods:
            pod.running = pod.waiting = 0
            pod.queue.clear()
            pod.running_batch.clear()
            pod.kv_running.clear()
            pod.kv_full_at = inf
        for queue in self._queue.values():
            queue.clear()
        self._running = {False: 0, True: 0}
        self._waiting_in_pods = {False: 0, True: 0}
        self._waiting_in_picker = {False: 0, True: 0}
        self.in_system = 0
        for job in lost:
            job.finished_at, job.is_gone = self.now, True
            self.on_dropped(job)

    def _end_outage(self) -> None:
        self.is_down = False
