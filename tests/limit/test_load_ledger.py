"""Bounds of the number of batch requests in a reading, compared with a model that counts all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.load_ledger import DELTA_S, HALF_LIFE_S, LoadBounds, LoadLedger

HORIZON_S = 20.0
Interval = tuple[float, float | None]
"""Times at which a request was sent and answered. `None` if it was not answered yet."""


def make_ledger(intervals: list[Interval], units: Sequence[int] | None = None) -> LoadLedger:
    ledger = LoadLedger(HORIZON_S)
    for key, (sent, _) in enumerate(intervals):
        ledger.record_send(key, sent, 1 if units is None else units[key])
    for key, (_, answered) in enumerate(intervals):
        if answered is not None:
            ledger.record_answer(key, answered)
    return ledger


def count_at_every_moment(
    intervals: list[tuple[float, float]], a: float, b: float, contains: Callable[[float, float, float], bool]
) -> list[int]:
    """Return the number of intervals at each moment of [a, b] at which it can change, and between them."""
    times = sorted({a, b} | {time for interval in intervals for time in interval if a < time < b})
    moments = times + [(one + other) / 2 for one, other in pairwise(times)]
    return [sum(contains(start, moment, end) for start, end in intervals) for moment in moments]


def is_strictly_inside(start: float, moment: float, end: float) -> bool:
    return start < moment < end


def is_inside(start: float, moment: float, end: float) -> bool:
    return start <= moment <= end


TIMES = st.one_of(st.integers(0, 40).map(lambda n: n / 20), st.floats(0, 2))
INTERVALS = st.lists(
    st.tuples(TIMES, st.one_of(st.none(), TIMES)).map(
        lambda interval: (interval[0], None if interval[1] is None else max(interval[0], interval[1]))
    ),
    max_size=12,
)


@given(INTERVALS, TIMES, TIMES)
def test_bounds_equal_the_counts_at_every_moment(intervals: list[Interval], one: float, other: float) -> None:
    """If a request ends at the moment another begins, `lo` may be the smaller one of both interpretations."""
    a, b = sorted((one, other))
    bounds = make_ledger(intervals).bounds_between(a, b)
    possible = [(sent, float("inf") if answered is None else answered) for sent, answered in intervals]
    certain = [(start + DELTA_S, end - DELTA_S) for start, end in possible if start + DELTA_S < end - DELTA_S]
    assert bounds.hi == max(count_at_every_moment(possible, a, b, is_inside))
    least = (
        count_at_every_moment(certain, a, b, is_strictly_inside),
        count_at_every_moment(certain, a, b, is_inside),
    )
    assert min(least[0]) <= bounds.lo <= min(least[1])
    assert bounds.own_lo == bounds.lo


def test_request_sent_again_under_the_same_key_counts_once() -> None:
    ledger = LoadLedger(HORIZON_S)
    ledger.record_send("a", 1.0, 3)
    ledger.record_send("a", 2.0, 2)
    assert ledger.own_units == 2
    ledger.record_answer("a", 3.0)
    assert ledger.own_units == 0


@given(INTERVALS, st.lists(st.integers(1, 8), min_size=12, max_size=12), TIMES, TIMES)
def test_request_of_several_units_counts_like_as_many_requests(
    intervals: list[Interval], units: list[int], one: float, other: float
) -> None:
    a, b = sorted((one, other))
    weighted = make_ledger(intervals, units)
    repeated = make_ledger(
        [interval for interval, count in zip(intervals, units, strict=False) for _ in range(count)]
    )
    assert weighted.bounds_between(a, b) == repeated.bounds_between(a, b)
    assert weighted.own_units == repeated.own_units


@given(
    INTERVALS,
    st.lists(st.integers(1, 8), min_size=12, max_size=12),
    TIMES,
    TIMES,
    st.integers(0, 60),
)
def test_bounds_of_a_reading_that_counts_calls_are_limited_by_its_items_beyond_calls(
    intervals: list[Interval], units: list[int], one: float, other: float, items_beyond_calls: int
) -> None:
    a, b = sorted((one, other))
    weighted = make_ledger(intervals, units)
    all_units, calls = weighted.bounds_between(a, b), make_ledger(intervals).bounds_between(a, b)
    bounds = weighted.bounds_between(a, b, items_beyond_calls=items_beyond_calls)
    assert bounds == LoadBounds(
        lo=min(all_units.lo, calls.lo + items_beyond_calls),
        hi=min(all_units.hi, calls.hi + items_beyond_calls),
        own_lo=min(all_units.own_lo, calls.own_lo + items_beyond_calls),
    )
    assert weighted.call_count == make_ledger(intervals).own_units


def test_units_of_others_may_be_calls_only_while_ours_are() -> None:
    ledger = LoadLedger(HORIZON_S)
    for at in (0.0, 10.0, 100.0):
        ledger.record_lease_count(at, 8, 0)
    ledger.record_send("a", 1.0)
    assert ledger.bounds_between(5.0, 6.0, items_beyond_calls=0.0) == LoadBounds(9, 9, 1)
    ledger.record_send("b", 2.0, 4)
    assert ledger.bounds_between(5.0, 6.0, items_beyond_calls=0.0) == LoadBounds(2, 10, 2)
    assert ledger.bounds_between(5.0, 6.0, items_beyond_calls=2.5) == LoadBounds(4, 13, 4)
    assert ledger.bounds_between(5.0, 6.0) == LoadBounds(13, 13, 5)
    ledger.record_answer("b", 7.0)
    assert ledger.bounds_between(8.0, 9.0, items_beyond_calls=0.0) == LoadBounds(1, 9, 1), (
        "others may still have such calls"
    )
    assert ledger.bounds_between(50.0, 60.0, items_beyond_calls=0.0) == LoadBounds(9, 9, 1)


@given(INTERVALS, st.randoms(use_true_random=False), TIMES, TIMES)
def test_order_of_recorded_answers_does_not_matter(
    intervals: list[Interval], random: Random, one: float, other: float
) -> None:
    a, b = sorted((one, other))
    shuffled = list(intervals)
    random.shuffle(shuffled)
    assert make_ledger(shuffled).bounds_between(a, b) == make_ledger(intervals).bounds_between(a, b)


COUNTS = st.lists(
    st.tuples(TIMES, st.integers(-1, 3), st.integers(-1, 4)), max_size=10, unique_by=lambda count: count[0]
)


@given(COUNTS, TIMES, TIMES)
def test_units_of_others_are_bounded_by_the_counts_in_and_next_to_the_window(
    counts: list[tuple[float, int, int]], one: float, other: float
) -> None:
    a, b = sorted((one, other))
    counts = sorted(counts, key=lambda count: count[0])
    ledger = LoadLedger(HORIZON_S)
    for at, others, just_leased in counts:
        ledger.record_lease_count(at, others, just_leased)
    before = [count for count in counts if count[0] <= a][-1:]
    inside = [count for count in counts if a < count[0] < b]
    after = [count for count in counts if count[0] >= b][:1]
    nearest = before + inside + after
    certain = [max(0, max(0, others) - max(0, just_leased)) for _, others, just_leased in nearest]
    if not (before and after):
        certain = [0]  # requests may have begun or ended on the side without a count
    if not nearest:
        nearest = counts[:1]
    possible = [max(0, others) for _, others, _ in nearest]
    assert ledger.bounds_between(a, b) == LoadBounds(min(certain), max(possible, default=0), 0)


def test_window_between_two_counts_is_bounded_by_both() -> None:
    ledger = LoadLedger(HORIZON_S)
    for at, others, just_leased in ((1, 5, 0), (2, 9, 2), (3, 4, 1), (4, 8, 0)):
        ledger.record_lease_count(at, others, just_leased)
    assert ledger.bounds_between(0.1, 0.5) == LoadBounds(
        0, 5, 0
    )  # no count before: the first one after it applies
    assert ledger.bounds_between(1.2, 1.4) == LoadBounds(5, 9, 0)
    assert ledger.bounds_between(1.2, 2.5) == LoadBounds(3, 9, 0)
    assert ledger.bounds_between(4.5, 5) == LoadBounds(
        0, 8, 0
    )  # no count after: the requests may have ended since
    assert ledger.other_owners_units == 8


def test_request_certainly_counts_only_apart_from_the_transit_times() -> None:
    ledger = make_ledger([(1.0, 2.0)])
    assert ledger.bounds_between(0.5, 0.9) == LoadBounds(0, 0, 0)
    assert ledger.bounds_between(1.01, 1.01) == LoadBounds(0, 1, 0)
    assert ledger.bounds_between(1.03, 1.97) == LoadBounds(1, 1, 1)
    assert ledger.bounds_between(1.99, 1.99) == LoadBounds(0, 1, 0)
    assert ledger.bounds_between(2.01, 3) == LoadBounds(0, 0, 0)


def test_replaced_request_within_the_window_counts_at_most_once() -> None:
    ledger = make_ledger([(0.0, 5.0), (5.001, None)])
    assert ledger.bounds_between(4, 6) == LoadBounds(0, 1, 0)
    assert ledger.bounds_between(5.2, 6) == LoadBounds(1, 1, 1)


def test_answer_to_a_request_that_was_never_sent_is_ignored() -> None:
    ledger = LoadLedger(HORIZON_S)
    ledger.record_answer("ghost", 1.0)
    assert (ledger.own_units, ledger.bounds_between(0, 2)) == (0, LoadBounds(0, 0, 0))


def test_answer_before_the_request_counts_as_of_the_same_time() -> None:
    ledger = make_ledger([])
    ledger.record_send(1, 5.0)
    ledger.record_answer(1, 4.0)
    assert ledger.bounds_between(3, 6) == LoadBounds(0, 1, 0)


def test_late_lease_count_counts_as_of_the_previous_one() -> None:
    ledger = LoadLedger(HORIZON_S)
    ledger.record_lease_count(5, 3, 0)
    ledger.record_lease_count(4, 7, 0)
    assert ledger.other_owners_units == 7
    ledger.record_lease_count(6, 7, 0)
    assert ledger.bounds_between(5.1, 5.2) == LoadBounds(7, 7, 0)


def test_only_the_first_and_last_of_equal_lease_counts_are_kept() -> None:
    ledger = LoadLedger(HORIZON_S)
    for second in range(100):
        ledger.record_lease_count(second, 4, 0)
    ledger.record_lease_count(100, 6, 0)
    assert len(ledger._lease_counts) == 3
    assert ledger.bounds_between(50, 50.5) == LoadBounds(4, 4, 0)
    assert ledger.bounds_between(99, 99.5) == LoadBounds(4, 6, 0)


def test_memory_is_bounded_by_the_horizon() -> None:
    ledger = LoadLedger(HORIZON_S)
    for n in range(50_000):
        ledger.record_send(n, n / 100)
        ledger.record_answer(n, n / 100 + 0.5)
        ledger.record_lease_count(n / 100, n % 7, 0)
    within_horizon = HORIZON_S * 100
    assert len(ledger._end_times) == len(ledger._start_times) <= 2 * within_horizon + 1024
    assert len(ledger._lease_counts) <= 2 * within_horizon + 1024
    # All requests within the horizon are kept: 50 at any moment, 46 of them certainly.
    opened_at = (50_000 - 1) / 100 - HORIZON_S
    bounds = ledger.bounds_between(opened_at + 0.005, opened_at + 0.005)
    others = [n % 7 for n in range(50_000) if abs(n / 100 - opened_at - 0.005) < 0.0051]
    assert bounds == LoadBounds(46 + min(others), 50 + max(others), 46)


def test_mean_duration_counts_requests_that_are_still_in_flight() -> None:
    """Ten of a hundred requests end within the first seconds. The mean of these ten would be too small."""
    ledger = LoadLedger(HORIZON_S)
    ledger.measure_duration(0.0)
    assert ledger.mean_duration_s == 0.0, "no request was answered"
    for key in range(100):
        ledger.record_send(key, 0.0)
    for second in range(1, 5):
        ledger.measure_duration(float(second))
    for key in range(10):
        ledger.record_answer(key, 4.0)
    ledger.measure_duration(5.0)
    assert ledger.mean_duration_s > 40.0


def test_mean_duration_follows_a_change_of_a_steady_load() -> None:
    ledger, at = LoadLedger(HORIZON_S), 0.0
    for duration_s in (4.0, 12.0):
        for _ in range(600):
            at += 1.0
            ledger.record_send(at, at)
            ledger.record_answer(at - duration_s, at)
            ledger.measure_duration(at)
        assert abs(ledger.mean_duration_s - duration_s) <= 1.0


def test_mean_duration_is_kept_while_nothing_is_sent() -> None:
    ledger = LoadLedger(HORIZON_S)
    ledger.measure_duration(0.0)
    ledger.record_send("a", 0.0)
    ledger.measure_duration(3.0)
    ledger.record_answer("a", 3.0)
    ledger.measure_duration(4.0)
    before = ledger.mean_duration_s
    ledger.measure_duration(1e9)
    ledger.measure_duration(1e9)
    ledger.measure_duration(5.0)
    assert ledger.mean_duration_s == before > 0.0


def test_older_durations_count_half_after_a_half_life() -> None:
    """A request took one half-life. Its answer is counted a half-life after the time that it took."""
    ledger = LoadLedger(HORIZON_S)
    ledger.measure_duration(0.0)
    ledger.record_send("a", 0.0)
    ledger.measure_duration(HALF_LIFE_S)
    ledger.record_answer("a", HALF_LIFE_S)
    ledger.measure_duration(2 * HALF_LIFE_S)
    assert ledger.mean_duration_s == HALF_LIFE_S / 2


@pytest.mark.parametrize(
    ("duration_s", "certain"),
    [(99.0, 2000 - 3 - 2 * 20), (49.0, 2000 - 3 - 2 * 40), (48.0, 0)],
    ids=["a hundredth", "a fiftieth", "more"],
)
def test_requests_of_others_that_ended_but_still_hold_a_lease_are_not_certain(
    duration_s: float, certain: int
) -> None:
    """Recording the end of a request takes one second. Twice the share that has ended is not certain."""
    ledger = LoadLedger(HORIZON_S)
    ledger.queue_call_s = 1.0
    ledger.measure_duration(0.0)
    ledger.record_lease_count(0.0, 2000, 0)
    assert ledger.bounds_between(0.0, 0.0).lo == 0, "nothing is known of the duration of requests"
    ledger.record_send("a", 0.0)
    ledger.measure_duration(duration_s)
    for at in (duration_s + 0.5, duration_s + 3):
        ledger.record_lease_count(at, 2000, 3)
    bounds = ledger.bounds_between(duration_s + 1, duration_s + 2)
    assert bounds == LoadBounds(1 + certain, 1 + 2000, 1)


def test_lease_count_that_differs_only_in_its_upper_bound_is_kept() -> None:
    ledger = LoadLedger(HORIZON_S)
    for at, others, just_leased in ((1.0, 4, 1), (2.0, 3, 0), (3.0, 3, 0)):
        ledger.record_lease_count(at, others, just_leased)
    assert ledger.bounds_between(2.2, 2.8) == LoadBounds(3, 3, 0)


def test_call_of_one_unit_that_ended_leaves_the_units_of_others_certain() -> None:
    ledger = make_ledger([(1.0, 2.0)])
    for at in (0.0, 10.0):
        ledger.record_lease_count(at, 8, 0)
    assert ledger.bounds_between(5.0, 6.0, items_beyond_calls=0.0) == LoadBounds(8, 8, 0)


def test_duration_of_an_answer_is_returned() -> None:
    ledger = LoadLedger(HORIZON_S)
    ledger.record_send("a", 5.0)
    assert ledger.record_answer("a", 7.5) == 2.5
    assert ledger.record_answer("a", 8.0) is None
    ledger.record_send("a", 5.0)
    assert ledger.record_answer("a", 4.0) == 0.0
    assert ledger.ended_count == 2


@pytest.mark.parametrize(
    ("window", "lo", "hi"),
    [
        ((0.5, 0.75), 0, 0),
        ((0.5, 1.0), 0, 1),
        ((1.25, 1.25), 1, 1),
        ((1.24, 1.5), 0, 1),
        ((1.25, 2.75), 1, 1),
        ((1.25, 2.76), 0, 1),
        ((3.0, 4.0), 0, 1),
        ((3.01, 4.0), 0, 0),
    ],
)
def test_window_includes_its_two_ends(window: tuple[float, float], lo: int, hi: int) -> None:
    """A request is possible from its sending to its answer, and certain a transit time apart from both."""
    ledger = make_ledger([(1.0, 3.0)])
    assert ledger.bounds_between(*window, delta_s=0.25) == LoadBounds(lo, hi, lo)
    if window[1] < 3.0:
        ledger = make_ledger([(1.0, None)])
        still_there = int(window[0] >= 1.25)
        assert ledger.bounds_between(*window, delta_s=0.25) == LoadBounds(still_there, hi, still_there)


def test_request_as_short_as_two_transit_times_is_never_certain() -> None:
    assert make_ledger([(1.0, 1.5)]).bounds_between(1.25, 1.25, delta_s=0.25) == LoadBounds(0, 1, 0)
