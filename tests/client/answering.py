"""A dispatcher that answers each request with its own payload, when it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from dispatcher.core.request import Request, parse
from dispatcher.core.result import ErrorCode, answered, failed
from dispatcher.ports import QueueUnavailableError, Settlement
from dispatcher.queue.keys import Names
from tests.queue.made import OwnerAndDesk, claim

NAMES = Names("batch:{qwen}:requests", "batch:{qwen}:results")
POOL = "qwen"


def echo(request: Request) -> bytes:
    return answered(request.id, 200, request.payload, token=request.token)


def refusal(
    code: ErrorCode, status: int | None = None, body: bytes | None = None
) -> Callable[[Request], bytes]:
    """An answerer that fails each request so."""
    return lambda request: failed(request.id, code, f"told {code}", status, body, token=request.token)


class Answering:
    """`served`: the ids in the order in which they left the line."""

    def __init__(self, queue: OwnerAndDesk, seed: int = 0) -> None:
        self.queue = queue
        self.served: list[str] = []
        self._chance = random.Random(seed)

    async def once(self, answer: Callable[[Request], bytes] = echo) -> int:
        """Answer all that is in line now, in any order; how many."""
        settlements = []
        for lease in (await claim(self.queue)).leases:
            request = parse(lease.member)
            assert isinstance(request, Request)
            self.served.append(request.id)
            settlements.append(Settlement(lease, answer(request), request.results, request.id, request.token))
        self._chance.shuffle(settlements)
        if settlements:
            await self.queue.settle(settlements)
        return len(settlements)

    @asynccontextmanager
    async def always(self, answer: Callable[[Request], bytes] = echo) -> AsyncIterator[Answering]:
        """Answer for the length of the block, as soon as something is in line."""

        async def run() -> None:
            while True:
                with suppress(QueueUnavailableError):
                    if await self.once(answer):
                        continue
                await asyncio.sleep(0.005)

        task = asyncio.create_task(run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
