"""Decides which changes of the gate's reason, and which events of sequences, are logged. Has no clock of its
own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dispatcher.core.limit.allowance import Allowance, explain_allowance
from dispatcher.core.limit.budget import Reason
from dispatcher.core.sequences.decisions import SequenceCounters
from dispatcher.telemetry.events import Event

MAX_IMMEDIATE_CHANGES = 10
"""Maximum number of openings and closings in FLAPPING_WINDOW_S that are logged when they happen."""
FLAPPING_WINDOW_S = 10.0
STABLE_AFTER_S = 1.0
"""A state that lasts this long ends the flapping."""
OPEN_LOG_INTERVAL_S = 10.0
"""Minimum time between two changes among the reasons of an open gate. These can change with each completion:
a line each would push everything else off the page."""

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


class GateChangeLog:
    """Decides which changes of the gate's reason are logged. Call `check_reason` at every turn of the loop,
    and at least once in STABLE_AFTER_S."""

    def __init__(self) -> None:
        self._logged_reason: Reason | None = None
        self._last_reason: Reason | None = None
        self._immediate_log_times: deque[float] = deque(maxlen=MAX_IMMEDIATE_CHANGES)
        self._logged_at = self._open_logged_at = float("-inf")
        self._unlogged_count = 0

    def check_reason(self, reason: Reason, now: float) -> int | None:
        """Return the number of changes not logged since the last call that returned one, if `reason` is to be
        logged now. `None` if nothing is to be logged.

        A change is important if the gate opens or closes, is closed for another reason, or the pool becomes
        too full. Important changes are logged at once, however short they last. After MAX_IMMEDIATE_CHANGES
        of them in FLAPPING_WINDOW_S, only the state is logged that holds STABLE_AFTER_S after the last log.
        Changes among `open`, `full` and `idle` are logged as the state that holds then, and only once in
        OPEN_LOG_INTERVAL_S.
        """
        if reason is not self._last_reason:
            self._last_reason = reason
            self._unlogged_count += 1
        if reason is self._logged_reason:
            return None
        # `None` is the state before the first log, so that the first reason is always important.
        is_important = any(
            each is None or each.is_closed or each is Reason.SATURATED
            for each in (self._logged_reason, reason)
        )
        is_flapping = (
            len(self._immediate_log_times) == MAX_IMMEDIATE_CHANGES
            and now - self._immediate_log_times[0] < FLAPPING_WINDOW_S
        )
        if now < self._logged_at + (STABLE_AFTER_S if is_flapping or not is_important else 0.0):
            return None
        if not is_important and now < self._open_logged_at + OPEN_LOG_INTERVAL_S:
            return None
        if is_important:
            self._immediate_log_times.append(now)
        else:
            self._open_logged_at = now
        self._logged_reason = reason
        self._logged_at = now
        unlogged_count, self._unlogged_count = self._unlogged_count - 1, 0
        return unlogged_count


def build_gate_fields(allowance: Allowance, *, in_flight: int, reading_age_s: float | None) -> dict[str, Any]:
    """Return all terms of the limit algorithm that are known, named as in /status, and the explanation."""
    budget = allowance.budget
    fields: dict[str, Any] = {
        "reason": str(allowance.reason),
        "limit": allowance.limit,
        "in_flight": in_flight,
        "signal": None if allowance.signal is None else str(allowance.signal),
        "reading_age_s": reading_age_s,
        "explanation": explain_allowance(allowance, in_flight, with_terms=False),
    }
    if budget is not None:
        fields |= {"f_sys": budget.f_sys, "f_epp": budget.f_epp, "reserve": budget.reserve}
        fields |= {"max_sys": budget.max_sys}
        if budget.is_capacity_learned:
            fields |= {"configured_max_sys": budget.configured_max_sys}
        if budget.fault is None:
            fields |= {"budget": budget.d, "headroom": budget.headroom}
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


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
