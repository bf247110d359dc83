"""The ceiling that refusals teach: how far it falls, and how it comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.ceiling import PLATEAU, Ceiling

BACKOFF = 0.7
NEVER_UNBOUND = 10**9


def refused_at(in_flight: int, backoff: float = BACKOFF) -> Ceiling:
    ceiling = Ceiling()
    ceiling.refused(in_flight, backoff)
    return ceiling


def risen(ceiling: Ceiling, readings: int, unbound: int = NEVER_UNBOUND) -> list[float | None]:
    values = []
    for _ in range(readings):
        ceiling.reading(unbound)
        values.append(ceiling.value)
    return values


def test_there_is_none_before_the_first_refusal() -> None:
    ceiling = Ceiling()
    assert risen(ceiling, 5, unbound=10) == [None] * 5


def test_refusal_leaves_beta_of_what_was_in_flight() -> None:
    assert refused_at(40).value == pytest.approx(28)


@pytest.mark.parametrize("in_flight", [-1, 0, 1])
def test_ceiling_never_falls_below_one(in_flight: int) -> None:
    assert refused_at(in_flight).value == 1


def test_refusals_between_two_readings_cut_once() -> None:
    ceiling = refused_at(40)
    for in_flight in (39, 20, 2):
        ceiling.refused(in_flight, BACKOFF)
    assert ceiling.value == pytest.approx(28)
    ceiling.reading(NEVER_UNBOUND)
    ceiling.refused(20, BACKOFF)
    assert ceiling.value == pytest.approx(14)


def test_refusal_never_raises_the_ceiling() -> None:
    ceiling = refused_at(10)
    ceiling.reading(NEVER_UNBOUND)
    before = ceiling.value
    ceiling.refused(1000, BACKOFF)
    assert ceiling.value == before


@given(st.integers(0, 500), st.floats(0.1, 0.95))
def test_readings_without_refusal_only_ever_raise_it(in_flight: int, backoff: float) -> None:
    ceiling = refused_at(in_flight, backoff)
    values = [ceiling.value, *risen(ceiling, 3 * PLATEAU)]
    assert all(earlier <= later for earlier, later in pairwise(values))


def test_rise_is_flat_around_the_last_refusal_and_steep_on_either_side() -> None:
    ceiling = refused_at(40)
    values = [ceiling.value, *risen(ceiling, 2 * PLATEAU)]
    assert values[PLATEAU] == pytest.approx(40)
    rises = [later - earlier for earlier, later in pairwise(values)]
    assert rises.index(min(rises)) in (PLATEAU - 1, PLATEAU)
    assert min(rises[0], rises[-1]) > 20 * min(rises)


def test_ceiling_that_binds_no_longer_is_forgotten() -> None:
    ceiling = refused_at(40)
    values = risen(ceiling, 2 * PLATEAU, unbound=47)
    assert None in values
    at = values.index(None)
    assert max(values[:at]) < 47
    assert values[at:] == [None] * (len(values) - at)


def test_ceiling_over_a_pool_without_room_is_forgotten_once_it_allows_one() -> None:
    ceiling = refused_at(1)
    ceiling.reading(0)
    assert ceiling.value is None


def test_ceiling_holds_while_anything_waits_in_the_picker() -> None:
    ceiling = refused_at(40)
    before = ceiling.value
    for _ in range(3 * PLATEAU):
        ceiling.reading(NEVER_UNBOUND, waiting=True)
    assert ceiling.value == before
    ceiling.reading(NEVER_UNBOUND)
    assert ceiling.value is not None
    assert before is not None
    assert ceiling.value > before


def test_reading_that_shows_somebody_waiting_still_lets_the_next_refusal_cut() -> None:
    ceiling = refused_at(40)
    ceiling.reading(NEVER_UNBOUND, waiting=True)
    ceiling.refused(20, BACKOFF)
    assert ceiling.value == pytest.approx(14)


def test_one_refusal_while_little_was_in_flight_is_forgotten_within_forty_readings() -> None:
    assert None in risen(refused_at(1), 40, unbound=30)


def test_large_ceiling_is_back_where_it_was_refused_after_the_plateau() -> None:
    assert risen(refused_at(200), PLATEAU)[-1] == pytest.approx(200)
