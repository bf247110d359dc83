"""Explanation that the reserve is small for long calls, given only if realtime requests may wait."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.limit.reserve_check import (
    LONG_CALL_S,
    MIN_BATCH_SHARE,
    MIN_REALTIME_SHARE,
    SUFFICIENT_RESERVE,
    explain_small_reserve,
)

LONG_CALLS: dict[str, Any] = {
    "mean_duration_s": 48.0,
    "reserve": 0.05,
    "batch_requests": 40,
    "all_requests": 60,
    "max_sys": 64,
}


def test_small_reserve_for_long_calls_is_explained_with_the_wait_and_a_recommended_setting() -> None:
    explanation = explain_small_reserve(**LONG_CALLS)
    assert explanation is not None
    assert "take 48 s on average, and a realtime request that finds no free slot may wait" in explanation
    assert "budget.reserve is 0.05, and 0.2 or more" in explanation


def test_reason_why_calls_are_long_is_named() -> None:
    explanation = explain_small_reserve(**LONG_CALLS, why_long="slicing.mode is off")
    assert explanation is not None
    assert "48 s on average (slicing.mode is off)" in explanation


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_duration_s": 4.0},
        {"mean_duration_s": None},
        {"mean_duration_s": float("nan")},
        {"reserve": 0.2},
        {"batch_requests": 8, "all_requests": 28},
        {"batch_requests": 60},
        {"max_sys": 0.0},
    ],
    ids=[
        "short",
        "unknown",
        "not a number",
        "enough reserve",
        "few batch requests",
        "no other requests",
        "no pool",
    ],
)
def test_no_explanation_if_the_reserve_suffices_or_no_other_requests_run(changes: dict[str, Any]) -> None:
    assert explain_small_reserve(**LONG_CALLS | changes) is None


@pytest.mark.parametrize(
    ("changes", "is_explained"),
    [
        ({"mean_duration_s": LONG_CALL_S}, True),
        ({"mean_duration_s": LONG_CALL_S - 0.1}, False),
        ({"reserve": SUFFICIENT_RESERVE - 0.01}, True),
        ({"batch_requests": MIN_BATCH_SHARE * 64}, True),
        ({"batch_requests": MIN_BATCH_SHARE * 64 - 1}, False),
        ({"all_requests": 40 + MIN_REALTIME_SHARE * 64}, True),
        ({"all_requests": 40 + MIN_REALTIME_SHARE * 64 - 1}, False),
    ],
)
def test_reserve_is_small_from_each_limit_on(changes: dict[str, Any], is_explained: bool) -> None:
    assert (explain_small_reserve(**LONG_CALLS | changes) is not None) is is_explained
