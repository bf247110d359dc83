"""The way of a claimed request, from the claim until it is sent: named stages, each with its own file and its
own state.

    admit               admission.py             valid, in time, has not killed its owners
                        queue_timeouts.py        has not waited for longer than its rule allows
    order in sequence   sequences/turns.py       its turn has come; conversation and server of the sequence
    check cancellation  cancellation.py          not cancelled; its result list can be used
    resolve model       models/model_router.py   its model is served; version of the model
    plan slices         slices/slicer.py         a long generation is sent in several calls
    weigh               weights.py               the limit has room for its units
    send or gather      sending.py               an attempt of its own, or a batch group

Each stage takes the requests that are left, and returns those that continue; all others it has completed.
What the first stages need to know from the queue is looked up at once, for all claimed requests. Only
weighing asks again, because the stages before it decide what a request weighs. So a claim is followed by at
most two waits for the queue, and by none if its requests need nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from dispatcher.dispatch.admission import Admission
from dispatcher.dispatch.cancellation import CancellationCheck
from dispatcher.dispatch.queue_timeouts import QueueTimeouts
from dispatcher.dispatch.sending import RequestSender
from dispatcher.dispatch.weights import UnitAllocator

if TYPE_CHECKING:
    from dispatcher.core.limit.allowance import Allowance
    from dispatcher.core.limit.limiter import Limiter
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.attempts import AttemptRunner
    from dispatcher.dispatch.claimed_request import ClaimedLeases
    from dispatcher.dispatch.completions import Completion
    from dispatcher.dispatch.in_flight import InFlightLease, InFlightTable
    from dispatcher.dispatch.merging.merger import RequestMerger
    from dispatcher.dispatch.models.model_router import ModelRouter
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.outcome_judge import OutcomeJudge
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.dispatch.sequences.turns import TurnChecker
    from dispatcher.dispatch.slices.slicer import Slicer
    from dispatcher.ports import Permit


class RequestPipeline:
    """The stages of one process, in their order.

    `complete` takes the completion of each request that a stage ends. `remove_lease` removes a lease that the
    queue has taken back.
    """

    def __init__(
        self,
        limiter: Limiter,
        access: QueueAccess,
        in_flight: InFlightTable,
        options: Options,
        merger: RequestMerger,
        turn_checker: TurnChecker,
        model_router: ModelRouter,
        slicer: Slicer,
        judge: OutcomeJudge,
        runner: AttemptRunner,
        weigh_request: Callable[[Request], int],
        complete: Callable[[Completion], None],
        remove_lease: Callable[[str], object],
    ) -> None:
        self._limiter = limiter
        self._merger = merger
        self._turn_checker = turn_checker
        self._model_router = model_router
        self._slicer = slicer
        self._weigh_request = weigh_request
        self.queue_timeouts = QueueTimeouts(options)
        self._admission = Admission(
            access.queue, in_flight, turn_checker.parsed_requests, self.queue_timeouts, options, complete
        )
        self._cancellation = CancellationCheck(access, complete)
        self._weights = UnitAllocator(access, in_flight, complete, self._weigh_entry, remove_lease)
        self._sender = RequestSender(
            limiter, access, in_flight, merger, self._weights, judge, runner, complete
        )

    def reconfigure(self, options: Options) -> None:
        self.queue_timeouts.reconfigure(options)
        self._admission.reconfigure(options)
        self._merger.reconfigure(options)
        self._turn_checker.reconfigure(options)
        self._model_router.reconfigure(options)
        self._slicer.reconfigure(options)

    def stop(self) -> None:
        """Send nothing more from now on."""
        self._sender.is_stopping = True

    def plan_claim(self, free_units: int) -> tuple[int, int]:
        """Return how many requests to claim for the free units, and the units that each counts until it is
        parsed."""
        return self._weights.plan_claim(free_units, self._merger.groups.unweighted_count)

    async def start_claimed(self, claimed: ClaimedLeases) -> bool:
        """Start the claimed requests that may be sent. Return True if some wait for their turn or their
        model."""
        admitted = requests = self._admission.admit_leases(claimed)
        lookups = (
            self._turn_checker.look_up(requests),
            self._cancellation.look_up(requests),
            self._model_router.look_up(requests),
        )
        calls = list(filter(None, lookups))
        if len(calls) == 1:  # by far the most frequent case, and cheaper than `gather`
            await calls[0]
        elif calls:
            await asyncio.gather(*calls)
        requests = self._turn_checker.apply(requests)
        requests = self._cancellation.apply(requests)
        requests = self._model_router.apply(requests)
        self._slicer.apply(requests)
        if self._merger.has_rules:
            for each in requests:
                self._merger.register_request(each.entry, each.request)
        requests = await self._weights.apply(requests, claimed.permit, self._limiter)
        self._sender.apply(requests, is_probe=claimed.is_probe)
        return len(requests) < len(admitted) and any(each.waits for each in admitted)

    @property
    def next_group_due_at(self) -> float | None:
        """Time at which the next batch group may be ready. `None` if no request waits in a group."""
        return self._merger.groups.next_due_at

    async def send_ready_groups(self, build_permit: Callable[[Allowance], Permit]) -> None:
        """Send the batch groups that are complete or have waited long enough."""
        await self._sender.send_ready_groups(build_permit)

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self._merger.forget_lease(token)
        self._turn_checker.forget_lease(token)
        self._model_router.forget_lease(token)
        if self._slicer.slices:
            self._slicer.forget_lease(token)

    def _weigh_entry(self, entry: InFlightLease, request: Request) -> float:
        member = self._merger.get_member(entry)
        return self._weigh_request(request) if member is None else member.units
