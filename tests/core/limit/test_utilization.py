"""What was free, what of it was used, and how long the gate said what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.utilization import Observation, UtilizationMeter, WorkState


def test_harvest_is_what_was_used_of_what_was_free_while_work_waited() -> None:
    meter = UtilizationMeter()
    meter.add_observation(Observation(10.0, Reason.OPEN, used_units=4, free_units=8, is_work_waiting=True))
    meter.add_observation(Observation(12.0, Reason.FULL, used_units=8, free_units=8, is_work_waiting=True))
    meter.add_observation(Observation(15.0, Reason.IDLE, used_units=1, free_units=8, is_work_waiting=False))
    meter.add_observation(Observation(16.0, Reason.IDLE, used_units=0, free_units=8, is_work_waiting=False))
    assert meter.used_unit_s == {WorkState.WAITING: 4 * 2 + 8 * 3, WorkState.NONE: 1, WorkState.UNKNOWN: 0}
    assert meter.free_unit_s == {WorkState.WAITING: 8 * 5, WorkState.NONE: 8, WorkState.UNKNOWN: 0}
    assert {reason: s for reason, s in meter.reason_s.items() if s} == {
        Reason.OPEN: 2,
        Reason.FULL: 3,
        Reason.IDLE: 1,
    }


def test_what_is_used_while_nobody_knows_what_is_free_is_counted_apart() -> None:
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
def test_time_adds_up_whatever_the_order(seen: list[Observation]) -> None:
    """Each stretch of time counts for one reason and one kind of work, and none counts twice or backwards."""
    meter = UtilizationMeter()
    forward_s = 0.0
    for before, after in zip([None, *seen], seen, strict=False):
        meter.add_observation(after)
        if before is not None:
            forward_s += max(0.0, after.at - before.at)
    assert sum(meter.reason_s.values()) == pytest.approx(forward_s, abs=1e-3)
    assert all(value >= 0 for sums in (meter.used_unit_s, meter.free_unit_s) for value in sums.values())
