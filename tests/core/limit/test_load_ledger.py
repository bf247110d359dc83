"""How many of our requests a reading may contain: the two bounds, against a model that counts them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.load_ledger import DELTA_S, LoadBounds, LoadLedger

HORIZON_S = 20.0
Stay = tuple[float, float | None]
"""When a request was sent, and when answered (None: not yet)."""


def held_with(stays: list[Stay], units: Sequence[int] | None = None) -> LoadLedger:
    held = LoadLedger(HORIZON_S)
    for key, (sent, _) in enumerate(stays):
        held.record_send(key, sent, 1 if units is None else units[key])
    for key, (_, answered) in enumerate(stays):
        if answered is not None:
            held.record_answer(key, answered)
    return held


def counts_at_every_moment(
    stays: list[tuple[float, float]], a: float, b: float, inside: Callable[[float, float, float], bool]
) -> list[int]:
    """How many stays hold at each moment of [a, b] at which that can change, and between those."""
    edges = sorted({a, b} | {edge for stay in stays for edge in stay if a < edge < b})
    moments = edges + [(one + other) / 2 for one, other in pairwise(edges)]
    return [sum(inside(start, moment, end) for start, end in stays) for moment in moments]


def open_ended(start: float, moment: float, end: float) -> bool:
    return start < moment < end


def closed_ended(start: float, moment: float, end: float) -> bool:
    return start <= moment <= end


TIMES = st.one_of(st.integers(0, 40).map(lambda n: n / 20), st.floats(0, 2))
STAYS = st.lists(
    st.tuples(TIMES, st.one_of(st.none(), TIMES)).map(
        lambda stay: (stay[0], None if stay[1] is None else max(stay[0], stay[1]))
    ),
    max_size=12,
)


@given(STAYS, TIMES, TIMES)
def test_bounds_agree_with_counting_at_every_moment(stays: list[Stay], one: float, other: float) -> None:
    """At a tie (one ends the moment another begins) `least` may be the smaller of both readings of it."""
    a, b = sorted((one, other))
    interval = held_with(stays).bounds_between(a, b)
    maybe = [(sent, float("inf") if answered is None else answered) for sent, answered in stays]
    surely = [(start + DELTA_S, end - DELTA_S) for start, end in maybe if start + DELTA_S < end - DELTA_S]
    assert interval.hi == max(counts_at_every_moment(maybe, a, b, closed_ended))
    least = (
        counts_at_every_moment(surely, a, b, open_ended),
        counts_at_every_moment(surely, a, b, closed_ended),
    )
    assert min(least[0]) <= interval.lo <= min(least[1])
    assert interval.own_lo == interval.lo


def test_what_is_sent_again_under_its_key_counts_once() -> None:
    held = LoadLedger(HORIZON_S)
    held.record_send("a", 1.0, 3)
    held.record_send("a", 2.0, 2)
    assert held.own_units == 2
    held.record_answer("a", 3.0)
    assert held.own_units == 0


@given(STAYS, st.lists(st.integers(1, 8), min_size=12, max_size=12), TIMES, TIMES)
def test_a_request_counts_as_so_many_requests_as_it_has_units(
    stays: list[Stay], units: list[int], one: float, other: float
) -> None:
    a, b = sorted((one, other))
    heavy = held_with(stays, units)
    light = held_with([stay for stay, count in zip(stays, units, strict=False) for _ in range(count)])
    assert heavy.bounds_between(a, b) == light.bounds_between(a, b)
    assert heavy.own_units == light.own_units


@given(
    STAYS,
    st.lists(st.integers(1, 8), min_size=12, max_size=12),
    TIMES,
    TIMES,
    st.integers(0, 60),
)
def test_a_reading_shows_each_call_once_and_its_other_units_as_far_as_it_goes_beyond_calls(
    stays: list[Stay], units: list[int], one: float, other: float, beyond: int
) -> None:
    a, b = sorted((one, other))
    heavy = held_with(stays, units)
    all_units, calls = heavy.bounds_between(a, b), held_with(stays).bounds_between(a, b)
    found = heavy.bounds_between(a, b, items_beyond_calls=beyond)
    assert found == LoadBounds(
        lo=min(all_units.lo, calls.lo + beyond),
        hi=min(all_units.hi, calls.hi + beyond),
        own_lo=min(all_units.own_lo, calls.own_lo + beyond),
    )
    assert heavy.call_count == held_with(stays).own_units


def test_units_of_others_are_calls_only_while_ours_are() -> None:
    held = LoadLedger(HORIZON_S)
    for at in (0.0, 10.0, 100.0):
        held.record_lease_count(at, 8, 0)
    held.record_send("a", 1.0)
    assert held.bounds_between(5.0, 6.0, items_beyond_calls=0.0) == LoadBounds(9, 9, 1)
    held.record_send("b", 2.0, 4)
    assert held.bounds_between(5.0, 6.0, items_beyond_calls=0.0) == LoadBounds(2, 10, 2)
    assert held.bounds_between(5.0, 6.0, items_beyond_calls=2.5) == LoadBounds(4, 13, 4)
    assert held.bounds_between(5.0, 6.0) == LoadBounds(13, 13, 5)
    held.record_answer("b", 7.0)
    assert held.bounds_between(8.0, 9.0, items_beyond_calls=0.0) == LoadBounds(1, 9, 1), (
        "others may have such calls still"
    )
    assert held.bounds_between(50.0, 60.0, items_beyond_calls=0.0) == LoadBounds(9, 9, 1)


@given(STAYS, st.randoms(use_true_random=False), TIMES, TIMES)
def test_order_in_which_answers_are_told_does_not_matter(
    stays: list[Stay], random: Random, one: float, other: float
) -> None:
    a, b = sorted((one, other))
    shuffled = list(stays)
    random.shuffle(shuffled)
    assert held_with(shuffled).bounds_between(a, b) == held_with(stays).bounds_between(a, b)


COUNTS = st.lists(
    st.tuples(TIMES, st.integers(-1, 3), st.integers(-1, 4)), max_size=10, unique_by=lambda count: count[0]
)


@given(COUNTS, TIMES, TIMES)
def test_others_are_bounded_by_the_counts_in_the_window_and_next_to_it(
    counts: list[tuple[float, int, int]], one: float, other: float
) -> None:
    a, b = sorted((one, other))
    counts = sorted(counts, key=lambda count: count[0])
    held = LoadLedger(HORIZON_S)
    for at, others, young in counts:
        held.record_lease_count(at, others, young)
    before = [count for count in counts if count[0] <= a][-1:]
    inside = [count for count in counts if a < count[0] < b]
    after = [count for count in counts if count[0] >= b][:1]
    nearest = before + inside + after
    surely = [max(0, max(0, others) - max(0, young)) for _, others, young in nearest]
    if not (before and after):
        surely = [0]  # they may have come, or drained, on the side without a count
    if not nearest:
        nearest = counts[:1]
    maybe = [max(0, others) for _, others, _ in nearest]
    assert held.bounds_between(a, b) == LoadBounds(min(surely), max(maybe, default=0), 0)


def test_others_nearest_counts_bound_a_window_between_them() -> None:
    held = LoadLedger(HORIZON_S)
    for at, others, young in ((1, 5, 0), (2, 9, 2), (3, 4, 1), (4, 8, 0)):
        held.record_lease_count(at, others, young)
    assert held.bounds_between(0.1, 0.5) == LoadBounds(0, 5, 0)  # nothing before: the first one after
    assert held.bounds_between(1.2, 1.4) == LoadBounds(5, 9, 0)
    assert held.bounds_between(1.2, 2.5) == LoadBounds(3, 9, 0)
    assert held.bounds_between(4.5, 5) == LoadBounds(0, 8, 0)  # nothing after: they may have drained since
    assert held.other_owners_units == 8


def test_request_counts_surely_only_a_delta_after_sending_and_before_its_answer() -> None:
    held = held_with([(1.0, 2.0)])
    assert held.bounds_between(0.5, 0.9) == LoadBounds(0, 0, 0)
    assert held.bounds_between(1.01, 1.01) == LoadBounds(0, 1, 0)
    assert held.bounds_between(1.03, 1.97) == LoadBounds(1, 1, 1)
    assert held.bounds_between(1.99, 1.99) == LoadBounds(0, 1, 0)
    assert held.bounds_between(2.01, 3) == LoadBounds(0, 0, 0)


def test_slot_refilled_within_the_window_dips_surely_and_never_doubles() -> None:
    held = held_with([(0.0, 5.0), (5.001, None)])
    assert held.bounds_between(4, 6) == LoadBounds(0, 1, 0)
    assert held.bounds_between(5.2, 6) == LoadBounds(1, 1, 1)


def test_answer_to_a_request_that_was_never_sent_is_ignored() -> None:
    held = LoadLedger(HORIZON_S)
    held.record_answer("ghost", 1.0)
    assert (held.own_units, held.bounds_between(0, 2)) == (0, LoadBounds(0, 0, 0))


def test_answer_is_not_before_its_sending() -> None:
    held = held_with([])
    held.record_send(1, 5.0)
    held.record_answer(1, 4.0)
    assert held.bounds_between(3, 6) == LoadBounds(0, 1, 0)


def test_count_told_late_counts_as_of_the_one_before_it() -> None:
    held = LoadLedger(HORIZON_S)
    held.record_lease_count(5, 3, 0)
    held.record_lease_count(4, 7, 0)
    assert held.other_owners_units == 7
    held.record_lease_count(6, 7, 0)
    assert held.bounds_between(5.1, 5.2) == LoadBounds(7, 7, 0)


def test_equal_counts_are_kept_as_the_ends_of_their_run() -> None:
    held = LoadLedger(HORIZON_S)
    for second in range(100):
        held.record_lease_count(second, 4, 0)
    held.record_lease_count(100, 6, 0)
    assert len(held._lease_counts) == 3
    assert held.bounds_between(50, 50.5) == LoadBounds(4, 4, 0)
    assert held.bounds_between(99, 99.5) == LoadBounds(4, 6, 0)


def test_memory_does_not_grow_with_the_work_done() -> None:
    held = LoadLedger(HORIZON_S)
    for n in range(50_000):
        held.record_send(n, n / 100)
        held.record_answer(n, n / 100 + 0.5)
        held.record_lease_count(n / 100, n % 7, 0)
    within_horizon = HORIZON_S * 100
    assert len(held._end_times) == len(held._start_times) <= 2 * within_horizon + 1024
    assert len(held._lease_counts) <= 2 * within_horizon + 1024
    # What lies within the horizon is all still there: 50 at any moment, of which 46 are surely there.
    opened = (50_000 - 1) / 100 - HORIZON_S
    interval = held.bounds_between(opened + 0.005, opened + 0.005)
    others = [n % 7 for n in range(50_000) if abs(n / 100 - opened - 0.005) < 0.0051]
    assert interval == LoadBounds(46 + min(others), 50 + max(others), 46)


def test_mean_duration_counts_requests_that_are_still_in_flight() -> None:
    """Ten of a hundred requests end within the first seconds. Their mean alone would be 2 s."""
    held = LoadLedger(HORIZON_S)
    held.measure_duration(0.0)
    assert held.mean_duration_s == 0.0, "none was answered"
    for key in range(100):
        held.record_send(key, 0.0)
    for second in range(1, 5):
        held.measure_duration(float(second))
    for key in range(10):
        held.record_answer(key, 4.0)
    held.measure_duration(5.0)
    assert held.mean_duration_s > 40.0


def test_mean_duration_is_that_of_a_steady_load_and_follows_a_change() -> None:
    held, at = LoadLedger(HORIZON_S), 0.0
    for took_s in (4.0, 12.0):
        for _ in range(600):
            at += 1.0
            held.record_send(at, at)
            held.record_answer(at - took_s, at)
            held.measure_duration(at)
        assert abs(held.mean_duration_s - took_s) <= 1.0


def test_mean_duration_is_kept_while_nothing_is_sent() -> None:
    held = LoadLedger(HORIZON_S)
    held.measure_duration(0.0)
    held.record_send("a", 0.0)
    held.measure_duration(3.0)
    held.record_answer("a", 3.0)
    held.measure_duration(4.0)
    before = held.mean_duration_s
    held.measure_duration(1e9)
    held.measure_duration(1e9)
    held.measure_duration(5.0)
    assert held.mean_duration_s == before > 0.0
