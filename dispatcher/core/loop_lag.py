"""Lag of the event loop: how much later than requested it wakes a task.

Timeouts run by the clock, but the code that they wait for runs on the loop. A loop that gets too little CPU
misses answers that came in time, and blames a peer for its own delay. A task therefore sleeps again and again
until a given time, and the lag is how late it is woken.

    lag ──▶ the last WINDOW_S:   share = Σ lag / Σ time     longest = max lag

    fine ── share ≥ SLOW_SHARE, or longest ≥ STALL_S ──▶ slow
    slow ── share < FINE_SHARE, and longest < STALL_S ─▶ fine

If a CPU limit throttles the process most of the time, FINE_SHARE already counts as slow: the process is woken
soon, in the next period of the limit, but with hardly any CPU time left to do anything.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
SLOW_SHARE = 0.25
"""Share of the passed time. A process that a CPU limit throttles in every period is late by a quarter or
more; one that is merely busy, by less."""
FINE_SHARE = 0.15
STALL_S = 1.0
"""Lag that uses up most of the time that a connection to Redis or the gateway may take."""
QUIET_S = 300.0
"""Minimum time between two log messages about a slow loop."""


class Pace:
    """Summary of the lags in the last WINDOW_S."""

    def __init__(self) -> None:
        self.behind_s = 0.0
        """Sum of all lags so far."""
        self.slow = False
        self.held_up = False
        """True if a CPU limit throttled the process in most of the recent periods."""
        self._lags: deque[tuple[float, float, float]] = deque()
        """Time of each wake-up, time since the previous one, and lag."""
        self._told_at = float("-inf")

    def __repr__(self) -> str:
        state = "slow" if self.slow else "fine"
        return f"<Pace {state}: behind for {self.share:.0%}, at most {self.longest_s:.2f} s>"

    @property
    def longest_s(self) -> float:
        """Longest lag in the window."""
        return max((late_s for _, _, late_s in self._lags), default=0.0)

    @property
    def share(self) -> float:
        """Share of the window's time for which the loop was late."""
        passed_s = sum(passed_s for _, passed_s, _ in self._lags)
        return sum(late_s for *_, late_s in self._lags) / passed_s if passed_s else 0.0

    def woke(self, at: float, passed_s: float, late_s: float) -> bool:
        """Record that the loop woke a task at `at`, `passed_s` after the last time and `late_s` too late.
        Return True if the loop has become slow and that was not logged for LOG_INTERVAL_S."""
        self.behind_s += late_s
        self._lags.append((at, passed_s, late_s))
        while self._lags[0][0] <= at - WINDOW_S:
            self._lags.popleft()
        before, stalled = self.slow, self.longest_s >= STALL_S
        # Two thresholds, so that a lag in between does not switch the state back and forth.
        most = FINE_SHARE if before or self.held_up else SLOW_SHARE
        self.slow = stalled or (self._whole and self.share >= most)
        if not self.slow or before or at - self._told_at < QUIET_S:
            return False
        self._told_at = at
        return True

    @property
    def _whole(self) -> bool:
        """True if the window is long enough for its share to be meaningful."""
        return sum(passed_s for _, passed_s, _ in self._lags) >= WINDOW_S / 2
