"""Streams: submit many items, with a limited number of them unanswered, and yield results as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from itertools import islice
from typing import Any

from dispatcher.client.item import Body, Handle, Item
from dispatcher.client.result import Result

Items = Iterable[Item | Body] | AsyncIterable[Item | Body]

_AT_ONCE = 500
"""Largest number of items that are submitted in one call."""


async def streamed(
    items: Items,
    enqueue: Callable[[Sequence[Item | Body]], Awaitable[Sequence[Handle]]],
    take: Callable[[Handle], Awaitable[Result]],
    given: Callable[[Result], Awaitable[None]],
    *,
    most: int,
    ordered: bool,
    earlier: list[Handle] | None = None,
) -> AsyncGenerator[Result, None]:
    """Submit items, and yield their results in the order of arrival, or of the items if `ordered`.

    At most `max_pending` requests are submitted and not yet consumed. A result counts as consumed when the
    next one is requested: then `on_consumed` is called. `enqueue` returns one handle for each item that will
    have a result. `earlier_handles` are requests that were submitted before. Their results come first.

    An exception of `items` or `enqueue` is raised after the results of the items before it. An exception of
    `wait_for_result` is raised at once.
    """
    if most < 1:
        raise ValueError(f"max_pending {most}: must be at least 1")
    came: asyncio.Queue[asyncio.Task[Result] | None] = asyncio.Queue()
    earlier = earlier or []
    room = _Room(most - len(earlier))
    under_way: set[asyncio.Task[Result]] = set()

    def begin(handle: Handle) -> None:
        task = asyncio.ensure_future(take(handle))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        if ordered:
            came.put_nowait(task)
        else:
            task.add_done_callback(came.put_nowait)

    async def feed() -> None:
        try:
            for handle in earlier:
                begin(handle)
            earlier.clear()  # lets handles and results be freed once the results were yielded
            async for some in _portions(items, room):
                handles = await enqueue(some)
                # A named stream returns no handle for items that it knows already: they take no place.
                room.give(len(some) - len(handles))
                for handle in handles:
                    begin(handle)
        finally:
            if under_way:
                await asyncio.wait(under_way)
            came.put_nowait(None)  # marks the end, also if the source of the items raised

    feeder = asyncio.create_task(feed(), name="batch client: stream")
    try:
        while (task := await came.get()) is not None:
            result = await task
            yield result
            await given(result)
            room.give(1)
        await feeder
    finally:
        tasks = [feeder, *under_way]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        _forget_errors([*tasks, *_left_in(came)])


def _left_in(came: asyncio.Queue[asyncio.Task[Result] | None]) -> Iterator[asyncio.Task[Result]]:
    while not came.empty():
        if (task := came.get_nowait()) is not None:
            yield task


def _forget_errors(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Retrieve the errors of these tasks, so that asyncio does not report them a second time."""
    for each in tasks:
        _ = each.cancelled() or each.exception()


class _Room:
    """Window of a stream: how many more requests may be submitted."""

    def __init__(self, most: int) -> None:
        self.free = most
        self._freed = asyncio.Event()

    async def wait(self) -> int:
        """Wait until there is space, and return for how many requests.

        `free_count` is negative while more requests are pending than allowed: earlier runs of a named stream
        may have had a larger limit.
        """
        while self.free <= 0:
            self._freed.clear()
            await self._freed.wait()
        return self.free

    def give(self, count: int) -> None:
        self.free += count
        self._freed.set()


async def _portions(items: Items, room: _Room) -> AsyncIterator[list[Item | Body]]:
    """Yield the items in portions that fit into the window. No item is taken from the source before."""
    if isinstance(items, AsyncIterable):
        # One item at a time: the source may wait long for the next one, and the first must not wait with it.
        source = aiter(items)
        while await room.wait():
            try:
                item = await anext(source)
            except StopAsyncIteration:
                return
            room.free -= 1
            yield [item]
        return
    iterator = iter(items)
    while some := list(islice(iterator, min(_AT_ONCE, await room.wait()))):
        room.free -= len(some)
        yield some
