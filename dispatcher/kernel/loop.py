"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases.

One task runs the rounds of the loop: each round flushes what has finished, then claims what the allowance
leaves free, with two round trips to the queue for any number of requests. Each request runs in a task of its
own from claim to answer, and ends as a completion that the next round flushes. Nothing else is buffered:
requests are claimed only for free units.

    woken by   a finished request, new work, a reading, a due retry, changed settings, a timer
    round      flush: settle, release, dead-letter;  allowance → claim → the stages of pipeline.py

Maintenance runs at the same time, each task at its own interval: it renews leases, expires and sweeps
requests, reads cancel markers, and shares limits with other replicas.

While the queue is unreachable nothing is claimed, requests in flight continue, and their completions are kept
until the queue is back. Every step can be repeated: claims by their nonce, the others by the tokens of the
leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from dispatcher.features import import_modules
from dispatcher.gateway.contract import Gateway
from dispatcher.kernel.attempts import AttemptRunner
from dispatcher.kernel.claiming import Claimer
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.error_guard import RESTART_PAUSE_S, ErrorGuard, start_task
from dispatcher.kernel.flush import CompletionFlusher
from dispatcher.kernel.health_watch import HealthWatch
from dispatcher.kernel.hooks import Hooks, join_hooks
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.lanes import LaneRules
from dispatcher.kernel.maintenance import Maintenance
from dispatcher.kernel.options import Options
from dispatcher.kernel.outcome_judge import OutcomeJudge
from dispatcher.kernel.pipeline import RequestPipeline
from dispatcher.kernel.queue_access import QueueAccess, QueueView, is_unexpected, loop_time
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import Poll
from dispatcher.limit.utilization import UtilizationMeter
from dispatcher.queue.contract import Queue
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.request import Request
from dispatcher.requests.units import compute_units
from dispatcher.telemetry.events import Event, emit

FLUSH_DELAY_S = 0.002
"""Time that a flush waits for more completions while other requests are running."""
FLUSH_NOW_COUNT = 8
"""Number of completions that are flushed without waiting: where they come that fast, the duration of a round
gathers them."""
MAX_ROUND_INTERVAL_S = 1.0
"""Longest time between two rounds."""
FINAL_FLUSH_S = 10.0
"""Time that a stopping process tries to flush its completions."""


def build_feature_hooks(context: KernelContext) -> Hooks:
    """Create all features that this build has, and return their hooks."""
    return join_hooks([module.build_hooks(context) for module in import_modules("hooks").values()])


class Dispatcher:
    """One owner that works on one queue. `run` returns after `drain`."""

    def __init__(
        self,
        queue: Queue,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        journal: Journal,
        random_source: random.Random | None = None,
        *,
        build_hooks: Callable[[KernelContext], Hooks] = build_feature_hooks,
        clock: Callable[[], float] | None = None,
        weigh_request: Callable[[Request], int] = compute_units,
    ) -> None:
        """Create the parts of the loop.

        `build_hooks` creates the features, by default all of them. `clock` returns seconds that go on while
        the machine sleeps; by default, the time of the loop.
        """
        self.limiter = limiter
        self.last_round_at = 0.0
        """Time of the newest round."""
        lease_validity = LeaseValidity(options.lease_s, options.owner_timeout_s)
        self._access = access = QueueAccess(queue, limiter, lease_validity, clock or loop_time)
        self.view: QueueView = access.view
        self.context = context = KernelContext(
            access, limiter, gateway, journal, options, random_source or random.Random()
        )
        self._in_flight, self._journal = context.in_flight, journal
        context.hooks = build_hooks(context)
        self._maintenance = Maintenance(context)
        self._judge = OutcomeJudge(context, self._maintenance)
        guard = ErrorGuard(context)
        self._runner = AttemptRunner(context, self._judge, guard)
        self._pipeline = RequestPipeline(context, self._judge, self._runner, guard, weigh_request)
        self.queue_timeouts = self._pipeline.queue_timeouts
        lane_rules = LaneRules()
        self._flusher = CompletionFlusher(context, lane_rules, guard)
        self._claimer = Claimer(context, lane_rules, self._judge, self._flusher, self._pipeline)
        self.health = HealthWatch(context)
        self._stop_event = asyncio.Event()
        self._stop_by = float("inf")
        self._round_ended = asyncio.Event()
        """Set between two rounds."""
        self._wake_timer: asyncio.TimerHandle | None = None
        self._tasks = asyncio.TaskGroup()

    # ── called from outside ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Work until drained. An unexpected exception costs the requests concerned a failed attempt, and ends
        nothing else (error_guard.py)."""
        async with self._tasks as tasks:
            self._runner.use_task_group(tasks)
            # Before the first count, see `reclaim_from_ended_owners`.
            try:
                await self._maintenance.reclaim_from_ended_owners()
            except Exception as error:  # later sweeps do the same
                emit(Event.INTERNAL_ERROR, where="first sweep", error=repr(error))
            background_tasks = self._maintenance.start_tasks(tasks)
            background_tasks += [
                tasks.create_task(self._run_rounds(), name="loop-rounds"),
                start_task(tasks, self.health.run, "health"),
                *(start_task(tasks, run, name) for name, run in self.context.hooks.tasks),
            ]
            await self._stop_event.wait()
            await self._drain_in_flight()
            for task in background_tasks:
                task.cancel()
        self._judge.close()

    def drain(self, within_s: float) -> None:
        """Claim nothing more, let requests in flight finish within `within_s`, return the rest, and end.

        A second call can only shorten the time.
        """
        self._stop_by = min(self._stop_by, loop_time() + within_s)
        self.limiter.start_draining(loop_time())
        self._pipeline.stop()
        self._stop_event.set()
        # The time limit may be shorter than the one that `_drain_in_flight` waits for.
        self._in_flight.request_recheck()

    def reconfigure(self, options: Options) -> None:
        self.context.options = options
        for apply_options in (
            self._judge.reconfigure,
            self.queue_timeouts.reconfigure,
            *self.context.hooks.reconfigure,
        ):
            apply_options()

    def wake_up(self) -> None:
        """Start a round, because something has changed that the allowance depends on."""
        self._access.wake.set()

    def apply_poll(self, poll: Poll) -> None:
        """Apply the result of a poll of the pool."""
        at = loop_time()
        self.limiter.apply_poll(poll, at)
        self.context.gateway.resize_connection_pool(self.limiter.get_allowance(at).limit)
        self._maintenance.request_lease_count()
        self.wake_up()

    @property
    def running_count(self) -> int:
        """Number of requests of this process at the gateway."""
        return self._in_flight.running_count

    def get_allowance(self) -> Allowance:
        return self.limiter.get_allowance(loop_time())

    # ── the round ────────────────────────────────────────────────────────────────────────────────────────

    async def _run_rounds(self) -> None:
        self.wake_up()
        # This does what `start_task` does, whose additional frame would slow down each step of a round.
        while True:
            await self._access.wake.wait()
            # Clear before working, so that a change during this round starts another one.
            self._access.wake.clear()
            last_round_at, self.last_round_at = self.last_round_at, loop_time()
            self._round_ended.clear()
            try:
                # Flush before claiming: the flush frees the units that the claim uses.
                if self.context.pending:
                    await self._flush_completions()
                if not self.context.options.observe:
                    await self._claimer.claim_work()
                    grouping = self.context.hooks.grouping
                    if grouping is not None and grouping.groups.next_due_at is not None:
                        await self._pipeline.send_ready_groups(self._claimer.build_permit)
                self._schedule_wake_up()
            except BaseException as error:
                if not is_unexpected(error):
                    raise
                emit(Event.INTERNAL_ERROR, where="loop-rounds", error=repr(error))
                # Only rounds that succeed count. If all fail, the liveness probe has the process restarted.
                self.last_round_at = last_round_at
                await asyncio.sleep(RESTART_PAUSE_S)
                self.wake_up()
            finally:
                self._round_ended.set()

    def _schedule_wake_up(self) -> None:
        """Schedule the next round: when the allowance may change, or after MAX_ROUND_INTERVAL_S."""
        at = loop_time()
        allowance = self.limiter.get_allowance(at)
        for on_allowance in self.context.hooks.on_allowance:
            on_allowance(allowance)
        wake_at = at + (self._access.retry_pause_s if self.context.pending else MAX_ROUND_INTERVAL_S)
        grouping = self.context.hooks.grouping
        if grouping is not None and (group_due_at := grouping.groups.next_due_at) is not None:
            wake_at = max(min(wake_at, group_due_at), at)
        if (grant_at := self._claimer.next_grant_at) is not None:
            wake_at = max(min(wake_at, grant_at), at)
        if allowance.next_check_at is not None:
            # Without the lower bound, a check that is due now would make the loop spin.
            wake_at = max(min(wake_at, allowance.next_check_at), at + 1e-4)
        if self._wake_timer is not None:
            self._wake_timer.cancel()
        self._wake_timer = asyncio.get_running_loop().call_at(wake_at, self._access.wake.set)
        self._maintenance.schedule_share(allowance)
        self._journal.record_state(at, allowance, self.limiter, used_units=self._in_flight.running_units)

    def measure_utilization(self) -> UtilizationMeter:
        """Return the integrals over time, until now."""
        at, used_units = loop_time(), self._in_flight.running_units
        self._journal.record_state(at, self.limiter.get_allowance(at), self.limiter, used_units=used_units)
        return self._journal.meter

    # ── completions ──────────────────────────────────────────────────────────────────────────────────────

    async def _flush_completions(self) -> None:
        """Flush all completions, and start the requests that come with the replies."""
        pending = self.context.pending
        if self.running_count and len(pending) < FLUSH_NOW_COUNT and not self._stop_event.is_set():
            # Requests of a pool often finish together; one call for all is cheaper than one each.
            await asyncio.sleep(FLUSH_DELAY_S)
        claimed = await self._flusher.flush_all(self._claimer.begin_claim_by_flush)
        if claimed is not None:
            await self._claimer.start_claimed_by_flush(claimed)

    async def _drain_in_flight(self) -> None:
        """Let requests in flight finish in time, return the rest, and flush everything."""
        # A claim may be in progress; its leases are known when the queue answers. Later rounds claim nothing.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._stop_by):
                await self._round_ended.wait()
        while len(self._in_flight) and loop_time() < self._stop_by:
            await self._in_flight.wait_until_empty(self._stop_by - loop_time())
        for entry in self._in_flight:
            # Each lease is returned, so that another owner can run its request at once.
            self._in_flight.stop_waiting(entry, "drain")
        # If the queue stays unreachable, the leases run out and are taken back by other owners.
        give_up_at = loop_time() + FINAL_FLUSH_S
        while len(self._in_flight) and loop_time() < give_up_at:
            self.wake_up()
            await self._in_flight.wait_until_empty(self._access.retry_pause_s)
        if len(self._in_flight):
            emit(Event.LEASES_LEFT_BEHIND, leases=len(self._in_flight))
