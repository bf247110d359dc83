"""How many running slices end early, because realtime requests wait.

The limit alone makes room only as fast as running slices end by themselves. The tokens that a slice has
generated are kept, so ending it early costs little. But the slots that it leaves stay empty until the next
reading, so with rare readings revocation costs more batch tokens than it saves waiting.
"""

from __future__ import annotations

from math import ceil

from dispatcher.limit.allowance import Allowance

MAX_READING_AGE_S = 10.0
"""Time between readings, and age of the newest one, above which no slice ends early."""


class RevocationPlanner:
    """Decides once for each reading."""

    def __init__(self) -> None:
        self._acted_at = float("-inf")
        """Time of the last decision to end slices."""

    def plan_revocations(
        self, allowance: Allowance, now: float, own_units: int, all_units: int, reading_interval_s: float
    ) -> int:
        """Return how many units of this process to end.

        A reading shows too little room if its headroom is negative: requests wait, or the reserve is in use.
        Then as many units as are missing end, but none beyond the limit. All owners read the same, and each
        ends its part. A reading that was taken before the last decision shows the pool as it was before.
        """
        budget = allowance.budget
        if budget is None or budget.fault is not None or budget.headroom >= 0:
            return 0
        if allowance.read_at <= self._acted_at or own_units <= 0:
            return 0
        if max(reading_interval_s, now - allowance.read_at) > MAX_READING_AGE_S:
            return 0
        excess = min(-budget.headroom, all_units - allowance.limit)
        if excess <= 0:
            return 0
        self._acted_at = now
        return min(own_units, ceil(excess * own_units / all_units))
