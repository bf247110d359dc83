"""Whether what this process holds is surely still its own: what it may send. Pure.

Others take a lease back when its owner has been silent for owner_timeout_s, or when its time has run out.
Both are counted in Redis from when a call of ours was carried out, and so end no earlier than counted from
when it was asked. Whoever stood still in between finds out only by asking: so nothing is sent of

    a lease      confirmed (claimed, renewed) lease_s ago or longer
    a process    last heard of owner_timeout_s ago or longer; nor, when it is heard of again, of what it had
                 confirmed before that silence

Times are of a clock that goes on while the machine sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tenure:
    """`owner_timeout_s`: 0: silence alone loses nothing."""

    lease_s: float
    owner_timeout_s: float
    _heard_at: float = float("-inf")
    _unbroken_since: float = float("-inf")

    def heard(self, asked_at: float, answered_at: float) -> None:
        """A call that shows that its owner lives: carried out at some time between the two."""
        if answered_at >= self._heard_at + self.owner_timeout_s:
            self._unbroken_since = asked_at
        self._heard_at = max(self._heard_at, asked_at)

    def holds(self, confirmed_at: float, now: float) -> bool:
        """Whether a lease is still ours that was, as a call asked at `confirmed_at` told."""
        if now >= confirmed_at + self.lease_s:
            return False
        if self.owner_timeout_s <= 0:
            return True
        return confirmed_at >= self._unbroken_since and now < self._heard_at + self.owner_timeout_s
