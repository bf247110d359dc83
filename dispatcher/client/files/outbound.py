"""Calls of a run to the queue: submit chunks, collect results, and find out which lines are in the queue."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dispatcher.client.files.naming import Naming
from dispatcher.client.outage import Outage
from dispatcher.core.requests.result import PoppedResult, decode_result
from dispatcher.core.requests.submission import QueueUnavailableError, Submission
from dispatcher.queue.keys import Names
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.connect import connect, place_of
from dispatcher.queue.redis.producer import Box, Collected
from dispatcher.queue.redis.scripts import Scripts

T = TypeVar("T")

FIRST_S = 1.5
"""Seconds of retries if Redis was never reached. Short, because the URL is probably wrong, and because the
same command can continue the run later."""
WAIT_S = 5.0
"""Longest time of one blocking command. Longer waits use several commands."""
REMEMBERED_S = 7 * 86_400
"""Seconds for which the queue remembers which chunks it has accepted."""
ASKED_AT_ONCE = 500


class LineQueue:
    """Connection of a run to the queue.

    All calls are retried while Redis is unreachable, and raise QueueUnreachableError for permanent errors.
    """

    def __init__(self, url: str, names: Names, naming: Naming) -> None:
        self._naming = naming
        self._box = Box(naming.results)
        self._backend = Backend(connect(url, answer_s=WAIT_S + 3.0), names)
        self._waits = Scripts(self._backend.scripts.client, try_s=WAIT_S + 3.0)
        self._outage = Outage(None, place_of(url), first_s=FIRST_S)
        self._done_with: list[str] = []
        self.passed_over = 0
        """Number of elements in the result list that do not belong to this run."""

    @property
    def trouble(self) -> str:
        """Error of the last call, or empty if it succeeded."""
        return str(self._outage.trouble or "")

    async def submit(self, chunk: int, submissions: Sequence[Submission]) -> None:
        """Submit a chunk. Further calls for the same chunk submit nothing."""
        reply = self._naming.reply(chunk)
        # Delete the reply key of the previous chunk: the journal has recorded that it was accepted.
        done_with = self._done_with

        async def act() -> None:
            await producer.submit(
                self._backend, submissions, reply=reply, reply_s=REMEMBERED_S, done_with=done_with
            )

        await self._patiently(act)
        self._done_with = [reply]

    async def took(self, chunk: int) -> bool:
        """Return whether the queue remembers that it accepted this chunk."""
        scripts, reply = self._backend.scripts, self._naming.reply(chunk)
        return bool(await self._patiently(lambda: scripts.attempt(lambda: scripts.client.exists(reply))))

    async def inactive(self, numbers: Sequence[int]) -> set[int]:
        """Return the lines whose requests are neither waiting nor in flight. Takes up to MAX_IDS_PER_CALL."""
        scripts, names = self._backend.scripts, self._backend.names

        async def ask() -> list[int]:
            pipe = scripts.client.pipeline(transaction=False)
            for n in numbers:
                pipe.exists(names.active(self._naming.request_id(n)))
            found: list[int] = await pipe.execute()
            return found

        there = await self._patiently(lambda: scripts.attempt(ask))
        return {n for n, is_there in zip(numbers, there, strict=True) if not is_there}

    async def collect(self, seen: int, given_back: Sequence[int]) -> Collected:
        """Return the results after `last_number`, and delete the results that are given back."""
        scripts = self._backend.scripts
        return await self._patiently(
            lambda: producer.collect(scripts, self._box, me="", owner_s=1, seen=seen, given_back=given_back)
        )

    async def arrival(self) -> None:
        """Wait until there is something in the result list, but no longer than WAIT_S."""
        await self._patiently(lambda: producer.arrival(self._waits, self._box, WAIT_S))

    def read(self, raw: bytes) -> tuple[int, PoppedResult] | None:
        """Decode a result. Return its line number and the result, or `None` if it is not of this run."""
        try:
            result = decode_result(raw)
        except ValueError:
            result = None
        n = None if result is None else self._naming.line_of(result)
        if n is None or result is None:
            self.passed_over += 1
            return None
        return n, result

    async def discard(self) -> None:
        """Delete the result list, its keep and the reply keys, after the last result."""
        scripts = self._backend.scripts

        async def act() -> None:
            await producer.discard(scripts, self._box)
            for reply in self._done_with:
                await scripts.attempt(lambda: scripts.client.delete(reply))  # noqa: B023 - called at once

        await self._patiently(act)

    async def cancel(self, numbers: Sequence[int], until: float) -> None:
        """Cancel the requests of these lines, until the time `give_up_at` (monotonic clock)."""
        for n in numbers:
            if time.monotonic() > until:
                return
            await producer.cancel(self._backend, self._naming.request_id(n), "", "")

    async def aclose(self) -> None:
        await self._backend.aclose()

    async def _patiently(self, act: Callable[[], Awaitable[T]]) -> T:
        while True:
            began = time.monotonic()
            try:
                done = await act()
            except QueueUnavailableError as error:
                if (told := self._outage.ill(error, began)) is not None:
                    raise told from error
                await self._outage.pause()
            else:
                self._outage.well()
                return done
