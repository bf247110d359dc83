"""Decide whether this process certainly still holds its leases, and thus what it may send.

Other owners take a lease back when its owner was not heard from for owner_timeout_s, or when the time of the
lease has run out. Both times are counted in Redis from the moment a call was executed, so they end no earlier
than if counted from the moment the call was sent. A process that was suspended in between notices this only
with its next call. Therefore nothing is sent for

    a lease      that was last confirmed (claimed or renewed) lease_s ago or longer
    a process    that last reached the queue owner_timeout_s ago or longer; once it reaches the queue again,
                 nothing is sent for leases that were confirmed before that gap

All times are of a clock that continues while the machine is suspended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LeaseValidity:
    """Tracks when this process last reached the queue. With an `owner_timeout_s` of 0, a gap alone loses no
    lease."""

    lease_s: float
    owner_timeout_s: float
    _last_contact_at: float = float("-inf")
    _contact_unbroken_since: float = float("-inf")

    def record_contact(self, asked_at: float, answered_at: float) -> None:
        """Record a call that proved that its owner is alive. It was executed at some time between the two
        given times."""
        # The call may have been executed as late as `answered_at`, after other owners had taken leases back.
        if answered_at >= self._last_contact_at + self.owner_timeout_s:
            self._contact_unbroken_since = asked_at
        self._last_contact_at = max(self._last_contact_at, asked_at)

    def is_certainly_held(self, confirmed_at: float, now: float) -> bool:
        """Return whether the lease is certainly still held. A call sent at `confirmed_at` confirmed the
        lease."""
        if now >= confirmed_at + self.lease_s:
            return False
        if self.owner_timeout_s <= 0:
            return True
        return (
            confirmed_at >= self._contact_unbroken_since
            and now < self._last_contact_at + self.owner_timeout_s
        )
