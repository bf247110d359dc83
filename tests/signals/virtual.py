"""A Kubernetes watch in virtual time, with the real client and the API server of the other tests.

They speak over real sockets of one event loop, whose time jumps to the next timer only when no socket has
anything: hours pass in seconds.
"""

from __future__ import annotations

import asyncio
import fcntl
import selectors
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dispatcher.settings import EppSettings
from dispatcher.signals.kubernetes import api
from dispatcher.signals.kubernetes.capacity import CapacityWatch
from tests.signals.apiserver import ApiServer, access, populate
from tests.signals.told import QWEN, Seen

LOOK_S = 0.05
"""Time between two looks of a test, and so the precision of the times that it sees."""


class _Jump(selectors.DefaultSelector):
    """Selector that adds the time for which the loop would wait to its clock, once nothing is on its way."""

    now = 0.0
    threads = 0
    """Number of threads at work for the loop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        # What is still on its way through a busy kernel must not become a time-out.
        patience = 100
        while patience and not ready and (self.threads or any(map(_on_its_way, self.get_map().values()))):
            ready, patience = super().select(0.01), patience - 1
        # In small steps, and looking longer before a long one.
        step_s = 2.0 if timeout is None else min(timeout, 2.0)
        ready = ready or super().select(0.000_3 if step_s < 0.5 else 0.008)
        if not ready:
            self.now += step_s + 1e-6  # whoever waited finds the time reached in spite of rounding
        return ready


def _on_its_way(key: selectors.SelectorKey) -> bool:
    """A connection that is being made, or bytes (an end among them) that have not reached the other side."""
    if key.events & selectors.EVENT_WRITE:
        return True
    unsent = bytearray(4)
    try:
        fcntl.ioctl(key.fd, termios.TIOCOUTQ, unsent)
    except OSError:  # a listener
        return False
    return any(unsent)


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self._jump.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self._jump.threads -= 1


def run(main: Coroutine[Any, Any, None]) -> None:
    api.import_client()  # no thread is waited for in virtual time
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main)


class Stage:
    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.seen = Seen()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, condition: Callable[[], Any], within_s: float) -> float:
        """Return the time at which the condition holds. Fail if that takes longer than `within_s`."""
        end = self.now + within_s
        while not condition():
            assert self.now < end, f"not within {within_s:g} s: {self.seen.now}"
            await asyncio.sleep(LOOK_S)
        return self.now

    async def ready(self, number: int | None, within_s: float) -> float:
        return await self.until(lambda: bool(self.seen.history) and self.seen.now.ready == number, within_s)

    async def fine(self, ready: int, within_s: float) -> float:
        return await self.until(lambda: self.seen.fine(ready, "10.0.0.1"), within_s)

    def pause(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)


@asynccontextmanager
async def stage(tmp_path: Path, pods: int = 3) -> AsyncIterator[Stage]:
    async with ApiServer().serve(tmp_path) as server:
        made = Stage(server)
        if pods:
            populate(server, pods)
        watch = CapacityWatch(QWEN, EppSettings(), made.seen, access=access(server))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watch.run())
            try:
                yield made
            finally:
                server.thaw()
                task.cancel()
