"""What was free, what of it was used, and how long the gate said what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.budget import Reason
from dispatcher.core.limit.utilization import Meter, Observation, Work


def test_harvest_is_what_was_used_of_what_was_free_while_work_waited() -> None:
    meter = Meter()
    meter.observe(Observation(10.0, Reason.OPEN, used=4, free=8, waiting=True))
    meter.observe(Observation(12.0, Reason.FULL, used=8, free=8, waiting=True))
    meter.observe(Observation(15.0, Reason.IDLE, used=1, free=8, waiting=False))
    meter.observe(Observation(16.0, Reason.IDLE, used=0, free=8, waiting=False))
    assert meter.used_s == {Work.WAITING: 4 * 2 + 8 * 3, Work.NONE: 1, Work.UNKNOWN: 0}
    assert meter.free_s == {Work.WAITING: 8 * 5, Work.NONE: 8, Work.UNKNOWN: 0}
    assert {reason: s for reason, s in meter.reason_s.items() if s} == {
        Reason.OPEN: 2,
        Reason.FULL: 3,
        Reason.IDLE: 1,
    }


def test_what_is_used_while_nobody_knows_what_is_free_is_counted_apart() -> None:
    meter = Meter()
    meter.observe(Observation(0.0, Reason.STALE, used=3, free=None, waiting=True))
    meter.observe(Observation(2.0, Reason.OPEN, used=3, free=5, waiting=True))
    assert meter.used_s == {Work.WAITING: 0, Work.NONE: 0, Work.UNKNOWN: 6}
    assert sum(meter.free_s.values()) == 0


observations = st.builds(
    Observation,
    at=st.floats(0, 1e6),
    reason=st.sampled_from(Reason),
    used=st.integers(0, 1000),
    free=st.none() | st.floats(0, 1000),
    waiting=st.booleans(),
)


@given(st.lists(observations, min_size=1, max_size=30))
def test_time_adds_up_whatever_the_order(seen: list[Observation]) -> None:
    """Each stretch of time counts for one reason and one kind of work, and none counts twice or backwards."""
    meter = Meter()
    forward_s = 0.0
    for before, after in zip([None, *seen], seen, strict=False):
        meter.observe(after)
        if before is not None:
            forward_s += max(0.0, after.at - before.at)
    assert sum(meter.reason_s.values()) == pytest.approx(forward_s, abs=1e-3)
    assert all(value >= 0 for sums in (meter.used_s, meter.free_s) for value in sums.values())
