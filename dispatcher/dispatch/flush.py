"""Reports finished requests to the queue, and claims requests that go on in the same call.

    flush    reports all completions, with one call for each kind
    claim    if requests of sequences end, the next ones come with the reply. This saves a claim and the check
             of their turns. Likewise, generations of which a slice has ended are claimed again for the next.

A lost reply loses nothing: the completions are reported again, and the next claim returns the leases of the
lost reply, because it uses the same nonce.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from dispatcher.core.sequences.decisions import TurnGranted
from dispatcher.dispatch import completions
from dispatcher.dispatch.completions import Completion
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.lanes import LaneRules
from dispatcher.dispatch.queue_access import QueueAccess, loop_time
from dispatcher.ports import (
    ClaimResult,
    DeadLetter,
    EndAndClaimResult,
    Lease,
    Permit,
    Release,
    Settlement,
    SettleStatus,
)


@dataclass(frozen=True, slots=True)
class ClaimedByFlush:
    """Requests that a flush has claimed: next ones of sequences, or the next slices of generations."""

    nonce: str
    """Nonce of the call that flushed and claimed."""
    asked_at: float
    permit: Permit
    claim_result: ClaimResult | None
    """Reply of the queue. `None` if it is not known: a claim with the same nonce returns it."""
    granted_turns: Sequence[TurnGranted] = ()


class CompletionFlusher:
    """Completions of this process until the queue has confirmed them. `remove_lease` is called for each
    confirmed one."""

    def __init__(
        self,
        access: QueueAccess,
        lane_rules: LaneRules,
        journal: Journal,
        remove_lease: Callable[[str], InFlightLease | None],
    ) -> None:
        self.pending: list[Completion] = []
        """Completions that are not flushed yet."""
        self.nonces = _generate_nonces()
        """Nonces for calls that create leases. No two processes generate the same one."""
        self._access = access
        self._lane_rules = lane_rules
        self._journal = journal
        self._remove_lease = remove_lease

    def has_final_completion(self, leases: Iterable[Lease]) -> bool:
        """Return True if one of these leases has a completion that ends its request for good, or moves it
        behind others."""
        tokens = {lease.token for lease in leases}
        return any(
            completions.get_lease(completion).token in tokens
            for completion in self.pending
            if not isinstance(completion, Release) or completion.new_score is not None
        )

    async def flush_all(self, get_permit: Callable[[], Permit | None]) -> ClaimedByFlush | None:
        """Flush all pending completions. `get_permit` returns the permit to claim requests in the same step,
        or `None` if none may be claimed."""
        # Requests that finish during the calls below are appended to the new list.
        pending, self.pending = self.pending, []
        settlements = [completion for completion in pending if isinstance(completion, Settlement)]
        releases = [completion for completion in pending if isinstance(completion, Release)]
        dead_letters = [completion for completion in pending if isinstance(completion, DeadLetter)]
        access, queue, claimed = self._access, self._access.queue, None
        if settlements:
            # Without a request of a sequence there is no next one, and the plain call is cheaper.
            permit = (
                get_permit() if any(completion.turn_end is not None for completion in settlements) else None
            )
            if permit is not None:
                claimed = await self._end_and_claim(
                    "settle", settlements, permit, partial(queue.settle_and_claim_next, settlements)
                )
            else:
                self._handle_statuses(
                    settlements, await access.call_queue("settle", queue.settle(settlements))
                )
        if releases:
            # A flush claims with one call only, because only one nonce can be repeated.
            permit = (
                get_permit()
                if claimed is None and any(each.can_be_claimed_again for each in releases)
                else None
            )
            if permit is not None:
                claimed = await self._end_and_claim(
                    "release", releases, permit, partial(queue.release_and_claim_again, releases)
                )
            else:
                self._handle_statuses(releases, await access.call_queue("release", queue.release(releases)))
        if dead_letters:
            self._handle_statuses(
                dead_letters,
                await access.call_queue("dead-letter", queue.move_to_dead_letters(dead_letters)),
            )
        return claimed

    async def _end_and_claim(
        self,
        what: str,
        completions_sent: Sequence[Completion],
        permit: Permit,
        call: Callable[[str, Permit], Awaitable[EndAndClaimResult]],
    ) -> ClaimedByFlush:
        """Report completions with a call that also claims, with the nonce and the permit that it is given."""
        access = self._access
        nonce, asked_at = next(self.nonces), access.clock()
        reply = await access.call_queue(what, call(nonce, permit))
        # Keep the nonce: a claim with it returns leases that the queue may have created.
        if reply is None or reply.claim_result is None:
            self._handle_statuses(completions_sent, None if reply is None else reply.statuses)
            return ClaimedByFlush(nonce, asked_at, permit, None)
        self._handle_statuses(completions_sent, reply.statuses, is_next_known=True)
        access.record_sign_of_life(asked_at)
        access.update_from_reply(reply.claim_result)
        access.has_work = access.has_work or reply.claim_result.claimable_count > 0
        return ClaimedByFlush(nonce, asked_at, permit, reply.claim_result, reply.granted_turns)

    def _handle_statuses(
        self,
        completions_sent: Sequence[Completion],
        statuses: Sequence[SettleStatus | None] | None,
        *,
        is_next_known: bool = False,
    ) -> None:
        """Remove the leases that have ended, and keep the completions that must be flushed again.

        `is_next_known` is True if the reply says whether there are requests to claim.
        """
        if statuses is None:
            # The queue is unreachable: the whole call is repeated with the next flush.
            self.pending.extend(completions_sent)
            return
        at, unix_now = loop_time(), self._access.queue.unix_now()
        for completion, status in zip(completions_sent, statuses, strict=True):
            if status is None:  # only this one failed: flush it again with the next turn
                self.pending.append(completion)
                continue
            lease = completions.get_lease(completion)
            entry = self._remove_lease(lease.token)
            self._journal.record_completion(entry, completion, status, at, unix_now)
            if isinstance(completion, Release):
                makes_work = completion.delay_s <= 0 and not completion.missing_model
            else:
                makes_work = completions.get_turn_end(completion) is not None
            if self._lane_rules.record_completion(lease, completion) or (makes_work and not is_next_known):
                self._access.has_work = True


def _generate_nonces() -> Iterator[str]:
    prefix = secrets.token_hex(8)
    return (f"{prefix}-{number}" for number in count(1))
