"""Event loop in virtual time: sleeping takes no time, and runs with the same seed are identical.

The real dispatch loop runs on it, one hour of traffic in seconds. The time stands still while callbacks are
ready, and jumps to the next timer when none is. The loop differs from that of asyncio where a million timers
would be slow: handles are light and sorted by a number, and sockets are polled only when there is nothing
else to do. It replaces four methods that asyncio calls on its own loops, of which
tests/lab/simulation/test_virtual_loop.py checks that the Python in use still has them.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from itertools import count
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_LEAP_S = 86_400.0
"""Maximum jump of the time. Timers beyond it are reached by several jumps."""
MIN_CLEANUP_TIMERS = 100
"""Number of timers up to which cancelled ones are kept."""


class StuckError(RuntimeError):
    """Error for tasks that wait for something that no timer and no socket will bring."""


class _VirtualHandle(msgspec.Struct, eq=False):
    """Handle of a callback. `callback` is `None` after it was cancelled."""

    at: float
    callback: Callable[..., object] | None
    args: Any
    context: Context

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        # Drops the references, so that objects are freed although the handle stays in the heap.
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` starts at `start` and jumps. Callbacks run in the order of their times and,
    if those are equal, in the order in which they were scheduled."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._ready_handles: deque[_VirtualHandle] = deque()
        self._timers: list[tuple[float, int, _VirtualHandle]] = []
        """Heap of timers. The number keeps timers of the same time in the order of their creation."""
        self._numbers = count(1)
        self._cleanup_threshold = MIN_CLEANUP_TIMERS
        """Number of timers at which cancelled ones are removed."""
        self._is_stopped = False
        self._polled_sockets = selectors.DefaultSelector()
        super().__init__(self._polled_sockets)

    def stop(self) -> None:
        self._is_stopped = True
        super().stop()

    def time(self) -> float:
        return self._now

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        # Skips the task factory, which the simulation does not use.
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def stall_loop(self, seconds: float) -> None:
        """Advance the time, as if the current callback took this long."""
        self._now += seconds

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _VirtualHandle:
        handle = _VirtualHandle(0.0, callback, args, copy_context() if context is None else context)
        self._ready_handles.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _VirtualHandle:
        handle = self.call_soon(callback, *args, context=context)
        # As in asyncio: wakes a loop that polls its sockets.
        self._write_to_self()  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _VirtualHandle:
        return self._add_timer(self._now + delay, callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _VirtualHandle:
        return self._add_timer(when, callback, args, context)

    def _add_timer(
        self, when: float, callback: Callable[..., object], args: Any, context: Context | None
    ) -> _VirtualHandle:
        timer = _VirtualHandle(when, callback, args, copy_context() if context is None else context)
        if len(self._timers) > self._cleanup_threshold:
            self._remove_cancelled_timers()
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _remove_cancelled_timers(self) -> None:
        timers = self._timers
        timers[:] = [each for each in timers if each[2].callback is not None]
        heapq.heapify(timers)
        self._cleanup_threshold = max(MIN_CLEANUP_TIMERS, 2 * len(timers))

    def _add_callback(self, handle: asyncio.Handle) -> None:
        """Schedule a handle that asyncio itself adds when a socket is ready."""
        self.call_soon(handle._run)

    def _run_once(self) -> None:
        """Run callbacks until the loop is stopped, in rounds like those of asyncio.

        asyncio calls this method once per round. Staying inside it saves the overhead of each call.
        """
        due, timers, pop = self._ready_handles, self._timers, heapq.heappop
        while True:
            if not due and not self._is_stopped:
                while timers and timers[0][2].callback is None:
                    pop(timers)
                if timers:
                    # The time never goes back, even if a timer was set in the past.
                    self._now = max(self._now, min(timers[0][0], self._now + MAX_LEAP_S))
                else:
                    self._poll_sockets()
            now = self._now
            while timers and timers[0][0] <= now:
                due.append(pop(timers)[2])
            # Callbacks that these callbacks add run in the next round, as in asyncio.
            for _ in range(len(due)):
                handle = due.popleft()
                callback = handle.callback
                if callback is None:
                    continue
                try:
                    handle.context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler(
                        {"message": f"Exception in {handle!r}", "exception": error, "handle": handle}
                    )
            if self._is_stopped:
                self._is_stopped = False
                return

    def _poll_sockets(self) -> None:
        """Poll the sockets without waiting."""
        ready = self._polled_sockets.select(0)
        if not ready:
            raise StuckError("nothing is ready and no timer is set: the simulation would wait for ever")
        self._process_events(ready)  # type: ignore[attr-defined]


def run_in_virtual_time(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """Run a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start)) as runner:
        return runner.run(main)
