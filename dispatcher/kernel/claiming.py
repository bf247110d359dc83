"""Claims requests for the units that are free, and one request to probe a gateway that is unreachable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.kernel import completions
from dispatcher.kernel.claimed_request import ClaimedLeases
from dispatcher.kernel.flush import ClaimByFlush
from dispatcher.kernel.overtaking import Overtaking
from dispatcher.kernel.queue_access import explain_empty_claim, loop_time
from dispatcher.kernel.queue_steps import QueueStep
from dispatcher.queue.contract import Permit

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.flush import CompletionFlusher
    from dispatcher.kernel.lanes import LaneRules
    from dispatcher.kernel.outcome_judge import OutcomeJudge
    from dispatcher.kernel.pipeline import RequestPipeline
    from dispatcher.limit.allowance import Allowance


class Claimer:
    """Claims the requests of one process, and passes them to the pipeline.

    A claim whose reply was lost is repeated with its nonce, so that the queue returns the same leases. They
    count from when the claim was asked for the first time.
    """

    def __init__(
        self,
        context: KernelContext,
        lane_rules: LaneRules,
        judge: OutcomeJudge,
        flusher: CompletionFlusher,
        pipeline: RequestPipeline,
    ) -> None:
        self._context = context
        self._access = context.access
        self._limiter = context.limiter
        self._in_flight = context.in_flight
        self._lane_rules = lane_rules
        self._judge = judge
        self._flusher = flusher
        self._pipeline = pipeline
        self._claim_nonce = self._probe_nonce = ""
        """Nonce of a claim or probe whose reply was lost, or not processed: the next one repeats it."""
        self._claim_asked_at = self._probe_asked_at = 0.0
        """Time at which it was asked for the first time."""
        self._overtaking = Overtaking()
        self.next_grant_at: float | None = None
        """Time at which more of the free units may be used. `None` if the newest claim could use all."""

    async def claim_work(self) -> None:
        """Claim requests until the free units are used, none are left, or no more may be sent now."""
        self.next_grant_at = None
        while True:
            at = loop_time()
            allowance = self._limiter.get_allowance(at)
            # While the gateway is unreachable, only probes are claimed.
            if allowance.probe_limit:
                await self._claim_probe(allowance)
                return
            free_units = (
                allowance.limit
                - self._in_flight.units
                - self._limiter.other_owners_units
                - self._count_outside_units()
            )
            if free_units <= 0 or not (self._access.has_work or self._claim_nonce):
                return
            if self._limiter.has_send_pace:
                grant = self._limiter.grant_units(at, free_units)
                self.next_grant_at, free_units = grant.next_at, grant.units
                if free_units <= 0:
                    return
            max_count, assumed_units = self._pipeline.plan_claim(free_units)
            # If all requests are refused, only a few are tried at a time.
            max_count = min(max_count, self._judge.max_tried_at_once or max_count)
            # Requests that wait in groups will use the free units, or a feature has no room.
            if max_count < 1:
                return
            max_per_lane = self._lane_rules.compute_rooms(self._in_flight.lane_counts, at)
            if not self._claim_nonce:
                self._claim_nonce, self._claim_asked_at = next(self._flusher.nonces), self._access.clock()
            permit = self.build_permit(allowance)
            claim = self._access.queue.claim(
                max_count,
                self._claim_nonce,
                permit,
                max_per_lane=max_per_lane,
                assumed_units=assumed_units,
                max_blocked=self._count_passable(at),
            )
            claim_result = await self._access.call_queue(QueueStep.CLAIM, claim)
            if claim_result is None:
                return
            self._access.record_sign_of_life(self._claim_asked_at)
            self._access.update_from_reply(claim_result)
            self._limiter.set_withheld_reason(explain_empty_claim(claim_result, permit))
            must_claim_again = self._lane_rules.record_claim(claim_result.claimable_count)
            blocked = claim_result.blocked_entry_id
            is_first_new = blocked is not None and self._overtaking.record_claim(blocked, at)
            self._access.has_work = claim_result.claimable_count > 0 or must_claim_again
            # Not earlier: after an exception above, the next claim returns the same leases.
            self._claim_nonce = ""
            if claim_result.leases:
                has_waiting = await self._pipeline.start_claimed(
                    ClaimedLeases(claim_result.leases, self._claim_asked_at, permit)
                )
                if has_waiting and self._context.pending:  # flush first, or others would be claimed ahead
                    return
            elif not must_claim_again and not is_first_new:
                return

    def _count_passable(self, now: float) -> int:
        """Return how many requests without room the claim may pass over."""
        # Usually there are no requests of several units. A claim that comes to the first one is repeated.
        if self._overtaking.first is None:
            return 0
        return self._overtaking.count_passable(now, self._limiter.mean_duration_s)

    def _count_outside_units(self) -> int:
        """Return the units of the limit that are used beside the leases."""
        units = 0
        for load in self._context.hooks.loads:
            units += load.units
        return units

    async def _claim_probe(self, allowance: Allowance) -> None:
        """Claim one request to see whether the gateway is back. No other replica probes at the same time."""
        # The previous probe still runs.
        if any(entry.is_probe for entry in self._in_flight):
            return
        if not self._probe_nonce:
            self._probe_nonce, self._probe_asked_at = next(self._flusher.nonces), self._access.clock()
        permit = self.build_permit(allowance).copy_with(limit=allowance.probe_limit, unleased_units=0)
        claim_result = await self._access.call_queue(
            QueueStep.PROBE, self._access.queue.claim_probe(self._probe_nonce, permit)
        )
        if claim_result is not None:
            self._access.record_sign_of_life(self._probe_asked_at)
            self._access.update_from_reply(claim_result)
            self._probe_nonce = ""
            leases = claim_result.leases
            if self._access.has_claimable_requests and leases:
                (lease,) = leases
                # One bad request must not be the probe again and again, or the gateway would never count as
                # back.
                rest_s = self._judge.get_probe_rest_s(lease)
                if rest_s > 0:  # it has probed before: let another one probe, at once
                    self._in_flight.add_lease(lease, self._probe_asked_at, is_probe=True)
                    self._context.complete(completions.build_return(lease, after_s=rest_s))
                    return
            has_waiting = await self._pipeline.start_claimed(
                ClaimedLeases(leases, self._probe_asked_at, permit, is_probe=True)
            )
            if has_waiting or self._flusher.has_final_completion(leases):
                self._access.wake.set()  # it was not sent: let another one probe, at once
                return
            for load in self._context.hooks.loads:
                load.allow_probe(claim_result, allowance.probe_limit)
        self._limiter.record_probe(loop_time(), has_other_requests=self._access.has_claimable_requests)

    def begin_claim_by_flush(self, max_count: int) -> ClaimByFlush | None:
        """Return a claim of at most `max_count` requests to be made with a flush. `None` if a claim now would
        be impossible or different: a probe, a repetition, one by one, or fewer requests.

        Unless `start_claimed_by_flush` is called, the next claim repeats it.
        """
        allowance = self._limiter.get_allowance(loop_time())
        must_claim_otherwise = (
            self._claim_nonce
            or self._context.options.observe
            or self._judge.max_tried_at_once
            or allowance.limit <= 0
        )
        if must_claim_otherwise:
            return None
        for room in self._context.hooks.rooms:
            if room.plan_claim(max_count) < max_count:
                return None
        self._claim_nonce, self._claim_asked_at = next(self._flusher.nonces), self._access.clock()
        return ClaimByFlush(self._claim_nonce, self._claim_asked_at, self.build_permit(allowance))

    async def start_claimed_by_flush(self, claimed: ClaimedLeases) -> None:
        """Start the requests that came with a flush."""
        self._claim_nonce = ""
        if claimed.leases:
            await self._pipeline.start_claimed(claimed)

    def build_permit(self, allowance: Allowance) -> Permit:
        """Return the permit for this allowance, with the units outside of leases as taken."""
        return Permit(
            allowance.limit,
            allowance.read_at,
            allowance.lost_units,
            self._context.options.retry.max_s,
            self._count_outside_units(),
        )
