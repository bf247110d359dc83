"""Who is to blame for an answer that no gateway gave: shown by what becomes of the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.gateway.intermediary_errors import (
    FREE_CHARGES,
    MAX_DELAY_S,
    MAX_RECORDS,
    MIN_REST_S,
    REST_PER_SECOND,
    SLOW_ANSWER_S,
    IntermediaryErrors,
)
from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.gateway.reachability import MAX_PROBE_PAUSE_OTHERS_S

T0 = 1000.0
POLICY = RetryPolicy(base_s=2.0, max_s=60.0)


def charged(bounces: IntermediaryErrors, times: int, entry: int = 1) -> Iterator[bool]:
    for n in range(times):
        yield bounces.record_error(entry, T0 + n)
        bounces.record_answer(99, sent_at=T0 + n + 0.5)


def test_bounces_that_others_answers_follow_are_its_own_fault_in_the_end() -> None:
    assert list(charged(IntermediaryErrors(), 8)) == [False] * (FREE_CHARGES + 1) + [True] * (
        7 - FREE_CHARGES
    )


def test_without_anybody_who_gets_through_nobody_is_blamed() -> None:
    bounces = IntermediaryErrors()
    bounces.record_answer(99, sent_at=T0 - 0.1)
    assert not any(bounces.record_error(1, T0 + n) for n in range(1000))


def test_who_was_sent_before_the_bounce_shows_nothing_about_it() -> None:
    bounces = IntermediaryErrors()
    for n in range(100):
        assert not bounces.record_error(1, T0 + n)
        bounces.record_answer(99, sent_at=T0 + n - 0.1)


def test_its_own_answer_clears_it() -> None:
    bounces = IntermediaryErrors()
    list(charged(bounces, FREE_CHARGES + 1))
    bounces.record_answer(1, sent_at=T0 + 50)
    assert not bounces.record_error(1, T0 + 51)


def test_it_is_sent_again_at_once_and_then_later_each_time() -> None:
    bounces, found = IntermediaryErrors(), []
    for n in range(8):
        bounces.record_error(1, T0 + n)
        found.append(bounces.compute_retry_delay_s(1, 0.003, POLICY))
    assert found == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("took_s", "again_s"), [(SLOW_ANSWER_S, SLOW_ANSWER_S), (15.0, 15.0), (600.0, MAX_DELAY_S)]
)
def test_who_has_held_a_slot_for_long_leaves_it_to_others_for_as_long(took_s: float, again_s: float) -> None:
    bounces = IntermediaryErrors()
    bounces.record_error(1, T0)
    assert bounces.compute_retry_delay_s(1, took_s, POLICY) == again_s


def test_the_longer_nobody_gets_through_the_longer_it_rests_but_not_in_the_queue() -> None:
    bounces = IntermediaryErrors()
    for n in range(100):
        bounces.record_error(1, T0 + n)
        rest_s = bounces.set_aside(1, T0 + n, since=T0, time_left_s=1e6)
        assert rest_s == min(MAX_DELAY_S, max(MIN_REST_S, REST_PER_SECOND * n))
    assert bounces.compute_rest_s(1, T0 + 99 + MAX_DELAY_S) == MAX_DELAY_S
    assert bounces.compute_rest_s(1, T0 + 99 + 99 * REST_PER_SECOND) == 0
    assert bounces.compute_rest_s(2, T0) == 0


def test_time_in_which_another_replica_probed_makes_no_rest_longer() -> None:
    bounces = IntermediaryErrors()
    bounces.record_error(1, T0)
    assert bounces.set_aside(1, T0, since=T0 - 100, time_left_s=1e6) == MIN_REST_S


@given(st.floats(-10, 1e6), st.floats(0, 1e6))
def test_it_never_rests_for_more_than_half_of_what_is_left(left_s: float, away_s: float) -> None:
    bounces = IntermediaryErrors()
    bounces.record_error(1, T0)
    rest_s = bounces.set_aside(1, T0, since=T0 - away_s, time_left_s=left_s)
    assert 0 <= rest_s <= max(0.0, left_s) / 2 + 1e-6


def test_it_remembers_so_many_and_no_more() -> None:
    bounces = IntermediaryErrors()
    for entry in range(MAX_RECORDS + 10):
        bounces.record_error(entry, T0)
    assert len(bounces._records) == MAX_RECORDS


@pytest.mark.parametrize("poisons", [10, 50, 200, 1000])
def test_whoever_stands_behind_any_number_of_poisons_comes_to_probe(poisons: int) -> None:
    """Probes of quick answers, the first in line that has rested each time."""
    bounces, at, probes = IntermediaryErrors(), T0, 0
    while True:
        entry = next(each for each in range(poisons + 1) if not bounces.compute_rest_s(each, at))
        probes += 1
        if entry == poisons:
            break
        bounces.record_error(entry, at)
        bounces.set_aside(entry, at, since=T0, time_left_s=1e9)
        at += MAX_PROBE_PAUSE_OTHERS_S
    assert probes <= poisons * 1.5 + 3


times = st.floats(0, 1000)


@given(
    st.lists(st.tuples(times, st.integers(0, 3), st.booleans(), st.floats(0, 20)), max_size=200), st.data()
)
def test_outages_of_everybody_never_blame_and_poison_among_others_always_does(
    tries: list[tuple[float, int, bool, float]], data: st.DataObject
) -> None:
    """Honest requests bounce within fewer than FREE outages only; a poison each time, others beside it."""
    marks = sorted(data.draw(st.lists(times, max_size=2 * FREE_CHARGES, unique=True)))
    outages = list(zip(marks[::2], marks[1::2], strict=False))

    def away(at: float) -> bool:
        return any(start <= at <= end for start, end in outages)

    bounces = IntermediaryErrors()
    for at, entry, _, took_s in sorted(tries):
        # An answer comes only while there is a gateway, to a request that was sent to it.
        if away(at):
            assert not bounces.record_error(entry, at)
        elif not away(at - took_s):
            bounces.record_answer(100 + entry, at - took_s)
    for n in range(FREE_CHARGES + 1):
        bounces.record_error(50, 2000.0 + n)
        bounces.record_answer(100, 2000.5 + n)
    assert bounces.record_error(50, 2000.0 + FREE_CHARGES + 1)
