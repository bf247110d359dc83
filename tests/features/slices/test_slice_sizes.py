"""Sizes of successive slices: average, bounds, and even distances of slices that start together."""

from __future__ import annotations

import pytest

from dispatcher.features.slices.size import vary_tokens


@pytest.mark.parametrize("size", [1, 2, 64, 250, 1024])
def test_slices_have_the_wanted_size_on_average_and_at_most_half_of_it_more_or_less(size: int) -> None:
    sizes = [vary_tokens(size, number) for number in range(1000)]
    assert sum(sizes) / len(sizes) == pytest.approx(size, rel=0.05, abs=0.3)
    assert min(sizes) >= max(1, size // 2)
    assert max(sizes) <= -(-3 * size // 2)


@pytest.mark.parametrize("count", [5, 20, 60])
def test_slices_sent_together_end_at_even_distances(count: int) -> None:
    """Whichever number of slots comes free at once, no part of the time of a slice is without an end."""
    for first in range(50):
        ends = sorted(vary_tokens(1000, number) for number in range(first, first + count))
        gaps = [later - earlier for earlier, later in zip([500, *ends], [*ends, 1500], strict=True)]
        assert max(gaps) <= 2.7 * 1000 / count


def test_slices_without_spread_are_equal() -> None:
    assert {vary_tokens(250, number, 0.0) for number in range(100)} == {250}
