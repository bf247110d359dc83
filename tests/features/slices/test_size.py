"""The size of slices, chosen by measurements."""

from __future__ import annotations

import random

import pytest

from dispatcher.features.slices.size import (
    DEFAULT_SIZE,
    MAX_OVERHEAD,
    MEASURE_EVERY,
    MEASURE_TOKENS,
    MIN_SAMPLES,
    SIZES,
    SizeEstimator,
)

TOKEN_S = 0.02


def measure(overhead_s: float, noise: float = 0.0, count: int = 20) -> SizeEstimator:
    """Return the estimator after slices of a server with this time to the first token.

    `noise` is the largest deviation of a duration, as a share. One call of ten takes ten times as long.
    """
    source = random.Random(1)
    estimator = SizeEstimator()

    def record(tokens: int) -> None:
        duration_s = (overhead_s + tokens * TOKEN_S) * source.uniform(1 - noise, 1 + noise)
        estimator.record_slice(tokens, duration_s * (10 if noise and source.random() < 0.1 else 1))

    for _ in range(count):
        record(MEASURE_TOKENS)
        record(estimator.size)
    return estimator


@pytest.mark.parametrize("size", SIZES)
def test_smallest_size_within_the_allowed_overhead_is_chosen(size: int) -> None:
    # A bit less than the overhead that this size may have. Durations per token contain a part of it, too.
    estimator = measure(0.9 * MAX_OVERHEAD * size * TOKEN_S)
    assert estimator.size == size
    assert not estimator.is_too_expensive


@pytest.mark.parametrize("size", [128, 256, 512])
def test_noisy_durations_with_slow_calls_change_the_size_by_one_step_at_most(size: int) -> None:
    chosen = measure(0.75 * MAX_OVERHEAD * size * TOKEN_S, noise=0.05, count=32).size
    assert abs(SIZES.index(chosen) - SIZES.index(size)) <= 1


def test_server_without_overhead_gets_the_smallest_slices() -> None:
    assert measure(0.0).size == SIZES[0]
    assert measure(0.0).overhead_s == pytest.approx(0.0, abs=1e-9)


def test_overhead_that_no_size_makes_up_for_is_too_expensive() -> None:
    estimator = measure(2 * MAX_OVERHEAD * SIZES[-1] * TOKEN_S)
    assert estimator.is_too_expensive
    assert estimator.size == SIZES[-1]


def test_size_is_the_default_until_enough_is_measured() -> None:
    estimator = SizeEstimator()
    for _ in range(MIN_SAMPLES - 1):
        estimator.record_slice(MEASURE_TOKENS, 0.01)
        estimator.record_slice(DEFAULT_SIZE, 0.02)
    estimator.record_slice(DEFAULT_SIZE, 0.02)
    assert estimator.size == DEFAULT_SIZE
    assert estimator.overhead_s is None


def test_durations_of_zero_do_not_break_the_estimate() -> None:
    estimator = SizeEstimator()
    for _ in range(MIN_SAMPLES):
        estimator.record_slice(DEFAULT_SIZE, 0.0)
        estimator.record_slice(MEASURE_TOKENS, 0.0)
    assert estimator.is_too_expensive


def test_slice_without_tokens_is_not_measured() -> None:
    estimator = SizeEstimator()
    for _ in range(2 * MIN_SAMPLES):
        estimator.record_slice(0, 1.0)
        estimator.record_slice(DEFAULT_SIZE, 1.0)
    assert estimator.overhead_s is None


def test_one_of_many_continued_slices_measures_the_overhead() -> None:
    estimator = SizeEstimator()
    assert [estimator.choose_tokens(is_continued=False) for _ in range(100)] == [DEFAULT_SIZE] * 100
    chosen = [estimator.choose_tokens(is_continued=True) for _ in range(4 * MEASURE_EVERY)]
    assert chosen.count(MEASURE_TOKENS) == 4
    assert chosen.count(DEFAULT_SIZE) == 4 * MEASURE_EVERY - 4
