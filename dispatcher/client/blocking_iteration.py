"""Iteration over an asynchronous generator in a program without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_END = object()


def iterate_blocking(
    source: AsyncGenerator[T, None], run_call: Callable[[Coroutine[Any, Any, Any]], Any]
) -> Iterator[T]:
    """Yield the items of an asynchronous generator, each of which is awaited on the loop of the client."""
    stream: _OpenStream[T] = _OpenStream(source)
    try:
        while (item := run_call(stream.next_item())) is not _END:
            yield item
    finally:
        run_call(stream.aclose())


class _OpenStream(Generic[T]):
    """Stream that can be closed while its next item is awaited, as happens after a second Ctrl-C.

    An asynchronous generator raises RuntimeError if it is closed at that moment.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._awaiting: asyncio.Task[Any] | None = None

    async def next_item(self) -> Any:
        """Return the next item, a T, or _END after the last one."""
        self._awaiting = asyncio.current_task()
        try:
            return await anext(self._source, _END)
        finally:
            self._awaiting = None

    async def aclose(self) -> None:
        """Cancel the wait for the next item, and close the stream."""
        if self._awaiting is not None:
            if not self._awaiting.cancelling():  # a second cancel would interrupt the cleanup of the first
                self._awaiting.cancel()
            await asyncio.wait([self._awaiting])
        await self._source.aclose()
