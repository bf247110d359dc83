"""Sync functions and worker processes under `batched`: their callers, of whatever loops and threads, wait in
one line. Threads take from it: a thread forms a batch, has its worker run it, and tells each loop its answers
in one call."""

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

from dispatcher.batched.calls import Attempt, Raised, answers, raised
from dispatcher.batched.errors import ClosedError
from dispatcher.batched.waiting import CallTerms, Gathering, Waiter, tell
from dispatcher.core.merging.grouping import Waiting

T = TypeVar("T")
R = TypeVar("R")

QUIET_S = 0.0005
"""Without a further item. Threads that an answer woke ask again one after the other: of ten callers one half
was late where this was 0, and there were twice as many calls."""
IDLE_S = 10.0
"""A thread costs little to begin."""
EXIT_S = 5.0
"""What a worker process may take to end, when the interpreter does."""


class Worker(Protocol[T, R]):
    """Runs batches for one thread, which alone calls it; `kill` comes from another one."""

    def start(self) -> None:
        """Be ready; a later `run` is, in any case. Raises what keeps it from it."""

    def run(self, items: list[T]) -> list[R | Raised]:
        """An outcome for each."""

    def end(self) -> None:
        """Nothing more comes."""

    def kill(self) -> None:
        """End at once, in the midst of a `run`."""

    def forget(self) -> None:
        """This process was forked from the one whose worker it is."""


class FunctionWorker(Generic[T, R]):
    """Runs a function in the thread itself."""

    def __init__(self, function: Callable[[list[T]], Any], terms: CallTerms) -> None:
        self._function = function
        self._terms = terms

    def start(self) -> None:
        """It is ready."""

    def run(self, items: list[T]) -> list[R | Raised]:
        """An outcome for each."""
        attempt = Attempt[T, R](items, isolate=self._terms.isolate)
        while part := attempt.part():
            count = len(part)  # the list is the function's now, which may change it
            try:
                returned = self._terms.context.copy().run(self._function, part)
                attempt.ran(answers(self._terms.name, returned, count))
            except BaseException as error:  # what would end the thread ends the call
                attempt.ran(raised(self._terms.name, error))
        return attempt.outcomes

    def end(self) -> None:
        """Nothing is held."""

    def kill(self) -> None:
        """A thread cannot be ended from outside."""

    def forget(self) -> None:
        """Nothing is held."""


class ThreadWaiters(Generic[T, R]):
    """Callers of any loops and threads, whose batches are run by threads with a worker each.

    `idle_s`: a thread that had nothing to do for so long ends, and with it what its worker holds; inf: none
    does, for workers are dear.
    """

    def __init__(
        self, worker: Callable[[], Worker[T, R]], terms: CallTerms, *, idle_s: float = IDLE_S
    ) -> None:
        self._worker = worker
        self._terms = terms
        self._idle_s = idle_s
        self._begin_anew()
        _made.add(self)

    def forked(self) -> None:
        """This is another process: the threads, and who waits for them, are those of the one before."""
        for worker in self._threads.values():
            worker.forget()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._changed = threading.Condition()
        self._gathering = Gathering[T, R](self._terms)
        self._threads: dict[threading.Thread, Worker[T, R]] = {}
        self._taking = 0
        """Threads that take from the line; the others are about to end."""
        self._idle = 0
        """Threads that wait for something to do."""
        self._quiet_at = 0.0

    def __len__(self) -> int:
        return len(self._gathering)

    @property
    def running(self) -> int:
        """Calls."""
        return self._gathering.running

    async def answer(self, item: T) -> R:
        """Wait for this item's result, on the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        waiter = self._join(item, future, loop)
        try:
            return await future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def answer_in_thread(self, item: T, timeout_s: float | None) -> R:
        """Wait for this item's result, in a thread. Raises TimeoutError."""
        if threading.current_thread() in self._threads:
            raise RuntimeError(f"{self._terms.name} waits for itself: it was called from within its own call")
        future: Future[R] = Future()
        waiter = self._join(item, future, None)
        try:
            return future.result(timeout_s)
        except BaseException:
            if future.cancel():
                self._leave(waiter)
            raise

    def start(self) -> list[Future[None]]:
        """All threads; each future is done when its worker is ready, or could not be."""
        ready = []
        with self._changed:
            if self._gathering.closed:
                raise ClosedError(f"{self._terms.name} was closed")
            while self._taking < self._terms.concurrency:
                ready.append(Future[None]())
                self._begin(ready[-1])
        return ready

    def close(self) -> None:
        """No further item comes; what waits goes at once."""
        with self._changed:
            self._gathering.closed = True
            self._changed.notify_all()

    def ended(self, timeout_s: float | None = None) -> None:
        """After `close()`: all that waited has been answered, no thread and no worker is left."""
        for thread in list(self._threads):
            thread.join(timeout_s)

    def exit(self) -> None:
        """The interpreter ends: nobody waits for an answer any more."""
        self.close()
        with self._changed:
            dropped, workers = self._gathering.drop(), list(self._threads.values())
            if self._gathering.running:
                for worker in workers:
                    worker.kill()
        self._tell(dropped, [Raised(ClosedError(f"{self._terms.name} was closed"))] * len(dropped))
        if self._idle_s == inf:
            self.ended(EXIT_S)

    def _join(
        self, item: T, future: asyncio.Future[R] | Future[R], loop: asyncio.AbstractEventLoop | None
    ) -> Waiter[T, R]:
        now = time.monotonic()
        waiter = Waiter(item, Waiting(1, now), future, loop)
        with self._changed:
            self._gathering.join(waiter)
            self._quiet_at = now + QUIET_S
            if not self._idle and self._taking < self._terms.concurrency:
                try:
                    self._begin()
                except RuntimeError:  # no further thread can be had
                    if not self._taking:
                        future.cancel()
                        self._gathering.leave(waiter)
                        raise
            self._changed.notify()
        return waiter

    def _leave(self, waiter: Waiter[T, R]) -> None:
        with self._changed:
            self._gathering.leave(waiter)

    def _begin(self, ready: Future[None] | None = None) -> None:
        worker = self._worker()
        thread = threading.Thread(target=self._work, args=(worker, ready), name=self._terms.name, daemon=True)
        thread.start()
        self._threads[thread] = worker
        self._taking += 1

    def _work(self, worker: Worker[T, R], ready: Future[None] | None) -> None:
        try:
            # If the caller that waited for the start was cancelled, the worker starts with the first item.
            if ready is not None and ready.set_running_or_notify_cancel():
                try:
                    worker.start()
                except BaseException as error:
                    ready.set_exception(raised(self._terms.name, error).error)
                else:
                    ready.set_result(None)
            while taken := self._next():
                try:
                    outcomes = worker.run([each.item for each in taken])
                except BaseException as error:
                    outcomes = [raised(self._terms.name, error)] * len(taken)
                self._tell(taken, outcomes)
                # The next one may be long in coming: nothing of these is held until then.
                del taken, outcomes
                with self._changed:
                    self._gathering.running -= 1
                    self._quiet_at = time.monotonic() + QUIET_S
        finally:
            worker.end()
            with self._changed:
                del self._threads[threading.current_thread()]

    def _next(self) -> list[Waiter[T, R]]:
        """Who goes next; nobody: this thread is needed no longer."""
        with self._changed:
            since = time.monotonic()
            while True:
                now = time.monotonic()
                taken = self._gathering.take(now, quiet=now >= self._quiet_at)
                if not isinstance(taken, float):
                    return taken
                idle = not len(self._gathering)
                if idle and (self._gathering.closed or now >= since + self._idle_s):
                    self._taking -= 1
                    return []
                until = taken
                if self._gathering.hastens:
                    until = min(until, self._quiet_at)
                if idle:
                    until = since + self._idle_s
                self._idle += 1
                self._changed.wait(min(max(0.0, until - now), threading.TIMEOUT_MAX))
                self._idle -= 1

    def _tell(self, waiters: list[Waiter[T, R]], outcomes: list[R | Raised]) -> None:
        """Each loop in one call."""
        by_loop: dict[asyncio.AbstractEventLoop | None, tuple[list[Any], list[Any]]] = {}
        for waiter, outcome in zip(waiters, outcomes, strict=True):
            those = by_loop.setdefault(waiter.loop, ([], []))
            those[0].append(waiter)
            those[1].append(outcome)
        for loop, those in by_loop.items():
            if loop is None:
                tell(*those)
                continue
            with contextlib.suppress(RuntimeError):  # it was closed, and who waited there is gone
                loop.call_soon_threadsafe(tell, *those)


_made: WeakSet[ThreadWaiters[Any, Any]] = WeakSet()


def _exit() -> None:
    for each in list(_made):
        each.exit()


def _forked() -> None:
    for each in list(_made):
        each.forked()


atexit.register(_exit)
os.register_at_fork(after_in_child=_forked)
