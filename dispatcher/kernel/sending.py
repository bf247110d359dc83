"""Last stage: sends each request at once, or gathers it in a batch group that is sent as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dispatcher.kernel import completions
from dispatcher.kernel.in_flight import Attempt
from dispatcher.kernel.queue_access import loop_time

if TYPE_CHECKING:
    from dispatcher.kernel.attempts import AttemptRunner
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.error_guard import ErrorGuard
    from dispatcher.kernel.hooks import Grouping
    from dispatcher.kernel.outcome_judge import OutcomeJudge
    from dispatcher.kernel.weights import UnitAllocator
    from dispatcher.limit.allowance import Allowance
    from dispatcher.queue.contract import Permit


class RequestSender:
    """Sends the requests of one process."""

    def __init__(
        self,
        context: KernelContext,
        weights: UnitAllocator,
        judge: OutcomeJudge,
        runner: AttemptRunner,
        guard: ErrorGuard,
    ) -> None:
        self.is_stopping = False
        """True if nothing may be sent any more."""
        self._context = context
        self._access = context.access
        self._limiter = context.limiter
        self._in_flight = context.in_flight
        self._weights = weights
        self._judge = judge
        self._runner = runner
        self._guard = guard

    def apply(self, requests: list[ClaimedRequest], *, is_probe: bool) -> None:
        """Start each request or add it to its group. Requests that may not be sent now are returned."""
        at, clock, lease_validity = loop_time(), self._access.clock(), self._access.lease_validity
        # Ask again: a refusal since the claim closes the gate for these requests, too.
        may_send = not self.is_stopping and (is_probe or not self._limiter.get_allowance(at).reason.is_closed)
        is_paced, grouping = self._limiter.has_send_pace, self._context.hooks.grouping
        for claimed in requests:
            entry, request = claimed.entry, claimed.request
            if not may_send or not lease_validity.is_certainly_held(entry.confirmed_at, clock):
                self._context.complete(completions.build_return(entry.lease))
            # Asked last, because a request that may be sent counts as sent there.
            elif (rest_s := self._judge.get_rest_s(entry)) > 0:
                self._context.complete(completions.build_return(entry.lease, after_s=rest_s))
            elif grouping is not None and entry.lease.token in grouping.leases:
                if is_paced:
                    self._limiter.use_grant(grouping.weigh(entry.lease.token))
                grouping.add_to_group(entry, at, request.deadline - self._access.queue.unix_now())
                self._in_flight.enter_batch_group(entry)
            else:
                if is_paced:
                    self._limiter.use_grant(entry.lease.units)
                self._runner.start_attempt(Attempt(entry.lease.token, request, [entry]))

    async def send_ready_groups(self, build_permit: Callable[[Allowance], Permit]) -> None:
        """Send the batch groups that are complete or have waited long enough. Return all their leases if
        nothing may be sent."""
        grouping = self._context.hooks.grouping
        if grouping is None or grouping.groups.next_due_at is None:
            return
        try:
            await self._send_ready_groups(grouping, build_permit)
        except Exception as error:
            # Any member may be the cause. After a failed attempt, each of them is sent alone.
            entries = [entry for entry in self._in_flight if entry.is_in_batch_group]
            grouping.groups.take_all()
            self._in_flight.leave_batch_group(entries)
            self._guard.fail_leases(entries, error, "batch groups")

    async def _send_ready_groups(
        self, grouping: Grouping, build_permit: Callable[[Allowance], Permit]
    ) -> None:
        allowance = self._limiter.get_allowance(loop_time())
        if allowance.reason.is_closed or self.is_stopping:
            self._runner.complete_unsent(grouping.groups.take_all())
            return
        room = allowance.limit - self._in_flight.units - self._limiter.other_owners_units
        # No request can join soon: none waits in the queue, or there is no room and no running request will
        # make some.
        is_complete = not self._access.has_claimable_requests or (
            room <= 0 and not self._in_flight.running_count
        )
        ready, stopped = grouping.groups.take_ready(
            loop_time(), is_complete=is_complete, is_lease_valid=self._access.is_lease_valid
        )
        self._runner.complete_unsent(stopped)
        attempts = []
        for members, max_items in ready:
            try:
                attempts.append(grouping.prepare_first_attempt(members, max_items))
            except Exception as error:
                entries = grouping.get_entries(members)
                self._in_flight.leave_batch_group(entries)
                self._guard.fail_leases(entries, error, "call of a group")
        one_unit_attempts = [attempt for attempt in attempts if grouping.counts_one_unit(attempt)]
        without_room = await self._weights.allocate_for_calls(one_unit_attempts, build_permit(allowance))
        for attempt in attempts:
            if any(entry.stop_reason or entry.lease.token in without_room for entry in attempt.leases):
                grouping.handle_stopped(attempt)
                self._runner.complete_unsent(
                    entry for entry in attempt.leases if entry.lease.token not in without_room
                )
            else:
                self._runner.start_attempt(attempt)
                self._in_flight.leave_batch_group(attempt.leases)
