"""The dispatch loop: allowance → claim → forward → settle, and the maintenance of leases.

One task runs the turns of the loop: each turn flushes what has finished, then claims what the allowance
leaves free, with two round trips to the queue for any number of requests. Each request runs in a task of its
own from claim to answer, and ends as a completion that the next turn flushes. Nothing else is buffered:
requests are claimed only for free units.

    woken by   a finished request, new work, a reading, a due retry, changed settings, a timer
    turn       flush: settle, release, dead-letter;  allowance → claim → check cancelled → start

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
from collections.abc import Callable, Sequence
from functools import partial

from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import Poll
from dispatcher.core.limit.utilization import UtilizationMeter
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.units import compute_units
from dispatcher.core.sequences.decisions import TurnGranted
from dispatcher.dispatch import completions
from dispatcher.dispatch.admission import EARLY_RULES, SEND_RULES, AdmissionCase, apply_rules, parse_lease
from dispatcher.dispatch.attempts import AttemptRunner
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.flush import CompletionFlusher
from dispatcher.dispatch.health_watch import HealthWatch
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.lanes import LaneRules
from dispatcher.dispatch.maintenance import Maintenance, build_permit
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, QueueView, explain_empty_claim, loop_time
from dispatcher.dispatch.weights import UnitAllocator
from dispatcher.ports import ClaimResult, Gateway, ModelServers, Permit, Queue, Release
from dispatcher.telemetry.events import Event, emit

FLUSH_DELAY_S = 0.002
"""Time that a flush waits for more completions while other requests are running."""
FLUSH_NOW_COUNT = 8
"""Number of completions that are flushed without waiting: where they come that fast, the duration of a turn
gathers them."""
LARGE_MEMBER_BYTES = 65_536
"""Longest member that is kept beside its parsed request, which holds the payload once more."""
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
        self._queue = queue
        self._gateway = gateway
        self._journal = journal
        self._lane_rules = LaneRules()
        self._in_flight = InFlightTable()
        lease_validity = LeaseValidity(options.lease_s, options.owner_timeout_s)
        self._access = QueueAccess(queue, limiter, lease_validity, clock or loop_time)
        self._weigh_request = weigh_request
        self._unit_allocator = UnitAllocator(
            self._access, self._in_flight, self._add_completion, self._weigh_entry, self._remove_lost_lease
        )
        self._maintenance = Maintenance(self._access, self._in_flight, limiter, options, journal)
        self._runner = AttemptRunner(
            gateway,
            limiter,
            options,
            self._in_flight,
            self._access,
            self._maintenance,
            journal,
            random_source or random.Random(),
            self._add_completion,
            self._remove_lost_lease,
            servers,
        )
        self.view: QueueView = self._access.view
        self.merger = self._runner.merger
        self.turn_checker = self._runner.turn_checker
        self.model_router, self.warm_ups = self._runner.model_router, self._runner.warm_ups
        self.health = HealthWatch(
            limiter,
            self.view,
            journal.recent_attempts,
            self._in_flight,
            self.model_router,
            is_observing=options.observe,
        )
        self._flusher = CompletionFlusher(self._access, self._lane_rules, journal, self._remove_lease)
        self._claim_nonce = self._probe_nonce = ""
        """Nonce of a claim or probe whose reply was lost: the next one repeats it."""
        self._claim_asked_at = self._probe_asked_at = 0.0
        """Time at which it was asked for the first time."""
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
        self._runner.close()

    def drain(self, within_s: float) -> None:
        """Claim nothing more, let requests in flight finish within `within_s`, return the rest, and end.

        A second call can only shorten the time.
        """
        self._stop_by = min(self._stop_by, loop_time() + within_s)
        self.limiter.start_draining(loop_time())
        self._stop_event.set()
        # The time limit may be shorter than the one that `_drain_in_flight` waits for.
        self._in_flight.request_recheck()

    def reconfigure(self, options: Options) -> None:
        # The options are immutable, so that the parts can keep references to them.
        self._options = self._maintenance.options = options
        self._runner.reconfigure(options)
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
                await self._claim_work()
                await self._send_ready_groups()
            self._schedule_wake_up()
            self._turn_ended.set()

    def _schedule_wake_up(self) -> None:
        """Schedule the next turn: when the allowance may change, or after MAX_TURN_INTERVAL_S."""
        at = loop_time()
        allowance = self.limiter.get_allowance(at)
        wake_at = at + (self._access.retry_pause_s if self._flusher.pending else MAX_TURN_INTERVAL_S)
        if (group_due_at := self._runner.merger.groups.next_due_at) is not None:
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

    async def _claim_work(self) -> None:
        """Claim requests for the free units, and start them."""
        while True:
            at = loop_time()
            allowance = self.limiter.get_allowance(at)
            # While the gateway is unreachable, only probes are claimed.
            if allowance.probe_limit:
                await self._claim_probe(allowance)
                return
            free_units = (
                allowance.limit
                - self._in_flight.units
                - self.limiter.other_owners_units
                - self.warm_ups.units
            )
            if free_units <= 0 or not self._access.has_work:
                return
            max_count, assumed_units = self._unit_allocator.plan_claim(
                free_units, self._runner.merger.groups.unweighted_count
            )
            # If all requests are refused, only a few are tried at a time.
            max_count = min(max_count, self._runner.tenants.max_tried_at_once or max_count)
            if max_count < 1:  # requests that wait in groups will use the free units
                return
            max_per_lane = self._lane_rules.compute_rooms(self._in_flight.lane_counts, at)
            # A claim whose reply was lost is repeated with its nonce. Its leases count from when it was first
            # asked.
            if not self._claim_nonce:
                self._claim_nonce, self._claim_asked_at = next(self._flusher.nonces), self._access.clock()
            permit = build_permit(allowance, self._options, self.warm_ups.units)
            claim = self._queue.claim(
                max_count, self._claim_nonce, permit, max_per_lane=max_per_lane, assumed_units=assumed_units
            )
            claim_result = await self._access.call_queue("claim", claim)
            if claim_result is None:
                return
            self._claim_nonce = ""
            self._access.record_sign_of_life(self._claim_asked_at)
            self._access.update_from_reply(claim_result)
            self.limiter.set_withheld_reason(explain_empty_claim(claim_result, permit))
            self._runner.has_claimable_requests = claim_result.claimable_count > 0
            must_claim_again = self._lane_rules.record_claim(claim_result.claimable_count)
            self._access.has_work = claim_result.claimable_count > 0 or must_claim_again
            if claim_result.leases:
                is_waiting = await self._start_claimed(claim_result, self._claim_asked_at, permit)
                if is_waiting and self._flusher.pending:  # flush first, or others would be claimed ahead
                    return
            elif not must_claim_again:
                return

    async def _claim_probe(self, allowance: Allowance) -> None:
        """Claim one request to see whether the gateway is back. No other replica probes at the same time."""
        # The previous probe still runs.
        if any(entry.is_probe for entry in self._in_flight):
            return
        if not self._probe_nonce:
            self._probe_nonce, self._probe_asked_at = next(self._flusher.nonces), self._access.clock()
        permit = build_permit(allowance, self._options).copy_with(limit=allowance.probe_limit)
        claim_result = await self._access.call_queue(
            "probe", self._queue.claim_probe(self._probe_nonce, permit)
        )
        if claim_result is not None:
            self._probe_nonce = ""
            self._access.record_sign_of_life(self._probe_asked_at)
            self._access.update_from_reply(claim_result)
            self._runner.has_claimable_requests = claim_result.claimable_count > 0
            if self._runner.has_claimable_requests and claim_result.leases:
                (lease,) = claim_result.leases
                # One bad request must not be the probe again and again, or the gateway would never count as
                # back.
                rest_s = self._runner.intermediary_errors.compute_rest_s(lease.entry_id, loop_time())
                if rest_s > 0:  # it has probed before: let another one probe, at once
                    self._in_flight.add_lease(lease, self._probe_asked_at, is_probe=True)
                    self._add_completion(completions.build_return(lease, after_s=rest_s))
                    return
            if await self._start_claimed(claim_result, self._probe_asked_at, permit, is_probe=True):
                self.wake_up()  # it was not sent: let another one probe, at once
                return
            self.warm_ups.allow_probe(claim_result, allowance.probe_limit)
        self.limiter.record_probe(loop_time(), has_other_requests=self._runner.has_claimable_requests)

    async def _start_claimed(
        self,
        claim_result: ClaimResult,
        asked_at: float,
        permit: Permit,
        *,
        is_probe: bool = False,
        granted_turns: Sequence[TurnGranted] = (),
    ) -> bool:
        """Start the requests of a call at `asked_at` that may be sent.

        Return True if some wait for their turn or their model, or if the probe ended unsent. `granted_turns`
        has the turns that are known already.
        """
        admitted: list[tuple[InFlightLease, Request]] = []
        max_bytes = self._options.max_payload_bytes
        for number, lease in enumerate(claim_result.leases):
            entry = self._in_flight.add_lease(lease, asked_at, is_probe=is_probe)
            entry.granted_turn = granted_turns[number] if granted_turns else None
            request = self.turn_checker.parsed_requests.take_request(lease, max_bytes) or parse_lease(
                lease, max_bytes
            )
            if isinstance(request, Request):
                admitted.append((entry, request))
            else:
                self._add_completion(request)
        cases: list[tuple[InFlightLease, AdmissionCase]] = []
        unix_now = self._queue.unix_now()
        for entry, request in await self.model_router.route_requests(admitted):
            entry.request, lease = request, entry.lease
            self._runner.merger.register_request(entry, request)
            case = AdmissionCase(lease, request, unix_now, self._options.retry)
            if (completion := apply_rules(case, EARLY_RULES)) is not None:
                self._add_completion(completion)
                continue
            # The payload is in the request already: do not keep large bytes twice while the request runs.
            if len(lease.member) > LARGE_MEMBER_BYTES:
                entry.lease = case.lease = lease.copy_with(member=b"")
            cases.append((entry, case))
        cases, is_waiting = await self.turn_checker.check_turns(
            cases
        )  # first, because the conversation adds weight
        requests = [(entry, case.request) for entry, case in cases]
        without_room = await self._unit_allocator.allocate_for_requests(requests, permit, self.limiter)
        cases = [each for each in cases if each[0].lease.token not in without_room] if without_room else cases
        # A claim does not read cancel markers: one lookup for all claimed requests is cheaper.
        cancelled = await self._access.check_cancelled([entry for entry, _ in cases])
        result_lists = {case.request.results for _, case in cases} - {""}
        list_problems = await self._queue.find_invalid_result_lists(result_lists) if result_lists else {}
        # Ask again: a refusal since the claim closes the gate for these requests, too.
        at, lease_validity, clock = loop_time(), self._access.lease_validity, self._access.clock()
        may_send = (
            is_probe or not self.limiter.get_allowance(at).reason.is_closed
        ) and not self._stop_event.is_set()
        for (entry, case), is_cancelled in zip(cases, cancelled, strict=True):
            case.lease, case.is_cancelled, case.result_list_problem = (
                entry.lease,
                is_cancelled,
                list_problems.get(case.request.results),
            )
            case.can_send, case.is_lease_valid = (
                may_send,
                lease_validity.is_certainly_held(entry.confirmed_at, clock),
            )
            case.check_model = partial(self.model_router.check_model, entry, case.request)
            # Called only if all other rules agree, because the lookup counts the request as sent.
            case.get_rest_s = partial(self._runner.get_rest_s, entry)
            if (completion := apply_rules(case, SEND_RULES)) is not None:
                is_waiting = is_waiting or (
                    isinstance(completion, Release) and completion.missing_model != ""
                )
                self._add_completion(completion)
            elif not self._runner.merger.add_to_group(entry, at, case.request.deadline - unix_now):
                self._runner.start_attempt(Attempt(case.lease.token, case.request, [entry]), self._tasks)
        return is_waiting or (is_probe and self._flusher.has_final_completion(claim_result.leases))

    def _weigh_entry(self, entry: InFlightLease, request: Request) -> float:
        member = self._runner.merger.get_member(entry)
        return self._weigh_request(request) if member is None else member.units

    async def _send_ready_groups(self) -> None:
        """Send the batch groups that are complete or have waited long enough. Return all leases if nothing
        may be sent."""
        merger = self._runner.merger
        if merger.groups.next_due_at is None:
            return
        allowance = self.get_allowance()
        if allowance.reason.is_closed or self._stop_event.is_set():
            self._runner.complete_unsent(merger.groups.take_all())
            return
        room = allowance.limit - self._in_flight.units - self.limiter.other_owners_units
        # No request can join soon: none waits in the queue, or there is no room and no running request will
        # make some.
        is_complete = not self._runner.has_claimable_requests or (room <= 0 and not self.running_count)
        attempts, stopped = merger.take_ready_attempts(
            loop_time(), is_complete=is_complete, is_lease_valid=self._access.is_lease_valid
        )
        self._runner.complete_unsent(stopped)
        one_unit_attempts = [attempt for attempt in attempts if merger.counts_one_unit(attempt)]
        without_room = await self._unit_allocator.allocate_for_calls(
            one_unit_attempts, build_permit(allowance, self._options, self.warm_ups.units)
        )
        for attempt in attempts:
            if without_room and any(entry.lease.token in without_room for entry in attempt.leases):
                merger.handle_stopped(attempt)
                self._runner.complete_unsent(
                    entry for entry in attempt.leases if entry.lease.token not in without_room
                )
            else:
                self._runner.start_attempt(attempt, self._tasks)

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
        claimed_turns = await self._flusher.flush_all(self._permit_next_turns)
        if claimed_turns is None:
            return
        if claimed_turns.claim_result is None:  # the reply was lost: the next claim repeats it
            self._claim_nonce, self._claim_asked_at, self._access.has_work = (
                claimed_turns.nonce,
                claimed_turns.asked_at,
                True,
            )
            return
        self._runner.has_claimable_requests = claimed_turns.claim_result.claimable_count > 0
        if claimed_turns.claim_result.leases:
            await self._start_claimed(
                claimed_turns.claim_result,
                claimed_turns.asked_at,
                claimed_turns.permit,
                granted_turns=claimed_turns.granted_turns,
            )

    def _permit_next_turns(self) -> Permit | None:
        """Return the permit to claim next requests of sequences. `None` if a claim now would be impossible or
        different: a probe, a repetition, one by one."""
        allowance = self.get_allowance()
        must_claim_otherwise = (
            self._claim_nonce
            or self._options.observe
            or self._runner.tenants.max_tried_at_once
            or allowance.limit <= 0
        )
        return None if must_claim_otherwise else build_permit(allowance, self._options, self.warm_ups.units)

    def _remove_lost_lease(self, token: str) -> InFlightLease | None:
        self.wake_up()
        return self._remove_lease(token)

    def _remove_lease(self, token: str) -> InFlightLease | None:
        self._runner.merger.forget_lease(token)
        entry = self._in_flight.remove_lease(token)
        if entry is not None and entry.used_version:
            self.model_router.forget_lease(entry)
        return entry

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
