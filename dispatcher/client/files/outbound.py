"""A run's side of the queue: chunks of lines go in, results come out, and it is asked what is in line."""

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
"""Where Redis was never reached, a run says so after this and the try that is under way: the same command
goes on later, and who waits at it wants to know of a wrong URL."""
WAIT_S = 5.0
"""One wait for results takes at most this long; then another one follows."""
REMEMBERED_S = 7 * 86_400
"""For so long the queue remembers which chunks it has taken."""
ASKED_AT_ONCE = 500


class LineQueue:
    """Waits for the queue while it is away. Raises QueueAwayError where that will not pass by itself."""

    def __init__(self, url: str, names: Names, naming: Naming) -> None:
        self._naming = naming
        self._box = Box(naming.results)
        self._backend = Backend(connect(url, answer_s=WAIT_S + 3.0), names)
        self._waits = Scripts(self._backend.scripts.client, try_s=WAIT_S + 3.0)
        self._outage = Outage(None, place_of(url), first_s=FIRST_S)
        self._done_with: list[str] = []
        self.passed_over = 0
        """Elements of the list that are no result of this job."""

    @property
    def trouble(self) -> str:
        """Why the queue cannot be reached now."""
        return str(self._outage.trouble or "")

    async def submit(self, chunk: int, submissions: Sequence[Submission]) -> None:
        """Once, however often it is called for a chunk."""
        reply = self._naming.reply(chunk)
        done_with = self._done_with

        async def act() -> None:
            await producer.submit(
                self._backend, submissions, reply=reply, reply_s=REMEMBERED_S, done_with=done_with
            )

        await self._patiently(act)
        self._done_with = [reply]

    async def took(self, chunk: int) -> bool:
        """Whether it remembers this chunk."""
        scripts, reply = self._backend.scripts, self._naming.reply(chunk)
        return bool(await self._patiently(lambda: scripts.attempt(lambda: scripts.client.exists(reply))))

    async def inactive(self, numbers: Sequence[int]) -> set[int]:
        """Those of at most ASKED_AT_ONCE lines whose requests are neither in line nor at work."""
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
        """What has come since `seen`; the results of these numbers are forgotten."""
        scripts = self._backend.scripts
        return await self._patiently(
            lambda: producer.collect(scripts, self._box, me="", owner_s=1, seen=seen, given_back=given_back)
        )

    async def arrival(self) -> None:
        """Wait until something lies in the list, at most WAIT_S."""
        await self._patiently(lambda: producer.arrival(self._waits, self._box, WAIT_S))

    def read(self, raw: bytes) -> tuple[int, PoppedResult] | None:
        """A result with the number of its line; None for what is no result of this job."""
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
        """Nothing more will come, and nobody will ask."""
        scripts = self._backend.scripts

        async def act() -> None:
            await producer.discard(scripts, self._box)
            for reply in self._done_with:
                await scripts.attempt(lambda: scripts.client.delete(reply))  # noqa: B023 - called at once

        await self._patiently(act)

    async def cancel(self, numbers: Sequence[int], until: float) -> None:
        """Ask for these to be cancelled, as far as there is time for it."""
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
