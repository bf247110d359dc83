"""The realtime traffic of the live world: a trace that is replayed, or a level that is held."""

from __future__ import annotations

import asyncio
import itertools
import random

from dispatcher.lab.standin.model import BATCH_CONTEXT, generated, work_s
from dispatcher.lab.standin.pool import Job, Pool
from dispatcher.lab.standin.trace import Trace

_AGAIN_S = 0.05
"""A held request that was refused comes back after so long."""


class Realtime:
    """Interactive users: they come when they come, and do not retry what is refused."""

    def __init__(self, pool: Pool, *, seconds: float | None, seed: int) -> None:
        self._pool = pool
        self._seconds = seconds
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._level = 0
        self._held = 0

    def hold(self, level: int) -> None:
        """Keep so many in the pool: at once when there are fewer, as they finish when there are more."""
        self._level = level
        while self._held < level:
            self._held += 1
            self._hold_one()

    async def step(self, steps: list[tuple[float, int]]) -> None:
        """Hold each level from its time on."""
        start = self._loop.time()
        for at, level in steps:
            await asyncio.sleep(start + at - self._loop.time())
            self.hold(level)

    async def replay(self, trace: Trace, from_s: float, speed: float) -> None:
        """Send what the trace has from `from_s` on, `speed` times as fast; ends with it."""
        start = self._loop.time()
        for arrived in itertools.dropwhile(lambda arrived: arrived.at < from_s, trace.arrivals):
            wait_s = start + (arrived.at - from_s) / speed - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._pool.submit(self._job(arrived.work_s, arrived.tokens))

    def _hold_one(self) -> None:
        if self._held > self._level:
            self._held -= 1
            return
        tokens = generated(self._random)
        job = self._job(work_s(BATCH_CONTEXT, tokens), tokens)
        job.on_finish = self._hold_one
        if not self._pool.submit(job):
            self._loop.call_later(_AGAIN_S, self._hold_one)

    def _job(self, work_s: float, tokens: int) -> Job:
        return Job(batch=False, work_s=work_s, seconds=self._seconds, tokens=tokens, on_finish=_nothing)


def _nothing() -> None:
    pass
