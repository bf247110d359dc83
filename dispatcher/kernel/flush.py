"""Reports finished requests to the queue, and claims requests that go on in the same call.

    flush    reports all completions, with one call for each kind
    claim    requests that may run because of the report come with the reply, which saves a claim: those that
             a feature has freed, and those that have progressed and go on with another call.

A lost reply loses nothing, and neither does an exception after a reply: the completions are reported again,
and the next claim returns the leases of that reply, because it uses the same nonce.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from dispatcher.kernel import completions
from dispatcher.kernel.claimed_request import ClaimedLeases
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.error_guard import ErrorGuard
from dispatcher.kernel.lanes import LaneRules
from dispatcher.kernel.queue_access import loop_time
from dispatcher.kernel.queue_steps import FailureCause, QueueStep
from dispatcher.queue.contract import (
    DeadLetter,
    EndAndClaimResult,
    Lease,
    Permit,
    Release,
    Settlement,
    SettleStatus,
)
from dispatcher.telemetry.events import Event, emit

MAX_REPORTS_ALONE = 30
"""Number of times that a completion is reported alone before it is given up. The pause between two of them is
about a second."""


@dataclass(frozen=True, slots=True)
class ClaimByFlush:
    """Claim that is made in the same call as a flush."""

    nonce: str
    asked_at: float
    """Start of the call, by the clock of `LeaseValidity`."""
    permit: Permit


class CompletionFlusher:
    """Reports completions until the queue has confirmed them."""

    def __init__(self, context: KernelContext, lane_rules: LaneRules, guard: ErrorGuard) -> None:
        self.nonces = _generate_nonces()
        """Nonces for calls that create leases. No two processes generate the same one."""
        self._flushes_one_by_one = False
        """True if the next flush reports each completion alone, because an exception may concern only one."""
        self._failed_alone: Counter[str] = Counter()
        """Number of times that the reply to a completion that was reported alone was not understood, by the
        token of its lease."""
        self._context = context
        self._access = context.access
        self._in_flight = context.in_flight
        self._guard = guard
        self._lane_rules = lane_rules
        self._journal = context.journal

    def has_final_completion(self, leases: Iterable[Lease]) -> bool:
        """Return True if one of these leases has a completion that ends its request for good, or moves it
        behind others."""
        tokens = {lease.token for lease in leases}
        return any(
            completions.get_lease(completion).token in tokens
            for completion in self._context.pending
            if not isinstance(completion, Release) or completion.new_score is not None
        )

    async def flush_all(self, begin_claim: Callable[[int], ClaimByFlush | None]) -> ClaimedLeases | None:
        """Flush all pending completions, and return the requests that were claimed in the same step. `None`
        if none were, or they are not known.

        `begin_claim` returns the claim of a number of requests for that step, or `None` if fewer may be
        claimed. A later claim with its nonce returns requests that are not known.
        """
        # Requests that finish during the calls below are appended to the new list.
        pending, self._context.pending = self._context.pending, []
        if self._flushes_one_by_one:
            await self._flush_one_by_one(pending)
            return None
        try:
            settlements = [completion for completion in pending if isinstance(completion, Settlement)]
            releases = [completion for completion in pending if isinstance(completion, Release)]
            dead_letters = [completion for completion in pending if isinstance(completion, DeadLetter)]
            queue, claimed = self._access.queue, None
            if settlements:
                # Only what is left to a feature frees other requests, and the plain call is cheaper.
                is_freeing = any(completion.extra is not None for completion in settlements)
                claim = begin_claim(len(settlements)) if is_freeing else None
                if claim is not None:
                    claimed = await self._end_and_claim(
                        QueueStep.SETTLE,
                        settlements,
                        claim,
                        queue.settle_and_claim_next(settlements, claim.nonce, claim.permit),
                    )
                else:
                    await self._report(QueueStep.SETTLE, settlements, queue.settle(settlements))
            if releases:
                # After a claim with the settlements, `begin_claim` returns `None`: one nonce can be repeated.
                claim = (
                    begin_claim(len(releases))
                    if any(each.can_be_claimed_again for each in releases)
                    else None
                )
                if claim is not None:
                    claimed = await self._end_and_claim(
                        QueueStep.RELEASE,
                        releases,
                        claim,
                        queue.release_and_claim_again(releases, claim.nonce, claim.permit),
                    )
                else:
                    await self._report(QueueStep.RELEASE, releases, queue.release(releases))
            if dead_letters:
                await self._report(
                    QueueStep.MOVE_TO_DEAD_LETTERS, dead_letters, queue.move_to_dead_letters(dead_letters)
                )
        except Exception:
            # Report all again that may not have been confirmed. A repetition does no harm.
            self._flushes_one_by_one = True
            kept = {completions.get_lease(completion).token for completion in self._context.pending}
            for completion in pending:
                token = completions.get_lease(completion).token
                if token not in kept and self._in_flight.find_lease(token) is not None:
                    self._context.pending.append(completion)
            raise
        return claimed

    async def _flush_one_by_one(self, pending: Sequence[Completion]) -> None:
        """Report each completion with a call of its own, after an unexpected exception.

        A completion that raises the exception again would keep the gate closed. It is given up at once if the
        queue has answered the call, and otherwise after MAX_REPORTS_ALONE calls.
        """
        self._flushes_one_by_one = False
        queue, failed_alone = self._access.queue, Counter[str]()
        for number, completion in enumerate(pending):
            token = completions.get_lease(completion).token
            try:
                call: Awaitable[Sequence[SettleStatus | None]]
                if isinstance(completion, Settlement):
                    step, call = QueueStep.SETTLE, queue.settle([completion])
                elif isinstance(completion, Release):
                    step, call = QueueStep.RELEASE, queue.release([completion])
                else:
                    step, call = QueueStep.MOVE_TO_DEAD_LETTERS, queue.move_to_dead_letters([completion])
                cause = await self._report(step, [completion], call)
            except Exception as error:
                emit(Event.INTERNAL_ERROR, where="completion", error=repr(error))
                self._guard.drop_lease(token)
                continue
            if cause is FailureCause.UNREACHABLE:
                # Each further call would take as long, and the loop stands still meanwhile. This completion
                # goes to the end, so that it does not hold up the others.
                self._context.pending[:0] = pending[number + 1 :]
                break
            if cause is FailureCause.NOT_UNDERSTOOD:
                failed_alone[token] = self._failed_alone[token] + 1
                if failed_alone[token] >= MAX_REPORTS_ALONE:
                    self._context.pending.remove(completion)
                    self._guard.drop_lease(token)
        self._failed_alone = failed_alone

    async def _report(
        self,
        step: QueueStep,
        completions_sent: Sequence[Completion],
        call: Awaitable[Sequence[SettleStatus | None]],
    ) -> FailureCause | None:
        """Report completions with a call that only ends their leases. Return why it failed, or `None`."""
        statuses = await self._access.call_queue(step, call)
        self._handle_statuses(step, completions_sent, statuses)
        return None if statuses is not None else self._access.get_failure_cause(step)

    async def _end_and_claim(
        self,
        step: QueueStep,
        completions_sent: Sequence[Completion],
        claim: ClaimByFlush,
        call: Awaitable[EndAndClaimResult],
    ) -> ClaimedLeases | None:
        """Report completions with a call that also claims. Return what it has claimed, if that is known."""
        access = self._access
        reply = await access.call_queue(step, call)
        if reply is None or reply.claim_result is None:
            self._handle_statuses(step, completions_sent, None if reply is None else reply.statuses)
            return None
        self._handle_statuses(step, completions_sent, reply.statuses, is_next_known=True)
        access.record_sign_of_life(claim.asked_at)
        access.update_from_reply(reply.claim_result)
        access.has_work = access.has_work or reply.claim_result.claimable_count > 0
        return ClaimedLeases(reply.claim_result.leases, claim.asked_at, claim.permit, reply.extras)

    def _handle_statuses(
        self,
        step: QueueStep,
        completions_sent: Sequence[Completion],
        statuses: Sequence[SettleStatus | None] | None,
        *,
        is_next_known: bool = False,
    ) -> None:
        """Remove the leases that have ended, and keep the completions that must be flushed again.

        `is_next_known` is True if the reply says whether there are requests to claim.
        """
        if statuses is None:
            # The whole call is repeated with the next flush.
            self._context.pending.extend(completions_sent)
            # If the reply was not understood, one of the completions may be the cause.
            if self._access.get_failure_cause(step) is FailureCause.NOT_UNDERSTOOD:
                self._flushes_one_by_one = True
            return
        at, unix_now = loop_time(), self._access.queue.unix_now()
        for completion, status in zip(completions_sent, statuses, strict=True):
            if status is None:  # only this one failed: flush it again with the next round
                self._context.pending.append(completion)
                continue
            lease = completions.get_lease(completion)
            entry = self._context.remove_lease(lease.token)
            self._journal.record_completion(entry, completion, status, at, unix_now)
            if isinstance(completion, Release):
                makes_work = completion.delay_s <= 0 and completion.extra is None
            else:
                makes_work = completions.get_extra(completion) is not None
            if self._lane_rules.record_completion(lease, completion) or (makes_work and not is_next_known):
                self._access.has_work = True


def _generate_nonces() -> Iterator[str]:
    prefix = secrets.token_hex(8)
    return (f"{prefix}-{number}" for number in count(1))
