"""A fake dispatcher with sequences: it checks the turns of claimed requests and answers those whose turn it
is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnGranted,
    TurnRejected,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.queue.contract import Lease, Settlement
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import decode_result, encode_failure
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import claim_leases, echo, retry_while_unavailable
from tests.queue.factories import OwnerAndAdmin

NO_LEASE = Lease(
    entry_id=0,
    token="",
    member=b"",
    score=0.0,
    deliveries=0,
    failed_attempts=0,
    refusals=0,
    deaths_as_suspect=0,
)
"""Lease of a request that was never claimed."""
AnswerFunction = Callable[[Request], bytes | None]


class FakeSequenceDispatcher:
    """Fake dispatcher with sequences. `answered` has the bodies of each sequence in the order of their
    turns. A request stays running if its answer function returns `None`."""

    def __init__(self, queue: OwnerAndAdmin, terms: SequenceTerms | None = None) -> None:
        self.queue = queue
        self.terms = terms or SequenceTerms()
        self.answered: dict[str, list[bytes]] = {}
        self.indexes: dict[str, list[int]] = {}
        self.running: list[tuple[Lease, Request]] = []

    async def answer_once(self, answer: AnswerFunction = echo) -> int:
        """Handle all requests that may run now, and return their number."""
        claimed = []
        for lease in (await claim_leases(self.queue)).leases:
            request = parse_member(lease.member)
            assert isinstance(request, Request)
            claimed.append((lease, request))
        turns = [(lease, request.extra) for lease, request in claimed if request.extra is not None]
        decisions = {}
        if turns:
            claimed_turns = await retry_while_unavailable(lambda: self.queue.claim_turns(turns, self.terms))
            decisions = {
                lease.entry_id: decision
                for (lease, _), decision in zip(turns, claimed_turns.decisions, strict=True)
            }
        settlements = []
        for lease, request in claimed:
            decision = decisions.get(lease.entry_id)
            if isinstance(decision, TurnRejected):
                result = encode_failure(request.id, decision.code, decision.why, token=request.token)
                settlements.append(Settlement(lease, result, request.results, request.id, request.token))
            elif isinstance(decision, TurnGranted) or decision is None:
                if isinstance(decision, TurnGranted) and request.extra is not None:
                    self.indexes.setdefault(request.extra.id, []).append(decision.index)
                settlements += await self._answer_request(lease, request, answer)
        if settlements:
            await retry_while_unavailable(lambda: self.queue.settle(settlements))
        return len(claimed) + await self._fail_remaining()

    async def _answer_request(
        self, lease: Lease, request: Request, answer: AnswerFunction
    ) -> list[Settlement]:
        (cancelled,) = await retry_while_unavailable(
            lambda: self.queue.check_cancelled([(request.id, request.token)])
        )
        turn = request.extra
        if turn is not None:
            self.answered.setdefault(turn.id, []).append(request.payload)
        result = encode_failure(request.id, ErrorCode.CANCELLED, "cancelled", token=request.token)
        if not cancelled:
            answered = answer(request)
            if answered is None:
                self.running.append((lease, request))
                return []
            result = answered
        decoded = decode_result(result)
        end = None
        if turn is not None:
            end = TurnEnd(turn, decoded.error_code is not None, decoded.error_message or "")
        return [Settlement(lease, result, request.results, request.id, request.token, extra=end)]

    async def _fail_remaining(self) -> int:
        """Answer the requests that will not run any more."""
        items = []
        for remaining in await retry_while_unavailable(lambda: self.queue.find_remaining_requests(100)):
            request = parse_member(remaining.request.member)
            assert isinstance(request, Request)
            result = encode_failure(request.id, remaining.error_code, remaining.message, token=request.token)
            settlement = Settlement(NO_LEASE, result, request.results, request.id, request.token)
            items.append((remaining.request, settlement))
        return await retry_while_unavailable(lambda: self.queue.settle_unleased(items)) if items else 0

    @asynccontextmanager
    async def answer_continuously(
        self, answer: AnswerFunction = echo
    ) -> AsyncIterator[FakeSequenceDispatcher]:
        """Handle requests until the context manager is left."""

        async def run() -> None:
            while True:
                if not await self.answer_once(answer):
                    await asyncio.sleep(0.005)

        task = asyncio.create_task(run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
