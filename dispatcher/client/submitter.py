"""Submissions of many callers, made together: while one call is under way, those that come meanwhile wait for
the next.

So a client submits over one connection, in the order in which it was asked to, and thousands in a call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dispatcher.client.errors import QueueAwayError
from dispatcher.client.outage import Outage, away
from dispatcher.core.requests.submission import QueueUnavailableError, Submission
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import SCRIPT_BYTES

SUBMITTED_MOST = 1000
_LONGEST_REPLY_S = 86_400
"""An outage after which nothing is tried again."""


FINISH_S = 1.0
"""A call that is under way when the client is closed may take so long."""


@dataclass(slots=True, eq=False)
class SubmittedGroup:
    """What one caller hands in at once, in one call or several."""

    submissions: Sequence[Submission]
    until: float
    """Unix time: it is given up then."""
    left: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """All of it is in line, or no call with any of it will be made any more. Raises QueueAwayError."""
    begun: bool = False
    """A call was made with some of it, which may be in line."""
    given_up: bool = False
    """Nobody awaits it."""


class Submitter:
    """Raises QueueAwayError as `Outage` says. A call that was not answered is repeated with the same place
    for its reply, so that whatever it did is not done again."""

    def __init__(self, backend: Backend, outage: Outage) -> None:
        self._backend = backend
        self._outage = outage
        self._waiting: deque[tuple[Submission, SubmittedGroup]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._done_with: list[str] = []

    def hand_in(self, submissions: Sequence[Submission], until: float) -> SubmittedGroup:
        """Put them in line, some at least: its `done` says when they are."""
        group = SubmittedGroup(submissions, until, len(submissions))
        self._waiting.extend((each, group) for each in submissions)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="batch client: submit")
        return group

    def give_up(self, group: SubmittedGroup) -> bool:
        """Nobody awaits it any more: what was not sent is not sent. Whether some of it may be in line, or
        will be by a call that is under way: its `done` tells when that has ended."""
        group.given_up = True
        if not group.begun and not group.done.done():
            group.done.set_result(None)
        return group.begun

    async def aclose(self) -> None:
        """What waits is not sent. A call that is under way may end, so that what it does can be undone."""
        _fail(self._waiting, QueueAwayError("the client was closed"))
        self._waiting.clear()
        if self._task is not None:
            if self._outage.trouble is None:
                await asyncio.wait([self._task], timeout=FINISH_S)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._waiting:
            batch = self._next()
            try:
                await self._send(batch)
            except QueueAwayError as error:
                _fail(batch, error)
            except BaseException:
                _fail(batch, QueueAwayError("the client was closed while this was under way"))
                raise

    def _next(self) -> list[tuple[Submission, SubmittedGroup]]:
        batch: list[tuple[Submission, SubmittedGroup]] = []
        size = 0
        while self._waiting and len(batch) < SUBMITTED_MOST:
            size += len(self._waiting[0][0].member)
            if batch and size > SCRIPT_BYTES:
                break
            one = self._waiting.popleft()
            if one[1].given_up:
                _settle([one])
            elif not one[1].done.done():
                one[1].begun = True
                batch.append(one)
        return batch

    async def _send(self, batch: list[tuple[Submission, SubmittedGroup]]) -> None:
        reply = self._backend.names.reply(secrets.token_hex(8))
        longest = max((group.until for _, group in batch), default=0.0)
        reply_s = int(min(max(60.0, longest - time.time() + 60.0), _LONGEST_REPLY_S))
        while batch := _wanted(batch):
            done_with = self._done_with[:100]
            try:
                await producer.submit(
                    self._backend,
                    [submission for submission, _ in batch],
                    reply=reply,
                    reply_s=reply_s,
                    done_with=done_with,
                )
            except QueueUnavailableError as error:
                if (told := self._outage.ill(error)) is not None:
                    raise told from error
                now = time.time()
                _fail([one for one in batch if one[1].until <= now], away(error))
                await self._outage.pause()
            else:
                self._outage.well()
                del self._done_with[: len(done_with)]
                self._done_with.append(reply)
                _settle(batch)
                return


def _wanted(
    batch: Sequence[tuple[Submission, SubmittedGroup]],
) -> list[tuple[Submission, SubmittedGroup]]:
    """What somebody still waits for."""
    _settle([one for one in batch if one[1].given_up])
    return [one for one in batch if not one[1].done.done() and not one[1].given_up]


def _settle(batch: Sequence[tuple[Submission, SubmittedGroup]]) -> None:
    for _, group in batch:
        group.left -= 1
        if not group.left and not group.done.done():
            group.done.set_result(None)


def _fail(batch: Iterable[tuple[Submission, SubmittedGroup]], error: QueueAwayError) -> None:
    for _, group in batch:
        if not group.done.done():
            group.done.set_exception(error)
            group.done.exception()  # whoever was cancelled meanwhile does not ask for it
