"""Events of sequences that are logged, and when."""

from __future__ import annotations

from dispatcher.features.sequences.change_log import SEQUENCE_LOG_INTERVAL_S, SequenceChangeLog
from dispatcher.features.sequences.decisions import SequenceCounters
from dispatcher.telemetry.events import Event


def test_sequence_changes_before_the_first_check_are_not_logged() -> None:
    changes = SequenceChangeLog()
    assert changes.collect_events(SequenceCounters(held=3, last_held="a"), 0.0) == []
    assert changes.collect_events(SequenceCounters(held=3, last_held="a"), 1.0) == []
    events = changes.collect_events(SequenceCounters(held=4, last_held="b", idle=2, cancelled=1), 2.0)
    assert events == [
        (Event.SEQUENCES_HELD, {"held": 1, "newest": "b"}),
        (Event.SEQUENCES_ENDED, {"idle": 2, "cancelled": 1}),
    ]


def test_many_aborted_sequences_are_one_event_a_minute_that_counts_all() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(), 0.0)
    events = [
        (second, fields)
        for second in range(1, 200)
        for event, fields in changes.collect_events(
            SequenceCounters(aborted=min(second * 1000, 100_000), last_aborted=f"s{second}"), float(second)
        )
        if event is Event.SEQUENCES_ABORTED
    ]
    assert [second for second, _ in events] == [
        1,
        1 + SEQUENCE_LOG_INTERVAL_S,
        1 + 2 * SEQUENCE_LOG_INTERVAL_S,
    ]
    assert [fields["aborted"] for _, fields in events] == [1000, 60_000, 39_000]


def test_event_of_one_kind_does_not_delay_events_of_other_kinds() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(), 0.0)
    changes.collect_events(SequenceCounters(held=1, last_held="a"), 1.0)
    assert changes.collect_events(SequenceCounters(held=1, released=1, gaps=2), 2.0) == [
        (Event.SEQUENCES_RELEASED, {"released": 1}),
        (Event.SEQUENCES_GAPS, {"gaps": 2}),
    ]


def test_counters_that_the_queue_lost_are_counted_from_zero() -> None:
    changes = SequenceChangeLog()
    changes.collect_events(SequenceCounters(aborted=50), 0.0)
    assert changes.collect_events(SequenceCounters(aborted=2, last_aborted="z"), 1.0) == [
        (Event.SEQUENCES_ABORTED, {"aborted": 2, "newest": "z"})
    ]
