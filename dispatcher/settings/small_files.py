"""Reading of small files: tokens, configurations, warm-ups.

Such a file may be a pipe without a writer, or may be on a file system that no longer answers. Neither may
block the process, or keep it from ending.
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

READ_TIMEOUT_S = 5.0
"""Time limit of a read. A token takes less than a millisecond, and certificates a second on a slow CPU."""


_HANGS_MESSAGE = "its file system does not answer"


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file, up to `max_bytes` and one more byte that shows a larger file.

    Links are followed: mounted ConfigMaps and Secrets consist of links. Raises OSError, also for a file of
    another kind.
    """
    # Without O_NONBLOCK, opening a pipe would wait until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 -- Path cannot open a descriptor
        require_regular(os.fstat(descriptor))
        return file.read(max_bytes + 1)


def require_regular(stat_result: os.stat_result) -> None:
    """Raise OSError unless this is a regular file, or /dev/null, which commonly stands for an empty file."""
    if stat.S_ISDIR(stat_result.st_mode):
        raise IsADirectoryError("it is a directory")
    is_null = stat.S_ISCHR(stat_result.st_mode) and stat_result.st_rdev == Path(os.devnull).stat().st_rdev
    if not stat.S_ISREG(stat_result.st_mode) and not is_null:
        raise OSError("it is not a regular file, but a pipe, a socket or a device")


def read_with_timeout(reader: Callable[[], T], *, timeout_s: float = READ_TIMEOUT_S) -> T:
    """Return the result of `reader`, or raise its error, or TimeoutError. Blocks the caller."""
    running = _start_read(reader)
    wait([running], timeout_s)
    if not running.done():
        raise TimeoutError(_HANGS_MESSAGE)
    return running.result()


class BackgroundRead(Generic[T]):
    """A blocking read that runs in a thread beside the event loop, one at a time."""

    def __init__(self, reader: Callable[[], T], *, timeout_s: float = READ_TIMEOUT_S) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._started_at = 0.0
        self._running: Future[T] | None = None

    async def __call__(self) -> T:
        """Return the result of `reader`, or raise its error.

        Callers that come while a read is in progress share it. Raises TimeoutError `timeout_s` after the read
        began, and at once as long as that read goes on. So a file system that hangs is not asked again.
        """
        if self._running is None or self._running.done():
            self._running, self._started_at = _start_read(self._reader), time.monotonic()
        left_s = self._started_at + self._timeout_s - time.monotonic()
        limit = asyncio.timeout(max(0.0, left_s))
        try:
            async with limit:
                return await asyncio.wrap_future(self._running)
        except TimeoutError as error:
            if not limit.expired():  # the read itself raised TimeoutError
                raise
            raise TimeoutError(_HANGS_MESSAGE) from error


def _start_read(reader: Callable[[], T]) -> Future[T]:
    """Run a read in a daemon thread.

    An executor would wait for its threads when the process ends, and for ever for a thread that a hanging
    file system does not release.
    """
    running: Future[T] = Future()
    # A running future cannot be cancelled, so a cancelled caller does not cancel the read for the others.
    running.set_running_or_notify_cancel()

    def run_read() -> None:
        try:
            running.set_result(reader())
        except BaseException as error:  # every error goes to the callers
            running.set_exception(error)

    threading.Thread(target=run_read, name="file read", daemon=True).start()
    return running
