"""One sequence as a client sends it: it numbers the requests, and cancels what waits when it is broken off.

Each request carries its index, so that their order is the sequence's own and not that of arrival: the queue
may see them late, twice or out of order. Of one that begins the sequence anew the index is not enough, for a
request behind it that arrives first belongs to the life before: what follows is submitted when that one has
ended.
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
"""Of one sequence whose bodies are known: so many are submitted and unanswered, for each of them is claimed
and given back once before its turn."""
MARK_GRACE_S = 60.0
"""Seconds for which a cancel is remembered after the last deadline of the requests that it cancels."""
CANCEL_S = 5.0
"""Leaving a block waits no longer for what it cancels."""
_OF_ITEM = tuple(each.name for each in fields(Item) if each.name not in ("body", "sequence"))
_END = object()
OnErrorWord = OnError | Literal["continue", "abort", "hold"]
CarryWord = Carry | Literal["off", "messages"]


@dataclass(frozen=True, slots=True)
class SequenceDoors:
    """Methods of a client that its sequences use."""

    enqueue: Callable[..., Awaitable[Handle]]
    take: Callable[[Handle, float | None], Awaitable[Result]]
    """Return the result of a request, and keep it until `give_back`."""
    arrived: Callable[[Handle], Awaitable[object]]
    """Wait until the result of a request is there, without taking it."""
    give_back: Callable[[Result], None]
    cancel: Callable[[Handle], Awaitable[bool]]
    known: Callable[[str], Awaitable[SequenceSeen | None]]
    cancel_all: Callable[[str, float], Awaitable[bool]]
    """Cancel a sequence. The second argument is the time in seconds for which its requests may wait to be
    claimed."""


class OpenSequence:
    """A sequence that this client sends: `client.sequence("chat-7")`.

        async with client.sequence("chat-7") as chat:
            first = await chat.send({"model": "m", "prompt": "hi"})
            second = await chat.send({"model": "m", "prompt": "and then?"}, last=True)

    Requests are numbered in the order of the calls, whoever awaits them. Leaving the block by an exception,
    and `cancel`, cancel what is not answered. Leaving it well marks no end: what was submitted goes on, and
    the sequence ends with a request that is `last`, or when nothing of it came for `sequences.max_idle_s`.
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
        """Of the next request; None: the queue is asked with the first one."""
        self._doors = doors
        self._on_error = None if on_error is None else OnError(on_error)
        self._carry = None if carry is None else Carry(carry)
        self._resets = reset
        self._lock = asyncio.Lock()
        self._began: Handle | None = None
        """The request that began it anew, until it has ended."""
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
        """Submit its next request, and return when it is in line. `last`: the sequence ends with it. The
        options are those of `BatchClient.enqueue`.

        Raises as that, ClosedError behind the last one, and SequenceBusyError. Where it raises QueueAwayError
        or is cancelled, the request may have been made: its index is not used again, and what follows may
        wait `sequences.gap_s` for it. Otherwise one that raises has no index.
        """
        async with self._lock:  # in the order of the calls
            if self._over:
                raise ClosedError(f"sequence {self.id}: {self._over}: open it anew")
            if self._resets and options.get("results") is not None:
                raise ValueError("results: what begins a sequence anew is awaited here")
            if self._began is not None:
                await self._doors.arrived(self._began)
                self._began = None
            index = await self._index()
            if self._over:  # it was cancelled meanwhile
                raise ClosedError(f"sequence {self.id}: {self._over}: open it anew")
            turn = Turn(self.id, index, last, self._resets, self._on_error, self._carry)
            try:
                handle = await self._doors.enqueue(body, sequence=turn, **options)
            except (QueueAwayError, asyncio.CancelledError):
                self._pass(index, last=last)
                raise
            if self._resets:
                self._began = handle
            self._pass(index, last=last)
            self._note(handle)
            if self._cancelled:  # while this one was being submitted, perhaps after the mark was set
                await self.cancel()
            return handle

    async def send(
        self, body: Body, *, last: bool = False, timeout: float | None = None, **options: Any
    ) -> Result:
        """Submit its next request and await the result: `enqueue`, and `BatchClient.result`.

        A request that failed is a result, too: `raise_for_status` raises; of one whose sequence was given up
        SequenceAbortedError.
        """
        result = await self._doors.take(await self.enqueue(body, last=last, **options), timeout)
        self._doors.give_back(result)
        return result

    async def send_many(self, items: Iterable[Item | Body], *, last: bool = False) -> list[Result]:
        """All their results, in this order; `last`: the sequence ends with the last of them. No more than
        AHEAD_MOST are submitted and unanswered.

        One that cannot be submitted has a result that says so (INVALID_REQUEST, HOOK_FAILED), and unless
        `on_error` is `continue` those behind it are not submitted: SEQUENCE_ABORTED.
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
        for each in results:
            self._doors.give_back(each)
        return results

    async def cancel(self) -> bool:
        """Cancel what of it is not answered, and end it; False where it had ended. Results are CANCELLED,
        unless they came before."""
        self._over, self._cancelled = "it was cancelled", True
        if not self._unanswered and self._began is None:
            return False
        # The sequence is cancelled first, because a request that is cancelled alone would abort it, which is
        # remembered. Then each request is cancelled, because one that is not the head may run, too.
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
    """All results of these sequences, so many of which are under way at a time."""
    if at_once < 1:
        raise ValueError(f"at_once {at_once}: must be at least 1")
    results: dict[str, list[Result]] = {}
    rest = iter(sequences.items())

    async def work() -> None:
        for sequence_id, items in rest:
            results[sequence_id] = []
            async with opened(sequence_id) as one:
                results[sequence_id] = await one.send_many(items, last=True)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(sequences))):
                group.create_task(work(), name="batch client: sequence")
    except BaseExceptionGroup as several:  # one of them failed, and the others were ended
        raise several.exceptions[0] from None
    return results


def _behind(seen: SequenceSeen | None, sequence_id: str) -> int:
    """The index of who goes on with it. Raises SequenceBusyError where that cannot be known."""
    if seen is None or seen.status in (SequenceStatus.ABORTED, SequenceStatus.ENDED):
        return 0  # it begins anew, or is refused whatever its index
    if seen.lives > 1 or seen.waiting > len(seen.line):
        what = f"{seen.waiting} requests of {sequence_id} wait, and the last of them is not seen"
        raise SequenceBusyError(f"{what}: say by index= what comes next, or reset=True")
    return max([seen.next, *(index + 1 for index, _ in seen.line)])


def _ends_told(items: Iterable[Item | Body]) -> Iterable[tuple[Item | Body, bool]]:
    """Each, and whether it is the last one. Its source is asked for one more than was given."""
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
    """One whose result is there, and that never was in line."""
    handle = Handle(_id_of(item), "", 0, "")
    handle.arrived = result
    return handle
