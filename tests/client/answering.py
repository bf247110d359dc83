"""A dispatcher that answers each request with its own payload, when it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode, encode_answer, encode_failure
from dispatcher.ports import ClaimResult, QueueUnavailableError, Settlement
from dispatcher.queue.keys import QueueNames
from tests.queue.made import OwnerAndDesk, permit

T = TypeVar("T")
_numbers = count(1)

NAMES = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
POOL = "qwen"


def echo(request: Request) -> bytes:
    return encode_answer(request.id, 200, request.payload, token=request.token)


def refusal(
    code: ErrorCode, status: int | None = None, body: bytes | None = None
) -> Callable[[Request], bytes]:
    """An answerer that fails each request so."""
    return lambda request: encode_failure(request.id, code, f"told {code}", status, body, token=request.token)


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Make the same call until it gets through: what was claimed is nobody else's to answer."""
    while True:
        try:
            return await call()
        except QueueUnavailableError:
            await asyncio.sleep(0.05)


async def claimed(queue: OwnerAndDesk) -> ClaimResult:
    """A claim, repeated by its nonce where its reply was lost."""
    nonce = f"claim-{next(_numbers)}"
    return await insist(lambda: queue.claim(1000, nonce, permit()))


class Answering:
    """`served`: the ids in the order in which they left the line."""

    def __init__(self, queue: OwnerAndDesk, seed: int = 0) -> None:
        self.queue = queue
        self.served: list[str] = []
        self._chance = random.Random(seed)

    async def once(self, answer: Callable[[Request], bytes] = echo) -> int:
        """Answer all that is in line now, in any order; how many."""
        settlements = []
        for lease in (await claimed(self.queue)).leases:
            request = parse_member(lease.member)
            assert isinstance(request, Request)
            self.served.append(request.id)
            settlements.append(Settlement(lease, answer(request), request.results, request.id, request.token))
        self._chance.shuffle(settlements)
        if settlements:
            await insist(lambda: self.queue.settle(settlements))
        return len(settlements)

    @asynccontextmanager
    async def always(self, answer: Callable[[Request], bytes] = echo) -> AsyncIterator[Answering]:
        """Answer for the length of the block, as soon as something is in line."""

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
