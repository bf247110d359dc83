"""Submitter: sends the submissions of many callers together.

While one call to Redis is in progress, further submissions wait for the next call. So a client submits over
one connection, in the order of the callers, with up to a thousand requests in one call.
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
"""Longest time for which Redis remembers the reply to a call, so that a retry submits nothing twice."""


FINISH_S = 1.0
"""Seconds that a call may still take when the client is closed."""


@dataclass(slots=True, eq=False)
class SubmittedGroup:
    """Submissions of one caller, which are sent in one call to Redis or in several."""

    submissions: Sequence[Submission]
    until: float
    """Unix time after which the group is not retried."""
    left: int
    """Number of submissions that are not finished."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future that is resolved when all submissions are in the queue, or when none of them will be sent any
    more. Raises QueueUnreachableError."""
    begun: bool = False
    """True if a call with some of the submissions was started. They may be in the queue."""
    given_up: bool = False
    """True if the caller no longer waits for the group."""


class Submitter:
    """Submitter of one client. Retries and errors are those of `Outage`.

    A call without an answer is repeated with the same reply key. Redis remembers the reply under that key, so
    nothing is submitted twice.
    """

    def __init__(self, backend: Backend, outage: Outage) -> None:
        self._backend = backend
        self._outage = outage
        self._waiting: deque[tuple[Submission, SubmittedGroup]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._done_with: list[str] = []

    def hand_in(self, submissions: Sequence[Submission], until: float) -> SubmittedGroup:
        """Queue submissions for the next calls, and return their group. The caller waits for its `done`."""
        group = SubmittedGroup(submissions, until, len(submissions))
        self._waiting.extend((each, group) for each in submissions)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="batch client: submit")
        return group

    def give_up(self, group: SubmittedGroup) -> bool:
        """Stop a group whose caller no longer waits. Submissions that were not sent are dropped.

        Return True if some of the group may be in the queue, or may get there by a call in progress. The
        future `done` is resolved when that call has ended.
        """
        group.given_up = True
        if not group.begun and not group.done.done():
            group.done.set_result(None)
        return group.begun

    async def aclose(self) -> None:
        """Drop the waiting submissions, and wait up to FINISH_TIMEOUT_S for the call in progress.

        The caller cancels what that call has submitted, so the call should end first.
        """
        _fail(self._waiting, QueueAwayError("the client was closed"))
        self._waiting.clear()
        if self._task is not None:
            if self._outage.trouble is None:  # during an outage the call would not end in time
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
            except BaseException:  # the task was cancelled: no caller may wait for ever
                _fail(batch, QueueAwayError("the client was closed while this was under way"))
                raise

    def _next(self) -> list[tuple[Submission, SubmittedGroup]]:
        batch: list[tuple[Submission, SubmittedGroup]] = []
        size = 0
        while self._waiting and len(batch) < SUBMITTED_MOST:
            size += len(self._waiting[0][0].member)
            if batch and size > SCRIPT_BYTES:  # a single larger request is sent alone
                break
            one = self._waiting.popleft()
            if one[1].given_up:
                _settle([one])  # counts as finished, so that the future of its group is resolved
            elif not one[1].done.done():
                one[1].begun = True
                batch.append(one)
        return batch

    async def _send(self, batch: list[tuple[Submission, SubmittedGroup]]) -> None:
        reply = self._backend.names.reply(secrets.token_hex(8))
        # The call may be repeated until the last deadline, so the reply is kept a minute longer.
        longest = max((group.until for _, group in batch), default=0.0)
        reply_s = int(min(max(60.0, longest - time.time() + 60.0), _LONGEST_REPLY_S))
        # Without the entries that were given up meanwhile, a repeated call may have fewer submissions. That
        # is safe: if the first call was executed, Redis returns its reply.
        while batch := _wanted(batch):
            # This call also deletes the reply keys of earlier calls, which will not be repeated any more.
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
    """Return the entries whose callers still wait."""
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
            group.done.exception()  # retrieve it: asyncio would log it if the caller was cancelled meanwhile
