"""A CPU limit for a process of a test, as a container has it: a share of each tenth of a second.

It uses a control group if one can be created. Otherwise it uses signals, which need no rights: the process
is stopped when it has used up its share and continued when the next period begins.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tests.support import wait_until_sync

PERIOD_S = 0.1
_CHECK_INTERVAL_S = 0.002
_CGROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class Throttle(Protocol):
    kind: str
    """`cgroup` or `signals`."""

    def limit_process(self, pid: int) -> None:
        """Apply the limit to a process, which has no children yet, from now on."""


@contextlib.contextmanager
def cpu_limit(cores: float, kind: str = "") -> Iterator[Throttle]:
    """Create a limit that is removed at the end of the block. `kind` selects the mechanism; by default the
    available one is used."""
    group = _create_group(cores) if kind in ("", "cgroup") else None
    if group is not None:
        try:
            yield group
        finally:
            group.remove()
        return
    if kind == "cgroup":
        raise OSError("no control group can be made here")
    signals = _SignalLimit(cores)
    try:
        yield signals
    finally:
        signals.end()


class _ControlGroup:
    kind = "cgroup"

    def __init__(self, folder: Path, unlimited_setting: tuple[str, str]) -> None:
        self._folder = folder
        self._unlimited_setting = unlimited_setting

    def limit_process(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        name, unlimited = self._unlimited_setting
        (self._folder / name).write_text(unlimited)
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # the process has ended, or is about to
                (self._folder.parent / "cgroup.procs").write_text(pid)
        wait_until_sync(self._is_removed, 10.0, what=f"{self._folder} to be empty")

    def _is_removed(self) -> bool:
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return not self._folder.exists()


def _create_group(cores: float) -> _ControlGroup | None:
    """Create a control group of the available version. Returns `None` without the rights, or if no version
    limits CPU."""
    name = f"batch-dispatcher-test-{os.getpid()}-{next(_numbers)}"
    quota, period = str(round(cores * PERIOD_S * 1e6)), str(round(PERIOD_S * 1e6))
    candidates = (
        (_CGROUPS / "cpu" / name, {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}, "-1"),
        (_CGROUPS / name, {"cpu.max": f"{quota} {period}"}, f"max {period}"),
    )
    for folder, limits, unlimited in candidates:
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, value in limits.items():
                with (folder / file).open(
                    "r+"
                ) as limit_file:  # a folder that is no control group has no such files
                    limit_file.write(value)
        except OSError:
            folder.rmdir()
            continue
        return _ControlGroup(folder, (list(limits)[-1], unlimited))
    return None


class _SignalLimit:
    kind = "signals"

    def __init__(self, cores: float) -> None:
        self._share_s = cores * PERIOD_S
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def limit_process(self, pid: int) -> None:
        thread = threading.Thread(
            target=self._stop_and_continue, args=(pid,), name=f"throttle of {pid}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _stop_and_continue(self, pid: int) -> None:
        clock = ~pid << 3 | 2  # clock of the CPU time of the whole process: clock_getcpuclockid(3)
        used_up_at = float("inf")
        with contextlib.suppress(OSError):  # the process has ended
            while not self._ended.is_set():
                ends_at = time.monotonic() + PERIOD_S
                # Checks happen at intervals, so excess time is subtracted from the next period.
                used_up_at = min(used_up_at, time.clock_gettime(clock)) + self._share_s
                while (left_s := ends_at - time.monotonic()) > 0:
                    if time.clock_gettime(clock) >= used_up_at:
                        os.kill(pid, signal.SIGSTOP)
                        try:
                            self._ended.wait(left_s)
                        finally:
                            os.kill(pid, signal.SIGCONT)
                        break
                    self._ended.wait(_CHECK_INTERVAL_S)
