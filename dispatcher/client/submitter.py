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

from dispatcher.client.errors import QueueUnreachableError
from dispatcher.client.outage import Outage, unreachable_error
from dispatcher.queue.redis import producer
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES
from dispatcher.requests.submission import QueueUnavailableError, Submission

MAX_SUBMISSIONS_PER_CALL = 1000
_MAX_REPLY_TTL_S = 86_400
"""Longest time for which Redis remembers the reply to a call, so that a retry submits nothing twice."""


FINISH_TIMEOUT_S = 1.0
"""Seconds that a call may still take when the client is closed."""


@dataclass(slots=True, eq=False)
class SubmissionGroup:
    """Submissions of one caller, which are sent in one call to Redis or in several."""

    submissions: Sequence[Submission]
    give_up_at: float
    """Unix time after which the group is not retried."""
    open_count: int
    """Number of submissions that are not finished."""
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future that is resolved when all submissions are in the queue, or when none of them will be sent any
    more. Raises QueueUnreachableError."""
    is_begun: bool = False
    """True if a call with some of the submissions was started. They may be in the queue."""
    is_given_up: bool = False
    """True if the caller no longer waits for the group."""


class Submitter:
    """Submitter of one client. Retries and errors are those of `Outage`.

    A call without an answer is repeated with the same reply key. Redis remembers the reply under that key, so
    nothing is submitted twice.
    """

    def __init__(self, backend: Backend, outage: Outage) -> None:
        self._backend = backend
        self._outage = outage
        self._waiting: deque[tuple[Submission, SubmissionGroup]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._finished_replies: list[str] = []

    def start_submission(self, submissions: Sequence[Submission], give_up_at: float) -> SubmissionGroup:
        """Queue submissions for the next calls, and return their group. The caller waits for its `done`."""
        group = SubmissionGroup(submissions, give_up_at, len(submissions))
        self._waiting.extend((each, group) for each in submissions)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_waiting(), name="batch client: submit")
        return group

    def give_up_group(self, group: SubmissionGroup) -> bool:
        """Stop a group whose caller no longer waits. Submissions that were not sent are dropped.

        Return True if some of the group may be in the queue, or may get there by a call in progress. The
        future `done` is resolved when that call has ended.
        """
        group.is_given_up = True
        if not group.is_begun and not group.done.done():
            group.done.set_result(None)
        return group.is_begun

    async def aclose(self) -> None:
        """Drop the waiting submissions, and wait up to FINISH_TIMEOUT_S for the call in progress.

        The caller cancels what that call has submitted, so the call should end first.
        """
        _fail_groups(self._waiting, QueueUnreachableError("the client was closed"))
        self._waiting.clear()
        if self._task is not None:
            if self._outage.current_error is None:  # during an outage the call would not end in time
                await asyncio.wait([self._task], timeout=FINISH_TIMEOUT_S)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch = self._take_next_batch()
            try:
                await self._send_batch(batch)
            except QueueUnreachableError as error:
                _fail_groups(batch, error)
            except BaseException:  # the task was cancelled: no caller may wait for ever
                _fail_groups(batch, QueueUnreachableError("the client was closed while this was under way"))
                raise

    def _take_next_batch(self) -> list[tuple[Submission, SubmissionGroup]]:
        batch: list[tuple[Submission, SubmissionGroup]] = []
        size = 0
        while self._waiting and len(batch) < MAX_SUBMISSIONS_PER_CALL:
            size += len(self._waiting[0][0].member)
            if batch and size > MAX_SCRIPT_BYTES:  # a single larger request is sent alone
                break
            entry = self._waiting.popleft()
            if entry[1].is_given_up:
                _mark_done([entry])  # counts as finished, so that the future of its group is resolved
            elif not entry[1].done.done():
                entry[1].is_begun = True
                batch.append(entry)
        return batch

    async def _send_batch(self, batch: list[tuple[Submission, SubmissionGroup]]) -> None:
        reply = self._backend.names.reply_key(secrets.token_hex(8))
        # The call may be repeated until the last deadline, so the reply is kept a minute longer.
        last_give_up_at = max((group.give_up_at for _, group in batch), default=0.0)
        reply_s = int(min(max(60.0, last_give_up_at - time.time() + 60.0), _MAX_REPLY_TTL_S))
        # Without the entries that were given up meanwhile, a repeated call may have fewer submissions. That
        # is safe: if the first call was executed, Redis returns its reply.
        while batch := _still_awaited(batch):
            # This call also deletes the reply keys of earlier calls, which will not be repeated any more.
            finished_replies = self._finished_replies[:100]
            try:
                await producer.submit(
                    self._backend,
                    [submission for submission, _ in batch],
                    reply_key=reply,
                    reply_ttl_s=reply_s,
                    obsolete_replies=finished_replies,
                )
            except QueueUnavailableError as error:
                if (error_to_raise := self._outage.record_failure(error)) is not None:
                    raise error_to_raise from error
                now = time.time()
                _fail_groups([one for one in batch if one[1].give_up_at <= now], unreachable_error(error))
                await self._outage.wait_before_retry()
            else:
                self._outage.record_success()
                del self._finished_replies[: len(finished_replies)]
                self._finished_replies.append(reply)
                _mark_done(batch)
                return


def _still_awaited(
    batch: Sequence[tuple[Submission, SubmissionGroup]],
) -> list[tuple[Submission, SubmissionGroup]]:
    """Return the entries whose callers still wait."""
    _mark_done([one for one in batch if one[1].is_given_up])
    return [one for one in batch if not one[1].done.done() and not one[1].is_given_up]


def _mark_done(batch: Sequence[tuple[Submission, SubmissionGroup]]) -> None:
    for _, group in batch:
        group.open_count -= 1
        if not group.open_count and not group.done.done():
            group.done.set_result(None)


def _fail_groups(batch: Iterable[tuple[Submission, SubmissionGroup]], error: QueueUnreachableError) -> None:
    for _, group in batch:
        if not group.done.done():
            group.done.set_exception(error)
            group.done.exception()  # retrieve it: asyncio would log it if the caller was cancelled meanwhile
