"""What a claim takes a request to weigh that nobody has read yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.requests.request import Request, encode_member, parse_member
from dispatcher.core.requests.units import UnitsEstimate, compute_units


def test_a_request_weighs_one() -> None:
    request = parse_member(encode_member("r-1", {"n": 1}, 4_000_000_000))
    assert isinstance(request, Request)
    assert compute_units(request) == 1


def test_where_all_weigh_one_a_claim_asks_for_what_is_free() -> None:
    weights = UnitsEstimate()
    for _ in range(1000):
        weights.record_units(1)
    assert weights.typical_units == 1
    assert weights.plan_claim(7) == (7, 1)


def test_a_claim_follows_what_recent_requests_weighed() -> None:
    weights = UnitsEstimate()
    for _ in range(500):
        weights.record_units(4)
    assert weights.typical_units == 4
    assert weights.plan_claim(11) == (2, 4)
    assert weights.plan_claim(3) == (1, 3), "one may be lighter"
    for _ in range(500):
        weights.record_units(1)
    assert weights.typical_units in (1, 2)


@given(st.lists(st.integers(1, 1000)), st.integers(1, 10_000))
def test_a_claim_asks_for_some_and_for_no_more_than_is_free(seen: list[int], free: int) -> None:
    weights = UnitsEstimate()
    for units in seen:
        weights.record_units(units)
    requests, units = weights.plan_claim(free)
    assert 1 <= units <= weights.typical_units <= max([1, *seen])
    assert 1 <= requests * units <= free


def test_where_requests_share_units_a_claim_asks_for_all_that_have_room_in_what_is_free() -> None:
    weights = UnitsEstimate()
    for _ in range(500):
        weights.record_units(1 / 32)
    most, units = weights.plan_claim(2)
    assert units == 0
    assert 60 <= most <= 70
    assert weights.plan_claim(2, unweighed_count=most - 3) == (3, 0)
    assert weights.plan_claim(2, unweighed_count=1000) == (0, 0)


@given(st.lists(st.floats(0.001, 1)), st.integers(1, 10_000), st.integers(0, 100_000))
def test_of_those_that_share_no_more_are_held_than_64_for_each_unit(
    seen: list[float], free: int, riding: int
) -> None:
    weights = UnitsEstimate()
    for each in seen:
        weights.record_units(each)
    most, units = weights.plan_claim(free, riding)
    assert (units == 0) or most * units <= free
    assert most >= 0
    assert most + (riding if units == 0 and most else 0) <= 64 * free
