"""Conditions under which an event loop counts as slow, and how often that is logged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.loop_lag import FINE_SHARE, LOG_INTERVAL_S, SLOW_SHARE, STALL_S, WINDOW_S, LoopLag

STEP_S = 0.25


class SimulatedLoop:
    """Event loop that wakes its task with given lags."""

    def __init__(self) -> None:
        self.lag = LoopLag()
        self.now = 1000.0

    def wake(self, *lags_s: float) -> int:
        """Wake the task once for each lag. Return how many of these wake-ups were to be logged."""
        log_count = 0
        for late_s in lags_s:
            self.now += STEP_S + late_s
            log_count += self.lag.record_wake_up(self.now, STEP_S + late_s, late_s)
        return log_count

    def run_for(self, seconds: float, lag_share: float = 0.0) -> int:
        """Wake the task for this many seconds, late for this share of the time. Return the number of logs."""
        late_s, until, log_count = STEP_S * lag_share / (1 - lag_share), self.now + seconds, 0
        while self.now < until:
            log_count += self.wake(late_s)
        return log_count


@pytest.fixture
def loop() -> SimulatedLoop:
    return SimulatedLoop()


def test_loop_that_is_on_time_is_not_slow(loop: SimulatedLoop) -> None:
    assert loop.run_for(60) == 0
    assert (loop.lag.is_slow, loop.lag.lag_share, loop.lag.longest_lag_s, loop.lag.total_lag_s) == (
        False,
        0,
        0,
        0,
    )


def test_loop_that_is_behind_for_too_much_of_the_time_is_slow(loop: SimulatedLoop) -> None:
    assert loop.run_for(60, SLOW_SHARE + 0.02) == 1
    assert loop.lag.is_slow
    assert loop.lag.lag_share == pytest.approx(SLOW_SHARE + 0.02)


def test_throttled_loop_is_slow_at_a_smaller_share_of_lag(loop: SimulatedLoop) -> None:
    """A throttled process is woken in the next period of the limit, but gets hardly any CPU time in it."""
    share = (FINE_SHARE + SLOW_SHARE) / 2
    assert loop.run_for(60, share) == 0
    loop.lag.is_throttled = True
    assert loop.run_for(60, share) == 1
    loop.lag.is_throttled = False
    assert loop.run_for(60, FINE_SHARE - 0.02) == 0
    assert not loop.lag.is_slow


def test_lag_at_the_start_does_not_count_until_the_window_is_filled(loop: SimulatedLoop) -> None:
    assert loop.wake(0.9) == 0
    assert loop.run_for(WINDOW_S) == 0


def test_loop_is_slow_while_a_long_stall_is_in_the_window(loop: SimulatedLoop) -> None:
    assert loop.run_for(WINDOW_S) == 0
    assert loop.wake(STALL_S) == 1
    assert loop.run_for(WINDOW_S / 2) == 0
    assert loop.lag.is_slow
    loop.run_for(WINDOW_S / 2 + STEP_S)
    assert not loop.lag.is_slow


def test_slow_loop_recovers_only_below_the_lower_threshold(loop: SimulatedLoop) -> None:
    loop.run_for(WINDOW_S, SLOW_SHARE + 0.02)
    loop.run_for(2 * WINDOW_S, (SLOW_SHARE + FINE_SHARE) / 2)
    assert loop.lag.is_slow
    loop.run_for(2 * WINDOW_S, FINE_SHARE - 0.02)
    assert not loop.lag.is_slow


def test_repeated_slowness_is_logged_at_most_once_per_interval(loop: SimulatedLoop) -> None:
    began_at, log_count = loop.now, 0
    while loop.now < began_at + 2 * LOG_INTERVAL_S:
        log_count += loop.run_for(WINDOW_S, SLOW_SHARE + 0.05) + loop.run_for(2 * WINDOW_S)
    assert log_count == 2
    loop.run_for(LOG_INTERVAL_S)
    assert loop.run_for(WINDOW_S, SLOW_SHARE + 0.05) == 1


def test_lasting_slowness_is_logged_only_once(loop: SimulatedLoop) -> None:
    assert loop.run_for(3 * LOG_INTERVAL_S, SLOW_SHARE + 0.02) == 1


@given(st.lists(st.floats(0, 30), min_size=1, max_size=300))
def test_lag_figures_cover_only_the_window(lags_s: list[float]) -> None:
    loop = SimulatedLoop()
    wake_ups: list[tuple[float, float]] = []
    for late_s in lags_s:
        loop.wake(late_s)
        wake_ups.append((loop.now, late_s))
    lags_in_window = [late_s for at, late_s in wake_ups if at > loop.now - WINDOW_S]
    assert loop.lag.longest_lag_s == max(lags_in_window)
    assert loop.lag.lag_share == pytest.approx(
        sum(lags_in_window) / (sum(lags_in_window) + STEP_S * len(lags_in_window))
    )
    assert 0 <= loop.lag.lag_share < 1
    assert loop.lag.total_lag_s == pytest.approx(sum(lags_s))
