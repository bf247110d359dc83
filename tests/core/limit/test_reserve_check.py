"""When it is said that the reserve is little for long requests: never where nobody has to wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.core.limit.reserve_check import explain_small_reserve

LONG: dict[str, Any] = {
    "mean_duration_s": 48.0,
    "reserve": 0.05,
    "batch_requests": 40,
    "all_requests": 60,
    "max_sys": 64,
}


def test_long_requests_with_little_reserve_are_told_with_the_setting_that_mends_it() -> None:
    told = explain_small_reserve(**LONG)
    assert told is not None
    assert "last 48 s" in told
    assert "budget.reserve: 0.2 or more" in told


@pytest.mark.parametrize(
    "otherwise",
    [
        {"mean_duration_s": 4.0},
        {"mean_duration_s": 0.0},
        {"mean_duration_s": float("nan")},
        {"reserve": 0.2},
        {"batch_requests": 8, "all_requests": 28},
        {"batch_requests": 60},
        {"max_sys": 0.0},
    ],
    ids=["short", "not known", "no number", "reserve enough", "few of ours", "nobody else", "no pool"],
)
def test_no_wolf_is_cried(otherwise: dict[str, Any]) -> None:
    assert explain_small_reserve(**LONG | otherwise) is None
