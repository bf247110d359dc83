"""A dispatcher that knows sequences: it lines up what it claims, and answers those whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, decode_result, encode_failure
from dispatcher.core.sequences.decisions import SequenceTerms, TurnEnd, TurnGranted, TurnRejected
from dispatcher.ports import Lease, Settlement
from tests.client.answering import claimed, echo, insist
from tests.queue.made import OwnerAndDesk

NOBODY = Lease(
    entry_id=0,
    token="",
    member=b"",
    score=0.0,
    deliveries=0,
    failed_attempts=0,
    refusals=0,
    deaths_as_suspect=0,
)
"""Whose lease an expired request has."""
Answerer = Callable[[Request], bytes | None]


class TurnTaking:
    """`served`: body by body of each sequence, as they went. An answerer that returns None leaves the request
    running."""

    def __init__(self, queue: OwnerAndDesk, terms: SequenceTerms | None = None) -> None:
        self.queue = queue
        self.terms = terms or SequenceTerms()
        self.served: dict[str, list[bytes]] = {}
        self.indexes: dict[str, list[int]] = {}
        self.running: list[tuple[Lease, Request]] = []

    async def once(self, answer: Answerer = echo) -> int:
        """Work on all that may go now; how many that were."""
        read = []
        for lease in (await claimed(self.queue)).leases:
            request = parse_member(lease.member)
            assert isinstance(request, Request)
            read.append((lease, request))
        turns = [(lease, request.sequence) for lease, request in read if request.sequence is not None]
        verdicts = {}
        if turns:
            told = await insist(lambda: self.queue.claim_turns(turns, self.terms))
            verdicts = {lease.entry_id: one for (lease, _), one in zip(turns, told.decisions, strict=True)}
        settlements = []
        for lease, request in read:
            verdict = verdicts.get(lease.entry_id)
            if isinstance(verdict, TurnRejected):
                result = encode_failure(request.id, verdict.code, verdict.why, token=request.token)
                settlements.append(Settlement(lease, result, request.results, request.id, request.token))
            elif isinstance(verdict, TurnGranted) or verdict is None:
                if isinstance(verdict, TurnGranted) and request.sequence is not None:
                    self.indexes.setdefault(request.sequence.id, []).append(verdict.index)
                settlements += await self._answered(lease, request, answer)
        if settlements:
            await insist(lambda: self.queue.settle(settlements))
        return len(read) + await self._over()

    async def _answered(self, lease: Lease, request: Request, answer: Answerer) -> list[Settlement]:
        (cancelled,) = await insist(lambda: self.queue.check_cancelled([(request.id, request.token)]))
        turn = request.sequence
        if turn is not None:
            self.served.setdefault(turn.id, []).append(request.payload)
        result = encode_failure(request.id, ErrorCode.CANCELLED, "cancelled", token=request.token)
        if not cancelled:
            told = answer(request)
            if told is None:
                self.running.append((lease, request))
                return []
            result = told
        popped = decode_result(result)
        end = None
        if turn is not None:
            end = TurnEnd(turn, popped.error_code is not None, popped.error_message or "")
        return [Settlement(lease, result, request.results, request.id, request.token, turn_end=end)]

    async def _over(self) -> int:
        """Answer those that will not go any more."""
        items = []
        for one in await insist(lambda: self.queue.find_remaining_requests(100)):
            request = parse_member(one.request.member)
            assert isinstance(request, Request)
            result = encode_failure(request.id, one.error_code, one.message, token=request.token)
            settlement = Settlement(NOBODY, result, request.results, request.id, request.token)
            items.append((one.request, settlement))
        return await insist(lambda: self.queue.settle_unleased(items)) if items else 0

    @asynccontextmanager
    async def always(self, answer: Answerer = echo) -> AsyncIterator[TurnTaking]:
        """For the length of the block."""

        async def run() -> None:
            while True:
                if not await self.once(answer):
                    await asyncio.sleep(0.005)

        task = asyncio.create_task(run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
