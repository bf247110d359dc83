"""Realtime traffic of the live world: a replayed trace, or a constant number of requests."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.model import BATCH_CONTEXT, compute_work_s, draw_tokens
from dispatcher.lab.standin.pool import Job, Pool
from dispatcher.lab.standin.trace import Trace

_RETRY_S = 0.05
"""Time after which a refused request of a constant level is sent again."""


class RealtimeTraffic:
    """Interactive users. They do not retry refused requests, except to hold a level."""

    def __init__(self, config: Config, pool: Pool) -> None:
        self._pool = pool
        self._seconds = config.realtime_seconds
        self._random = random.Random(config.seed)
        self._loop = asyncio.get_running_loop()
        self._level = 0
        self._held = 0

    def hold_level(self, level: int) -> None:
        """Keep this number of requests in the pool. More are sent at once; fewer are reached as requests
        finish."""
        self._level = level
        while self._held < level:
            self._held += 1
            self._submit_held_job()

    async def hold_levels(self, steps: list[tuple[float, int]]) -> None:
        """Hold each level from its time on."""
        start = self._loop.time()
        for at, level in steps:
            # Relative to the start, so that delays do not add up.
            await asyncio.sleep(start + at - self._loop.time())
            self.hold_level(level)

    async def replay_trace(self, trace: Trace, from_s: float, speed: float) -> None:
        """Send the requests of the trace from `from_s` on, `speed` times as fast, until its end."""
        start = self._loop.time()
        for arrived in itertools.dropwhile(lambda arrived: arrived.arrives_at < from_s, trace.arrivals):
            wait_s = start + (arrived.arrives_at - from_s) / speed - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._pool.submit_job(self._make_job(arrived.work_s, arrived.tokens))

    def _submit_held_job(self) -> None:
        # The level was lowered while this request was running.
        if self._held > self._level:
            self._held -= 1
            return
        tokens = draw_tokens(self._random)
        job = self._make_job(compute_work_s(BATCH_CONTEXT, tokens), tokens, self._submit_held_job)
        if not self._pool.submit_job(job):
            self._loop.call_later(_RETRY_S, self._submit_held_job)

    def _make_job(self, work_s: float, tokens: int, on_finish: Callable[[], None] = lambda: None) -> Job:
        return Job(is_batch=False, work_s=work_s, seconds=self._seconds, tokens=tokens, on_finish=on_finish)
