"""Does the event loop keep pace with the clock?

Time limits run by the clock, what they wait for runs on the loop: a loop that gets too little CPU misses
answers that came in time, and blames a peer for its own delay. So a task asks again and again to be woken at
a time, and how late it is woken is the loop's lag.

    lag ──▶ the last WINDOW_S:   share = Σ lag / Σ time     longest = max lag

    fine ── share ≥ SLOW_SHARE, or longest ≥ STALL_S ──▶ slow
    slow ── share < FINE_SHARE, and longest < STALL_S ─▶ fine

Where a CPU limit holds the process up most of the time, FINE_SHARE is too much already: it is woken soon, in
the next period of the limit, but with next to no time to do anything in.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
SLOW_SHARE = 0.25
"""Of the time that passed. A process that a CPU limit holds up at every turn is late by a quarter and more;
one that is only busy, by less."""
FINE_SHARE = 0.15
STALL_S = 1.0
"""Most of the time that a connection to Redis or the gateway may take."""
QUIET_S = 300.0
"""A loop that is slow now and then is told of no more often."""


class Pace:
    """What the lags of the last WINDOW_S come to."""

    def __init__(self) -> None:
        self.behind_s = 0.0
        """The sum of all lags so far."""
        self.slow = False
        self.held_up = False
        """A CPU limit stopped the process in most of the last periods."""
        self._lags: deque[tuple[float, float, float]] = deque()
        """When it was woken, how long after the wake-up before, how late."""
        self._told_at = float("-inf")

    def __repr__(self) -> str:
        state = "slow" if self.slow else "fine"
        return f"<Pace {state}: behind for {self.share:.0%}, at most {self.longest_s:.2f} s>"

    @property
    def longest_s(self) -> float:
        """The longest lag in the window."""
        return max((late_s for _, _, late_s in self._lags), default=0.0)

    @property
    def share(self) -> float:
        """Of the window's time, for which the loop was behind."""
        passed_s = sum(passed_s for _, passed_s, _ in self._lags)
        return sum(late_s for *_, late_s in self._lags) / passed_s if passed_s else 0.0

    def woke(self, at: float, passed_s: float, late_s: float) -> bool:
        """The loop woke a task at `at`, `passed_s` after the last time and `late_s` too late.

        True: it has become slow, and that has not been told for QUIET_S.
        """
        self.behind_s += late_s
        self._lags.append((at, passed_s, late_s))
        while self._lags[0][0] <= at - WINDOW_S:
            self._lags.popleft()
        before, stalled = self.slow, self.longest_s >= STALL_S
        most = FINE_SHARE if before or self.held_up else SLOW_SHARE
        self.slow = stalled or (self._whole and self.share >= most)
        if not self.slow or before or at - self._told_at < QUIET_S:
            return False
        self._told_at = at
        return True

    @property
    def _whole(self) -> bool:
        """The window tells of long enough that a share means something."""
        return sum(passed_s for _, passed_s, _ in self._lags) >= WINDOW_S / 2
