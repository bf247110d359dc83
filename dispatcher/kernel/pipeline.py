"""The way of a claimed request, from the claim until it is sent: named stages, each with its own file and its
own state.

    admit               admission.py        valid, in time, has not killed its owners
                        queue_timeouts.py   has not waited for longer than its rule allows
    check cancellation  cancellation.py     not cancelled; its result list can be used
    stages of features  hooks.py            before and after the check for cancellation
    weigh               weights.py          the limit has room for its units
    send or gather      sending.py          an attempt of its own, or a group that is sent in one call

Each stage takes the requests that are left, and returns those that continue; all others it has completed.
What the first stages need to know from the queue is looked up at once, for all claimed requests. Only
weighing asks again, because the stages before it decide what a request weighs. So a claim is followed by at
most two waits for the queue, and by none if its requests need nothing.

After an exception, the requests that no stage has completed or sent run through the stages again, each alone.
A request whose handling raises again is charged a failed attempt, and the others are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dispatcher.kernel.admission import Admission
from dispatcher.kernel.cancellation import CancellationCheck
from dispatcher.kernel.queue_timeouts import QueueTimeouts
from dispatcher.kernel.sending import RequestSender
from dispatcher.kernel.weights import UnitAllocator
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.kernel.attempts import AttemptRunner
    from dispatcher.kernel.claimed_request import ClaimedLeases
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.error_guard import ErrorGuard
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.kernel.outcome_judge import OutcomeJudge
    from dispatcher.limit.allowance import Allowance
    from dispatcher.queue.contract import Permit
    from dispatcher.requests.request import Request


class RequestPipeline:
    """The stages of one process, in their order."""

    def __init__(
        self,
        context: KernelContext,
        judge: OutcomeJudge,
        runner: AttemptRunner,
        guard: ErrorGuard,
        weigh_request: Callable[[Request], int],
    ) -> None:
        self._context = context
        self._guard = guard
        self.queue_timeouts = QueueTimeouts(context)
        self._admission = Admission(context, self.queue_timeouts)
        self._stages = (*context.hooks.first_stages, CancellationCheck(context), *context.hooks.stages)
        self._weights = UnitAllocator(context, weigh_request)
        self._sender = RequestSender(context, self._weights, judge, runner, guard)

    def stop(self) -> None:
        """Send nothing more from now on."""
        self._sender.is_stopping = True

    def plan_claim(self, free_units: int) -> tuple[int, int]:
        """Return how many requests to claim for the free units, and the units that each counts until it is
        parsed."""
        return self._weights.plan_claim(free_units)

    async def start_claimed(self, claimed: ClaimedLeases) -> bool:
        """Start the claimed requests that may be sent. Return True if some wait for something else than
        room."""
        # Before the stages, so that all leases are in the table even if a stage raises an exception.
        entries = self._context.in_flight.add_leases(
            claimed.leases, claimed.asked_at, is_probe=claimed.is_probe
        )
        try:
            admitted = requests = self._admission.admit_leases(claimed, entries)
            lookups = [stage.look_up(requests) for stage in self._stages]
            calls = list(filter(None, lookups))
            if len(calls) == 1:  # by far the most frequent case, and cheaper than `gather`
                await calls[0]
            elif calls:
                await asyncio.gather(*calls)
            for stage in self._stages:
                requests = stage.apply(requests)
            requests = await self._weights.apply(requests, claimed.permit, self._context.limiter)
            self._sender.apply(requests, is_probe=claimed.is_probe)
            return len(requests) < len(admitted) and any(each.waits for each in admitted)
        except Exception as error:
            if len(claimed.leases) > 1:
                emit(Event.INTERNAL_ERROR, where="claimed requests", error=repr(error))
                return await self._start_one_by_one(claimed, self._guard.find_open(entries))
            self._guard.fail_leases(entries, error, "claimed request")
            return False

    async def _start_one_by_one(self, claimed: ClaimedLeases, entries: Sequence[InFlightLease]) -> bool:
        """Run each of these requests through the stages alone."""
        has_waiting = False
        numbers = {lease.token: number for number, lease in enumerate(claimed.leases)}
        for entry in entries:
            number = numbers[entry.lease.token]
            # Forget what the stages know about the request. Calls to the queue can be repeated.
            self._guard.drop_lease(entry.lease.token)
            alone = replace(
                claimed,
                leases=claimed.leases[number : number + 1],
                extras=claimed.extras[number : number + 1],
            )
            has_waiting |= await self.start_claimed(alone)
        return has_waiting

    async def send_ready_groups(self, build_permit: Callable[[Allowance], Permit]) -> None:
        """Send the batch groups that are complete or have waited long enough."""
        await self._sender.send_ready_groups(build_permit)
