"""How many running slices end early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dispatcher.features.slices.revocation import MAX_READING_AGE_S, RevocationPlanner
from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import Policy, Reading, Reason, Signal, compute_budget


def make_allowance(headroom: int, limit: int, read_at: float = 1.0, **budget: Any) -> Allowance:
    reading = Reading(Signal.SATURATION, 0, 0, 0.5, 0.1, 50)
    return Allowance(
        limit=limit,
        reason=Reason.OPEN,
        detail="",
        signal=Signal.SATURATION,
        budget=replace(compute_budget(reading, Policy()), headroom=headroom, **budget),
        read_at=read_at,
        lost_units=0,
        next_check_at=None,
    )


def plan(
    planner: RevocationPlanner,
    allowance: Allowance,
    now: float,
    own_units: int,
    all_units: int,
    reading_interval_s: float = 1.0,
) -> int:
    return planner.plan_revocations(allowance, now, own_units, all_units, reading_interval_s)


@pytest.mark.parametrize(
    ("headroom", "limit", "own_units", "all_units", "expected"),
    [
        pytest.param(0, 5, 10, 10, 0, id="there is room"),
        pytest.param(-3, 7, 10, 10, 3, id="as many as are missing"),
        pytest.param(-8, 7, 10, 10, 3, id="none within the limit"),
        pytest.param(-8, 10, 10, 10, 0, id="no more than the limit run"),
        pytest.param(-4, 6, 5, 10, 2, id="half of them are of this process"),
        pytest.param(-3, 7, 5, 10, 2, id="rounded up"),
        pytest.param(-9, 0, 3, 100, 1, id="a small part"),
        pytest.param(-9, 0, 0, 100, 0, id="none is of this process"),
        pytest.param(-100, 0, 4, 4, 4, id="all"),
    ],
)
def test_slices_end_as_far_as_units_are_missing(
    headroom: int, limit: int, own_units: int, all_units: int, expected: int
) -> None:
    planner = RevocationPlanner()
    assert plan(planner, make_allowance(headroom, limit), 2.0, own_units, all_units) == expected


def test_each_reading_counts_once_and_not_if_it_was_taken_before_the_last_decision() -> None:
    planner = RevocationPlanner()
    assert plan(planner, make_allowance(-3, 7, read_at=1.0), 2.0, 10, 10) == 3
    assert plan(planner, make_allowance(-3, 7, read_at=1.0), 2.5, 10, 10) == 0
    assert plan(planner, make_allowance(-3, 7, read_at=2.0), 3.0, 10, 10) == 0
    assert plan(planner, make_allowance(-3, 7, read_at=2.5), 3.0, 10, 10) == 3


def test_decision_to_end_none_does_not_make_readings_old() -> None:
    planner = RevocationPlanner()
    assert plan(planner, make_allowance(1, 7, read_at=1.0), 5.0, 10, 10) == 0
    assert plan(planner, make_allowance(-3, 7, read_at=4.0), 6.0, 10, 10) == 3


def test_no_slice_ends_without_a_budget_that_may_be_used() -> None:
    planner = RevocationPlanner()
    faulty = make_allowance(-3, 7, fault=Reason.NO_ENDPOINTS)
    assert plan(planner, faulty, 2.0, 10, 10) == 0
    unknown = Allowance(0, Reason.OPEN, "", None, None, 1.0, 0, None)
    assert plan(planner, unknown, 2.0, 10, 10) == 0


@pytest.mark.parametrize(
    ("interval_s", "age_s", "expected"),
    [
        pytest.param(MAX_READING_AGE_S, MAX_READING_AGE_S, 3, id="just often enough"),
        pytest.param(MAX_READING_AGE_S + 0.1, 0.0, 0, id="too rare"),
        pytest.param(1.0, MAX_READING_AGE_S + 0.1, 0, id="too old"),
    ],
)
def test_no_slice_ends_where_readings_are_too_rare_or_too_old(
    interval_s: float, age_s: float, expected: int
) -> None:
    allowance = make_allowance(-3, 7, read_at=1.0)
    assert plan(RevocationPlanner(), allowance, 1.0 + age_s, 10, 10, interval_s) == expected
