"""Staleness limit: time for which the newest reading is valid while later polls fail."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.staleness import MAX_AGE_INTERVALS, StalenessLimit


def test_readings_are_stale_before_the_first_sample() -> None:
    assert StalenessLimit(1.0, 10.0).compute_stale_at() == -inf


def test_first_sample_is_valid_for_the_shortest_possible_interval() -> None:
    staleness = StalenessLimit(2.0, 10.0)
    staleness.record_sample(100.0, 100.1)
    assert staleness.compute_stale_at() == 100.0 + MAX_AGE_INTERVALS * 2.0


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 15.0])
def test_readings_become_stale_after_two_missing_samples_but_not_after_one(interval_s: float) -> None:
    """The next sample is late by a tenth of the interval, and arrives another tenth later."""
    staleness = StalenessLimit(0.2, 60.0)
    for number in range(5):
        staleness.record_sample(number * interval_s, number * interval_s)
    at = 4 * interval_s
    assert at + 2.2 * interval_s < staleness.compute_stale_at() < at + 3 * interval_s


def test_missing_sample_does_not_lengthen_the_interval() -> None:
    staleness = StalenessLimit(0.2, 60.0)
    for at in (0.0, 5.0, 15.0):
        staleness.record_sample(at, at)
    assert staleness.compute_stale_at() == 15.0 + MAX_AGE_INTERVALS * 5.0


def test_repeated_sample_does_not_change_the_interval() -> None:
    """Prometheus is asked each second and has a new sample every 15 s."""
    staleness = StalenessLimit(1.0, 60.0)
    for _ in range(3):
        staleness.record_sample(0.0, 0.0)
    for _ in range(3):
        staleness.record_sample(15.0, 15.0)
    assert staleness.compute_stale_at() == 15.0 + MAX_AGE_INTERVALS * 15.0


def test_interval_of_staggered_replicas_is_that_of_each_replica() -> None:
    """Two replicas are each scraped every 15 s, 7 s apart. A reading is as old as the older view."""
    staleness = StalenessLimit(1.0, 60.0)
    views = [0.0, 7.0]
    for newest in (15.0, 22.0, 30.0, 37.0):
        staleness.record_sample(min(views), max(views))
        views = [max(views), newest]
    staleness.record_sample(min(views), max(views))
    assert staleness.compute_stale_at() == 30.0 + MAX_AGE_INTERVALS * 15.0


@given(
    interval_s=st.floats(0.05, 10),
    max_age_s=st.floats(1, 60),
    samples=st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 5)), min_size=1),
)
def test_readings_are_stale_at_the_latest_max_age_after_the_newest_sample(
    interval_s: float, max_age_s: float, samples: list[tuple[float, float]]
) -> None:
    staleness = StalenessLimit(interval_s, max_age_s)
    for at, window_s in samples:
        staleness.record_sample(at - window_s, at)
    assert staleness.compute_stale_at() <= max(at for at, _ in samples) + max_age_s
