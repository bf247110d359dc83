"""Explanation that the reserve is small for long requests, given only if realtime requests may wait."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.core.limit.reserve_check import explain_small_reserve

LONG_REQUESTS: dict[str, Any] = {
    "mean_duration_s": 48.0,
    "reserve": 0.05,
    "batch_requests": 40,
    "all_requests": 60,
    "max_sys": 64,
}


def test_small_reserve_for_long_requests_is_explained_with_a_recommended_setting() -> None:
    explanation = explain_small_reserve(**LONG_REQUESTS)
    assert explanation is not None
    assert "last 48 s" in explanation
    assert "budget.reserve: 0.2 or more" in explanation


@pytest.mark.parametrize(
    "changes",
    [
        {"mean_duration_s": 4.0},
        {"mean_duration_s": 0.0},
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
    assert explain_small_reserve(**LONG_REQUESTS | changes) is None
