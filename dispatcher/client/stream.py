"""Many items through a window: so many are submitted and unanswered, and their results come out as they
come."""

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
"""Items that are submitted in one call, at the most."""


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
    """`most`: so many are submitted and not `given` at any time; a result is given when the next one is asked
    for. `enqueue` returns a handle for each item that is to have a result. `earlier`: requests that were
    submitted before; their results come first.

    What `items` or `enqueue` raises is raised after the results of those before it; what `take` raises, at
    once.
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
            earlier.clear()  # their results are not kept in memory once they were yielded
            async for some in _portions(items, room):
                handles = await enqueue(some)
                room.give(len(some) - len(handles))
                for handle in handles:
                    begin(handle)
        finally:
            if under_way:
                await asyncio.wait(under_way)
            came.put_nowait(None)

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
    """Places in the window."""

    def __init__(self, most: int) -> None:
        self.free = most
        self._freed = asyncio.Event()

    async def wait(self) -> int:
        """Wait until a place is free and return the number of free places. `free` is negative while more
        requests are pending than may be."""
        while self.free <= 0:
            self._freed.clear()
            await self._freed.wait()
        return self.free

    def give(self, count: int) -> None:
        self.free += count
        self._freed.set()


async def _portions(items: Items, room: _Room) -> AsyncIterator[list[Item | Body]]:
    """The items, as many at once as there is room for. Their source is asked for no more than that."""
    if isinstance(items, AsyncIterable):
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
