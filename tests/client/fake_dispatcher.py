"""A fake dispatcher that answers each request with its own payload when the test asks for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from dispatcher.queue.contract import ClaimResult, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import Request, parse_member
from dispatcher.requests.result import encode_answer, encode_failure
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.wire_format import ErrorCode
from tests.queue.factories import OwnerAndAdmin, permit

T = TypeVar("T")
_numbers = count(1)

NAMES = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
POOL = "qwen"


def echo(request: Request) -> bytes:
    return encode_answer(request.id, 200, request.payload, token=request.token)


def fail_with(
    code: ErrorCode, status: int | None = None, body: bytes | None = None
) -> Callable[[Request], bytes]:
    """Return a function that answers each request with this error."""
    return lambda request: encode_failure(
        request.id, code, f"failed with {code}", status, body, token=request.token
    )


async def retry_while_unavailable(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until the queue is reachable. No other dispatcher answers the claimed requests."""
    while True:
        try:
            return await call()
        except QueueUnavailableError:
            await asyncio.sleep(0.05)


async def claim_leases(queue: OwnerAndAdmin) -> ClaimResult:
    """Claim leases. The claim is repeated with its nonce if its reply was lost."""
    nonce = f"claim-{next(_numbers)}"
    return await retry_while_unavailable(lambda: queue.claim(1000, nonce, permit()))


class FakeDispatcher:
    """Fake dispatcher. `answered` has the ids of the requests in the order of their claims."""

    def __init__(self, queue: OwnerAndAdmin, seed: int = 0) -> None:
        self.queue = queue
        self.answered: list[str] = []
        self._random = random.Random(seed)

    async def answer_once(self, answer: Callable[[Request], bytes] = echo) -> int:
        """Answer all requests of the queue, in random order, and return their number."""
        settlements = []
        for lease in (await claim_leases(self.queue)).leases:
            request = parse_member(lease.member)
            assert isinstance(request, Request)
            self.answered.append(request.id)
            settlements.append(Settlement(lease, answer(request), request.results, request.id, request.token))
        self._random.shuffle(settlements)
        if settlements:
            await retry_while_unavailable(lambda: self.queue.settle(settlements))
        return len(settlements)

    @asynccontextmanager
    async def answer_continuously(
        self, answer: Callable[[Request], bytes] = echo
    ) -> AsyncIterator[FakeDispatcher]:
        """Answer requests as soon as they are in the queue, until the context manager is left."""

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
