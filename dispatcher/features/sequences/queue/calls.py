"""Calls of sequences to the queue: those of a dispatcher, and those of producers and operators.

Each method is one atomic step that is safe to repeat, and raises only QueueUnavailableError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dispatcher.features.sequences.queue import secret, steps
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.contract import UnleasedRequest
from dispatcher.queue.redis.overdue import UNSEARCHED
from dispatcher.queue.redis.scripts import MAX_SCRIPT_ITEMS, split_for_owner
from dispatcher.requests.request import Request, parse_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatcher.features.sequences.decisions import SequencePage, SequenceTerms
    from dispatcher.features.sequences.queue.steps import ClaimTurnsResult
    from dispatcher.features.sequences.turns import SequenceSnapshot, SequenceStatus, Turn
    from dispatcher.queue.contract import Lease
    from dispatcher.queue.redis.owner import RedisQueue
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.wire_format import ErrorCode


@dataclass(frozen=True, slots=True)
class RemainingRequest:
    """A request that will never run because its sequence has ended, and the error with which to answer it."""

    request: UnleasedRequest
    error_code: ErrorCode
    message: str
    """One sentence."""


class SequenceCalls:
    """Calls of one dispatcher. Obtained by `Queue.open_calls`."""

    def __init__(self, queue: RedisQueue) -> None:
        self._queue = queue

    async def claim_turns(
        self, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms
    ) -> ClaimTurnsResult:
        """Decide for leased requests of sequences whether it is their turn. `terms` apply from now on, also
        if `turns` is empty.

        Call it for each such lease before anything else can end the lease, and again for each new lease of a
        request.

        `TurnGranted`: no other request of the sequence is granted a turn until this one has ended for good
        (`settle`, `move_to_dead_letters`, `settle_unleased`); it stays the current one while it is released,
        taken back or delayed. `TurnWaits`: the request was given back without counting a delivery, and waits
        for its turn in a closed lane. `TurnRejected`: the caller keeps the lease and settles it. Decisions
        come in the order given. A repeated call returns the same for granted and waiting requests, and
        decides anew about rejected ones.
        """
        queue = self._queue
        await queue.ensure_clock_known()
        lease_s = queue.owner_terms.lease_s
        results = [
            await steps.claim_turns(queue.backend, queue.owner, lease_s, batch, terms)
            for batch in split_for_owner(turns)
        ]
        return replace(results[-1], decisions=[decision for each in results for decision in each.decisions])

    async def find_remaining_requests(self, max_count: int) -> Sequence[RemainingRequest]:
        """Return requests of ended sequences that will never run, about 1 MB with their progress (at least
        one). Pass them to `settle_unleased` with their results, or with an empty `Settlement.result` if the
        member cannot be parsed."""
        queue, found = self._queue, []
        for row in await steps.find_remaining_requests(
            queue.backend, min(max_count, MAX_SCRIPT_ITEMS), queue.max_member_bytes
        ):
            entry = row.place.split(":")[1]
            member = await queue.load_if_large(queue.names.members_key, entry, row.member)
            progress = await queue.load_if_large(queue.names.progress_key, entry, row.progress)
            if member is not None:
                request = UnleasedRequest(f"{UNSEARCHED}|{row.place}", member, progress=progress or b"")
                found.append(RemainingRequest(request, row.error_code, row.message))
        return found


class SequenceAdminCalls:
    """Calls of producers and operators. Obtained by `QueueAdmin.open_calls`."""

    def __init__(self, admin: RedisQueueAdmin) -> None:
        self._admin, self._backend = admin, admin.backend

    async def list_sequences(
        self, max_count: int, after: str = "", status: SequenceStatus | None = None
    ) -> SequencePage:
        """Return a page of a walk over about `max_count` sequences in no order, filtered by status."""
        return await steps.list_sequences(self._backend, max_count, after, status)

    async def get_sequence(self, sequence_id: str) -> SequenceSnapshot | None:
        """Return one sequence with the first of its waiting requests. `None` if it is not known."""
        return await steps.get_sequence(self._backend, sequence_id)

    async def read_request_ids(self, entry_ids: Sequence[int]) -> dict[int, str]:
        """Return the ids of requests that were claimed at least once, as far as they exist and can be
        read."""
        found = {}
        for entry in entry_ids:
            if name := parse_member(await self._read_member(entry)).id:
                found[entry] = name
        return found

    async def _read_member(self, entry_id: int) -> bytes:
        scripts, key = self._backend.scripts, self._admin.names.members_key
        found: bytes | None = await scripts.call_with_retries(lambda: scripts.client.hget(key, entry_id))
        return found or b""

    async def release_sequence(self, sequence_id: str) -> bool:
        """Let a held sequence continue with its next request. Return False if it is not held."""
        return await self._wake_if_done(done=await steps.release_sequence(self._backend, sequence_id))

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        """Answer the waiting and later requests of a sequence with SEQUENCE_ABORTED and `why`.

        A running request continues. A sequence can be aborted before any request of it was claimed. Return
        False if the sequence was aborted before, or has ended.
        """
        return await self._wake_if_done(done=await steps.abort_sequence(self._backend, sequence_id, why))

    async def cancel_sequence(
        self, sequence_id: str, submitted_until: float | None = None, claimed_within_s: float = CANCEL_TTL_S
    ) -> bool:
        """End a sequence. Its waiting requests are answered CANCELLED, and its running one is cancelled if
        its producer gave it a token.

        Requests that were submitted until `submitted_until` (Unix time; `None` for now, by the queue's clock)
        and are claimed within `claimed_within_s` are answered CANCELLED, too. Until the sequence is
        forgotten, these include requests that do not say when they were submitted. Requests that are
        submitted later begin the sequence anew. Return False if, as far as dispatchers know, the sequence has
        ended or does not exist.
        """
        next_entry = await steps.cancel_sequence(
            self._backend, sequence_id, submitted_until, claimed_within_s
        )
        if next_entry:  # a request of the sequence runs or waits for its retry: cancel it by its token
            request = parse_member(await self._read_member(next_entry))
            if isinstance(request, Request) and request.token:
                await self._admin.cancel_request(request.id, request.token, is_token_known=True)
        await self._wake_if_done(done=True)
        return next_entry is not None

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        """Forget a sequence: its next index, and that it was aborted or has ended. Later requests begin it
        anew, except for those that were submitted before it was cancelled.

        Return False, and do nothing, if a request of it runs or waits. `None` if it is not known.
        """
        is_forgotten = await steps.forget_sequence(self._backend, sequence_id)
        return None if is_forgotten is None else await self._wake_if_done(done=is_forgotten)

    async def _wake_if_done(self, *, done: bool) -> bool:
        if done:
            await self._backend.scripts.call_with_retries(lambda: self._admin.publish_wake_up("sequence"))
        return done

    async def get_or_create_sequence_secret(self) -> str:
        """Return the secret that all programs with our client share for their sequences. Create it if there
        is none."""
        return await secret.get_or_create_secret(self._backend.scripts, self._admin.names)
