"""Sequences of the Python client: number and submit the requests of one sequence.

Each request carries its index, because the queue may receive the requests late, twice or out of order. After
a request that resets the sequence, the index is not enough: a later request that arrives before the reset
would belong to the run before it. So later requests are submitted only when the reset request has a result.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from dispatcher.client.errors import NoResultError, QueueUnreachableError, SequenceBusyError
from dispatcher.client.item import Body, Handle, Item, TokenGenerator, seconds_until
from dispatcher.client.mailbox import Mailbox
from dispatcher.client.result import HookError, Result, result_from_error
from dispatcher.common.errors import ClosedError, TooManyPendingError
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.turns import (
    MAX_SEQUENCE_ID_BYTES,
    CarryMode,
    OnError,
    SequenceSnapshot,
    SequenceStatus,
    Turn,
)
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.wire_format import ErrorCode

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

MAX_UNANSWERED = 50
"""Largest number of unanswered requests of `send_many`. Each request that is submitted before its turn costs
an additional claim, which is given back."""
CANCEL_MARK_GRACE_S = 60.0
"""Seconds for which a cancellation is remembered after the last deadline of the cancelled requests."""
CANCEL_TIMEOUT_S = 5.0
"""Longest time for which leaving the block by an exception waits for the cancellation."""
_ITEM_OPTIONS = tuple(each.name for each in fields(Item) if each.name not in ("body", "sequence"))
_END = object()
OnErrorOption = OnError | Literal["continue", "abort", "hold"]
CarryOption = CarryMode | Literal["off", "messages"]


class SequenceClient:
    """Sequences of one client. Calls to the queue are retried while Redis is unreachable."""

    def __init__(
        self,
        admin: RedisQueueAdmin,
        mailbox: Mailbox,
        tokens: TokenGenerator,
        call_queue: Callable[..., Awaitable[Any]],
        enqueue: Callable[..., Awaitable[Handle]],
        wait_for_result: Callable[[Handle, float | None], Awaitable[Result]],
        cancel: Callable[[Handle], Awaitable[bool]],
    ) -> None:
        """`call_queue` makes a call to the queue, with an optional time limit on the monotonic clock. The
        last three are methods of the client."""
        self._calls, self._tokens, self._call_queue = open_sequences(admin), tokens, call_queue
        self.mailbox = mailbox
        self.enqueue, self.wait_for_result, self.cancel = enqueue, wait_for_result, cancel
        self._secret = ""
        self._lock = asyncio.Lock()

    async def add_secret(self, item: Item) -> Item:
        """Return an item of a sequence with the secret that all programs with this client share.

        An item that has its own secret is returned unchanged.
        """
        turn = Turn(item.sequence) if isinstance(item.sequence, str) else item.sequence
        if turn is None or turn.secret:
            return item
        if not self._secret:
            give_up_at = time.monotonic() + seconds_until(item.deadline, time.time())
            async with self._lock:  # fair: the callers continue in the order in which they came
                if not self._secret:
                    self._secret = await self._call_queue(
                        self._calls.get_or_create_sequence_secret, give_up_at
                    )
        return replace(item, sequence=structs.replace(turn, secret=self._secret))

    async def get_status(self, sequence_id: str) -> SequenceSnapshot | None:
        """Return the state of a sequence in the queue, or `None` if the queue does not know it."""
        status: SequenceSnapshot | None = await self._call_queue(
            lambda: self._calls.get_sequence(sequence_id)
        )
        return status

    async def cancel_sequence(self, sequence_id: str, max_wait_s: float = CANCEL_TTL_S) -> bool:
        """Cancel all requests of a sequence that were submitted until now.

        `max_wait_s` is the longest time for which one of them may still wait to be claimed. Return False if,
        as far as dispatchers know, the sequence has ended or does not exist.
        """
        # The clock of the tokens, so that no request of this client is missed.
        cancelled_at = self._tokens.current_time()
        is_cancelled: bool = await self._call_queue(
            lambda: self._calls.cancel_sequence(sequence_id, cancelled_at, max_wait_s)
        )
        return is_cancelled

    async def forget_sequence(self, sequence_id: str) -> bool:
        """Forget a sequence. Return False if requests of it run or wait."""
        is_forgotten: bool | None = await self._call_queue(lambda: self._calls.forget_sequence(sequence_id))
        return is_forgotten is not False

    async def wait_until_arrived(self, handle: Handle) -> None:
        """Wait until the result of a request has arrived, without returning it."""
        with suppress(NoResultError):
            await self.mailbox.wait_for_result(handle, None)


class OpenSequence:
    """Sequence whose requests this client sends: `client.sequence("chat-7")`.

        async with client.sequence("chat-7") as chat:
            first = await chat.send({"model": "m", "prompt": "hi"})
            second = await chat.send({"model": "m", "prompt": "and then?"}, last=True)

    An `async for` over the sequence yields the results of the requests that `enqueue` submits, in their
    order, each as soon as it has arrived. More requests may be submitted meanwhile, also by other tasks.

        async with client.sequence() as chat:
            await chat.enqueue({"model": "m", "prompt": "hi"})
            await chat.enqueue({"model": "m", "prompt": "and then?"}, last=True)
            async for result in chat:
                print(result.status)

    The iteration ends after the result of the last request, or, when the sequence was cancelled or its block
    was left, after the results of all requests. A failed request also yields a result, as with
    `BatchClient.stream`. The iteration raises QueueUnreachableError and NameInUseError. A further `async for`
    continues with the next result. Results of `send` and `send_many` are not yielded.

    At most `max_pending` requests are enqueued ahead of the iteration. While a task iterates, `enqueue` waits
    for space, so a task that submits and iterates must not get further ahead. If more requests are enqueued
    while no task iterates, their results are not held, and an iteration raises TooManyPendingError. Their
    handles are still valid for `BatchClient.result`.

    Requests are numbered in the order of the calls. `cancel()`, or leaving the block by an exception, cancels
    the unanswered requests. Leaving the block normally does not end the sequence: submitted requests stay in
    the queue. The sequence ends with a request that is `last`, or when no request came for
    `sequences.max_idle_s`.
    """

    def __init__(
        self,
        client: SequenceClient,
        sequence_id: str | None = None,
        on_error: OnErrorOption | None = None,
        reset: bool = False,
        index: int | None = None,
        carry: CarryOption | None = None,
        max_pending: int = 1000,
    ) -> None:
        if sequence_id is None:
            sequence_id = secrets.token_hex(16)
            index = index or 0  # nobody else knows the id, so the queue need not be asked
        if not 0 < len(sequence_id.encode(errors="surrogatepass")) <= MAX_SEQUENCE_ID_BYTES:
            raise ValueError(f"the id of a sequence: 1 to {MAX_SEQUENCE_ID_BYTES} bytes")
        if index is not None and index < 0:
            raise ValueError(f"index {index}: must be 0 or more")
        if max_pending < 1:
            raise ValueError(f"max_pending {max_pending}: must be at least 1")
        self.id = sequence_id
        self.next_index = 0 if reset and index is None else index
        """Index of the next request, or `None` until the first request asks the queue for it."""
        self._client = client
        self._on_error = None if on_error is None else OnError(on_error)
        self._carry = None if carry is None else CarryMode(carry)
        self._is_reset_pending = reset
        self._lock = asyncio.Lock()
        self._opening_request: Handle | None = None
        """Request that resets the sequence, until its result has arrived."""
        self._unanswered: list[Handle] = []
        self._prune_at = 2 * MAX_UNANSWERED
        self._closed_reason = ""
        self._is_cancelled = False
        self._max_pending = max_pending
        self._unread: deque[Handle] = deque()
        """Enqueued requests whose results were not yielded yet."""
        self._is_unread_dropped = False
        """True if more than `max_pending` requests were enqueued while no task iterated."""
        self._iteration: object | None = None
        """The latest iteration, until the program leaves its loop."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<OpenSequence {self.id!r} next_index={self.next_index}>"

    async def __aenter__(self) -> OpenSequence:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(TimeoutError, QueueUnreachableError):
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self.cancel()
        self._close(self._closed_reason or "its block was left")

    async def __aiter__(self) -> AsyncGenerator[Result, None]:
        iteration = object()
        while True:
            self._iteration = iteration
            handle = await self._take_unread()
            if handle is None:
                return
            try:
                result = await self._wait_for_result(handle)
            except BaseException:  # the next iteration begins with this request
                self._unread.appendleft(handle)
                raise
            try:
                yield result
            except GeneratorExit:
                # The program left the loop. asyncio reports that late, so the next iteration may have begun.
                if self._iteration is iteration:
                    self._iteration = None
                    self._changed.set()
                raise
            # Only when the next result is requested: until then the program may crash, and want it again.
            self._client.mailbox.give_back(result)

    async def enqueue(self, body: Body, *, last: bool = False, **options: Any) -> Handle:
        """Submit the next request, and return its handle when it is in the queue.

        With `last=True` the sequence ends with this request. The other options are those of
        `BatchClient.enqueue`.

        Raises the exceptions of `BatchClient.enqueue`, ClosedError after the last request, and
        SequenceBusyError. If the call raises QueueUnreachableError or is cancelled, the request may have
        reached the queue. Its index is not used again, and later requests may wait a minute for it.
        After any other exception the index is used for the next request.
        """
        return await self._submit(body, last, options, is_iterated=True)

    async def _submit(
        self, body: Body, last: bool, options: dict[str, Any], *, is_iterated: bool = False
    ) -> Handle:
        """Submit the next request. If `is_iterated`, its result is held for an iteration of the sequence."""
        try:
            async with self._lock:  # fair: requests are numbered in the order of the calls
                return await self._submit_next(body, last, options, is_iterated=is_iterated)
        finally:
            self._changed.set()  # an iteration of a closed sequence waits until no submission is in progress

    async def _submit_next(
        self, body: Body, last: bool, options: dict[str, Any], *, is_iterated: bool
    ) -> Handle:
        if self._closed_reason:
            raise ClosedError(f"sequence {self.id}: {self._closed_reason}: open it anew")
        if self._is_reset_pending and options.get("results") is not None:
            raise ValueError("results: what begins a sequence anew is awaited here")
        if is_iterated:
            await self._wait_for_unread_space()
        if self._opening_request is not None:
            # A later request must not overtake the reset, as the docstring of the module explains.
            await self._client.wait_until_arrived(self._opening_request)
            self._opening_request = None
        index = await self._resolve_index()
        if self._closed_reason:  # the sequence was cancelled meanwhile
            raise ClosedError(f"sequence {self.id}: {self._closed_reason}: open it anew")
        turn = Turn(self.id, index, last, self._is_reset_pending, self._on_error, self._carry)
        try:
            handle = await self._client.enqueue(body, sequence=turn, **options)
        except (QueueUnreachableError, asyncio.CancelledError):
            # The request may be in the queue, so its index is used up.
            self._advance_index(index, last=last)
            raise
        if self._is_reset_pending:
            self._opening_request = handle
        self._advance_index(index, last=last)
        self._track_handle(handle)
        if is_iterated and handle.results == self._client.mailbox.box.result_list:
            self._hold_unread(handle)
        if self._is_cancelled:  # `cancel` ran during the submission, and may have missed this request
            await self.cancel()
        return handle

    async def send(
        self, body: Body, *, last: bool = False, timeout: float | None = None, **options: Any
    ) -> Result:
        """Submit the next request, and wait for its result.

        A failed request also returns a result. Its `raise_for_status` raises an exception, which is
        SequenceAbortedError if the sequence was aborted.
        """
        result = await self._client.wait_for_result(await self._submit(body, last, options), timeout)
        self._client.mailbox.give_back(result)
        return result

    async def send_many(self, items: Iterable[Item | Body], *, last: bool = False) -> list[Result]:
        """Submit many requests, and return their results in the same order.

        With `last=True` the sequence ends with the last request. At most 50 requests are unanswered at a
        time. A request that cannot be submitted has a result with the code INVALID_REQUEST or HOOK_FAILED.
        Unless `on_error` is `continue`, the requests after it are not submitted, and have the code
        SEQUENCE_ABORTED.
        """
        results: list[Result] = []
        under_way: deque[Handle] = deque()
        cause = ""
        for item, is_last in _mark_last(items):
            if cause:
                under_way.append(_aborted_handle(item, cause))
                continue
            if len(under_way) >= MAX_UNANSWERED:
                results.append(await self._wait_for_result(under_way.popleft()))
            try:
                under_way.append(await self._enqueue_item(item, last=last and is_last))
            except (HookError, ValueError, TypeError) as error:
                under_way.append(_handle_with_result(item, result_from_error(_item_id(item), error)))
                cause = "" if self._on_error is OnError.CONTINUE else str(error)
        while under_way:
            results.append(await self._wait_for_result(under_way.popleft()))
        # Only now: if the program dies before, all results are still in Redis.
        for each in results:
            self._client.mailbox.give_back(each)
        return results

    async def cancel(self) -> bool:
        """Cancel all unanswered requests, and end the sequence. Return False if it has already ended.

        The cancelled requests have results with the code CANCELLED.
        """
        self._is_cancelled = True
        self._close("it was cancelled")
        if not self._unanswered and self._opening_request is None:
            return False
        # The sequence is cancelled first, because cancelling a single request would abort the sequence, and
        # an abort is remembered. Then each request is cancelled, because requests other than the next one may
        # run, too.
        waiting = [each for each in self._unanswered if not each.done]
        latest_deadline = max((each.deadline for each in waiting), default=0.0)
        done = await self._client.cancel_sequence(
            self.id, max(0.0, latest_deadline - time.time()) + CANCEL_MARK_GRACE_S
        )
        for handle in waiting:
            done |= await self._client.cancel(handle)
        return done

    async def _resolve_index(self) -> int:
        if self.next_index is None:
            self.next_index = _next_index_after(await self._client.get_status(self.id), self.id)
        return self.next_index

    def _advance_index(self, index: int, *, last: bool) -> None:
        self.next_index, self._is_reset_pending = index + 1, False
        if last:
            self._close("its last request was sent")

    def _close(self, reason: str) -> None:
        self._closed_reason = reason
        self._changed.set()

    async def _take_unread(self) -> Handle | None:
        """Wait for the next request to iterate over, and return it, or `None` if no more will come."""
        while True:
            if self._is_unread_dropped:
                why = (
                    f"more than {self._max_pending} requests (max_pending) were enqueued before an iteration"
                )
                raise TooManyPendingError(f"sequence {self.id}: {why}: iterate in another task")
            if self._unread:
                handle = self._unread.popleft()
                self._changed.set()
                return handle
            if self._closed_reason and not self._lock.locked():
                return None
            await self._wait_for_change()

    async def _wait_for_unread_space(self) -> None:
        while (
            self._iteration is not None and len(self._unread) >= self._max_pending and not self._closed_reason
        ):
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _hold_unread(self, handle: Handle) -> None:
        if len(self._unread) >= self._max_pending:
            # A program that never iterates must not collect results without a limit.
            self._unread.clear()
            self._is_unread_dropped = True
        if not self._is_unread_dropped:
            self._unread.append(handle)
            self._changed.set()

    def _track_handle(self, handle: Handle) -> None:
        # Answered handles are dropped only at growing lengths, so that a call costs constant time on average.
        if len(self._unanswered) >= self._prune_at:
            self._unanswered = [each for each in self._unanswered if not each.done]
            self._prune_at = 2 * max(MAX_UNANSWERED, len(self._unanswered))
        self._unanswered.append(handle)

    async def _enqueue_item(self, item: Item | Body, *, last: bool) -> Handle:
        if not isinstance(item, Item):
            return await self._submit(item, last, {})
        if item.sequence is not None:
            raise ValueError(f"the item is of a sequence already: {item.sequence}")
        return await self._submit(item.body, last, {name: getattr(item, name) for name in _ITEM_OPTIONS})

    async def _wait_for_result(self, handle: Handle) -> Result:
        try:
            return await self._client.wait_for_result(handle, None)
        except (HookError, NoResultError) as error:
            return result_from_error(handle.id, error)


async def run_sequences(
    open_sequence: Callable[[str], OpenSequence], sequences: Mapping[str, Iterable[Item | Body]], at_once: int
) -> dict[str, list[Result]]:
    """Run sequences with up to `at_once` of them in progress, and return their results by id."""
    if at_once < 1:
        raise ValueError(f"at_once {at_once}: must be at least 1")
    results: dict[str, list[Result]] = {}
    rest = iter(sequences.items())

    async def run_next_sequences() -> None:
        for sequence_id, items in rest:  # all tasks share this iterator, so each takes the next sequence
            results[sequence_id] = []  # now, so that the results have the order of the sequences
            async with open_sequence(sequence_id) as sequence:
                results[sequence_id] = await sequence.send_many(items, last=True)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(sequences))):
                group.create_task(run_next_sequences(), name="batch client: sequence")
    except BaseExceptionGroup as several:  # the first failure cancelled the other tasks
        raise several.exceptions[0] from None
    return results


def _next_index_after(sequence: SequenceSnapshot | None, sequence_id: str) -> int:
    """Return the index after all known requests of a sequence. Raises SequenceBusyError if it is unknown."""
    if sequence is None or sequence.status in (SequenceStatus.ABORTED, SequenceStatus.ENDED):
        return 0  # the sequence begins anew, or rejects requests whatever their index
    # The queue shows only the first waiting requests, so the highest index may not be among them.
    if sequence.run_count > 1 or sequence.waiting_count > len(sequence.waiting_requests):
        what = f"{sequence.waiting_count} requests of {sequence_id} wait, and the last of them is not seen"
        raise SequenceBusyError(f"{what}: say by index= what comes next, or reset=True")
    return max([sequence.expected_index, *(index + 1 for index, _ in sequence.waiting_requests)])


def _mark_last(items: Iterable[Item | Body]) -> Iterable[tuple[Item | Body, bool]]:
    """Yield each item, and whether it is the last one. Reads one item ahead."""
    previous: Any = _END
    for item in chain(items, (_END,)):
        if previous is not _END:
            yield previous, item is _END
        previous = item


def _item_id(item: Item | Body) -> str:
    return item.id if isinstance(item, Item) else ""


def _aborted_handle(item: Item | Body, cause: str) -> Handle:
    message = f"an earlier request of its sequence could not be submitted: {cause}"
    text = result_from_error(_item_id(item), ValueError(message)).text
    return _handle_with_result(
        item, Result(_item_id(item), text, None, ErrorCode.SEQUENCE_ABORTED.value, message)
    )


def _handle_with_result(item: Item | Body, result: Result) -> Handle:
    """Return a handle with this result, for an item that was never in the queue."""
    handle = Handle(_item_id(item), "", 0, "")
    handle.received_result = result
    return handle
