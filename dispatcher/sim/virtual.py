"""An event loop whose time jumps: sleeping costs nothing, and every run of a seed is the same run.

The real dispatch loop runs on it, an hour of traffic in seconds. Time stands still while anything is ready
to run and leaps to the next timer when nothing is. It is asyncio's own loop but for what each of a million
timers costs: they are compared as tuples, and no socket is asked between two of them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")

RESOLUTION_S = 1e-9
"""Timers that are so near to each other are due together."""
LEAP_S = 86_400.0
"""The longest leap; a timer beyond it is reached by several."""
LITTER = 100
"""So many timers are kept though they are cancelled; above that, no more than are waited for."""


class StuckError(RuntimeError):
    """Every task waits for something that no timer will bring about."""


class _Timer(asyncio.TimerHandle):
    """A handle without what only asyncio's debug mode asks for."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._source_traceback = self._repr = None

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at `start` and jumps. The same calls give the same order, of equal times too."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._next: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        self._timers: list[tuple[float, float, _Timer]] = []
        """Time, a NaN of its own, and the timer. Of two NaNs neither is the smaller one: timers of the same
        time stay in the order that the heap has them in, as asyncio's do, and no method of ours is asked."""
        self._litter = 0
        """How many of the timers are cancelled."""

    def time(self) -> float:
        return self._now

    def stall(self, seconds: float) -> None:
        """What runs now takes so long."""
        self._now += seconds

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Timer(0.0, callback, args, self, context)
        self._next.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer._scheduled = True
        heapq.heappush(self._timers, (when, inf - inf, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._litter += handle._scheduled  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        """As many rounds, each as asyncio's has it, as there are until somebody stops the loop."""
        while True:
            self._round()
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _round(self) -> None:
        """What is due now, after a leap if nothing is."""
        due, timers, pop = self._next, self._timers, heapq.heappop
        if len(timers) > LITTER and self._litter / len(timers) > 0.5:
            timers[:] = [each for each in timers if not each[2]._cancelled]
            heapq.heapify(timers)
            self._litter = 0
        else:
            while timers and timers[0][2]._cancelled:
                pop(timers)
                self._litter -= 1
        if not due and not self._stopping:  # type: ignore[attr-defined]
            if timers:
                self._now += min(max(0.0, timers[0][0] - self._now), LEAP_S)
            else:
                self._look_at_sockets()
        until = self._now + RESOLUTION_S
        while timers and timers[0][0] < until:
            timer = pop(timers)[2]
            timer._scheduled = False
            due.append(timer)
        for _ in range(len(due)):
            handle = due.popleft()
            if handle._cancelled:
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler(
                    {"message": f"Exception in {handle!r}", "exception": error, "handle": handle}
                )

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
