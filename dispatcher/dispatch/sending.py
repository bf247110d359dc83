"""Last stage: sends each request at once, or gathers it in a batch group that is sent as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dispatcher.dispatch import completions
from dispatcher.dispatch.in_flight import Attempt
from dispatcher.dispatch.queue_access import loop_time

if TYPE_CHECKING:
    from dispatcher.core.limit.allowance import Allowance
    from dispatcher.core.limit.limiter import Limiter
    from dispatcher.dispatch.attempts import AttemptRunner
    from dispatcher.dispatch.claimed_request import ClaimedRequest
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.in_flight import InFlightTable
    from dispatcher.dispatch.merging.merger import RequestMerger
    from dispatcher.dispatch.outcome_judge import OutcomeJudge
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.dispatch.weights import UnitAllocator
    from dispatcher.ports import Permit


class RequestSender:
    """Sends the requests of one process. `complete` takes completions of requests that may not be sent."""

    def __init__(
        self,
        limiter: Limiter,
        access: QueueAccess,
        in_flight: InFlightTable,
        merger: RequestMerger,
        weights: UnitAllocator,
        judge: OutcomeJudge,
        runner: AttemptRunner,
        complete: Callable[[Completion], None],
    ) -> None:
        self.is_stopping = False
        """True if nothing may be sent any more."""
        self._limiter = limiter
        self._access = access
        self._in_flight = in_flight
        self._merger = merger
        self._weights = weights
        self._judge = judge
        self._runner = runner
        self._complete = complete

    def apply(self, requests: list[ClaimedRequest], *, is_probe: bool) -> None:
        """Start each request or add it to its group. Requests that may not be sent now are returned."""
        at, clock, lease_validity = loop_time(), self._access.clock(), self._access.lease_validity
        # Ask again: a refusal since the claim closes the gate for these requests, too.
        may_send = not self.is_stopping and (is_probe or not self._limiter.get_allowance(at).reason.is_closed)
        for claimed in requests:
            entry, request = claimed.entry, claimed.request
            if not may_send or not lease_validity.is_certainly_held(entry.confirmed_at, clock):
                self._complete(completions.build_return(entry.lease))
            # Asked last, because a request that may be sent counts as sent there.
            elif (rest_s := self._judge.get_rest_s(entry)) > 0:
                self._complete(completions.build_return(entry.lease, after_s=rest_s))
            elif self._merger.get_member(entry) is not None:
                self._in_flight.enter_batch_group(entry)
                self._merger.add_to_group(entry, at, request.deadline - self._access.queue.unix_now())
            else:
                self._runner.start_attempt(Attempt(entry.lease.token, request, [entry]))

    async def send_ready_groups(self, build_permit: Callable[[Allowance], Permit]) -> None:
        """Send the batch groups that are complete or have waited long enough. Return all their leases if
        nothing may be sent."""
        allowance = self._limiter.get_allowance(loop_time())
        if allowance.reason.is_closed or self.is_stopping:
            self._runner.complete_unsent(self._merger.groups.take_all())
            return
        room = allowance.limit - self._in_flight.units - self._limiter.other_owners_units
        # No request can join soon: none waits in the queue, or there is no room and no running request will
        # make some.
        is_complete = not self._access.has_claimable_requests or (
            room <= 0 and not self._in_flight.running_count
        )
        attempts, stopped = self._merger.take_ready_attempts(
            loop_time(), is_complete=is_complete, is_lease_valid=self._access.is_lease_valid
        )
        for attempt in attempts:
            self._in_flight.leave_batch_group(attempt.leases)
        self._runner.complete_unsent(stopped)
        one_unit_attempts = [attempt for attempt in attempts if self._merger.counts_one_unit(attempt)]
        without_room = await self._weights.allocate_for_calls(one_unit_attempts, build_permit(allowance))
        for attempt in attempts:
            if without_room and any(entry.lease.token in without_room for entry in attempt.leases):
                self._merger.handle_stopped(attempt)
                self._runner.complete_unsent(
                    entry for entry in attempt.leases if entry.lease.token not in without_room
                )
            else:
                self._runner.start_attempt(attempt)
