"""How late the event loop is, and what holds it up where a CPU limit does.

The kernel stops a process that has used up its limit until the next period begins, a tenth of a second
usually; the control group's `cpu.stat` counts the periods in which it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dispatcher.core.loop_lag import WINDOW_S, Pace

STEP_S = 0.25
HELD_UP_SHARE = 0.75
"""Of the periods in which the process wanted to run: in so many it was stopped where a limit holds it up."""
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Limit:
    """The CPU limit of this process's control group, and how often it was reached."""

    cores: float | None
    """None: there is none."""
    periods: int
    """In which the process wanted to run."""
    throttled: int
    """Of these, in which it was stopped."""


class PaceWatch:
    """Watches the loop that it runs on; `on_slow` is called when it has become slow, not too often."""

    def __init__(self, on_slow: Callable[[], None] = lambda: None, *, step_s: float = STEP_S) -> None:
        self.pace = Pace()
        self.step_s = step_s
        self._on_slow = on_slow
        self._before = self._next = read_limit()
        """What is counted from: how it stood one to two windows ago, and what takes its place."""
        self._looked_at = 0.0

    @property
    def problem(self) -> str | None:
        """What is wrong with the loop's pace and what mends it, in one sentence; None: nothing is."""
        pace = self.pace
        if not pace.slow:
            return None
        told = (
            f"this process gets too little CPU: in the last {WINDOW_S:g} s its event loop was behind for "
            f"{pace.share:.0%} of the time, at worst by {pace.longest_s:.1f} s"
        )
        return f"{told}; {self.cause()}"

    def cause(self) -> str:
        """What holds the process up, as far as that is known, and what mends it."""
        share, cores = self.throttled
        if share and cores is not None:
            return f"its CPU limit of {cores:g} cores stopped it in {share:.0%} of the periods: raise it"
        return "raise its CPU limit or request, or see what else runs on its node"

    async def run(self) -> None:
        """Watch until cancelled."""
        clock = asyncio.get_running_loop().time
        before = self._looked_at = clock()
        while True:
            await asyncio.sleep(self.step_s)
            now = clock()
            passed_s, before = now - before, now
            if now - self._looked_at >= WINDOW_S:
                self._looked_at, self._before, self._next = now, self._next, read_limit()
                share = _stopped(self._before, self._next)
                self.pace.held_up = share is not None and share >= HELD_UP_SHARE
            if self.pace.woke(now, passed_s, max(0.0, passed_s - self.step_s)):
                self._on_slow()

    @property
    def throttled(self) -> tuple[float | None, float | None]:
        """In what share of the last periods the limit stopped us, and the limit in cores; None: unknown."""
        newest = read_limit()
        share = _stopped(self._before, newest)
        return (None, None) if share is None or newest is None else (round(share, 2), newest.cores)


def _stopped(before: Limit | None, after: Limit | None) -> float | None:
    """In what share of the periods between the limit stopped the process; None: unknown."""
    if before is None or after is None:
        return None
    periods = after.periods - before.periods
    return (after.throttled - before.throttled) / periods if periods > 0 else 0.0


def read_limit(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> Limit | None:
    """The CPU limit that the control group of this process has; None where nothing tells."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, name in lines:
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container its own group is the root of what it sees, whatever the name outside.
        mounts = [groups / controllers, groups / "cpu"] if controllers else [groups]
        for folder in [path for mount in mounts for path in (mount / name.lstrip("/"), mount)]:
            found = _limit(folder)
            if found is not None:
                return found
    return None


def _limit(folder: Path) -> Limit | None:
    """Of either version of control groups."""
    try:
        stat = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = None if quota in ("max", "-1") else int(quota) / int(period)
        return Limit(cores, int(stat["nr_periods"]), int(stat["nr_throttled"]))
    except (OSError, ValueError, KeyError):
        return None
