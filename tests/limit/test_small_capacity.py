"""Evidence that the configured capacity is too small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import Reading, Signal
from dispatcher.limit.capacity import MAX_READING_INTERVAL_S, PoolCounts, PoolSnapshot
from dispatcher.limit.picker_inference import FLUSH_S
from dispatcher.limit.small_capacity import (
    PROOFS,
    QUIET_S,
    SmallCapacityCheck,
    count_running_without_waiting,
)

CAPACITY = 32.0
RESERVE = 0.05


def make_snapshot(
    at: float,
    running: float,
    waiting: float = 0.0,
    *,
    capacity: float = CAPACITY,
    is_capacity_known: bool = True,
    waiting_in_picker: float = 0.0,
) -> PoolSnapshot:
    return PoolSnapshot(
        sampled_at=at,
        configured_capacity=capacity,
        is_capacity_known=is_capacity_known,
        realtime_requests=0.0,
        present_requests=running + waiting,
        current_counts=PoolCounts(running, waiting, running),
        waiting_requests=waiting_in_picker,
    )


def record(check: SmallCapacityCheck, snapshot: PoolSnapshot, *, is_learned: bool = False) -> None:
    check.record_snapshot(snapshot, reserve=RESERVE, is_learned=is_learned)


def build_proven_check() -> SmallCapacityCheck:
    check = SmallCapacityCheck()
    for number in range(PROOFS):
        record(check, make_snapshot(100.0 + number * FLUSH_S, 40.0 + number))
    return check


def build_suggesting_check() -> SmallCapacityCheck:
    check = SmallCapacityCheck()
    for at in range(int(QUIET_S) + 1):
        record(check, make_snapshot(float(at), 30.0))
    return check


# Proof.


def test_requests_above_the_capacity_prove_a_larger_one_while_none_waits() -> None:
    assert build_proven_check().proven_capacity == 40.0  # exceeded by all of them


def test_single_observation_proves_nothing() -> None:
    check = SmallCapacityCheck()
    for tenth in range(int(10 * FLUSH_S * (PROOFS - 1))):
        record(check, make_snapshot(100.0 + tenth / 10, 40.0))
    assert check.proven_capacity is None


@pytest.mark.parametrize("running", [CAPACITY, CAPACITY * 1.02])
def test_number_at_the_capacity_proves_nothing(running: float) -> None:
    check = SmallCapacityCheck()
    for at in range(0, 100, 5):
        record(check, make_snapshot(float(at), running))
    assert check.proven_capacity is None


def test_averages_of_an_endpoint_that_has_just_left_prove_nothing() -> None:
    check = SmallCapacityCheck()
    for second in range(300):  # an endpoint leaves or returns every 9 s
        capacity = CAPACITY if second // 9 % 2 else 2 * CAPACITY
        record(check, make_snapshot(float(second), 1.5 * CAPACITY, capacity=capacity))
    assert check.proven_capacity is None


@pytest.mark.parametrize(
    "snapshot",
    [make_snapshot(1000.0, 20.0, capacity=48.0), make_snapshot(1000.0, 20.0, is_capacity_known=False)],
)
def test_evidence_ends_with_its_capacity(snapshot: PoolSnapshot) -> None:
    for check in (build_proven_check(), build_suggesting_check()):
        record(check, snapshot)
        assert (check.proven_capacity, check.quiet_s) == (None, 0.0)


def test_capacity_that_was_learned_to_be_smaller_ends_the_evidence() -> None:
    check = build_proven_check()
    record(check, make_snapshot(1000.0, 20.0), is_learned=True)
    assert check.proven_capacity is None


def test_own_counts_of_a_picker_prove_nothing_beside_averages() -> None:
    check = SmallCapacityCheck()
    for at in range(0, 100, 5):
        record(check, replace(make_snapshot(float(at), 40.0), average_counts=PoolCounts(32.0, 0.0, 32.0)))
    assert check.proven_capacity is None


@given(
    loads=st.lists(st.tuples(st.floats(0, 200), st.floats(0.1, 20.0)), max_size=80),
    slots=st.integers(1, 100),
)
def test_law_right_capacity_is_never_proven_to_be_too_small(
    loads: list[tuple[float, float]], slots: int
) -> None:
    check, at = SmallCapacityCheck(), 0.0
    for load, passed_s in loads:
        at += passed_s
        running = min(load, slots)
        record(check, make_snapshot(at, running, load - running, capacity=slots))
    assert check.proven_capacity is None


# Suggestion.


def test_larger_capacity_is_suggested_after_a_time_in_a_full_pool_without_waiting_requests() -> None:
    assert build_suggesting_check().is_larger_suggested
    assert build_suggesting_check().proven_capacity is None


@pytest.mark.parametrize(
    "waits", [make_snapshot(300.0, 30.0, 1.0), make_snapshot(300.0, 30.0, waiting_in_picker=1.0)]
)
def test_waiting_request_starts_the_time_again(waits: PoolSnapshot) -> None:
    check = SmallCapacityCheck()
    for at in (*range(300), *range(301, int(QUIET_S) + 300)):
        record(check, make_snapshot(float(at), 30.0))
        if at == 299:
            record(check, waits)
    assert not check.is_larger_suggested
    assert check.quiet_s == QUIET_S - 2


def test_refusal_starts_the_time_again() -> None:
    check = build_suggesting_check()
    check.record_refusal()
    record(check, make_snapshot(QUIET_S + 5, 30.0))
    assert check.quiet_s == 0.0


def test_time_in_a_pool_that_is_not_full_does_not_count() -> None:
    check = SmallCapacityCheck()
    for at in range(2 * int(QUIET_S)):
        record(check, make_snapshot(float(at), 26.0 if at % 2 else 30.0))
    assert check.quiet_s == 0.0


def test_time_without_readings_counts_little() -> None:
    check = SmallCapacityCheck()
    record(check, make_snapshot(0.0, 30.0))
    record(check, make_snapshot(10 * QUIET_S, 30.0))
    assert check.quiet_s == MAX_READING_INTERVAL_S


def test_nothing_is_known_without_counts_of_running_requests() -> None:
    check = SmallCapacityCheck()
    for at in range(int(QUIET_S) + 1):
        record(check, replace(make_snapshot(float(at), 40.0), current_counts=None))
    assert (check.proven_capacity, check.quiet_s) == (None, 0.0)


# A single reading.


@pytest.mark.parametrize(
    ("reading", "running"),
    [
        (Reading(Signal.REQUESTS, 0, 0, 1.0, 0.0, 32, running=40), 40),
        (Reading(Signal.REQUESTS, 0, 0, 1.0, 0.0, 32, running=40, has_exact_counts=False), None),
        (
            Reading(
                Signal.REQUESTS, 0, 0, 1.0, 0.0, 32, running=40, has_exact_counts=False, averages=(38, 0)
            ),
            38,
        ),
        (Reading(Signal.REQUESTS, 0, 0, 1.0, 0.0, 32, running=40, waiting=1, averages=(38, 0)), None),
        (Reading(Signal.REQUESTS, 0, 0, 1.0, 0.1, 32, averages=(38, 0)), None),
        (Reading(Signal.REQUESTS, 0, 0, 1.0, 0.0, 32), None),
    ],
)
def test_running_requests_count_only_if_none_waits(reading: Reading, running: float | None) -> None:
    assert count_running_without_waiting(reading) == running
