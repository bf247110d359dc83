"""Free units are granted at a pace that lets a picker spread them, and that no full pool exceeds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.send_pace import (
    MAX_DEBT_S,
    MIN_OWN_SHARE,
    PICKER_SCRAPE_S,
    STEP_S,
    SendPace,
    compute_send_rate,
)

TOLERANCE = 1e-6


def compute_rate(
    endpoints: float | None = 3.0,
    *,
    limit: int = 45,
    mean_duration_s: float = 10.0,
    own_units: int = 0,
    other_owners_units: int = 0,
) -> float:
    return compute_send_rate(
        endpoints,
        limit=limit,
        mean_duration_s=mean_duration_s,
        own_units=own_units,
        other_owners_units=other_owners_units,
    )


def send_all(pace: SendPace, units: int, rate: float, now: float = 0.0) -> list[tuple[float, int]]:
    """Send these units as the dispatch loop does. Return the times and units of all grants."""
    sent = []
    while units:
        grant = pace.grant(now, units, rate)
        if grant.units:
            pace.use_grant(grant.units)
            sent.append((now, grant.units))
            units -= grant.units
        if units:
            assert grant.next_at is not None
            now = grant.next_at
    return sent


@pytest.mark.parametrize("endpoints", [None, 0.0, 1.0, math.nan, math.inf, -3.0, 1e12])
def test_one_endpoint_or_an_unknown_number_has_no_pace(endpoints: float | None) -> None:
    rate = compute_rate(endpoints)
    grant = SendPace().grant(0.0, 1000, rate)
    assert (grant.units, grant.next_at) == (1000, None)


def test_pace_is_one_unit_per_endpoint_in_each_scrape_of_the_picker() -> None:
    assert compute_rate(3.0) == pytest.approx(60)
    sent = send_all(SendPace(), 28, 60.0)
    assert {units for _, units in sent} == {1}
    assert sent[-1][0] == pytest.approx(27 / 60, abs=0.05)


def test_pace_is_twice_as_fast_as_a_full_pool_drains() -> None:
    assert compute_rate(3.0, limit=45, mean_duration_s=0.05) == pytest.approx(2 * 45 / 0.05)


def test_pace_before_the_first_answer_depends_on_the_endpoints_alone() -> None:
    assert compute_rate(3.0, mean_duration_s=0.0) == pytest.approx(60)


def test_dispatchers_of_a_pool_share_the_pace() -> None:
    shares = [compute_rate(own_units=own, other_owners_units=40 - own) for own in (30, 10)]
    assert sum(shares) == pytest.approx(60)
    assert compute_rate(own_units=0, other_owners_units=40) == pytest.approx(MIN_OWN_SHARE * 60)


def test_time_without_requests_saves_nothing_up() -> None:
    pace = SendPace()
    send_all(pace, 5, 60.0)
    assert pace.grant(3600.0, 28, 60.0).units == 1


def test_single_unit_is_sent_at_once() -> None:
    pace = SendPace()
    for second in range(10):
        assert pace.grant(float(second), 1, 60.0).units == 1
        pace.use_grant(1)


def test_large_request_delays_later_ones_for_a_bounded_time() -> None:
    pace = SendPace()
    assert pace.grant(0.0, 2, 60.0).units == 1
    pace.use_grant(5000)
    assert pace.grant(0.0, 2, 60.0).units == 0
    assert pace.grant(MAX_DEBT_S + 2 * STEP_S, 2, 60.0).units == 1


def test_pace_that_ended_leaves_no_debt() -> None:
    pace = SendPace()
    pace.grant(0.0, 1, 60.0)
    pace.use_grant(5000)
    assert pace.grant(0.1, 9, math.inf).units == 9
    assert pace.grant(0.2, 9, 60.0).units == 1


def test_clock_that_goes_back_stops_nothing() -> None:
    pace = SendPace()
    send_all(pace, 3, 60.0, now=100.0)
    pace.grant(50.0, 3, 60.0)
    assert pace.grant(50.0 + 2 * STEP_S, 3, 60.0).units >= 1


@given(
    rate=st.floats(1.0, 1e6),
    steps=st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(0, 500)), max_size=60),
)
def test_no_interval_gets_more_than_its_share(rate: float, steps: list[tuple[float, int]]) -> None:
    pace, now = SendPace(), 0.0
    sent: list[tuple[float, int]] = []
    for passed_s, free_units in steps:
        now += passed_s
        units = pace.grant(now, free_units, rate).units
        assert 0 <= units <= free_units
        pace.use_grant(units)
        sent.append((now, units))
    for began_at, _ in sent:
        units = sum(count for at, count in sent if began_at <= at <= began_at + PICKER_SCRAPE_S)
        assert units <= rate * PICKER_SCRAPE_S + max(1.0, rate * STEP_S) + TOLERANCE


@given(rate=st.floats(1.0, 1e6), units=st.integers(1, 300))
def test_all_units_are_sent_at_the_rate(rate: float, units: int) -> None:
    sent = send_all(SendPace(), units, rate)
    assert sent[-1][0] <= units / rate + 2 * STEP_S + 2 / rate
