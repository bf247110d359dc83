"""Refusals of the gateway for overload, and the time until which nothing is sent because of them.

A refusal ends when a reading was taken after it and the longest requested wait has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.common.revision import Revisioned

REMOTE_CLOCK_ERROR_S = 0.05
"""Maximum error when two replicas compare a time by the clock of the queue."""


@dataclass(slots=True)
class Refusals(Revisioned):
    """The newest refusal, and the longest wait that any refusal requested."""

    refused_at: float = float("-inf")
    retry_at: float = 0.0
    in_flight: int = 0
    """Largest number of batch requests in flight at any refusal under one reading."""
    read_at: float = float("-inf")
    """Time of that reading."""

    def count_in_flight(self, in_flight: int, read_at: float) -> int:
        """Return how many batch requests were in flight when some of them are refused, those included.

        Requests that are refused together are removed from the count one by one. Of several refusals under
        one reading, the largest number is therefore the right one.
        """
        self.in_flight = max(in_flight, self.in_flight if self.read_at == read_at else 0)
        self.read_at = read_at
        return self.in_flight

    def record_refusal(self, now: float, retry_at: float, *, is_remote: bool) -> bool:
        """Record a refusal at `now` that asks to wait until `retry_at`. Return whether it was already known.

        `is_remote` is True if another replica reported it. Its clock is known only to REMOTE_CLOCK_ERROR_S,
        and it reports the same refusal repeatedly.
        """
        clock_error_s = REMOTE_CLOCK_ERROR_S if is_remote else 0.0
        # The longest Retry-After of all refusals counts, because the queue reports the newest refusal with
        # the longest wait of all. The tolerance keeps a repeated report from prolonging the wait by the clock
        # error.
        if retry_at - clock_error_s > self.retry_at:
            self.retry_at = retry_at
        is_known = now <= self.refused_at + clock_error_s
        self.refused_at = self.refused_at if is_known else now
        return is_known

    def explain_closure(self, now: float, read_at: float) -> str:
        """Return why nothing is sent on a reading of `read_at`. Empty if refusals do not prevent it."""
        if now < self.retry_at:
            return f"asked to wait another {self.retry_at - now:.1f} s"
        if read_at <= self.refused_at and self.refused_at > float("-inf"):
            return "refused; waiting for a reading taken after that"
        return ""
