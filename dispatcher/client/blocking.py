"""Blocking client for programs without an event loop. It runs a `BatchClient` in its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dispatcher.client.blocking_iteration import iterate_blocking
from dispatcher.client.errors import QueueUnreachableError
from dispatcher.client.item import Body, Handle, Item
from dispatcher.client.result import Result
from dispatcher.client.stream import Items

if TYPE_CHECKING:
    from dispatcher.features.batch_files.progress import FileProgress
    from dispatcher.features.named_streams.state import StreamStatus
    from dispatcher.features.sequences.blocking_client import BlockingSequence
    from dispatcher.features.sequences.client import OpenSequence
    from dispatcher.features.sequences.turns import SequenceSnapshot

T = TypeVar("T")


class AsyncClient(Protocol):
    """Methods of the `BatchClient` in the thread, which documents them and their arguments."""

    def enqueue(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Handle]: ...
    def enqueue_many(self, items: Sequence[Item | Body]) -> Coroutine[Any, Any, list[Handle]]: ...
    def result(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Result]: ...
    def submit(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, Result]: ...
    def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Result, None]: ...
    def stream_status(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, StreamStatus]: ...
    def forget_stream(self, name: str) -> Coroutine[Any, Any, None]: ...
    def map(self, items: Items) -> Coroutine[Any, Any, list[Result]]: ...
    def run_file(self, *arguments: Any, **options: Any) -> Coroutine[Any, Any, FileProgress]: ...
    def cancel(self, handle: Handle | str) -> Coroutine[Any, Any, bool]: ...
    def sequence(self, *arguments: Any, **options: Any) -> OpenSequence: ...
    def map_sequences(
        self, *arguments: Any, **options: Any
    ) -> Coroutine[Any, Any, dict[str, list[Result]]]: ...
    def sequence_status(self, sequence_id: str) -> Coroutine[Any, Any, SequenceSnapshot | None]: ...
    def cancel_sequence(self, sequence_id: str) -> Coroutine[Any, Any, bool]: ...
    def forget_sequence(self, sequence_id: str) -> Coroutine[Any, Any, bool]: ...
    def aclose(self) -> Coroutine[Any, Any, None]: ...


class BlockingBatchClient:
    """Blocking client, made by `BatchClient.sync(…)`. It has the methods and options of `BatchClient`.

    Any number of threads may share one client. Ctrl-C ends the call of the main thread, and cancels the
    request that only this call waited for. Hooks run in the thread of the client. After a fork, the child
    process cannot use the client of its parent.
    """

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()  # a forked child has a copy of this object, but not the thread
        self._thread = threading.Thread(target=self._loop.run_forever, name="batch client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run_call(_make_client(make))
        except BaseException:
            self._stop_loop()
            raise

    def __repr__(self) -> str:
        return f"<BlockingBatchClient of {self._client!r}>"

    def __enter__(self) -> BlockingBatchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(self, body: Body, **options: Any) -> Handle:
        """Submit one request, and return its handle when it is in the queue."""
        return self._run_call(self._client.enqueue(body, **options))

    def enqueue_many(self, items: Sequence[Item | Body]) -> list[Handle]:
        """Submit many requests in this order, and return their handles."""
        return self._run_call(self._client.enqueue_many(items))

    def result(self, handle: Handle | str, *, timeout: float | None = None) -> Result:
        """Wait for the result of a request, and return it."""
        return self._run_call(self._client.result(handle, timeout=timeout))

    def submit(self, body: Body, *, timeout: float | None = None, **options: Any) -> Result:
        """Submit one request, and wait for its result."""
        return self._run_call(self._client.submit(body, timeout=timeout, **options))

    def stream(
        self, items: Items, *, max_pending: int = 1000, ordered: bool = False, name: str = ""
    ) -> Iterator[Result]:
        """Submit items, and yield their results as they arrive, or in the order of the items if `ordered`.

        With a `name`, the stream continues where its last run under this name stopped.
        """
        yield from iterate_blocking(
            self._client.stream(items, max_pending=max_pending, ordered=ordered, name=name), self._run_call
        )

    def stream_status(self, name: str, **options: Any) -> StreamStatus:
        """Return the status of the stream with this name."""
        return self._run_call(self._client.stream_status(name, **options))

    def forget_stream(self, name: str) -> None:
        """Cancel the stream with this name, and delete its records, so that it can begin anew."""
        self._run_call(self._client.forget_stream(name))

    def map(self, items: Items) -> list[Result]:
        """Submit items, and return all results in the order of the items."""
        return self._run_call(self._client.map(items))

    def run_file(self, source: Any, output: Any, errors: Any = None, **options: Any) -> FileProgress:
        """Run a batch file: submit each line, and write the answers to files."""
        return self._run_call(self._client.run_file(source, output, errors, **options))

    def cancel(self, handle: Handle | str) -> bool:
        """Cancel a request. Return False if it has already ended."""
        return self._run_call(self._client.cancel(handle))

    def sequence(self, sequence_id: str | None = None, **options: Any) -> BlockingSequence:
        """Open a sequence, to send its requests."""
        # Imported here, because most programs have no sequences.
        from dispatcher.features.sequences.blocking_client import BlockingSequence

        return BlockingSequence(self._client.sequence(sequence_id, **options), self._run_call)

    def map_sequences(
        self, sequences: Mapping[str, Iterable[Item | Body]], **options: Any
    ) -> dict[str, list[Result]]:
        """Run many sequences, and return the results of each in order, by id."""
        return self._run_call(self._client.map_sequences(sequences, **options))

    def sequence_status(self, sequence_id: str) -> SequenceSnapshot | None:
        """Return the state of a sequence in the queue, or `None` if the queue does not know it."""
        return self._run_call(self._client.sequence_status(sequence_id))

    def cancel_sequence(self, sequence_id: str) -> bool:
        """Cancel all requests of a sequence that were submitted until now."""
        return self._run_call(self._client.cancel_sequence(sequence_id))

    def forget_sequence(self, sequence_id: str) -> bool:
        """Forget a sequence, so that its id begins anew. Return False if its requests run or wait."""
        return self._run_call(self._client.forget_sequence(sequence_id))

    def close(self) -> None:
        """Close the client and its connections."""
        if self._thread.is_alive() and self._pid == os.getpid():
            try:
                self._run_call(self._client.aclose())
            finally:
                self._stop_loop()

    def _run_call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid() or not self._thread.is_alive():
            coroutine.close()
            raise QueueUnreachableError(
                "the client was closed, or belongs to the process that this one was forked from"
            )
        call = _Call(coroutine, self._loop)
        try:
            self._loop.call_soon_threadsafe(call.start_task)
            return call.outcome.result()
        except BaseException:  # what the coroutine raised, or Ctrl-C
            if not call.outcome.done():
                self._loop.call_soon_threadsafe(call.cancel_task)
                # A cancelled call may still use the client, so await its end. Another Ctrl-C ends this wait.
                wait([call.outcome])
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make_client(make: Callable[[], AsyncClient]) -> AsyncClient:
    # A coroutine, so that it runs on the loop of the thread: the parts of a client belong to that loop.
    return make()


class _Call(Generic[T]):
    """Coroutine on the loop of the client, for a thread that waits until the coroutine has ended."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._task: asyncio.Task[T] | None = None
        self.outcome: Future[T] = Future()

    def start_task(self) -> None:
        """Start the coroutine. Like `cancel_task`, this must be called on the loop."""
        if not self.outcome.done():
            self._task = self._loop.create_task(self._coroutine)
            self._task.add_done_callback(self._set_outcome)

    def cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.outcome.done():  # Ctrl-C came before the task was started
            self._coroutine.close()
            self.outcome.set_exception(CancelledError())

    def _set_outcome(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())
