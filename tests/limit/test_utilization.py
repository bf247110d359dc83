"""Utilization: used and free unit-seconds, and the time of each reason of the gate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import Reason
from dispatcher.limit.utilization import Observation, UtilizationMeter, WorkState


def test_used_and_free_unit_seconds_are_summed_by_state_of_work_and_reason() -> None:
    meter = UtilizationMeter()
    meter.add_observation(Observation(10.0, Reason.OPEN, used_units=4, free_units=8, is_work_waiting=True))
    meter.add_observation(Observation(12.0, Reason.FULL, used_units=8, free_units=8, is_work_waiting=True))
    meter.add_observation(Observation(15.0, Reason.IDLE, used_units=1, free_units=8, is_work_waiting=False))
    meter.add_observation(Observation(16.0, Reason.IDLE, used_units=0, free_units=8, is_work_waiting=False))
    assert meter.used_unit_s == {WorkState.WAITING: 4 * 2 + 8 * 3, WorkState.NONE: 1, WorkState.UNKNOWN: 0}
    assert meter.free_unit_s == {WorkState.WAITING: 8 * 5, WorkState.NONE: 8, WorkState.UNKNOWN: 0}
    assert {reason: seconds for reason, seconds in meter.reason_s.items() if seconds} == {
        Reason.OPEN: 2,
        Reason.FULL: 3,
        Reason.IDLE: 1,
    }


def test_units_used_while_free_units_are_unknown_are_counted_separately() -> None:
    meter = UtilizationMeter()
    meter.add_observation(Observation(0.0, Reason.STALE, used_units=3, free_units=None, is_work_waiting=True))
    meter.add_observation(Observation(2.0, Reason.OPEN, used_units=3, free_units=5, is_work_waiting=True))
    assert meter.used_unit_s == {WorkState.WAITING: 0, WorkState.NONE: 0, WorkState.UNKNOWN: 6}
    assert sum(meter.free_unit_s.values()) == 0


observations = st.builds(
    Observation,
    at=st.floats(0, 1e6),
    reason=st.sampled_from(Reason),
    used_units=st.integers(0, 1000),
    free_units=st.none() | st.floats(0, 1000),
    is_work_waiting=st.booleans(),
)


@given(st.lists(observations, min_size=1, max_size=30))
def test_each_interval_counts_once_in_any_order_of_times(recorded: list[Observation]) -> None:
    """Each interval counts for one reason and one state of work. Times that go back count nothing."""
    meter = UtilizationMeter()
    elapsed_s = 0.0
    for previous, observation in zip([None, *recorded], recorded, strict=False):
        meter.add_observation(observation)
        if previous is not None:
            elapsed_s += max(0.0, observation.at - previous.at)
    assert sum(meter.reason_s.values()) == pytest.approx(elapsed_s, abs=1e-3)
    assert all(value >= 0 for sums in (meter.used_unit_s, meter.free_unit_s) for value in sums.values())
