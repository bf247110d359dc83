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
LOG_INTERVAL_S = 300.0
"""Minimum time between two log messages about a slow loop."""


class LoopLag:
    """Summary of the lags in the last WINDOW_S."""

    def __init__(self) -> None:
        self.total_lag_s = 0.0
        """Sum of all lags so far."""
        self.is_slow = False
        self.is_throttled = False
        """True if a CPU limit throttled the process in most of the recent periods."""
        self._lags: deque[tuple[float, float, float]] = deque()
        """Time of each wake-up, time since the previous one, and lag."""
        self._logged_at = float("-inf")

    def __repr__(self) -> str:
        state = "slow" if self.is_slow else "fine"
        return f"<LoopLag {state}: behind for {self.lag_share:.0%}, at most {self.longest_lag_s:.2f} s>"

    @property
    def longest_lag_s(self) -> float:
        """Longest lag in the window."""
        return max((late_s for _, _, late_s in self._lags), default=0.0)

    @property
    def lag_share(self) -> float:
        """Share of the window's time for which the loop was late."""
        passed_s = sum(passed_s for _, passed_s, _ in self._lags)
        return sum(late_s for *_, late_s in self._lags) / passed_s if passed_s else 0.0

    def record_wake_up(self, at: float, passed_s: float, late_s: float) -> bool:
        """Record that the loop woke a task at `at`, `passed_s` after the last time and `late_s` too late.
        Return True if the loop has become slow and that was not logged for LOG_INTERVAL_S."""
        self.total_lag_s += late_s
        self._lags.append((at, passed_s, late_s))
        while self._lags[0][0] <= at - WINDOW_S:
            self._lags.popleft()
        was_slow, has_stalled = self.is_slow, self.longest_lag_s >= STALL_S
        # Two thresholds, so that a lag in between does not switch the state back and forth.
        most = FINE_SHARE if was_slow or self.is_throttled else SLOW_SHARE
        self.is_slow = has_stalled or (self._is_window_filled and self.lag_share >= most)
        if not self.is_slow or was_slow or at - self._logged_at < LOG_INTERVAL_S:
            return False
        self._logged_at = at
        return True

    @property
    def _is_window_filled(self) -> bool:
        """True if the window is long enough for its share to be meaningful."""
        return sum(passed_s for _, passed_s, _ in self._lags) >= WINDOW_S / 2
