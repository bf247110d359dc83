"""Changes of the gate's reason that are logged, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.kernel.change_log import (
    FLAPPING_WINDOW_S,
    MAX_IMMEDIATE_CHANGES,
    OPEN_LOG_INTERVAL_S,
    STABLE_AFTER_S,
    GateChangeLog,
)
from dispatcher.limit.budget import Reason


def test_gate_that_closes_for_a_moment_is_logged_twice() -> None:
    changes = GateChangeLog()
    assert changes.check_reason(Reason.STARTING, 0.0) == 0
    assert changes.check_reason(Reason.FULL, 5.0) == 0
    assert changes.check_reason(Reason.BACKPRESSURE, 5.1) == 0
    assert changes.check_reason(Reason.BACKPRESSURE, 5.15) is None
    assert changes.check_reason(Reason.FULL, 5.2) == 0


def test_gate_that_alternates_between_full_and_open_is_logged_six_times_a_minute() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.OPEN, 0.0)
    replies = [
        (at, changes.check_reason(Reason.FULL if step % 2 else Reason.OPEN, at))
        for step in range(1, 6000)
        if (at := step / 100)
    ]
    events = [(at, skipped_count) for at, skipped_count in replies if skipped_count is not None]
    assert [at for at, _ in events] == [1.01, 11.02, 21.03, 31.04, 41.05, 51.06]
    assert {skipped_count for _, skipped_count in events[1:]} == {1000}


def test_saturated_pool_is_logged_immediately() -> None:
    changes = GateChangeLog()
    assert changes.check_reason(Reason.OPEN, 0.0) == 0
    assert changes.check_reason(Reason.FULL, 1.5) == 0
    assert changes.check_reason(Reason.SATURATED, 1.6) == 0
    assert changes.check_reason(Reason.FULL, 1.7) == 0


def test_first_change_of_an_open_gate_after_a_quiet_time_is_logged_immediately() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.IDLE, 0.0)
    assert changes.check_reason(Reason.OPEN, 60.0) == 0
    assert changes.check_reason(Reason.NO_ROOM, 60.1) == 0, (
        "a closed gate is logged despite the event just before"
    )
    assert changes.check_reason(Reason.FULL, 60.2) == 0, "and so is a gate that opens"


def test_change_that_is_reverted_before_it_is_logged_is_not_logged() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.FULL, 0.0)
    assert changes.check_reason(Reason.IDLE, 0.1) is None
    assert changes.check_reason(Reason.FULL, 0.2) is None
    assert changes.check_reason(Reason.FULL, 15.0) is None
    assert changes.check_reason(Reason.PAUSED, 16.0) == 2, (
        "the next event counts the changes that were not logged"
    )


@given(st.lists(st.tuples(st.sampled_from(list(Reason)), st.floats(0.0, 0.3)), max_size=300))
def test_every_change_is_logged_or_counted_and_a_lasting_reason_is_logged(
    steps: list[tuple[Reason, float]],
) -> None:
    changes, now, last_reason = GateChangeLog(), 0.0, None
    change_count = logged_or_counted = 0
    logged_at: list[float] = []
    logged_reason: Reason | None = None
    for reason, pause_s in steps:
        now += pause_s
        change_count += reason is not last_reason
        last_reason = reason
        skipped_count = changes.check_reason(reason, now)
        if skipped_count is not None:
            assert reason is not logged_reason, "no event without a change"
            logged_or_counted += skipped_count + 1
            logged_at.append(now)
            logged_reason = reason
    assert logged_or_counted <= change_count
    for at in logged_at:
        max_count = MAX_IMMEDIATE_CHANGES + FLAPPING_WINDOW_S / STABLE_AFTER_S + 1
        assert sum(at <= later < at + FLAPPING_WINDOW_S for later in logged_at) <= max_count
    if last_reason is not None:
        changes.check_reason(last_reason, now + OPEN_LOG_INTERVAL_S)
        assert changes.check_reason(last_reason, now + 2 * OPEN_LOG_INTERVAL_S) is None
        assert changes._logged_reason is last_reason
