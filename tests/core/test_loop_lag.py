"""When an event loop counts as too slow, and how often that is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.loop_lag import FINE_SHARE, LOG_INTERVAL_S, SLOW_SHARE, STALL_S, WINDOW_S, LoopLag

STEP_S = 0.25


class Loop:
    """Wakes the watch, late by what it is told."""

    def __init__(self) -> None:
        self.pace = LoopLag()
        self.now = 1000.0

    def wakes(self, *lags_s: float) -> int:
        """One wake-up after the other; how often that was worth telling."""
        told = 0
        for late_s in lags_s:
            self.now += STEP_S + late_s
            told += self.pace.record_wake_up(self.now, STEP_S + late_s, late_s)
        return told

    def goes_on(self, seconds: float, share: float = 0.0) -> int:
        """For so long, behind for this share of the time."""
        late_s, until, told = STEP_S * share / (1 - share), self.now + seconds, 0
        while self.now < until:
            told += self.wakes(late_s)
        return told


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_loop_that_is_on_time_is_fine(loop: Loop) -> None:
    assert loop.goes_on(60) == 0
    assert (loop.pace.is_slow, loop.pace.lag_share, loop.pace.longest_lag_s, loop.pace.total_lag_s) == (
        False,
        0,
        0,
        0,
    )


def test_loop_that_is_behind_for_too_much_of_the_time_is_slow(loop: Loop) -> None:
    assert loop.goes_on(60, SLOW_SHARE + 0.02) == 1
    assert loop.pace.is_slow
    assert loop.pace.lag_share == pytest.approx(SLOW_SHARE + 0.02)


def test_less_will_do_where_a_cpu_limit_holds_the_process_up(loop: Loop) -> None:
    """It is woken soon, in the next period, but gets nothing done in it."""
    share = (FINE_SHARE + SLOW_SHARE) / 2
    assert loop.goes_on(60, share) == 0
    loop.pace.is_throttled = True
    assert loop.goes_on(60, share) == 1
    loop.pace.is_throttled = False
    assert loop.goes_on(60, FINE_SHARE - 0.02) == 0
    assert not loop.pace.is_slow


def test_a_bad_moment_at_the_start_is_no_share_of_the_time(loop: Loop) -> None:
    assert loop.wakes(0.9) == 0
    assert loop.goes_on(WINDOW_S) == 0


def test_one_long_stall_is_slow_for_as_long_as_it_is_in_the_window(loop: Loop) -> None:
    assert loop.goes_on(WINDOW_S) == 0
    assert loop.wakes(STALL_S) == 1
    assert loop.goes_on(WINDOW_S / 2) == 0
    assert loop.pace.is_slow
    loop.goes_on(WINDOW_S / 2 + STEP_S)
    assert not loop.pace.is_slow


def test_it_is_fine_again_only_when_it_is_clearly_better(loop: Loop) -> None:
    loop.goes_on(WINDOW_S, SLOW_SHARE + 0.02)
    loop.goes_on(2 * WINDOW_S, (SLOW_SHARE + FINE_SHARE) / 2)
    assert loop.pace.is_slow
    loop.goes_on(2 * WINDOW_S, FINE_SHARE - 0.02)
    assert not loop.pace.is_slow


def test_what_comes_and_goes_is_told_once_in_a_while(loop: Loop) -> None:
    began_at, told = loop.now, 0
    while loop.now < began_at + 2 * LOG_INTERVAL_S:
        told += loop.goes_on(WINDOW_S, SLOW_SHARE + 0.05) + loop.goes_on(2 * WINDOW_S)
    assert told == 2
    loop.goes_on(LOG_INTERVAL_S)
    assert loop.goes_on(WINDOW_S, SLOW_SHARE + 0.05) == 1


def test_what_lasts_is_not_repeated(loop: Loop) -> None:
    assert loop.goes_on(3 * LOG_INTERVAL_S, SLOW_SHARE + 0.02) == 1


@given(st.lists(st.floats(0, 30), min_size=1, max_size=300))
def test_figures_are_those_of_the_window(lags_s: list[float]) -> None:
    loop = Loop()
    woken: list[tuple[float, float]] = []
    for late_s in lags_s:
        loop.wakes(late_s)
        woken.append((loop.now, late_s))
    kept = [late_s for at, late_s in woken if at > loop.now - WINDOW_S]
    assert loop.pace.longest_lag_s == max(kept)
    assert loop.pace.lag_share == pytest.approx(sum(kept) / (sum(kept) + STEP_S * len(kept)))
    assert 0 <= loop.pace.lag_share < 1
    assert loop.pace.total_lag_s == pytest.approx(sum(lags_s))
