"""Decides which events of sequences are logged. Has no clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dispatcher.features.sequences.decisions import SequenceCounters
from dispatcher.telemetry.events import Event

SEQUENCE_LOG_INTERVAL_S = 60.0
"""Minimum time between two logs of the same event of sequences. Each gives the number since the last one."""
_COUNTERS_BY_EVENT = {
    Event.SEQUENCES_HELD: ("held",),
    Event.SEQUENCES_RELEASED: ("released",),
    Event.SEQUENCES_ABORTED: ("aborted",),
    Event.SEQUENCES_ENDED: ("idle", "aged", "cancelled"),
    Event.SEQUENCES_GAPS: ("gaps",),
}
_NEWEST_ID_BY_EVENT = {Event.SEQUENCES_HELD: "last_held", Event.SEQUENCES_ABORTED: "last_aborted"}


class SequenceChangeLog:
    """Decides which events of sequences are logged. Call `collect_events` about every second."""

    def __init__(self) -> None:
        self._previous_counters: Mapping[str, Any] | None = None
        self._unlogged_counts: Counter[str] = Counter()
        self._logged_at: dict[Event, float] = {}

    def collect_events(self, counters: SequenceCounters, now: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events to log now, with their fields: the first of its kind at once, later ones once in
        SEQUENCE_LOG_INTERVAL_S.

        Changes before the first call are not logged. A counter that went back was lost in the queue and
        starts at 0.
        """
        counts = asdict(counters)
        before, self._previous_counters = self._previous_counters, counts
        if before is None:
            return []
        events = []
        for event, names in _COUNTERS_BY_EVENT.items():
            for name in names:
                previous_count = before[name] if before[name] <= counts[name] else 0
                self._unlogged_counts[name] += counts[name] - previous_count
            fields = {name: self._unlogged_counts[name] for name in names if self._unlogged_counts[name]}
            if fields and now >= self._logged_at.get(event, float("-inf")) + SEQUENCE_LOG_INTERVAL_S:
                self._logged_at[event] = now
                self._unlogged_counts.subtract(fields)
                events.append(
                    # The fields are the counters of this event; some events also name the newest sequence.
                    (
                        event,
                        fields
                        | (
                            {"newest": counts[_NEWEST_ID_BY_EVENT[event]]}
                            if event in _NEWEST_ID_BY_EVENT
                            else {}
                        ),
                    )
                )
        return events
