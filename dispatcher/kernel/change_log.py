"""Decides which changes of the gate's reason are logged. Has no clock of its own."""

from __future__ import annotations

from collections import deque
from typing import Any

from dispatcher.limit.allowance import Allowance, explain_allowance
from dispatcher.limit.budget import Reason

MAX_IMMEDIATE_CHANGES = 10
"""Maximum number of openings and closings in FLAPPING_WINDOW_S that are logged when they happen."""
FLAPPING_WINDOW_S = 10.0
STABLE_AFTER_S = 1.0
"""A state that lasts this long ends the flapping."""
OPEN_LOG_INTERVAL_S = 10.0
"""Minimum time between two changes among the reasons of an open gate. These can change with each completion:
a line each would push everything else off the page."""


class GateChangeLog:
    """Decides which changes of the gate's reason are logged. Call `check_reason` in every round of the loop,
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
