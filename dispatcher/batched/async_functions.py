"""Async functions under `batched`: they run on the event loop of their callers, and each loop forms its own
batches without threads or locks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, finalize

from dispatcher.batched.calls import BatchRun, collect_results, wrap_error
from dispatcher.batched.waiting import CallerQueue, CallTerms, Waiter, deliver_outcomes
from dispatcher.common.errors import ClosedError
from dispatcher.common.grouping import WaitingItem

T = TypeVar("T")
R = TypeVar("R")

QUIET_ROUNDS = 2
"""Rounds of the loop without a further item after which it is quiet. A task that an answer woke calls again
in the next round, or in the one after it if another task is in between."""


class LoopWaiters(Generic[T, R]):
    """Callers of an async function on one loop."""

    def __init__(self, function: Callable[[list[T]], Awaitable[Any]], terms: CallTerms) -> None:
        self._function = function
        self._terms = terms
        self._queue = CallerQueue[T, R](terms)
        self._calls: dict[asyncio.Task[None], list[Waiter[T, R]]] = {}
        self._quiet_rounds = 0
        """Number of rounds since the last item came or the last call ended."""
        self._check_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def running_calls(self) -> int:
        """Number of calls that run."""
        return self._queue.running_calls

    async def wait_for_result(self, item: T) -> R:
        """Wait for this item's result, and return it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        waiter = Waiter(item, WaitingItem(1, loop.time()), future, loop)
        self._queue.add_waiter(waiter)
        self._schedule_check(loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._queue.remove_waiter(waiter)
            self._cancel_unawaited_calls()
            raise

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept no further item, and start the waiting ones in the next round. Thread-safe."""
        self._queue.is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._start_due_calls, loop)

    async def wait_until_ended(self) -> None:
        """Wait until all waiting items have been answered. Call `close()` first."""
        while len(self._queue) or self._calls:
            self._start_due_calls(asyncio.get_running_loop())
            if self._calls:
                await asyncio.wait(self._calls)

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start due calls after this round, so that everything that happens in this round counts together."""
        self._quiet_rounds = 0
        if self._check_handle is None:
            self._check_handle = loop.call_soon(self._start_due_calls, loop)

    def _start_due_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        for handle in (self._check_handle, self._timer):
            if handle is not None:
                handle.cancel()
        self._check_handle = self._timer = None
        quiet = self._quiet_rounds >= QUIET_ROUNDS
        while not isinstance(taken := self._take_batch(loop.time(), is_quiet=quiet), float):
            # The context of the newest caller (a span, a user) does not apply to the call, which has many
            # callers.
            task = loop.create_task(self._run_call(taken), context=self._terms.context.copy())
            self._calls[task] = taken
            task.add_done_callback(self._finish_call)
        if self._queue.flushes_when_quiet:
            self._quiet_rounds += 1
            self._check_handle = loop.call_soon(self._start_due_calls, loop)
        elif taken < inf:
            self._timer = loop.call_at(taken, self._start_due_calls, loop)

    def _take_batch(self, now: float, *, is_quiet: bool) -> list[Waiter[T, R]] | float:
        has_room = self._queue.running_calls < self._terms.concurrency
        return self._queue.take_batch(now, is_quiet=is_quiet, has_room=has_room)

    async def _run_call(self, waiters: list[Waiter[T, R]]) -> None:
        attempt = BatchRun[T, R]([each.item for each in waiters], isolate=self._terms.isolate)
        name = self._terms.name
        try:
            while part := attempt.next_part():
                count = len(part)  # the function may change the list
                try:
                    attempt.record_part(collect_results(name, await self._function(part), count))
                except Exception as error:
                    attempt.record_part(wrap_error(name, error))
        except BaseException as error:
            # All callers gave up, the loop ends, or the function was cancelled from within.
            attempt.give_up(wrap_error(name, error))
            raise
        finally:
            deliver_outcomes(waiters, attempt.outcomes)

    def _finish_call(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        self._queue.running_calls -= 1
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not log it as never retrieved
        if not task.get_loop().is_closed():
            self._schedule_check(task.get_loop())

    def _cancel_unawaited_calls(self) -> None:
        """Cancel once each call whose callers have all given up."""
        for task, waiters in self._calls.items():
            if all(each.future.done() for each in waiters) and not task.cancelling():
                task.cancel()


class AsyncWaiters(Generic[T, R]):
    """Callers of an async function on any event loops. Threads without a loop share one that belongs to this
    object."""

    def __init__(self, function: Callable[[list[T]], Awaitable[Any]], terms: CallTerms) -> None:
        self._function = function
        self._terms = terms
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiters[T, R]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._own_thread: tuple[int, _LoopThread] | None = None
        """The thread with that loop, and the id of the process in which it was started."""
        self._closed = False

    def __len__(self) -> int:
        return sum(len(each) for each in list(self._by_loop.values()))

    @property
    def running_calls(self) -> int:
        """Number of calls that run."""
        return sum(each.running_calls for each in list(self._by_loop.values()))

    async def wait_for_result(self, item: T) -> R:
        """Wait for this item's result on the running loop, and return it."""
        loop = asyncio.get_running_loop()
        waiters = self._by_loop.get(loop)
        if waiters is None:
            with self._lock:
                self._check_open()
                waiters = self._by_loop[loop] = LoopWaiters(self._function, self._terms)
        return await waiters.wait_for_result(item)

    def wait_for_result_in_thread(self, item: T, timeout_s: float | None) -> R:
        """Wait for this item's result in a thread, and return it. Raises TimeoutError."""
        loop = self._get_own_loop()
        future = asyncio.run_coroutine_threadsafe(self.wait_for_result(item), loop)
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Accept no further item."""
        with self._lock:
            self._closed = True
            for loop, each in list(self._by_loop.items()):
                each.close(loop)

    async def wait_until_ended(self) -> None:
        """Wait until all items that wait on this loop and in threads have been answered. Call `close()`
        first."""
        here = self._by_loop.get(asyncio.get_running_loop())
        if here is not None:
            await here.wait_until_ended()
        if self._own_thread is not None:
            await asyncio.to_thread(self.wait_until_ended_in_thread)

    def wait_until_ended_in_thread(self) -> None:
        """Wait until all items that wait in threads have been answered and their loop has ended. Call
        `close()` first."""
        with self._lock:
            own, self._own_thread = self._own_thread, None
        if own is None or own[0] != os.getpid():
            return
        thread = own[1]
        waiters = self._by_loop.get(thread.loop)
        if waiters is not None:
            asyncio.run_coroutine_threadsafe(waiters.wait_until_ended(), thread.loop).result()
        thread.stop()
        thread.join()

    def _get_own_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            self._check_open()
            # A thread does not survive a fork, so a child process needs a new one.
            if self._own_thread is None or self._own_thread[0] != os.getpid():
                thread = _LoopThread(self._terms.name)
                thread.start()
                self._own_thread = os.getpid(), thread
                finalize(self, thread.stop).atexit = False  # no caller is left
            return self._own_thread[1].loop

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._terms.name} was closed")


class _LoopThread(threading.Thread):
    """Thread with an event loop that runs until `stop()`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.loop = asyncio.new_event_loop()
        self._stopped = False

    def run(self) -> None:
        """Run the loop, and restart it after a SystemExit or KeyboardInterrupt of a task, which ends a loop.

        The callers of that task get the error. All other callers need the loop to go on.
        """
        while not self._stopped:
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
        self.loop.close()

    def stop(self) -> None:
        """End the loop. May be called from any thread."""
        self._stopped = True
        # The flag is set before, so that a loop that a SystemExit ends at this moment is not restarted.
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.loop.stop)
