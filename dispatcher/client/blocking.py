"""The client for programs without an event loop: one in a thread of its own, and verbs that block."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dispatcher.client.batch import BatchClient
from dispatcher.client.errors import QueueAwayError
from dispatcher.client.item import Body, Handle, Item
from dispatcher.client.result import Result
from dispatcher.client.stream import Items

if TYPE_CHECKING:
    from dispatcher.client.files import FileProgress

T = TypeVar("T")
_END = object()


class BlockingBatchClient:
    """`BatchClient.sync(…)`: the verbs of `BatchClient`, which block. Its options are that client's.

    Any number of threads may use one. Ctrl-C ends the call that the main thread is in, and what that call
    alone awaited is cancelled. Hooks run in a thread of the client. It does not outlive a fork.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_made(url, options))
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        return f"<BlockingBatchClient of {self._client!r}>"

    def __enter__(self) -> BlockingBatchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(self, body: Body, **options: Any) -> Handle:
        """Submit one request, and return when it is in line."""
        return self._run(self._client.enqueue(body, **options))

    def enqueue_many(self, items: Sequence[Item | Body]) -> list[Handle]:
        """Submit many requests, in this order."""
        return self._run(self._client.enqueue_many(items))

    def result(self, handle: Handle | str, *, timeout: float | None = None) -> Result:
        """Await the result of a request."""
        return self._run(self._client.result(handle, timeout=timeout))

    def submit(self, body: Body, *, timeout: float | None = None, **options: Any) -> Result:
        """Submit one request and await its result."""
        return self._run(self._client.submit(body, timeout=timeout, **options))

    def stream(self, items: Items, *, max_pending: int = 1000, ordered: bool = False) -> Iterator[Result]:
        """Submit all of these, and yield their results as they come, or in their order."""
        source = self._client.stream(items, max_pending=max_pending, ordered=ordered)
        try:
            while (result := self._run(_next(source))) is not _END:
                yield result
        finally:
            self._run(source.aclose())

    def map(self, items: Items) -> list[Result]:
        """All their results, in the order of the items."""
        return self._run(self._client.map(items))

    def run_file(self, source: Any, output: Any, errors: Any = None, **options: Any) -> FileProgress:
        """Have every line of a batch file answered."""
        return self._run(self._client.run_file(source, output, errors, **options))

    def cancel(self, handle: Handle | str) -> bool:
        """Ask for it to be cancelled; False where it has ended."""
        return self._run(self._client.cancel(handle))

    def close(self) -> None:
        """End it, and close its connections."""
        if self._thread.is_alive() and self._pid == os.getpid():
            try:
                self._run(self._client.aclose())
            finally:
                self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid() or not self._thread.is_alive():
            coroutine.close()
            raise QueueAwayError(
                "the client was closed, or belongs to the process that this one was forked from"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C among them
            future.cancel()
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(url: str, options: dict[str, Any]) -> BatchClient:
    return BatchClient(url, **options)


async def _next(source: Any) -> Any:
    return await anext(source, _END)
