"""Lag of the event loop, and whether a CPU limit causes it.

The kernel stops a process that has used up its CPU limit until the next period starts, usually 100 ms later.
`cpu.stat` of the control group counts the periods in which that happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatcher.common.loop_lag import WINDOW_S, LoopLag

CHECK_INTERVAL_S = 0.25
THROTTLED_SHARE = 0.75
"""Share of the periods in which the process wanted to run and was stopped, at which the CPU limit is reported
as the cause."""
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """CPU limit of the control group of this process, and how often the process reached it."""

    cores: float | None
    """Limit in cores, or `None` if there is no limit."""
    period_count: int
    """Number of periods in which the process wanted to run."""
    throttled_count: int
    """Number of these periods in which the process was stopped."""


class LoopLagWatch:
    """Task that measures the lag of the event loop it runs on. It calls `on_slow` when the loop has become
    slow, at most once in a few minutes."""

    def __init__(
        self, on_slow: Callable[[], None] = lambda: None, *, check_interval_s: float = CHECK_INTERVAL_S
    ) -> None:
        self.lag = LoopLag()
        self.check_interval_s = check_interval_s
        self._on_slow = on_slow
        self._baseline = self._next_baseline = read_cpu_limit()
        """Counters to compare with. They are one to two windows old; `_next_baseline` replaces them one
        window later."""
        self._baseline_at = 0.0

    @property
    def problem(self) -> str | None:
        """One sentence with the problem and its remedy, or `None` if the loop is not slow."""
        lag = self.lag
        if not lag.is_slow:
            return None
        summary = (
            f"this process gets too little CPU: in the last {WINDOW_S:g} s its event loop was behind for "
            f"{lag.lag_share:.0%} of the time, at worst by {lag.longest_lag_s:.1f} s"
        )
        return f"{summary}; {self.describe_cause()}"

    def describe_cause(self) -> str:
        """Return the likely cause of the lag and its remedy, as the end of a sentence."""
        share, cores = self.throttling
        if share and cores is not None:
            return f"its CPU limit of {cores:g} cores stopped it in {share:.0%} of the periods: raise it"
        return "raise its CPU limit or request, or see what else runs on its node"

    async def watch_loop(self) -> None:
        """Measure the lag until cancelled."""
        clock = asyncio.get_running_loop().time
        woken_at = self._baseline_at = clock()
        while True:
            await asyncio.sleep(self.check_interval_s)
            now = clock()
            passed_s, woken_at = now - woken_at, now
            if now - self._baseline_at >= WINDOW_S:
                # With two baselines a share always covers at least one whole window.
                self._baseline_at, self._baseline, self._next_baseline = (
                    now,
                    self._next_baseline,
                    read_cpu_limit(),
                )
                share = _compute_throttled_share(self._baseline, self._next_baseline)
                self.lag.is_throttled = share is not None and share >= THROTTLED_SHARE
            if self.lag.record_wake_up(now, passed_s, max(0.0, passed_s - self.check_interval_s)):
                self._on_slow()

    @property
    def throttling(self) -> tuple[float | None, float | None]:
        """Share of the last periods in which the limit stopped the process, and the limit in cores. Both are
        `None` if they are not known."""
        newest = read_cpu_limit()
        share = _compute_throttled_share(self._baseline, newest)
        return (None, None) if share is None or newest is None else (round(share, 2), newest.cores)


def _compute_throttled_share(before: CpuLimit | None, after: CpuLimit | None) -> float | None:
    """Return the share of the periods between two readings in which the process was stopped, or `None` if a
    reading is missing."""
    if before is None or after is None:
        return None
    periods = after.period_count - before.period_count
    # No period has passed if the process did not want to run: it cannot have been stopped.
    return (after.throttled_count - before.throttled_count) / periods if periods > 0 else 0.0


def read_cpu_limit(
    cgroup_root: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE
) -> CpuLimit | None:
    """Return the CPU limit of the control group of this process, or `None` if it cannot be read."""
    try:
        lines = [line.split(":", 2) for line in own_cgroup_file.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, name in lines:
        # cgroup v2 has one line without controllers, v1 one line per hierarchy.
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container /proc/self/cgroup shows the name on the host, but the group is mounted as root.
        mounts = [cgroup_root / controllers, cgroup_root / "cpu"] if controllers else [cgroup_root]
        for folder in [path for mount in mounts for path in (mount / name.lstrip("/"), mount)]:
            limit = _read_cgroup_limit(folder)
            if limit is not None:
                return limit
    return None


def _read_cgroup_limit(folder: Path) -> CpuLimit | None:
    """Read the limit from a folder of cgroup v2 (`cpu.max`) or v1 (`cpu.cfs_*`)."""
    try:
        stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        # No limit is written as "max" in v2 and as -1 in v1.
        cores = None if quota in ("max", "-1") else int(quota) / int(period)
        return CpuLimit(cores, int(stat["nr_periods"]), int(stat["nr_throttled"]))
    except (OSError, ValueError, KeyError):
        return None
