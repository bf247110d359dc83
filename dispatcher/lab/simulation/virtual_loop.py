"""An event loop whose time jumps: sleeping costs nothing, and every run of a seed is the same run.

The real dispatch loop runs on it, an hour of traffic in seconds. Time stands still while anything is ready
to run and leaps to the next timer when nothing is. It is asyncio's own loop but for what each of a million
timers costs: a handle is its own place in the order, and no socket is asked between two of them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from itertools import count
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LEAP_S = 86_400.0
"""The longest leap; a timer beyond it is reached by several."""
LITTER = 100
"""So many timers are kept though they are cancelled; above that, no more than are waited for."""


class StuckError(RuntimeError):
    """Every task waits for something that no timer will bring about."""


class _Due(msgspec.Struct, eq=False):
    """What is to be called. `callback` is None once it is cancelled."""

    at: float
    callback: Callable[..., object] | None
    args: Any
    context: Context

    def when(self) -> float:
        return self.at

    def cancel(self) -> None:
        self.callback = self.args = None

    def cancelled(self) -> bool:
        return self.callback is None


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at `start` and jumps. The same calls give the same order, of equal times too."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._next: deque[_Due] = deque()
        self._timers: list[tuple[float, int, _Due]] = []
        """Of those of the same time the one that was set first goes first."""
        self._numbers = count(1)
        self._tidy_at = LITTER
        """So many timers, and those that are cancelled are dropped."""
        super().__init__()

    def time(self) -> float:
        return self._now

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def stall(self, seconds: float) -> None:
        """What runs now takes so long."""
        self._now += seconds

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        handle = _Due(0.0, callback, args, copy_context() if context is None else context)
        self._next.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        handle = self.call_soon(callback, *args, context=context)
        self._write_to_self()  # type: ignore[attr-defined]
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        return self._set(self._now + delay, callback, args, context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        return self._set(when, callback, args, context)

    def _set(self, when: float, callback: Callable[..., object], args: Any, context: Context | None) -> _Due:
        timer = _Due(when, callback, args, copy_context() if context is None else context)
        if len(self._timers) > self._tidy_at:
            self._tidy()
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _tidy(self) -> None:
        timers = self._timers
        timers[:] = [each for each in timers if each[2].callback is not None]
        heapq.heapify(timers)
        self._tidy_at = max(LITTER, 2 * len(timers))

    def _add_callback(self, handle: asyncio.Handle) -> None:
        """What asyncio itself adds: a socket is ready."""
        self.call_soon(handle._run)

    def _run_once(self) -> None:
        """As many rounds, each as asyncio's has it, as there are until somebody stops the loop: what is due
        now, after a leap if nothing is."""
        due, timers, pop = self._next, self._timers, heapq.heappop
        while True:
            if not due and not self._stopping:  # type: ignore[attr-defined]
                while timers and timers[0][2].callback is None:
                    pop(timers)
                if timers:
                    self._now = max(self._now, min(timers[0][0], self._now + LEAP_S))
                else:
                    self._look_at_sockets()
            now = self._now
            while timers and timers[0][0] <= now:
                due.append(pop(timers)[2])
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
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _look_at_sockets(self) -> None:
        """They are only looked at where there is nothing else to do."""
        ready = self._selector.select(0)  # type: ignore[attr-defined]
        if not ready:
            raise StuckError("nothing is ready and no timer is set: the simulation would wait for ever")
        self._process_events(ready)  # type: ignore[attr-defined]


def run(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start)) as runner:
        return runner.run(main)
