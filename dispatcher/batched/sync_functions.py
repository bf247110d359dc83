"""Sync functions and worker processes under `batched`: callers of any loops and threads wait in one queue.

Threads take from that queue: a thread forms a batch, has its worker run it, and delivers the results of each
loop in one call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from dispatcher.batched.calls import BatchRun, Raised, collect_results, wrap_error
from dispatcher.batched.waiting import CallerQueue, CallTerms, Waiter, deliver_outcomes
from dispatcher.core.errors import ClosedError
from dispatcher.core.merging.grouping import WaitingItem

T = TypeVar("T")
R = TypeVar("R")

QUIET_S = 0.0005
"""Time without a further item after which it is quiet. Threads that an answer woke call again one after the
other: with 0, half of ten callers were late, and there were twice as many calls."""
IDLE_S = 10.0
"""Time after which an idle thread ends. A thread costs little to start."""
EXIT_TIMEOUT_S = 5.0
"""Time that a worker process may take to end when the interpreter exits."""


class Worker(Protocol[T, R]):
    """Runs batches for one thread. Only that thread calls it, except `kill`, which another thread calls."""

    def start(self) -> None:
        """Get ready. Raises what prevents that. A later `run_batch` gets ready in any case."""

    def run_batch(self, items: list[T]) -> list[R | Raised]:
        """Return an outcome for each item."""

    def end(self) -> None:
        """Release everything: no further batch comes."""

    def kill(self) -> None:
        """End at once, even during `run_batch`."""

    def forget_after_fork(self) -> None:
        """Forget the worker, because this process was forked from the one that owns it."""


class FunctionWorker(Generic[T, R]):
    """Runs a function in the thread itself."""

    def __init__(self, function: Callable[[list[T]], Any], terms: CallTerms) -> None:
        self._function = function
        self._terms = terms

    def start(self) -> None:
        """Do nothing: the worker is always ready."""

    def run_batch(self, items: list[T]) -> list[R | Raised]:
        """Return an outcome for each item."""
        attempt = BatchRun[T, R](items, isolate=self._terms.isolate)
        while part := attempt.next_part():
            count = len(part)  # the function may change the list
            try:
                returned = self._terms.context.copy().run(self._function, part)
                attempt.record_part(collect_results(self._terms.name, returned, count))
            except BaseException as error:  # SystemExit would end the thread; it fails the call instead
                attempt.record_part(wrap_error(self._terms.name, error))
        return attempt.outcomes

    def end(self) -> None:
        """Do nothing: there is nothing to release."""

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def forget_after_fork(self) -> None:
        """Do nothing: there is nothing to release."""


class ThreadWaiters(Generic[T, R]):
    """Callers on any loops and threads, whose batches are run by threads with one worker each.

    A thread that had nothing to do for `idle_s` ends, together with its worker. Infinite keeps the threads,
    for workers that are expensive to start.
    """

    def __init__(
        self, make_worker: Callable[[], Worker[T, R]], terms: CallTerms, *, idle_s: float = IDLE_S
    ) -> None:
        self._make_worker = make_worker
        self._terms = terms
        self._idle_s = idle_s
        self._reset_state()
        _instances.add(self)

    def reset_after_fork(self) -> None:
        """Start with an empty state in a forked process: the threads and their callers are those of the
        parent."""
        for worker in self._threads.values():
            worker.forget_after_fork()
        self._reset_state()

    def _reset_state(self) -> None:
        self._changed = threading.Condition()
        self._queue = CallerQueue[T, R](self._terms)
        self._threads: dict[threading.Thread, Worker[T, R]] = {}
        self._active_threads = 0
        """Number of threads that take from the queue. Other threads are about to end."""
        self._idle_threads = 0
        """Number of threads that wait for something to do."""
        self._quiet_at = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def running_calls(self) -> int:
        """Number of calls that run."""
        return self._queue.running_calls

    async def wait_for_result(self, item: T) -> R:
        """Wait for this item's result on the running loop, and return it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        waiter = self._add_waiter(item, future, loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._remove_waiter(waiter)
            raise

    def wait_for_result_in_thread(self, item: T, timeout_s: float | None) -> R:
        """Wait for this item's result in a thread, and return it. Raises TimeoutError."""
        # The thread that runs the call would wait for itself forever.
        if threading.current_thread() in self._threads:
            raise RuntimeError(f"{self._terms.name} waits for itself: it was called from within its own call")
        future: Future[R] = Future()
        waiter = self._add_waiter(item, future, None)
        try:
            return future.result(timeout_s)
        except BaseException:
            if future.cancel():
                self._remove_waiter(waiter)
            raise

    def start_threads(self) -> list[Future[None]]:
        """Start all threads. Each future is done when its worker is ready or has failed to start."""
        ready = []
        with self._changed:
            if self._queue.is_closed:
                raise ClosedError(f"{self._terms.name} was closed")
            while self._active_threads < self._terms.concurrency:
                ready.append(Future[None]())
                self._start_thread(ready[-1])
        return ready

    def close(self) -> None:
        """Accept no further item. The waiting ones go at once."""
        with self._changed:
            self._queue.is_closed = True
            self._changed.notify_all()

    def wait_until_ended(self, timeout_s: float | None = None) -> None:
        """Wait until all waiting items have been answered and no thread or worker is left. Call `close()`
        first."""
        for thread in list(self._threads):
            thread.join(timeout_s)

    def shut_down(self) -> None:
        """Drop the waiting items at the exit of the interpreter, when no caller waits for an answer any
        more."""
        self.close()
        with self._changed:
            dropped, workers = self._queue.drop_all(), list(self._threads.values())
            if self._queue.running_calls:
                for worker in workers:
                    worker.kill()
        self._deliver_outcomes(
            dropped, [Raised(ClosedError(f"{self._terms.name} was closed"))] * len(dropped)
        )
        if self._idle_s == inf:
            self.wait_until_ended(EXIT_TIMEOUT_S)

    def _add_waiter(
        self, item: T, future: asyncio.Future[R] | Future[R], loop: asyncio.AbstractEventLoop | None
    ) -> Waiter[T, R]:
        now = time.monotonic()
        waiter = Waiter(item, WaitingItem(1, now), future, loop)
        with self._changed:
            self._queue.add_waiter(waiter)
            self._quiet_at = now + QUIET_S
            if not self._idle_threads and self._active_threads < self._terms.concurrency:
                try:
                    self._start_thread()
                except RuntimeError:  # no further thread can be started
                    # With another thread running, the item waits for that one.
                    if not self._active_threads:
                        future.cancel()
                        self._queue.remove_waiter(waiter)
                        raise
            self._changed.notify()
        return waiter

    def _remove_waiter(self, waiter: Waiter[T, R]) -> None:
        with self._changed:
            self._queue.remove_waiter(waiter)

    def _start_thread(self, ready: Future[None] | None = None) -> None:
        worker = self._make_worker()
        thread = threading.Thread(
            target=self._run_thread, args=(worker, ready), name=self._terms.name, daemon=True
        )
        thread.start()
        self._threads[thread] = worker
        self._active_threads += 1

    def _run_thread(self, worker: Worker[T, R], ready: Future[None] | None) -> None:
        try:
            # If the caller that waited for the start was cancelled, the worker starts with the first item.
            if ready is not None and ready.set_running_or_notify_cancel():
                try:
                    worker.start()
                except BaseException as error:
                    ready.set_exception(wrap_error(self._terms.name, error).error)
                else:
                    ready.set_result(None)
            while taken := self._take_batch():
                try:
                    outcomes = worker.run_batch([each.item for each in taken])
                except BaseException as error:
                    outcomes = [wrap_error(self._terms.name, error)] * len(taken)
                self._deliver_outcomes(taken, outcomes)
                # The next batch may take long to come, so nothing of this one is kept until then.
                del taken, outcomes
                with self._changed:
                    self._queue.running_calls -= 1
                    self._quiet_at = time.monotonic() + QUIET_S
        finally:
            worker.end()
            with self._changed:
                del self._threads[threading.current_thread()]

    def _take_batch(self) -> list[Waiter[T, R]]:
        """Return the waiters of the next call. Empty if this thread is not needed any more."""
        with self._changed:
            since = time.monotonic()
            while True:
                now = time.monotonic()
                taken = self._queue.take_batch(now, is_quiet=now >= self._quiet_at)
                if not isinstance(taken, float):
                    return taken
                is_idle = not len(self._queue)
                # Counted down under the lock, so that no new item relies on a thread that is about to end.
                if is_idle and (self._queue.is_closed or now >= since + self._idle_s):
                    self._active_threads -= 1
                    return []
                until = taken
                if self._queue.flushes_when_quiet:
                    until = min(until, self._quiet_at)
                if is_idle:
                    until = since + self._idle_s
                self._idle_threads += 1
                self._changed.wait(min(max(0.0, until - now), threading.TIMEOUT_MAX))
                self._idle_threads -= 1

    def _deliver_outcomes(self, waiters: list[Waiter[T, R]], outcomes: list[R | Raised]) -> None:
        """Deliver the outcomes, to each loop in one call."""
        by_loop: dict[asyncio.AbstractEventLoop | None, tuple[list[Any], list[Any]]] = {}
        for waiter, outcome in zip(waiters, outcomes, strict=True):
            group = by_loop.setdefault(waiter.loop, ([], []))
            group[0].append(waiter)
            group[1].append(outcome)
        for loop, group in by_loop.items():
            if loop is None:
                deliver_outcomes(*group)
                continue
            with contextlib.suppress(RuntimeError):  # that loop is closed, and its callers are gone
                loop.call_soon_threadsafe(deliver_outcomes, *group)


_instances: WeakSet[ThreadWaiters[Any, Any]] = WeakSet()


def _shut_down_all() -> None:
    for each in list(_instances):
        each.shut_down()


def _reset_all_after_fork() -> None:
    for each in list(_instances):
        each.reset_after_fork()


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_reset_all_after_fork)
