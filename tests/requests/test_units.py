"""Weight that a claim assumes for requests that were not parsed yet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.requests.request import Request, encode_member, parse_member
from dispatcher.requests.units import UnitsEstimate, compute_units


def test_request_weighs_one_unit() -> None:
    request = parse_member(encode_member("r-1", {"n": 1}, 4_000_000_000))
    assert isinstance(request, Request)
    assert compute_units(request) == 1


def test_claim_takes_all_free_units_if_each_request_weighs_one() -> None:
    estimate = UnitsEstimate()
    for _ in range(1000):
        estimate.record_units(1)
    assert estimate.typical_units == 1
    assert estimate.plan_claim(7) == (7, 1)


def test_claim_follows_the_weight_of_recent_requests() -> None:
    estimate = UnitsEstimate()
    for _ in range(500):
        estimate.record_units(4)
    assert estimate.typical_units == 4
    assert estimate.plan_claim(11) == (2, 4)
    assert estimate.plan_claim(3) == (1, 3), "the request may weigh less than the average"
    for _ in range(500):
        estimate.record_units(1)
    assert estimate.typical_units in (1, 2)


@given(st.lists(st.integers(1, 1000)), st.integers(1, 10_000))
def test_claim_takes_at_least_one_request_and_at_most_the_free_units(
    recorded_units: list[int], free_units: int
) -> None:
    estimate = UnitsEstimate()
    for units in recorded_units:
        estimate.record_units(units)
    requests, units = estimate.plan_claim(free_units)
    assert 1 <= units <= estimate.typical_units <= max([1, *recorded_units])
    assert 1 <= requests * units <= free_units


def test_claim_takes_all_requests_that_fit_if_requests_share_units() -> None:
    estimate = UnitsEstimate()
    for _ in range(500):
        estimate.record_units(1 / 32)
    request_count, units = estimate.plan_claim(2)
    assert units == 0
    assert 60 <= request_count <= 70
    assert estimate.plan_claim(2, unweighed_count=request_count - 3) == (3, 0)
    assert estimate.plan_claim(2, unweighed_count=1000) == (0, 0)


@given(st.lists(st.floats(0.001, 1)), st.integers(1, 10_000), st.integers(0, 100_000))
def test_at_most_64_requests_share_a_unit(
    recorded_units: list[float], free_units: int, unweighed_count: int
) -> None:
    estimate = UnitsEstimate()
    for each in recorded_units:
        estimate.record_units(each)
    request_count, units = estimate.plan_claim(free_units, unweighed_count)
    assert (units == 0) or request_count * units <= free_units
    assert request_count >= 0
    assert request_count + (unweighed_count if units == 0 and request_count else 0) <= 64 * free_units
