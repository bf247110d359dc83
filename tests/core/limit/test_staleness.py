"""How long the newest reading stands while later ones fail."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.staleness import MAX_AGE_INTERVALS, StalenessLimit


def test_nothing_read_is_nothing_to_stand_on() -> None:
    assert StalenessLimit(1.0, 10.0).compute_stale_at() == -inf


def test_first_sample_stands_for_the_shortest_interval_there_is() -> None:
    patience = StalenessLimit(2.0, 10.0)
    patience.record_sample(100.0, 100.1)
    assert patience.compute_stale_at() == 100.0 + MAX_AGE_INTERVALS * 2.0


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 15.0])
def test_one_lost_sample_is_borne_and_two_are_not(interval_s: float) -> None:
    """Its successor is a tenth late, and takes a tenth to be known."""
    patience = StalenessLimit(0.2, 60.0)
    for number in range(5):
        patience.record_sample(number * interval_s, number * interval_s)
    at = 4 * interval_s
    assert at + 2.2 * interval_s < patience.compute_stale_at() < at + 3 * interval_s


def test_lost_sample_does_not_stretch_the_interval() -> None:
    patience = StalenessLimit(0.2, 60.0)
    for at in (0.0, 5.0, 15.0):
        patience.record_sample(at, at)
    assert patience.compute_stale_at() == 15.0 + MAX_AGE_INTERVALS * 5.0


def test_same_sample_handed_in_again_shows_no_interval() -> None:
    """Prometheus is asked each second, and has a new sample each fifteen."""
    patience = StalenessLimit(1.0, 60.0)
    for _ in range(3):
        patience.record_sample(0.0, 0.0)
    for _ in range(3):
        patience.record_sample(15.0, 15.0)
    assert patience.compute_stale_at() == 15.0 + MAX_AGE_INTERVALS * 15.0


def test_interval_of_staggered_replicas_is_that_of_each() -> None:
    """Two replicas, each scraped every 15 s, 7 s apart: what is shown is as old as the older view."""
    patience = StalenessLimit(1.0, 60.0)
    views = [0.0, 7.0]
    for newest in (15.0, 22.0, 30.0, 37.0):
        patience.record_sample(min(views), max(views))
        views = [max(views), newest]
    patience.record_sample(min(views), max(views))
    assert patience.compute_stale_at() == 30.0 + MAX_AGE_INTERVALS * 15.0


@given(
    every_s=st.floats(0.05, 10),
    max_age_s=st.floats(1, 60),
    samples=st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 5)), min_size=1),
)
def test_it_never_ends_later_than_max_age_after_the_newest_sample(
    every_s: float, max_age_s: float, samples: list[tuple[float, float]]
) -> None:
    patience = StalenessLimit(every_s, max_age_s)
    for at, window_s in samples:
        patience.record_sample(at - window_s, at)
    assert patience.compute_stale_at() <= max(at for at, _ in samples) + max_age_s
