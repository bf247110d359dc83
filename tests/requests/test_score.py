"""Scores: the place of a request that goes before all others of its priority."""

from __future__ import annotations

from math import inf

import pytest

from dispatcher.requests.score import compute_score, floor_to_priority


@pytest.mark.parametrize("priority", range(10))
def test_lowest_score_of_a_priority_is_below_all_its_deadlines_and_above_better_priorities(
    priority: int,
) -> None:
    lowest = floor_to_priority(compute_score(1_800_000_000, priority))
    assert lowest < compute_score(1, priority)
    if priority:
        assert lowest > compute_score(10**11 - 1, priority - 1)


@pytest.mark.parametrize("score", [inf, -inf, 0.0, -5.0, 1e300, -1e300, 1.7e12])
def test_scores_beyond_all_priorities_are_never_raised(score: float) -> None:
    assert floor_to_priority(score) <= score
