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

_MAX_ITEMS_PER_CALL = 500
"""Largest number of items that are submitted in one call."""


async def stream_results(
    items: Items,
    enqueue: Callable[[Sequence[Item | Body]], Awaitable[Sequence[Handle]]],
    wait_for_result: Callable[[Handle], Awaitable[Result]],
    on_consumed: Callable[[Result], Awaitable[None]],
    *,
    max_pending: int,
    ordered: bool,
    earlier_handles: list[Handle] | None = None,
) -> AsyncGenerator[Result, None]:
    """Submit items, and yield their results in the order of arrival, or of the items if `ordered`.

    At most `max_pending` requests are submitted and not yet consumed. A result counts as consumed when the
    next one is requested: then `on_consumed` is called. `enqueue` returns one handle for each item that will
    have a result. `earlier_handles` are requests that were submitted before. Their results come first.

    An exception of `items` or `enqueue` is raised after the results of the items before it. An exception of
    `wait_for_result` is raised at once.
    """
    if max_pending < 1:
        raise ValueError(f"max_pending {max_pending}: must be at least 1")
    finished: asyncio.Queue[asyncio.Task[Result] | None] = asyncio.Queue()
    earlier_handles = earlier_handles or []
    window = _Window(max_pending - len(earlier_handles))
    result_tasks: set[asyncio.Task[Result]] = set()

    def start_wait(handle: Handle) -> None:
        task = asyncio.ensure_future(wait_for_result(handle))
        result_tasks.add(task)
        task.add_done_callback(result_tasks.discard)
        if ordered:
            finished.put_nowait(task)
        else:
            task.add_done_callback(finished.put_nowait)

    async def feed_items() -> None:
        try:
            for handle in earlier_handles:
                start_wait(handle)
            earlier_handles.clear()  # lets handles and results be freed once the results were yielded
            async for some in _read_portions(items, window):
                handles = await enqueue(some)
                # An item without a handle, whose result was consumed before, takes no place.
                window.add_space(len(some) - len(handles))
                for handle in handles:
                    start_wait(handle)
        finally:
            if result_tasks:
                await asyncio.wait(result_tasks)
            finished.put_nowait(None)  # marks the end, also if the source of the items raised

    feeder = asyncio.create_task(feed_items(), name="batch client: stream")
    try:
        while (task := await finished.get()) is not None:
            result = await task
            yield result
            await on_consumed(result)
            window.add_space(1)
        await feeder
    finally:
        tasks = [feeder, *result_tasks]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        _forget_errors([*tasks, *_unread_tasks(finished)])


def _unread_tasks(finished: asyncio.Queue[asyncio.Task[Result] | None]) -> Iterator[asyncio.Task[Result]]:
    while not finished.empty():
        if (task := finished.get_nowait()) is not None:
            yield task


def _forget_errors(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Retrieve the errors of these tasks, so that asyncio does not report them a second time."""
    for each in tasks:
        _ = each.cancelled() or each.exception()


class _Window:
    """Window of a stream: how many more requests may be submitted."""

    def __init__(self, size: int) -> None:
        self.free_count = size
        self._freed = asyncio.Event()

    async def wait_for_space(self) -> int:
        """Wait until there is space, and return for how many requests.

        `free_count` is negative while more requests are pending than allowed, because there were more earlier
        handles than that.
        """
        while self.free_count <= 0:
            self._freed.clear()
            await self._freed.wait()
        return self.free_count

    def add_space(self, count: int) -> None:
        self.free_count += count
        self._freed.set()


async def _read_portions(items: Items, window: _Window) -> AsyncIterator[list[Item | Body]]:
    """Yield the items in portions that fit into the window. No item is taken from the source before."""
    if isinstance(items, AsyncIterable):
        # One item at a time: the source may wait long for the next one, and the first must not wait with it.
        source = aiter(items)
        while await window.wait_for_space():
            try:
                item = await anext(source)
            except StopAsyncIteration:
                return
            window.free_count -= 1
            yield [item]
        return
    iterator = iter(items)
    while some := list(islice(iterator, min(_MAX_ITEMS_PER_CALL, await window.wait_for_space()))):
        window.free_count -= len(some)
        yield some
