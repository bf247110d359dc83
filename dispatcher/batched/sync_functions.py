"""Sync functions and worker processes under `batched`: callers of any loops and threads wait in one queue.

Threads take from that queue: a thread forms a batch, has its worker run it, and delivers the results of each
loop in one call. A worker that is a pipeline has one thread for each batch that it may have; `stages` says
when such a worker has room for the next batch.
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
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from dispatcher.batched.calls import Raised, run_isolated, wrap_error
from dispatcher.batched.stages import Stage
from dispatcher.batched.waiting import CallerQueue, CallTerms, Waiter, deliver_outcomes
from dispatcher.common.errors import ClosedError
from dispatcher.common.grouping import WaitingItem

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
    """Runs batches for its threads. Each thread carries one batch at a time. Another one calls `kill`."""

    depth: int
    """Number of batches that the worker may have at once. With more than one, they form a pipeline."""

    def start(self) -> None:
        """Start the worker. Raises an error if it cannot start; the next `run_batch` then tries again."""

    def run_batch(self, items: list[T], enter_stage: Callable[[Stage], None]) -> list[R | Raised]:
        """Return an outcome for each item. A worker that is a pipeline calls `enter_stage` when the batch
        enters a stage."""

    def end(self) -> None:
        """Release everything: no further batch comes."""

    def kill(self) -> None:
        """End at once, even during `run_batch`."""

    def forget_after_fork(self) -> None:
        """Forget the worker, because this process was forked from the one that owns it."""


class FunctionWorker(Generic[T, R]):
    """Runs a function in the thread itself."""

    depth = 1

    def __init__(self, function: Callable[[list[T]], Any], terms: CallTerms) -> None:
        self._function = function
        self._terms = terms

    def start(self) -> None:
        """Do nothing: the worker is always ready."""

    def run_batch(self, items: list[T], enter_stage: Callable[[Stage], None]) -> list[R | Raised]:
        """Return an outcome for each item. SystemExit would end the thread; it fails the call instead."""
        return run_isolated(self._terms.name, self._call_function, items, isolate=self._terms.isolate)

    def _call_function(self, items: list[T]) -> Any:
        return self._terms.context.copy().run(self._function, items)

    def end(self) -> None:
        """Do nothing: there is nothing to release."""

    def kill(self) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def forget_after_fork(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(slots=True, eq=False)
class _WorkerThreads(Generic[T, R]):
    """A worker, and the threads that carry its batches."""

    index: int
    worker: Worker[T, R]
    room_appeared: threading.Condition
    """Notified when the worker may have room for another batch."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that takes the next batch, until the worker has accepted it. That thread alone waits
    for items and for room, and no later batch overtakes its own."""
    thread_count: int = 0
    first_batches: int = 0
    """Number of batches that are in the first stage or wait for it."""
    early_batches: int = 0
    """Number of batches that have not reached the stage after `transform`."""


@dataclass(slots=True, eq=False)
class _RunningBatch(Generic[T, R]):
    """A batch, its worker and its stage."""

    waiters: list[Waiter[T, R]]
    threads: _WorkerThreads[T, R]
    stage: Stage = Stage.TAKEN


class ThreadWaiters(Generic[T, R]):
    """Callers on any loops and threads, whose batches are run by workers. Each worker has as many threads as
    it may have batches.

    A thread that had nothing to do for `idle_s` ends, and its worker with the last of its threads. Infinite
    keeps the threads, for workers that are expensive to start. `make_worker` is called with the index of the
    worker: the lowest that no other worker has.
    """

    def __init__(
        self, make_worker: Callable[[int], Worker[T, R]], terms: CallTerms, *, idle_s: float = IDLE_S
    ) -> None:
        self._make_worker = make_worker
        self._terms = terms
        self._idle_s = idle_s
        self._reset_state()
        _instances.add(self)

    def reset_after_fork(self) -> None:
        """Start with an empty state in a forked process: the threads and their callers are those of the
        parent."""
        for each in set(self._threads.values()):
            each.worker.forget_after_fork()
        self._reset_state()

    def _reset_state(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when an item comes. Threads wait for it whose worker has room for any batch."""
        self._queue = CallerQueue[T, R](self._terms)
        self._threads: dict[threading.Thread, _WorkerThreads[T, R]] = {}
        self._workers: list[_WorkerThreads[T, R]] = []
        """Workers whose threads take from the queue. Threads of other workers are about to end."""
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

    def start_workers(self) -> list[Future[None]]:
        """Start all workers. Each future is done when its worker is ready or has failed to start."""
        ready = []
        with self._changed:
            if self._queue.is_closed:
                raise ClosedError(f"{self._terms.name} was closed")
            while len(self._workers) < self._terms.concurrency:
                ready.append(Future[None]())
                self._start_worker(ready[-1])
        return ready

    def close(self) -> None:
        """Accept no further item. The waiting ones go at once."""
        with self._changed:
            self._queue.is_closed = True
            self._changed.notify_all()
            for each in self._workers:
                each.room_appeared.notify_all()

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
            dropped, workers = self._queue.drop_all(), set(self._threads.values())
            if self._queue.running_calls:
                for each in workers:
                    each.worker.kill()
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
            if not self._idle_threads and len(self._workers) < self._terms.concurrency:
                try:
                    self._start_worker()
                except RuntimeError:  # no further thread can be started
                    # With another thread running, the item waits for that one.
                    if not self._workers:
                        future.cancel()
                        self._queue.remove_waiter(waiter)
                        raise
            self._changed.notify()
            if len(self._queue) == self._terms.rule.max_size:
                for each in self._workers:  # those with room for full batches only
                    each.room_appeared.notify()
        return waiter

    def _remove_waiter(self, waiter: Waiter[T, R]) -> None:
        with self._changed:
            self._queue.remove_waiter(waiter)

    def _start_worker(self, ready: Future[None] | None = None) -> None:
        index = min(set(range(self._terms.concurrency)) - {each.index for each in self._workers})
        threads = _WorkerThreads(index, self._make_worker(index), threading.Condition(self._lock))
        for number in range(threads.worker.depth):
            thread = threading.Thread(
                target=self._run_thread,
                args=(threads, None if number else ready),
                name=self._terms.name,
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no further thread can be started
                if not number:
                    raise
                break  # the worker has fewer batches at once
            self._threads[thread] = threads
            threads.thread_count += 1
        self._workers.append(threads)

    def _run_thread(self, threads: _WorkerThreads[T, R], ready: Future[None] | None) -> None:
        try:
            # If the caller that waited for the start was cancelled, the worker starts with the first item.
            if ready is not None and ready.set_running_or_notify_cancel():
                try:
                    threads.worker.start()
                except BaseException as error:
                    ready.set_exception(wrap_error(self._terms.name, error).error)
                else:
                    ready.set_result(None)
            while taken := self._take_batch(threads):
                self._run_batch(taken)
                # The next batch may take long to come, so nothing of this one is kept until then.
                del taken
            threads.turn.release()
        finally:
            with self._lock:
                threads.thread_count -= 1
                is_last = not threads.thread_count
            if is_last:
                threads.worker.end()
            with self._lock:
                del self._threads[threading.current_thread()]

    def _run_batch(self, batch: _RunningBatch[T, R]) -> None:
        def enter_stage(stage: Stage) -> None:
            with self._lock:
                self._enter_stage(batch, stage)

        try:
            outcomes = batch.threads.worker.run_batch([each.item for each in batch.waiters], enter_stage)
        except BaseException as error:
            outcomes = [wrap_error(self._terms.name, error)] * len(batch.waiters)
        try:
            self._deliver_outcomes(batch.waiters, outcomes)
        finally:
            with self._lock:
                self._enter_stage(batch, Stage.DONE)
                self._queue.running_calls -= 1
                self._quiet_at = time.monotonic() + QUIET_S
                # Another thread may hold the turn, and waits for the time-out of the items that wait now.
                if self._queue.flushes_when_quiet:
                    self._changed.notify()

    def _enter_stage(self, batch: _RunningBatch[T, R], stage: Stage) -> None:
        """Record that a batch has entered a stage, and wake the thread that waits for room. A batch may skip
        stages, and does not return to an earlier one if its worker process is replaced."""
        threads = batch.threads
        if stage <= batch.stage:
            return
        if batch.stage is Stage.TAKEN:
            threads.turn.release()
        if batch.stage < Stage.TRANSFORM <= stage:
            threads.first_batches -= 1
        if batch.stage < Stage.POSTPROCESS <= stage:
            threads.early_batches -= 1
        batch.stage = stage
        threads.room_appeared.notify()

    def _take_batch(self, threads: _WorkerThreads[T, R]) -> _RunningBatch[T, R] | None:
        """Return the next batch. `None` if the worker is not needed any more. Acquires the turn."""
        threads.turn.acquire()
        with self._lock:
            since = time.monotonic()
            while True:
                now = time.monotonic()
                has_room = self._has_room(threads)
                taken = self._queue.take_batch(now, is_quiet=now >= self._quiet_at, has_room=has_room)
                if not isinstance(taken, float):
                    threads.first_batches += 1
                    threads.early_batches += 1
                    return _RunningBatch(taken, threads)
                is_idle = not len(self._queue)
                # Recorded under the lock, so that no new item relies on a thread that is about to end.
                if is_idle and (self._queue.is_closed or now >= since + self._idle_s):
                    if threads in self._workers:
                        self._workers.remove(threads)
                    return None
                if not has_room:
                    threads.room_appeared.wait()
                    continue
                until = taken
                if self._queue.flushes_when_quiet:
                    until = min(until, self._quiet_at)
                if is_idle:
                    until = since + self._idle_s
                self._idle_threads += 1
                self._changed.wait(min(max(0.0, until - now), threading.TIMEOUT_MAX))
                self._idle_threads -= 1

    def _has_room(self, threads: _WorkerThreads[T, R]) -> bool:
        """Return whether the worker may take the next batch now. A batch that is not full would only wait for
        the earlier one, while further items could join it. A full one may wait for the first stage."""
        if not threads.early_batches:
            return True
        return threads.first_batches <= 1 and self._queue.is_batch_full

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
