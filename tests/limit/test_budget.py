"""The budget D = 1 − (F_SYS + F_EPP + B), and readings that are implausible."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.limit.budget import (
    MAX_IN_FLIGHT,
    Policy,
    Reading,
    Reason,
    Signal,
    compute_budget,
    round_down,
)

POLICY = Policy()


def make_reading(f_sys: float = 0.5, f_epp: float = 0.1, max_sys: float = 50) -> Reading:
    return Reading(Signal.SATURATION, 0, 0, f_sys, f_epp, max_sys)


def test_budget_of_the_worked_example() -> None:
    budget = compute_budget(make_reading(), POLICY)
    assert budget.d == pytest.approx(0.35)
    assert (budget.headroom, budget.max_sys, budget.fault) == (17, 50, None)
    assert (budget.f_sys, budget.f_epp, budget.reserve) == (0.5, 0.1, 0.05)
    assert POLICY.compute_max_limit(50) == 47


def test_headroom_of_an_overfull_pool_is_negative() -> None:
    assert compute_budget(make_reading(1.5, 0.5), POLICY).headroom == -53  # floor(50 × −1.05)


@pytest.mark.parametrize(
    ("f_sys", "f_epp", "reserve", "max_sys", "headroom"),
    [
        (0.1, 0.2, 0.2, 10, 5),  # the computed 0.1 + 0.2 + 0.2 is above 0.5
        (0.3, 0.6, 0.0, 10, 1),  # the computed 1 − 0.9 is below 0.1
        (0.7, 0.1, 0.0, 10, 2),
        (1e-12, 0, 0.05, 100, 95),  # noise of an idle pool does not reduce the headroom
        (0, 0, 0.05, 20, 19),  # 20 × 0.95 exactly
        (0.95 - 1e-12, 0, 0.05, 100, 0),
        (0.95 + 1e-12, 0, 0.05, 100, 0),  # noise does not make the headroom negative
        (0.9501, 0, 0.05, 100, -1),  # a hundredth of a request too many does
    ],
)
def test_rounding_errors_do_not_change_the_headroom(
    f_sys: float, f_epp: float, reserve: float, max_sys: float, headroom: int
) -> None:
    assert compute_budget(make_reading(f_sys, f_epp, max_sys), Policy(reserve=reserve)).headroom == headroom


def test_round_down_ignores_only_rounding_errors() -> None:
    assert [round_down(n) for n in (4.9999999, 5.0, 5.0000001, 4.9999, -0.0000001, -0.001)] == [
        5,
        5,
        5,
        4,
        0,
        -1,
    ]


def make_changed_reading(name: str, value: float) -> Reading:
    fields: dict[str, Any] = {name: value}
    return replace(make_reading(), **fields)


@pytest.mark.parametrize("invalid", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["f_sys", "f_epp", "max_sys"])
def test_value_that_is_not_finite_is_implausible(name: str, invalid: float) -> None:
    budget = compute_budget(make_changed_reading(name, invalid), POLICY)
    assert budget.fault is Reason.IMPLAUSIBLE
    assert budget.headroom == 0
    assert math.isnan(budget.d)
    assert "not a finite number" in budget.fault_detail


@pytest.mark.parametrize(
    ("f_sys", "f_epp", "max_sys"), [(1e308, 1e308, 50), (1e308, 0, 1e308), (0.0, 1e300, 1e300)]
)
def test_sum_that_overflows_is_implausible(f_sys: float, f_epp: float, max_sys: float) -> None:
    assert compute_budget(make_reading(f_sys, f_epp, max_sys), POLICY).fault is Reason.IMPLAUSIBLE


@pytest.mark.parametrize("name", ["f_sys", "f_epp", "max_sys"])
def test_negative_value_is_implausible(name: str) -> None:
    budget = compute_budget(make_changed_reading(name, -0.001), POLICY)
    assert (budget.fault, budget.fault_detail) == (Reason.IMPLAUSIBLE, "a negative load or capacity")


@pytest.mark.parametrize(("f_sys", "f_epp", "max_sys"), [(0.0, 0.0, 1.1e9), (0.0, 1e8, 50), (1e300, 0.0, 50)])
def test_load_or_capacity_larger_than_any_pool_is_implausible(
    f_sys: float, f_epp: float, max_sys: float
) -> None:
    budget = compute_budget(make_reading(f_sys, f_epp, max_sys), POLICY)
    assert (budget.fault, budget.headroom) == (Reason.IMPLAUSIBLE, 0)
    assert "no pool has so many" in budget.fault_detail
    assert compute_budget(make_reading(0.5, 0.0, 1e9), POLICY).fault is None


def test_no_capacity_means_no_endpoints() -> None:
    assert compute_budget(make_reading(max_sys=0), POLICY).fault is Reason.NO_ENDPOINTS
    assert compute_budget(make_reading(), POLICY, capacity=0).fault is Reason.NO_ENDPOINTS
    assert compute_budget(make_reading(), POLICY, capacity=-1).fault is Reason.NO_ENDPOINTS


def test_idle_pool_is_plausible_by_default() -> None:
    budget = compute_budget(make_reading(0, 0), POLICY)
    assert (budget.fault, budget.headroom) == (None, 47)


def test_budget_above_the_configured_maximum_is_implausible() -> None:
    budget = compute_budget(make_reading(0.2, 0, 50), Policy(max_budget=0.7))
    assert budget.fault is Reason.IMPLAUSIBLE
    assert "D 0.750 is above 0.700" in budget.fault_detail
    assert compute_budget(make_reading(0.25, 0, 50), Policy(max_budget=0.7)).fault is None
    assert compute_budget(make_reading(0, 0, 50), Policy(max_budget=0.95 - 1e-12)).fault is None


def test_smaller_capacity_applies_at_once_and_rescales_the_load() -> None:
    budget = compute_budget(make_reading(0.5, 0.1, 50), POLICY, capacity=40)
    assert (budget.f_sys, budget.f_epp) == pytest.approx((0.625, 0.125))  # 25 and 5 of 40
    assert (budget.max_sys, budget.headroom) == (40, 8)


def test_larger_capacity_is_ignored_until_a_reading_shows_it() -> None:
    assert compute_budget(make_reading(), POLICY, capacity=80) == compute_budget(make_reading(), POLICY)
    assert compute_budget(make_reading(), POLICY, capacity=math.inf) == compute_budget(make_reading(), POLICY)


def test_capacity_that_is_not_a_number_is_implausible() -> None:
    assert compute_budget(make_reading(), POLICY, capacity=math.nan).fault is Reason.IMPLAUSIBLE


def test_rescaling_to_a_tiny_capacity_is_implausible() -> None:
    assert compute_budget(make_reading(0.5, 0, 1e300), POLICY, capacity=1e-300).fault is Reason.IMPLAUSIBLE


def test_maximum_limit_is_set_by_the_reserve_or_by_max_in_flight() -> None:
    assert Policy(reserve=0.05, max_in_flight=20).compute_max_limit(50) == 20
    assert Policy(reserve=0.05, max_in_flight=80).compute_max_limit(50) == 47
    assert Policy(reserve=0.1).compute_max_limit(10) == 9


@pytest.mark.parametrize("max_sys", [2.0**53 * 100, 1e308])
def test_maximum_limit_of_a_huge_capacity_is_a_number_that_the_queue_can_store(max_sys: float) -> None:
    """A page may contain any number, and Redis stores integers below 2**63."""
    assert Policy().compute_max_limit(max_sys) == MAX_IN_FLIGHT
    assert Policy(max_in_flight=2**70).compute_max_limit(max_sys) == MAX_IN_FLIGHT
    assert Policy(max_in_flight=20).compute_max_limit(max_sys) == 20


def test_reasons_up_to_no_room_close_the_gate() -> None:
    reasons = list(Reason)
    assert [reason.rank for reason in reasons] == list(range(len(reasons)))
    closed = [str(reason) for reason in reasons if reason.is_closed]
    assert closed == [
        "draining",
        "paused",
        "queue-unreachable",
        "starting",
        "unreadable",
        "stale",
        "no-endpoints",
        "implausible",
        "gateway-unreachable",
        "gateway-failing",
        "backpressure",
        "no-room",
    ]
    assert [str(reason) for reason in reasons[len(closed) :]] == ["saturated", "full", "idle", "open"]


def test_learned_share_does_not_scale_a_pressure_score() -> None:
    """The score does not depend on the configured capacity, but the number of waiting requests does."""
    pressure = Reading(Signal.SATURATION, 0, 0, 0.5, 6 / 192, 192, is_request_count=False)
    learned = compute_budget(pressure, Policy(), learned_share=1 / 3)
    assert learned.f_sys == 0.5
    assert learned.f_epp == pytest.approx(6 / 64)
    count = compute_budget(replace(pressure, is_request_count=True), Policy(), learned_share=1 / 3)
    assert count.f_sys == pytest.approx(1.5)
