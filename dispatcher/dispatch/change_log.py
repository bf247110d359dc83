"""Decides which changes of the gate's reason, and which events of sequences, are logged. Has no clock of its
own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dispatcher.core.limit.allowance import Allowance, explain
from dispatcher.core.limit.budget import Reason
from dispatcher.core.sequences.decisions import SequenceNews
from dispatcher.telemetry.events import Event

AT_ONCE = 10
"""Maximum number of openings and closings in FLAPPING_WINDOW_S that are logged when they happen."""
FLAPPING_S = 10.0
SETTLED_S = 1.0
"""A state that lasts this long ends the flapping."""
OPEN_EACH_S = 10.0
"""Minimum time between two changes among the reasons of an open gate. These can change with each completion:
a line each would push everything else off the page."""

SEQUENCES_EACH_S = 60.0
"""Minimum time between two logs of the same event of sequences. Each gives the number since the last one."""
_COUNTED = {
    Event.SEQUENCES_HELD: ("held",),
    Event.SEQUENCES_RELEASED: ("released",),
    Event.SEQUENCES_ABORTED: ("aborted",),
    Event.SEQUENCES_ENDED: ("idle", "aged", "cancelled"),
    Event.SEQUENCES_GAPS: ("gaps",),
}
_NEWEST = {Event.SEQUENCES_HELD: "last_held", Event.SEQUENCES_ABORTED: "last_aborted"}


class Changes:
    """Decides which changes of the gate's reason are logged. Call `check_reason` at every turn of the loop,
    and at least once in STABLE_AFTER_S."""

    def __init__(self) -> None:
        self._told: Reason | None = None
        self._last: Reason | None = None
        self._at_once: deque[float] = deque(maxlen=AT_ONCE)
        self._told_at = self._open_told_at = float("-inf")
        self._untold = 0

    def look(self, reason: Reason, now: float) -> int | None:
        """Return the number of changes not logged since the last call that returned one, if `reason` is to be
        logged now. `None` if nothing is to be logged.

        A change is important if the gate opens or closes, is closed for another reason, or the pool becomes
        too full. Important changes are logged at once, however short they last. After MAX_IMMEDIATE_CHANGES
        of them in FLAPPING_WINDOW_S, only the state is logged that holds STABLE_AFTER_S after the last log.
        Changes among `open`, `full` and `idle` are logged as the state that holds then, and only once in
        OPEN_LOG_INTERVAL_S.
        """
        if reason is not self._last:
            self._last = reason
            self._untold += 1
        if reason is self._told:
            return None
        # `None` is the state before the first log, so that the first reason is always important.
        weighs = any(each is None or each.closed or each is Reason.SATURATED for each in (self._told, reason))
        flaps = len(self._at_once) == AT_ONCE and now - self._at_once[0] < FLAPPING_S
        if now < self._told_at + (SETTLED_S if flaps or not weighs else 0.0):
            return None
        if not weighs and now < self._open_told_at + OPEN_EACH_S:
            return None
        if weighs:
            self._at_once.append(now)
        else:
            self._open_told_at = now
        self._told = reason
        self._told_at = now
        untold, self._untold = self._untold - 1, 0
        return untold


def terms(allowance: Allowance, *, in_flight: int, reading_age_s: float | None) -> dict[str, Any]:
    """Return all terms of the limit algorithm that are known, named as in /status, and the explanation."""
    budget = allowance.budget
    found: dict[str, Any] = {
        "reason": str(allowance.reason),
        "limit": allowance.limit,
        "in_flight": in_flight,
        "signal": None if allowance.signal is None else str(allowance.signal),
        "reading_age_s": reading_age_s,
        "explanation": explain(allowance, in_flight),
    }
    if budget is not None:
        found |= {"f_sys": budget.f_sys, "f_epp": budget.f_epp, "reserve": budget.reserve}
        found |= {"max_sys": budget.max_sys}
        if budget.learned:
            found |= {"configured_max_sys": budget.configured}
        if budget.fault is None:
            found |= {"budget": budget.d, "headroom": budget.headroom}
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in found.items()
        if value is not None
    }


class SequenceChanges:
    """Decides which events of sequences are logged. Call `collect_events` about every second."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] | None = None
        self._untold: Counter[str] = Counter()
        self._told_at: dict[Event, float] = {}

    def look(self, news: SequenceNews, now: float) -> list[tuple[Event, dict[str, Any]]]:
        """Return the events to log now, with their fields: the first of its kind at once, later ones once in
        SEQUENCE_LOG_INTERVAL_S.

        Changes before the first call are not logged. A counter that went back was lost in the queue and
        starts at 0.
        """
        counted = asdict(news)
        before, self._before = self._before, counted
        if before is None:
            return []
        found = []
        for event, names in _COUNTED.items():
            for name in names:
                was = before[name] if before[name] <= counted[name] else 0
                self._untold[name] += counted[name] - was
            told = {name: self._untold[name] for name in names if self._untold[name]}
            if told and now >= self._told_at.get(event, float("-inf")) + SEQUENCES_EACH_S:
                self._told_at[event] = now
                self._untold.subtract(told)
                found.append(
                    # The fields are the counters of this event; some events also name the newest sequence.
                    (event, told | ({"newest": counted[_NEWEST[event]]} if event in _NEWEST else {}))
                )
        return found
