"""When a change of the gate's reason is told, or what happens to sequences, and in which words: without a
clock of its own."""

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
"""So many openings and closings in FLAPPING_S are told when they happen."""
FLAPPING_S = 10.0
SETTLED_S = 1.0
"""What holds after so long ends a flapping."""
OPEN_EACH_S = 10.0
"""What an open gate is short of may change with each completion: it is told no more often, or a busy
day would be a line a second that says nothing, and push all else off the page."""

SEQUENCES_EACH_S = 60.0
"""Of many sequences something may happen in each second: an event is told no more often, with how many."""
_COUNTED = {
    Event.SEQUENCES_HELD: ("held",),
    Event.SEQUENCES_RELEASED: ("released",),
    Event.SEQUENCES_ABORTED: ("aborted",),
    Event.SEQUENCES_ENDED: ("idle", "aged", "cancelled"),
    Event.SEQUENCES_GAPS: ("gaps",),
}
_NEWEST = {Event.SEQUENCES_HELD: "last_held", Event.SEQUENCES_ABORTED: "last_aborted"}


class Changes:
    """Which changes are told. `look` at every turn, and at least once in SETTLED_S."""

    def __init__(self) -> None:
        self._told: Reason | None = None
        self._last: Reason | None = None
        self._at_once: deque[float] = deque(maxlen=AT_ONCE)
        self._told_at = self._open_told_at = float("-inf")
        self._untold = 0

    def look(self, reason: Reason, now: float) -> int | None:
        """None: nothing is to be told. Else the reason is told now, and this is how many changes were not
        told since the last time.

        A gate that opens or closes, or is closed for another reason, is told at once, however short that
        lasts, and so is a pool that became too full; but of more than AT_ONCE such changes in FLAPPING_S only
        what holds when SETTLED_S have passed since the last line. Of `open`, `full` and `idle` in turn only
        what holds then, and one such line in OPEN_EACH_S.
        """
        if reason is not self._last:
            self._last = reason
            self._untold += 1
        if reason is self._told:
            return None
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
    """Every term of the law that there is, by the names that /status has for them, and the sentence."""
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
    """Which events tell what happens to the sequences of a line. `look` every second or so."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] | None = None
        self._untold: Counter[str] = Counter()
        self._told_at: dict[Event, float] = {}

    def look(self, news: SequenceNews, now: float) -> list[tuple[Event, dict[str, Any]]]:
        """What is to be told now: the first of its kind at once, later ones once in SEQUENCES_EACH_S.

        What happened before the first look is not told. Counters that went back were lost, and begin at 0.
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
                    (event, told | ({"newest": counted[_NEWEST[event]]} if event in _NEWEST else {}))
                )
        return found
