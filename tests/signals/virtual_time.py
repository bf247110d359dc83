"""A Kubernetes watch in virtual time, with the real client and the fake API server of the other tests.

Client and server use real sockets on one event loop. The time of the loop jumps to the next timer only when
no socket has data, so hours pass in seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import selectors
import socket
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dispatcher.settings.signals import EppSettings
from dispatcher.signals.kubernetes import api
from dispatcher.signals.kubernetes.capacity import CapacityWatch
from tests.signals.apiserver import ApiServer, access, populate
from tests.signals.capacity_recorder import QWEN, CapacityRecorder

_LIBC = ctypes.CDLL(None)
CHECK_INTERVAL_S = 0.05
"""Time between two checks of a condition, and so the precision of the measured times."""


class _VirtualTimeSelector(selectors.DefaultSelector):
    """Selector that advances its clock by the waiting time of the loop once no data is in transit."""

    now = 0.0
    threads = 0
    """Number of running executor threads of the loop."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        # Data that a busy kernel has not delivered yet must not become a time-out.
        attempts = 100
        while attempts and not ready and (self.threads or self._is_data_in_transit()):
            ready, attempts = super().select(0.01), attempts - 1
        # Advance in small steps, and poll longer before a large one.
        step_s = 2.0 if timeout is None else min(timeout, 2.0)
        ready = ready or super().select(0.000_3 if step_s < 0.5 else 0.008)
        if not ready:
            self.now += step_s + 1e-6  # so that a timer is due in spite of rounding
        return ready

    def _is_data_in_transit(self) -> bool:
        keys = self.get_map().values()
        # The kernel delays acknowledgements by 40 ms, and until then received data counts as unsent.
        for key in keys:
            _acknowledge_received_data(key.fd)
        return any(map(_is_data_in_transit, keys))


def _acknowledge_received_data(fd: int) -> None:
    """Let the kernel acknowledge at once what this TCP connection has received. Ignores other files."""
    enabled = ctypes.c_int(1)
    size = ctypes.sizeof(enabled)
    _LIBC.setsockopt(fd, socket.IPPROTO_TCP, socket.TCP_QUICKACK, ctypes.byref(enabled), size)


def _is_data_in_transit(key: selectors.SelectorKey) -> bool:
    """Return whether a connection is being opened, or bytes (an end of file included) have not reached the
    other side."""
    if key.events & selectors.EVENT_WRITE:
        return True
    unsent = bytearray(4)
    try:
        fcntl.ioctl(key.fd, termios.TIOCOUTQ, unsent)
    except OSError:  # listening socket
        return False
    return any(unsent)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_selector = _VirtualTimeSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.now

    def run_in_executor(self, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self._virtual_selector.threads += 1
        future = super().run_in_executor(*args)
        future.add_done_callback(self._count_thread_end)
        return future

    def _count_thread_end(self, _: object) -> None:
        self._virtual_selector.threads -= 1


def run_in_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    api.import_client()  # virtual time does not wait for the import thread
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)


class RunningWatch:
    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.recorder = CapacityRecorder()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait_until(self, condition: Callable[[], Any], within_s: float) -> float:
        """Return the time at which the condition holds. Fail if that takes longer than `within_s`."""
        end = self.now + within_s
        while not condition():
            assert self.now < end, f"not within {within_s:g} s: {self.recorder.latest}"
            await asyncio.sleep(CHECK_INTERVAL_S)
        return self.now

    async def wait_for_ready(self, number: int | None, within_s: float) -> float:
        return await self.wait_until(
            lambda: bool(self.recorder.history) and self.recorder.latest.ready == number, within_s
        )

    async def wait_until_complete(self, ready: int, within_s: float) -> float:
        return await self.wait_until(lambda: self.recorder.is_complete_with(ready, "10.0.0.1"), within_s)

    def pause(self, seconds: float) -> Awaitable[None]:
        return asyncio.sleep(seconds)


@asynccontextmanager
async def run_watch(tmp_path: Path, pods: int = 3) -> AsyncIterator[RunningWatch]:
    async with ApiServer().serve(tmp_path) as server:
        running = RunningWatch(server)
        if pods:
            populate(server, pods)
        watch = CapacityWatch(QWEN, EppSettings(), running.recorder, access=access(server))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(watch.run())
            try:
                yield running
            finally:
                server.thaw()
                task.cancel()
