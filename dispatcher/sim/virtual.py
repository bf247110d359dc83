"""An event loop whose time jumps: sleeping costs nothing, and every run of a seed is the same run.

The real dispatch loop runs on it, an hour of traffic in seconds. Time stands still while anything is ready
to run and leaps to the next timer when nothing is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(RuntimeError):
    """Every task waits for something that no timer will bring about."""


class _Jump(selectors.SelectSelector):
    """Never waits: what the loop would have slept is added to its time. Sockets are looked at only where
    there is nothing else to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            ready = super().select(0)
            if not ready:
                raise StuckError("nothing is ready and no timer is set: the simulation would wait for ever")
            return ready
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at `start` and jumps."""

    def __init__(self, start: float = 0.0) -> None:
        self._jump = _Jump()
        self._jump.now = start
        super().__init__(self._jump)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jump.now


def run(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """asyncio.run in virtual time."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start)) as runner:
        return runner.run(main)
