"""Runs attempts, from the first step to the completions of their leases, and reports to the limiter what each
says about the gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from dispatcher.core.gateway.evictions import Evictions
from dispatcher.core.gateway.intermediary_errors import IntermediaryErrors
from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    ModelNotServed,
    Outcome,
    Overloaded,
    TooLarge,
    Unreachable,
)
from dispatcher.core.gateway.tenants import TenantRefusals
from dispatcher.core.gateway.unverified_gateway import UnverifiedGateway
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Request
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.maintenance import Maintenance
from dispatcher.dispatch.merging.merged_calls import FollowUp
from dispatcher.dispatch.merging.merger import RequestMerger
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.models.warm_up import WarmUpRunner
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess, loop_time
from dispatcher.dispatch.sequences.turns import TurnChecker
from dispatcher.ports import AttemptResult, Gateway, Lease, ModelServers, Overload
from dispatcher.telemetry.events import Event, emit

CONNECTION_CHECK_S = 0.1
"""Interval for checking open connections while the gateway is unreachable."""


class AttemptRunner:
    """All running attempts.

    `complete` takes the completion of each lease of an attempt. `remove_lease` removes a lease that another
    owner has now.
    """

    def __init__(
        self,
        gateway: Gateway,
        limiter: Limiter,
        options: Options,
        in_flight: InFlightTable,
        access: QueueAccess,
        maintenance: Maintenance,
        journal: Journal,
        random_source: random.Random,
        complete: Callable[[Completion], None],
        remove_lease: Callable[[str], object],
        servers: ModelServers | None = None,
    ) -> None:
        self.options = options
        self.has_claimable_requests = False
        """True if the newest claim or probe left requests that can be claimed."""
        self.tenants = TenantRefusals()
        self.intermediary_errors = IntermediaryErrors()
        self.evictions = Evictions()
        self.unverified_gateway = UnverifiedGateway()
        self.merger = RequestMerger(options, random_source)
        self.turn_checker = TurnChecker(access, options, complete, remove_lease)
        self.model_router = ModelRouter(access, options, complete)
        self.warm_ups = WarmUpRunner(
            access, limiter, in_flight, gateway, self.model_router.versions, options, servers
        )
        self._gateway = gateway
        self._limiter = limiter
        self._in_flight = in_flight
        self._access = access
        self._maintenance = maintenance
        self._journal = journal
        self._random = random_source
        self._complete = complete
        self._remove_lease = remove_lease
        self._connection_check: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None
        in_flight.on_detached = self._complete_stopped

    def reconfigure(self, options: Options) -> None:
        if options.gateway_url != self.options.gateway_url:
            self.unverified_gateway = UnverifiedGateway()
        self.options = self.turn_checker.options = options
        self.merger.reconfigure(options)
        self.model_router.reconfigure(options)
        self.warm_ups.reconfigure(options)

    def close(self) -> None:
        """Stop the timer. No attempt may be running."""
        if self._connection_check is not None:
            self._connection_check.cancel()

    def start_attempt(self, attempt: Attempt, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        attempt.task = tasks.create_task(self._run_attempt(attempt))
        # asyncio may cancel a task before its first step; then not even its `finally` blocks run.
        attempt.task.add_done_callback(partial(self._handle_never_started, attempt))
        self._in_flight.start_attempt(attempt)
        if len(attempt.leases) > 1:
            self._expire_late_leases(attempt)

    def _expire_late_leases(self, attempt: Attempt) -> None:
        """End each lease whose deadline comes before the answer. The last one ends the attempt."""
        unix_now = self._access.queue.unix_now()
        deadlines = [(entry.request.deadline, entry) for entry in attempt.leases if entry.request is not None]
        for deadline, entry in deadlines:
            if deadline <= unix_now and len(attempt.leases) > 1 and entry.attempt is attempt:
                self._in_flight.stop_waiting(entry, "deadline")
        remaining = [deadline for deadline, entry in deadlines if entry.attempt is attempt]
        if len(remaining) > 1 and (soonest := min(remaining)) < attempt.request.deadline:
            wait_s = max(0.0, soonest - unix_now)
            # The attempt itself runs until the latest of the deadlines, so earlier ones need a timer.
            asyncio.get_running_loop().call_later(wait_s, self._expire_late_leases, attempt)

    async def _run_attempt(self, attempt: Attempt) -> None:
        started, unix_now = loop_time(), self._access.queue.unix_now()
        self._limiter.record_send(attempt.token, started, attempt.units)
        for entry in () if attempt.is_follow_up else attempt.leases:
            self._journal.record_sent(entry, entry.request or attempt.request, unix_now)
        try:
            result = await self._gateway.forward(
                attempt.request,
                token=attempt.token,
                deadline=started + attempt.request.deadline - unix_now,
                may_send=partial(self._are_leases_valid, attempt),
            )
        except asyncio.CancelledError:
            self._limiter.record_answer(attempt.token, loop_time())
            # Without a reason, the cancellation comes from outside (the task group): pass it on.
            if any(entry.stop_reason is None for entry in attempt.leases):
                raise
            self._complete_stopped_attempt(attempt)
            return
        except Exception as error:
            emit(Event.INTERNAL_ERROR, where="forward", error=repr(error))
            result = AttemptResult(Failed(f"the dispatcher failed: {error!r}"), started, loop_time())
        finally:
            self._in_flight.end_attempt(attempt)
        # Before any completion: the next claim must already see the free units.
        self._limiter.record_answer(attempt.token, result.ended_at, result.connect_s)
        outcome = self.model_router.interpret_outcome(attempt, result.outcome, result.sent_at)
        if not isinstance(outcome, ModelNotServed):
            request = attempt.request
            path = request.endpoint or self.options.default_path
            outcome = self.unverified_gateway.judge_outcome(outcome, path, request.payload, result.ended_at)
        # Copying is expensive compared with the rest, and the outcome is rarely changed.
        judged = result if outcome is result.outcome else result.copy_with(outcome=outcome)
        self._report_to_limiter(attempt, judged)
        if attempt.is_merged_call:
            follow_up = self._interpret_answer(attempt, judged)
            self._hold_answer_memory([entry for entry, _ in follow_up.ended], result)
            self._apply_follow_up(attempt, follow_up)
        else:
            self._hold_answer_memory(attempt.leases, result)
            for entry in attempt.leases:
                self._complete_lease(entry, attempt.request, result, judged)

    def _hold_answer_memory(self, entries: Sequence[InFlightLease], result: AttemptResult) -> None:
        """Give the memory of an answer back when the queue has confirmed the end of all these leases.

        Attempts that follow from the answer have copies of what they need.
        """
        if result.memory is None:
            return
        entries = [entry for entry in entries if entry in self._in_flight]
        for entry in entries:
            entry.answer_memory = result.memory
        # 0 if all leases have ended meanwhile, which gives the memory back at once.
        result.memory.split_into(len(entries))

    def _complete_lease(
        self, entry: InFlightLease, request: Request, result: AttemptResult, judged: AttemptResult
    ) -> None:
        """Complete one lease. `result` is what the gateway answered, `judged` the same with the outcome that
        counts."""
        outcome = self._count_outcome(entry, judged)
        self._journal.record_attempt(entry, result, outcome)
        completion = self._build_completion(entry.lease, entry.request or request, outcome)
        self._complete(
            completion
            if entry.granted_turn is None
            else self.turn_checker.add_turn_end(entry, completion, result)
        )

    def _interpret_answer(self, attempt: Attempt, judged: AttemptResult) -> FollowUp:
        """Return what the answer means for each lease. An internal error costs each lease a failed
        attempt."""
        try:
            return self.merger.handle_answer(attempt, judged)
        except Exception as error:
            emit(Event.INTERNAL_ERROR, where="merging", error=repr(error))
            # Without this, the leases would stay in the table until the process ends.
            failure = judged.copy_with(outcome=Failed(f"the dispatcher failed: {error!r}"))
            return FollowUp([(entry, failure) for entry in attempt.leases])

    def _apply_follow_up(self, attempt: Attempt, follow_up: FollowUp) -> None:
        """Complete the leases that have an answer, and start the attempts that follow for the others. Where
        nothing may be sent any more, their leases are returned."""
        for entry, result in follow_up.ended:
            self._complete_lease(entry, attempt.request, result, result)
        for entry in follow_up.returned:
            self._complete(completions.build_return(entry.lease))
        for next_attempt in follow_up.attempts:
            if self._tasks is None or self._limiter.get_allowance(loop_time()).reason.is_closed:
                self._apply_follow_up(next_attempt, self.merger.handle_unsent(next_attempt))
            else:
                self.start_attempt(next_attempt, self._tasks)

    def complete_unsent(self, entries: Iterable[InFlightLease]) -> None:
        """Complete leases that leave their batch group without being sent."""
        for entry in entries:
            entry.is_in_batch_group = False
            self._complete_stopped(entry)

    def _complete_stopped_attempt(self, attempt: Attempt) -> None:
        for entry in attempt.leases:
            self._complete_stopped(entry)
        self._apply_follow_up(attempt, self.merger.handle_stopped(attempt))

    def _are_leases_valid(self, attempt: Attempt) -> bool:
        # Called before each send, mostly for one lease, for which a generator costs more than the check.
        for entry in attempt.leases:  # noqa: SIM110
            if not self._access.is_lease_valid(entry):
                return False
        return True

    def _handle_never_started(self, attempt: Attempt, _task: asyncio.Task[None]) -> None:
        """Complete an attempt whose task was cancelled before its first step, so that none of its code has
        run."""
        if attempt.task is not None and any(entry.attempt is attempt for entry in attempt.leases):
            self._in_flight.end_attempt(attempt)
            self._complete_stopped_attempt(attempt)

    def _complete_stopped(self, entry: InFlightLease) -> None:
        """Complete a lease whose answer is no longer awaited. If the process is stopping, the lease is
        returned."""
        if entry.stop_reason == "cancelled" and entry.request is not None:
            self._complete(completions.build_cancellation(entry.lease, entry.request))
        elif entry.stop_reason == "deadline" and entry.request is not None:
            self._complete(completions.build_deadline_error(entry.lease, entry.request))
        elif entry.stop_reason == "lost":
            self._remove_lease(entry.lease.token)
        else:
            self._complete(completions.build_return(entry.lease))

    def _report_to_limiter(self, attempt: Attempt, judged: AttemptResult) -> None:
        """Tell the limiter what the outcome says about the gateway."""
        outcome, at, sent_at = judged.outcome, judged.ended_at, judged.sent_at
        match outcome:
            case Overloaded():
                self._limiter.record_gateway_answer(at, sent_at)
                self._report_overload(attempt, outcome, at)
            case Failed(is_intermediary_error=True):
                if self._limiter.record_intermediary_error(
                    at, sent_at, outcome.why, self._iterate_connect_times()
                ):
                    self._handle_unreachable_gateway()
            case Unreachable():
                self._limiter.record_connection_failure(at, outcome.why)
                self._handle_unreachable_gateway()
            case Delivered() | TooLarge() | ModelNotServed() | Evicted():
                self._limiter.record_gateway_answer(at, sent_at)
            case Failed() if outcome.status is not None:
                self._limiter.record_gateway_answer(at, sent_at)
            case _:
                pass  # not sent, or no answer: says nothing about the gateway

    def _report_overload(self, attempt: Attempt, outcome: Overloaded, at: float) -> None:
        # Requests that were sent under an older reading may have caused the refusal.
        read_at = self._limiter.get_allowance(at).read_at
        alone = all(other.claimed_at >= read_at for other in self._in_flight.list_at_gateway())
        # All leases of a merged call have the same tenant, which is refused once.
        refused = {self._get_tenant(entry): entry.lease.refusals > 0 for entry in attempt.leases}
        is_capacity_shortage = [
            self.tenants.record_refusal(tenant, at, read_at, was_refused=was_refused_before, is_alone=alone)
            for tenant, was_refused_before in refused.items()
        ]
        overload = Overload(
            refused_at=at,
            retry_at=at + min(outcome.retry_after_s or 0.0, self.options.retry.max_s),
            is_out_of_capacity=outcome.is_out_of_capacity and all(is_capacity_shortage),
            in_flight=self._limiter.count_in_flight_at_refusal(at, attempt.units),
        )
        self._access.record_overload(overload)
        self._maintenance.schedule_share(self._limiter.get_allowance(at), overload)

    def _count_outcome(self, entry: InFlightLease, judged: AttemptResult) -> Outcome:
        """Return the outcome as it counts for one of the leases, and record what it says about the tenant."""
        outcome, at, sent_at = judged.outcome, judged.ended_at, judged.sent_at
        entry_id, was_refused_before = entry.lease.entry_id, entry.lease.refusals > 0
        match outcome:
            case Overloaded():
                self.intermediary_errors.record_answer(entry_id, sent_at)
                return outcome
            case Evicted():
                self.intermediary_errors.record_answer(entry_id, sent_at)
                rest_s = self.evictions.record_eviction(
                    entry_id, self.options.retry, self._random.random(), outcome.retry_after_s
                )
                outcome = replace(outcome, delay_s=rest_s)
            case Delivered() | TooLarge():
                self.intermediary_errors.record_answer(entry_id, sent_at)
                self.evictions.forget_request(entry_id)
                if was_refused_before or not self.tenants.has_no_refusals:
                    self.tenants.record_acceptance(
                        self._get_tenant(entry), sent_at, was_refused=was_refused_before
                    )
                return outcome
            case Failed(is_intermediary_error=True):
                is_blamed = self.intermediary_errors.record_error(entry_id, at)
                # Without a gateway, the failure counts against no request.
                if self._limiter.gateway_unreachable_since is not None:
                    outcome = Unreachable(outcome.why, self._get_unreachable_rest_s(entry, at))
                elif not is_blamed:
                    retry_s = self.intermediary_errors.compute_retry_delay_s(
                        entry_id, at - sent_at, self.options.retry
                    )
                    # An intermediary error of a single request may pass: retry before blaming the request.
                    outcome = Unreachable(outcome.why, retry_s)
            case Failed() if outcome.status is not None:
                self.intermediary_errors.record_answer(entry_id, sent_at)
            case _:
                pass
        # Other outcomes show neither acceptance nor refusal of the tenant.
        self.tenants.end_trial(self._get_tenant(entry), was_refused=was_refused_before)
        return outcome

    def _get_unreachable_rest_s(self, entry: InFlightLease, at: float) -> float:
        """Return how long the request waits in the queue so that others can show whether there is a gateway.
        0 if there are no others."""
        since = self._limiter.gateway_unreachable_since
        if since is None or entry.request is None or not self.has_claimable_requests:
            return 0.0
        left_s = entry.request.deadline - self._access.queue.unix_now()
        return self.intermediary_errors.set_aside(entry.lease.entry_id, at, since=since, time_left_s=left_s)

    def _handle_unreachable_gateway(self) -> None:
        self._schedule_connection_check()
        self._gateway.resize_connection_pool(0)  # idle connections may be dead: a probe must open a new one

    def get_rest_s(self, entry: InFlightLease) -> float:
        """Return how long the tenant, or the group of refused requests, must not send."""
        was_refused_before = entry.lease.refusals > 0
        if self.tenants.has_no_refusals and not was_refused_before:
            return 0.0
        return self.tenants.admit_request(
            self._get_tenant(entry), loop_time(), was_refused=was_refused_before
        )

    def _get_tenant(self, entry: InFlightLease) -> str:
        return "" if entry.request is None else entry.request.metadata.get(self.options.tenant_attribute, "")

    def _build_completion(self, lease: Lease, request: Request, outcome: Outcome) -> Completion:
        policy, at = self.options.retry, self._access.queue.unix_now()
        return completions.build_completion(lease, request, outcome, at, policy, self._random.random())

    def _check_connections(self) -> None:
        """Check whether a request stays connected while the gateway is unreachable: a probe, or a request
        that was sent together with the first that failed. If so, it has reached the gateway, though its
        answer is still to come."""
        if self._limiter.check_connections(loop_time(), self._iterate_connect_times()):
            # The gateway is back: what was claimed as a probe counts as an ordinary request from here on.
            for entry in self._in_flight:
                entry.is_probe = False
            self._access.wake.set()
        self._connection_check = None
        self._schedule_connection_check()

    def _schedule_connection_check(self) -> None:
        if self._connection_check is None and self._limiter.gateway_unreachable_since is not None:
            self._connection_check = asyncio.get_running_loop().call_later(
                CONNECTION_CHECK_S, self._check_connections
            )

    def _iterate_connect_times(self) -> Iterator[float]:
        """Yield for each request at the gateway the time since which it has a connection."""
        for attempt in self._in_flight.attempts:
            since = self._gateway.get_connected_at(attempt.token)
            if since is not None:
                yield since
