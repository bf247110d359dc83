"""Which changes of the gate's reason are told, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.budget import Reason
from dispatcher.core.sequences.decisions import SequenceCounters
from dispatcher.dispatch.change_log import (
    FLAPPING_WINDOW_S,
    MAX_IMMEDIATE_CHANGES,
    OPEN_LOG_INTERVAL_S,
    SEQUENCE_LOG_INTERVAL_S,
    STABLE_AFTER_S,
    GateChangeLog,
    SequenceChangeLog,
)
from dispatcher.telemetry.events import Event


def test_a_gate_that_closes_for_a_moment_is_told_twice() -> None:
    changes = GateChangeLog()
    assert changes.check_reason(Reason.STARTING, 0.0) == 0
    assert changes.check_reason(Reason.FULL, 5.0) == 0
    assert changes.check_reason(Reason.BACKPRESSURE, 5.1) == 0
    assert changes.check_reason(Reason.BACKPRESSURE, 5.15) is None
    assert changes.check_reason(Reason.FULL, 5.2) == 0


def test_a_busy_gate_that_is_full_and_open_in_turn_is_told_six_times_a_minute() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.OPEN, 0.0)
    told = [
        (at, changes.check_reason(Reason.FULL if step % 2 else Reason.OPEN, at))
        for step in range(1, 6000)
        if (at := step / 100)
    ]
    lines = [(at, untold) for at, untold in told if untold is not None]
    assert [at for at, _ in lines] == [1.01, 11.02, 21.03, 31.04, 41.05, 51.06]
    assert {untold for _, untold in lines[1:]} == {1000}


def test_a_pool_that_became_too_full_is_told_at_once() -> None:
    changes = GateChangeLog()
    assert changes.check_reason(Reason.OPEN, 0.0) == 0
    assert changes.check_reason(Reason.FULL, 1.5) == 0
    assert changes.check_reason(Reason.SATURATED, 1.6) == 0
    assert changes.check_reason(Reason.FULL, 1.7) == 0


def test_an_open_gate_that_was_quiet_tells_at_once_what_it_lacks() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.IDLE, 0.0)
    assert changes.check_reason(Reason.OPEN, 60.0) == 0
    assert changes.check_reason(Reason.NO_ROOM, 60.1) == 0, "and whatever was told before, that it closed"
    assert changes.check_reason(Reason.FULL, 60.2) == 0, "and that it opened"


def test_a_change_that_came_back_before_it_was_told_is_not_told() -> None:
    changes = GateChangeLog()
    changes.check_reason(Reason.FULL, 0.0)
    assert changes.check_reason(Reason.IDLE, 0.1) is None
    assert changes.check_reason(Reason.FULL, 0.2) is None
    assert changes.check_reason(Reason.FULL, 15.0) is None
    assert changes.check_reason(Reason.PAUSED, 16.0) == 2, "they are counted with the next that is"


@given(st.lists(st.tuples(st.sampled_from(list(Reason)), st.floats(0.0, 0.3)), max_size=300))
def test_every_change_is_told_or_counted_and_what_lasts_is_told(steps: list[tuple[Reason, float]]) -> None:
    changes, now, last = GateChangeLog(), 0.0, None
    changed = told = 0
    lines: list[float] = []
    shown: Reason | None = None
    for reason, pause_s in steps:
        now += pause_s
        changed += reason is not last
        last = reason
        untold = changes.check_reason(reason, now)
        if untold is not None:
            assert reason is not shown, "no line without a change"
            told += untold + 1
            lines.append(now)
            shown = reason
    assert told <= changed
    for at in lines:
        at_most = MAX_IMMEDIATE_CHANGES + FLAPPING_WINDOW_S / STABLE_AFTER_S + 1
        assert sum(at <= other < at + FLAPPING_WINDOW_S for other in lines) <= at_most
    if last is not None:
        changes.check_reason(last, now + OPEN_LOG_INTERVAL_S)
        assert changes.check_reason(last, now + 2 * OPEN_LOG_INTERVAL_S) is None
        assert changes._logged_reason is last


def test_what_happened_to_sequences_before_the_first_look_is_not_told() -> None:
    changes = SequenceChangeLog()
    assert changes.collect_events(SequenceCounters(held=3, last_held="a"), 0.0) == []
    assert changes.collect_events(SequenceCounters(held=3, last_held="a"), 1.0) == []
    told = changes.collect_events(SequenceCounters(held=4, last_held="b", idle=2, cancelled=1), 2.0)
    assert told == [
        (Event.SEQUENCES_HELD, {"held": 1, "newest": "b"}),
        (Event.SEQUENCES_ENDED, {"idle": 2, "cancelled": 1}),
    ]


def test_a_hundred_thousand_that_abort_are_a_line_a_minute_and_none_is_left_out() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(), 0.0)
    lines = [
        (second, fields)
        for second in range(1, 200)
        for event, fields in changes.collect_events(
            SequenceCounters(aborted=min(second * 1000, 100_000), last_aborted=f"s{second}"), float(second)
        )
        if event is Event.SEQUENCES_ABORTED
    ]
    assert [second for second, _ in lines] == [
        1,
        1 + SEQUENCE_LOG_INTERVAL_S,
        1 + 2 * SEQUENCE_LOG_INTERVAL_S,
    ]
    assert [fields["aborted"] for _, fields in lines] == [1000, 60_000, 39_000]


def test_one_kind_that_was_just_told_keeps_no_other_back() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(), 0.0)
    changes.collect_events(SequenceCounters(held=1, last_held="a"), 1.0)
    assert changes.collect_events(SequenceCounters(held=1, released=1, gaps=2), 2.0) == [
        (Event.SEQUENCES_RELEASED, {"released": 1}),
        (Event.SEQUENCES_GAPS, {"gaps": 2}),
    ]


def test_counters_that_the_queue_has_lost_begin_anew() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(aborted=50), 0.0)
    assert changes.collect_events(SequenceCounters(aborted=2, last_aborted="z"), 1.0) == [
        (Event.SEQUENCES_ABORTED, {"aborted": 2, "newest": "z"})
    ]
