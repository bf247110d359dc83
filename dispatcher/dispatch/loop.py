"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases.

One task runs the turns of the loop: each turn flushes what has finished, then claims what the allowance
leaves free, with two round trips to the queue for any number of requests. Each request runs in a task of its
own from claim to answer, and ends as a completion that the next turn flushes. Nothing else is buffered:
requests are claimed only for free units.

    woken by   a finished request, new work, a reading, a due retry, changed settings, a timer
    turn       flush: settle, release, dead-letter;  allowance → claim → the stages of pipeline.py

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

from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import Poll
from dispatcher.core.limit.utilization import UtilizationMeter
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.units import compute_units
from dispatcher.dispatch.attempts import AttemptRunner
from dispatcher.dispatch.claiming import Claimer
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.flush import CompletionFlusher
from dispatcher.dispatch.health_watch import HealthWatch
from dispatcher.dispatch.in_flight import InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.lanes import LaneRules
from dispatcher.dispatch.maintenance import Maintenance
from dispatcher.dispatch.merging.merger import RequestMerger
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.models.warm_up import WarmUpRunner
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.outcome_judge import OutcomeJudge
from dispatcher.dispatch.pipeline import RequestPipeline
from dispatcher.dispatch.queue_access import QueueAccess, QueueView, loop_time
from dispatcher.dispatch.sequences.turns import TurnChecker
from dispatcher.dispatch.slices.slicer import Slicer
from dispatcher.ports import Gateway, ModelServers, Queue
from dispatcher.telemetry.events import Event, emit

FLUSH_DELAY_S = 0.002
"""Time that a flush waits for more completions while other requests are running."""
FLUSH_NOW_COUNT = 8
"""Number of completions that are flushed without waiting: where they come that fast, the duration of a turn
gathers them."""
MAX_TURN_INTERVAL_S = 1.0
"""Longest time between two turns."""
FINAL_FLUSH_S = 10.0
"""Time that a stopping process tries to flush its completions."""


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
        clock: Callable[[], float] | None = None,
        weigh_request: Callable[[Request], int] = compute_units,
        servers: ModelServers | None = None,
    ) -> None:
        """Create the parts of the loop.

        `clock` returns seconds that go on while the machine sleeps; by default, the time of the loop.
        `servers` calls model servers directly; without it, warm-ups go through the gateway.
        """
        self.limiter = limiter
        self.last_turn_at = 0.0
        """Time of the newest turn."""
        self._options = options
        self._gateway = gateway
        self._journal = journal
        random_source = random_source or random.Random()
        complete, remove = self._add_completion, self._remove_lost_lease
        self._in_flight = InFlightTable()
        lease_validity = LeaseValidity(options.lease_s, options.owner_timeout_s)
        self._access = access = QueueAccess(queue, limiter, lease_validity, clock or loop_time)
        self.view: QueueView = access.view
        self._maintenance = Maintenance(access, self._in_flight, limiter, options, journal)
        # What merging, sequences, models and slices know about the requests of this process.
        self.merger = RequestMerger(options, random_source)
        self.turn_checker = TurnChecker(access, self._in_flight, options, complete, remove)
        self.model_router = ModelRouter(access, self._in_flight, options, complete)
        self.warm_ups = WarmUpRunner(
            access, limiter, self._in_flight, gateway, self.model_router.versions, options, servers
        )
        self.slicer = Slicer(access, gateway, options, self.merger.has_rule_for)
        self._judge = OutcomeJudge(
            gateway, limiter, options, self._in_flight, access, self._maintenance, random_source
        )
        self._runner = AttemptRunner(
            gateway,
            limiter,
            options,
            self._in_flight,
            access,
            journal,
            self._judge,
            self.merger,
            self.turn_checker,
            self.model_router,
            self.slicer,
            random_source,
            complete,
            remove,
        )
        self._pipeline = RequestPipeline(
            limiter,
            access,
            self._in_flight,
            options,
            self.merger,
            self.turn_checker,
            self.model_router,
            self.slicer,
            self._judge,
            self._runner,
            weigh_request,
            complete,
            remove,
        )
        self.queue_timeouts = self._pipeline.queue_timeouts
        lane_rules = LaneRules()
        self._flusher = CompletionFlusher(access, lane_rules, journal, self._remove_lease)
        self._claimer = Claimer(
            access,
            limiter,
            self._in_flight,
            lane_rules,
            self.warm_ups,
            self._judge,
            self._flusher,
            self._pipeline,
            options,
            complete,
        )
        self.health = HealthWatch(
            limiter,
            self.view,
            journal.recent_attempts,
            self._in_flight,
            self.model_router,
            is_observing=options.observe,
        )
        self._stop_event = asyncio.Event()
        self._stop_by = float("inf")
        self._turn_ended = asyncio.Event()
        """Set between two turns."""
        self._wake_timer: asyncio.TimerHandle | None = None
        self._tasks = asyncio.TaskGroup()

    # ── called from outside ──────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Work until drained. An internal error costs its request a failed attempt; an error of the loop is
        raised."""
        async with self._tasks as tasks:
            self._runner.use_task_group(tasks)
            # Before the first count, see `reclaim_from_ended_owners`.
            await self._maintenance.reclaim_from_ended_owners()
            background_tasks = self._maintenance.start_tasks(tasks)
            background_tasks.append(tasks.create_task(self._run_turns(), name="loop-turns"))
            background_tasks.append(tasks.create_task(self.model_router.run_checks(), name="model-requests"))
            background_tasks.append(tasks.create_task(self.warm_ups.run(), name="warm-up"))
            background_tasks.append(tasks.create_task(self.health.run(), name="health"))
            self.wake_up()
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
        # The options are immutable, so that the parts can keep references to them.
        self._options = options
        for part in (
            self._maintenance,
            self._pipeline,
            self._runner,
            self._judge,
            self._claimer,
            self.warm_ups,
        ):
            part.reconfigure(options)
        lease_validity = self._access.lease_validity
        lease_validity.lease_s, lease_validity.owner_timeout_s = options.lease_s, options.owner_timeout_s

    def wake_up(self) -> None:
        """Start a turn, because something has changed that the allowance depends on."""
        self._access.wake.set()

    def apply_poll(self, poll: Poll) -> None:
        """Apply the result of a poll of the pool."""
        at = loop_time()
        self.limiter.apply_poll(poll, at)
        self._gateway.resize_connection_pool(self.limiter.get_allowance(at).limit)
        self._maintenance.request_lease_count()
        self.wake_up()

    @property
    def running_count(self) -> int:
        """Number of requests of this process at the gateway."""
        return self._in_flight.running_count

    def get_allowance(self) -> Allowance:
        return self.limiter.get_allowance(loop_time())

    # ── the turn ─────────────────────────────────────────────────────────────────────────────────────────

    async def _run_turns(self) -> None:
        while True:
            await self._access.wake.wait()
            # Clear before working, so that a change during this turn starts another one.
            self._access.wake.clear()
            self.last_turn_at = loop_time()
            self._turn_ended.clear()
            # Flush before claiming: the flush frees the units that the claim uses.
            if self._flusher.pending:
                await self._flush_completions()
            if not self._options.observe:
                await self._claimer.claim_work()
                if self._pipeline.next_group_due_at is not None:
                    await self._pipeline.send_ready_groups(self._claimer.build_permit)
            self._schedule_wake_up()
            self._turn_ended.set()

    def _schedule_wake_up(self) -> None:
        """Schedule the next turn: when the allowance may change, or after MAX_TURN_INTERVAL_S."""
        at = loop_time()
        allowance = self.limiter.get_allowance(at)
        if self._options.slicing.revokes and self.slicer.slices:
            self.slicer.revoke_slices(allowance, self._in_flight, self.limiter.other_owners_units)
        wake_at = at + (self._access.retry_pause_s if self._flusher.pending else MAX_TURN_INTERVAL_S)
        if (group_due_at := self._pipeline.next_group_due_at) is not None:
            wake_at = max(min(wake_at, group_due_at), at)
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

    def _add_completion(self, completion: Completion) -> None:
        self._flusher.pending.append(completion)
        self._access.wake.set()

    # ── completions ──────────────────────────────────────────────────────────────────────────────────────

    async def _flush_completions(self) -> None:
        """Flush all completions, and start the requests that come with the replies."""
        pending = self._flusher.pending
        if self.running_count and len(pending) < FLUSH_NOW_COUNT and not self._stop_event.is_set():
            # Requests of a pool often finish together; one call for all is cheaper than one each.
            await asyncio.sleep(FLUSH_DELAY_S)
        claimed = await self._flusher.flush_all(self._claimer.permit_claim_by_flush)
        if claimed is not None:
            await self._claimer.start_claimed_by_flush(claimed)

    def _remove_lost_lease(self, token: str) -> InFlightLease | None:
        self.wake_up()
        return self._remove_lease(token)

    def _remove_lease(self, token: str) -> InFlightLease | None:
        self._pipeline.forget_lease(token)
        return self._in_flight.remove_lease(token)

    async def _drain_in_flight(self) -> None:
        """Let requests in flight finish in time, return the rest, and flush everything."""
        # A claim may be in progress; its leases are known when the queue answers. Later turns claim nothing.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._stop_by):
                await self._turn_ended.wait()
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
