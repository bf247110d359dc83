"""Reads of small files that others provide: tokens, configurations, warm-ups.

Such a file may be a pipe that nobody writes to, or be on a file system that no longer answers. Neither may
stop the process, or keep it from ending.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

READ_S = 5.0
"""Time limit of a read. A token takes less than a millisecond, certificates a second of a slow CPU."""


_HANGS = "its file system does not answer"


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return what a regular file holds, up to `max_bytes` and one more, by which a larger file is known.

    Links are followed: mounted ConfigMaps and Secrets consist of links. Raises OSError, also for a file of
    another kind.
    """
    # Without O_NONBLOCK the open of a pipe waits for a writer, for ever if there is none.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 -- of a descriptor
        require_regular(os.fstat(descriptor))
        return file.read(max_bytes + 1)


def require_regular(found: os.stat_result) -> None:
    """Raise OSError unless this is a regular file, or /dev/null, the usual way to say that there is none."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError("it is a directory")
    is_null = stat.S_ISCHR(found.st_mode) and found.st_rdev == Path(os.devnull).stat().st_rdev
    if not stat.S_ISREG(found.st_mode) and not is_null:
        raise OSError("it is not a regular file, but a pipe, a socket or a device")


def read_in_time(read: Callable[[], T], *, timeout_s: float = READ_S) -> T:
    """Return what `read` returns, or raise what it raises, or TimeoutError. It blocks."""
    running = _begin(read)
    wait([running], timeout_s)
    if not running.done():
        raise TimeoutError(_HANGS)
    return running.result()


class BackgroundRead(Generic[T]):
    """A blocking read that runs beside the event loop, one at a time."""

    def __init__(self, read: Callable[[], T], *, timeout_s: float = READ_S) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._started_at = 0.0
        self._running: Future[T] | None = None

    async def __call__(self) -> T:
        """Return what `read` returns, or raise what it raises.

        Callers that come while a read runs share it. Raises TimeoutError `timeout_s` after it began, and at
        once for as long as it goes on after that: a file system that hangs is not asked again.
        """
        if self._running is None or self._running.done():
            self._running, self._started_at = _begin(self._read), time.monotonic()
        left_s = self._started_at + self._timeout_s - time.monotonic()
        limit = asyncio.timeout(max(0.0, left_s))
        try:
            async with limit:
                return await asyncio.wrap_future(self._running)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(_HANGS) from error


def _begin(read: Callable[[], T]) -> Future[T]:
    """Run a read in a daemon thread.

    When a process ends, an executor waits for its threads, and would wait for ever for one that a file system
    does not let go.
    """
    running: Future[T] = Future()
    running.set_running_or_notify_cancel()  # from now on no cancelled caller takes it from the others

    def work() -> None:
        try:
            running.set_result(read())
        except BaseException as error:
            running.set_exception(error)

    threading.Thread(target=work, name="file read", daemon=True).start()
    return running
