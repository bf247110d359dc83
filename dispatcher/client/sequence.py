"""Open sequences: number and submit the requests of one sequence.

Each request carries its index, because the queue may receive the requests late, twice or out of order. After
a request that resets the sequence, the index is not enough: a later request that arrives before the reset
would belong to the run before it. So later requests are submitted only when the reset request has a result.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

from dispatcher.batched.errors import ClosedError
from dispatcher.client.errors import NoResultError, QueueAwayError, SequenceBusyError
from dispatcher.client.item import Body, Handle, Item
from dispatcher.client.result import HookError, Result, of_error
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.turns import (
    MAX_SEQUENCE_BYTES,
    Carry,
    OnError,
    SequenceSeen,
    SequenceStatus,
    Turn,
)

AHEAD_MOST = 50
"""Largest number of unanswered requests of `send_many`. Each request that is submitted before its turn costs
an additional claim, which is given back."""
MARK_GRACE_S = 60.0
"""Seconds for which a cancellation is remembered after the last deadline of the cancelled requests."""
CANCEL_S = 5.0
"""Longest time for which leaving the block by an exception waits for the cancellation."""
_OF_ITEM = tuple(each.name for each in fields(Item) if each.name not in ("body", "sequence"))
_END = object()
OnErrorWord = OnError | Literal["continue", "abort", "hold"]
CarryWord = Carry | Literal["off", "messages"]


@dataclass(frozen=True, slots=True)
class SequenceDoors:
    """Methods of a client that its open sequences use."""

    enqueue: Callable[..., Awaitable[Handle]]
    take: Callable[[Handle, float | None], Awaitable[Result]]
    """Wait for the result of a request. It stays in the keep until `give_back`."""
    arrived: Callable[[Handle], Awaitable[object]]
    """Wait until the result of a request has arrived, without returning it."""
    give_back: Callable[[Result], None]
    cancel: Callable[[Handle], Awaitable[bool]]
    known: Callable[[str], Awaitable[SequenceSeen | None]]
    cancel_all: Callable[[str, float], Awaitable[bool]]
    """Cancel a sequence. The second argument is the time in seconds for which its requests may wait to be
    claimed."""


class OpenSequence:
    """Sequence whose requests this client sends: `client.sequence("chat-7")`.

        async with client.sequence("chat-7") as chat:
            first = await chat.send({"model": "m", "prompt": "hi"})
            second = await chat.send({"model": "m", "prompt": "and then?"}, last=True)

    Requests are numbered in the order of the calls. `cancel()`, or leaving the block by an exception, cancels
    the unanswered requests. Leaving the block normally does not end the sequence: submitted requests stay in
    the queue. The sequence ends with a request that is `last`, or when no request came for
    `sequences.max_idle_s`.
    """

    def __init__(
        self,
        doors: SequenceDoors,
        sequence_id: str,
        on_error: OnErrorWord | None = None,
        reset: bool = False,
        index: int | None = None,
        carry: CarryWord | None = None,
    ) -> None:
        if not 0 < len(sequence_id.encode(errors="surrogatepass")) <= MAX_SEQUENCE_BYTES:
            raise ValueError(f"the id of a sequence: 1 to {MAX_SEQUENCE_BYTES} bytes")
        if index is not None and index < 0:
            raise ValueError(f"index {index}: must be 0 or more")
        self.id = sequence_id
        self.next_index = 0 if reset and index is None else index
        """Index of the next request, or `None` until the first request asks the queue for it."""
        self._doors = doors
        self._on_error = None if on_error is None else OnError(on_error)
        self._carry = None if carry is None else Carry(carry)
        self._resets = reset
        self._lock = asyncio.Lock()
        self._began: Handle | None = None
        """Request that resets the sequence, until its result has arrived."""
        self._unanswered: list[Handle] = []
        self._prune_at = 2 * AHEAD_MOST
        self._over = ""
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<OpenSequence {self.id!r} next_index={self.next_index}>"

    async def __aenter__(self) -> OpenSequence:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with suppress(TimeoutError, QueueAwayError):
                async with asyncio.timeout(CANCEL_S):
                    await self.cancel()
        self._over = self._over or "its block was left"

    async def enqueue(self, body: Body, *, last: bool = False, **options: Any) -> Handle:
        """Submit the next request, and return its handle when it is in the queue.

        With `last=True` the sequence ends with this request. The other options are those of
        `BatchClient.enqueue`.

        Raises the exceptions of `BatchClient.enqueue`, ClosedError after the last request, and
        SequenceBusyError. If the call raises QueueUnreachableError or is cancelled, the request may have
        reached the queue. Its index is not used again, and later requests may wait `sequences.gap_s` for it.
        After any other exception the index is used for the next request.
        """
        async with self._lock:  # fair: requests are numbered in the order of the calls
            if self._over:
                raise ClosedError(f"sequence {self.id}: {self._over}: open it anew")
            if self._resets and options.get("results") is not None:
                raise ValueError("results: what begins a sequence anew is awaited here")
            if self._began is not None:
                # A later request must not overtake the reset, as the docstring of the module explains.
                await self._doors.arrived(self._began)
                self._began = None
            index = await self._index()
            if self._over:  # the sequence was cancelled meanwhile
                raise ClosedError(f"sequence {self.id}: {self._over}: open it anew")
            turn = Turn(self.id, index, last, self._resets, self._on_error, self._carry)
            try:
                handle = await self._doors.enqueue(body, sequence=turn, **options)
            except (QueueAwayError, asyncio.CancelledError):
                # The request may be in the queue, so its index is used up.
                self._pass(index, last=last)
                raise
            if self._resets:
                self._began = handle
            self._pass(index, last=last)
            self._note(handle)
            if self._cancelled:  # `cancel` ran during the submission, and may have missed this request
                await self.cancel()
            return handle

    async def send(
        self, body: Body, *, last: bool = False, timeout: float | None = None, **options: Any
    ) -> Result:
        """Submit the next request, and wait for its result.

        A failed request also returns a result. Its `raise_for_status` raises an exception, which is
        SequenceAbortedError if the sequence was aborted.
        """
        result = await self._doors.take(await self.enqueue(body, last=last, **options), timeout)
        self._doors.give_back(result)
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
        for item, is_last in _ends_told(items):
            if cause:
                under_way.append(_not_submitted(item, cause))
                continue
            if len(under_way) >= AHEAD_MOST:
                results.append(await self._taken(under_way.popleft()))
            try:
                under_way.append(await self._enqueue_item(item, last=last and is_last))
            except (HookError, ValueError, TypeError) as error:
                under_way.append(_without_request(item, of_error(_id_of(item), error)))
                cause = "" if self._on_error is OnError.CONTINUE else str(error)
        while under_way:
            results.append(await self._taken(under_way.popleft()))
        # Only now: if the program dies before, all results are still in Redis.
        for each in results:
            self._doors.give_back(each)
        return results

    async def cancel(self) -> bool:
        """Cancel all unanswered requests, and end the sequence. Return False if it has already ended.

        The cancelled requests have results with the code CANCELLED.
        """
        self._over, self._cancelled = "it was cancelled", True
        if not self._unanswered and self._began is None:
            return False
        # The sequence is cancelled first, because cancelling a single request would abort the sequence, and
        # an abort is remembered. Then each request is cancelled, because requests other than the next one may
        # run, too.
        waiting = [each for each in self._unanswered if not each.done]
        latest = max((each.deadline for each in waiting), default=0.0)
        done = await self._doors.cancel_all(self.id, max(0.0, latest - time.time()) + MARK_GRACE_S)
        for handle in waiting:
            done |= await self._doors.cancel(handle)
        return done

    async def _index(self) -> int:
        if self.next_index is None:
            self.next_index = _behind(await self._doors.known(self.id), self.id)
        return self.next_index

    def _pass(self, index: int, *, last: bool) -> None:
        self.next_index, self._resets = index + 1, False
        if last:
            self._over = "its last request was sent"

    def _note(self, handle: Handle) -> None:
        # Answered handles are dropped only at growing lengths, so that a call costs constant time on average.
        if len(self._unanswered) >= self._prune_at:
            self._unanswered = [each for each in self._unanswered if not each.done]
            self._prune_at = 2 * max(AHEAD_MOST, len(self._unanswered))
        self._unanswered.append(handle)

    async def _enqueue_item(self, item: Item | Body, *, last: bool) -> Handle:
        if not isinstance(item, Item):
            return await self.enqueue(item, last=last)
        if item.sequence is not None:
            raise ValueError(f"the item is of a sequence already: {item.sequence}")
        return await self.enqueue(item.body, last=last, **{name: getattr(item, name) for name in _OF_ITEM})

    async def _taken(self, handle: Handle) -> Result:
        try:
            return await self._doors.take(handle, None)
        except (HookError, NoResultError) as error:
            return of_error(handle.id, error)


async def mapped(
    opened: Callable[[str], OpenSequence], sequences: Mapping[str, Iterable[Item | Body]], at_once: int
) -> dict[str, list[Result]]:
    """Run sequences with up to `at_once` of them in progress, and return their results by id."""
    if at_once < 1:
        raise ValueError(f"at_once {at_once}: must be at least 1")
    results: dict[str, list[Result]] = {}
    rest = iter(sequences.items())

    async def work() -> None:
        for sequence_id, items in rest:  # all tasks share this iterator, so each takes the next sequence
            results[sequence_id] = []  # now, so that the results have the order of the sequences
            async with opened(sequence_id) as one:
                results[sequence_id] = await one.send_many(items, last=True)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(sequences))):
                group.create_task(work(), name="batch client: sequence")
    except BaseExceptionGroup as several:  # the first failure cancelled the other tasks
        raise several.exceptions[0] from None
    return results


def _behind(seen: SequenceSeen | None, sequence_id: str) -> int:
    """Return the index after all known requests of a sequence. Raises SequenceBusyError if it is unknown."""
    if seen is None or seen.status in (SequenceStatus.ABORTED, SequenceStatus.ENDED):
        return 0  # the sequence begins anew, or rejects requests whatever their index
    # The queue shows only the first waiting requests, so the highest index may not be among them.
    if seen.lives > 1 or seen.waiting > len(seen.line):
        what = f"{seen.waiting} requests of {sequence_id} wait, and the last of them is not seen"
        raise SequenceBusyError(f"{what}: say by index= what comes next, or reset=True")
    return max([seen.next, *(index + 1 for index, _ in seen.line)])


def _ends_told(items: Iterable[Item | Body]) -> Iterable[tuple[Item | Body, bool]]:
    """Yield each item, and whether it is the last one. Reads one item ahead."""
    before: Any = _END
    for item in chain(items, (_END,)):
        if before is not _END:
            yield before, item is _END
        before = item


def _id_of(item: Item | Body) -> str:
    return item.id if isinstance(item, Item) else ""


def _not_submitted(item: Item | Body, cause: str) -> Handle:
    told = f"an earlier request of its sequence could not be submitted: {cause}"
    text = of_error(_id_of(item), ValueError(told)).text
    return _without_request(item, Result(_id_of(item), text, None, ErrorCode.SEQUENCE_ABORTED.value, told))


def _without_request(item: Item | Body, result: Result) -> Handle:
    """Return a handle with this result, for an item that was never in the queue."""
    handle = Handle(_id_of(item), "", 0, "")
    handle.arrived = result
    return handle
