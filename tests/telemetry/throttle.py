"""A CPU limit for a process of a test, as a container has it: so much of each tenth of a second, then a stop.

By a control group where we may make one; else by signals, which need no rights: the process is stopped when
it has used up its share and goes on when the next period begins.
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
_LOOK_S = 0.002
_GROUPS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class Throttle(Protocol):
    kind: str
    """`cgroup` or `signals`."""

    def hold(self, pid: int) -> None:
        """From now on the process, which has no children yet, gets no more than the limit."""


@contextlib.contextmanager
def cpu_limit(cores: float, kind: str = "") -> Iterator[Throttle]:
    """A limit that is lifted at the end of the block. `kind`: this way or none; empty: as it can be had."""
    group = _make_group(cores) if kind in ("", "cgroup") else None
    if group is not None:
        try:
            yield group
        finally:
            group.remove()
        return
    if kind == "cgroup":
        raise OSError("no control group can be made here")
    signals = _Signals(cores)
    try:
        yield signals
    finally:
        signals.end()


class _Group:
    kind = "cgroup"

    def __init__(self, folder: Path, lift: tuple[str, str]) -> None:
        self._folder = folder
        self._lift = lift

    def hold(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        name, unlimited = self._lift
        (self._folder / name).write_text(unlimited)
        for pid in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended, or is about to
                (self._folder.parent / "cgroup.procs").write_text(pid)
        wait_until_sync(self._gone, 10.0, what=f"{self._folder} to be empty")

    def _gone(self) -> bool:
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return not self._folder.exists()


def _make_group(cores: float) -> _Group | None:
    """Of whichever version is there; None where we may not, or where neither limits CPU."""
    name = f"batch-dispatcher-test-{os.getpid()}-{next(_numbers)}"
    quota, period = str(round(cores * PERIOD_S * 1e6)), str(round(PERIOD_S * 1e6))
    ways = (
        (_GROUPS / "cpu" / name, {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}, "-1"),
        (_GROUPS / name, {"cpu.max": f"{quota} {period}"}, f"max {period}"),
    )
    for folder, limits, unlimited in ways:
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, value in limits.items():
                with (folder / file).open("r+") as there:  # in a folder of the wrong kind, none is made
                    there.write(value)
        except OSError:
            folder.rmdir()
            continue
        return _Group(folder, (list(limits)[-1], unlimited))
    return None


class _Signals:
    kind = "signals"

    def __init__(self, cores: float) -> None:
        self._share_s = cores * PERIOD_S
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def hold(self, pid: int) -> None:
        thread = threading.Thread(
            target=self._stop_and_go, args=(pid,), name=f"throttle of {pid}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _stop_and_go(self, pid: int) -> None:
        clock = ~pid << 3 | 2  # of the whole process' CPU time: clock_getcpuclockid(3)
        used_up_at = float("inf")
        with contextlib.suppress(OSError):  # it has ended
            while not self._ended.is_set():
                ends_at = time.monotonic() + PERIOD_S
                # What it took too much, for we look only now and then, it lacks in the next period.
                used_up_at = min(used_up_at, time.clock_gettime(clock)) + self._share_s
                while (left_s := ends_at - time.monotonic()) > 0:
                    if time.clock_gettime(clock) >= used_up_at:
                        os.kill(pid, signal.SIGSTOP)
                        try:
                            self._ended.wait(left_s)
                        finally:
                            os.kill(pid, signal.SIGCONT)
                        break
                    self._ended.wait(_LOOK_S)
