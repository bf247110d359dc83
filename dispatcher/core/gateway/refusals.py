"""The gateway's refusals for overload: from each until when nothing is sent. Pure.

A refusal is over when a reading was taken after it and the longest wait that was asked for has passed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.limit.revision import Revised

HEARD_SLOP_S = 0.05
"""How far apart two replicas' ideas of one moment may lie, by the queue's clock."""


@dataclass(slots=True)
class Refusals(Revised):
    """The newest refusal, and the longest wait of all."""

    at: float = float("-inf")
    until: float = 0.0
    in_flight: int = 0
    """The most of ours at any refusal under one reading."""
    read_at: float = float("-inf")
    """Which reading that was."""

    def together(self, in_flight: int, read_at: float) -> int:
        """How many of ours were in flight when some of them are refused, these included.

        Requests that are refused together count each other out one by one: of several refusals under one
        reading the largest number is the truth.
        """
        self.in_flight = max(in_flight, self.in_flight if self.read_at == read_at else 0)
        self.read_at = read_at
        return self.in_flight

    def refused(self, now: float, until: float, *, heard: bool) -> bool:
        """Refused at `now`, asked to wait until then; whether that was known.

        `heard`: told by another replica, through a clock that is known to HEARD_SLOP_S only; the same
        refusal is told again and again.
        """
        slop = HEARD_SLOP_S if heard else 0.0
        # Every refusal's Retry-After counts, the newest's alone would not do: the queue tells the newest
        # refusal with the longest wait of all. What is heard again must not prolong it by the clock's error.
        if until - slop > self.until:
            self.until = until
        known = now <= self.at + slop
        self.at = self.at if known else now
        return known

    def closed(self, now: float, read_at: float) -> str:
        """Why nothing is sent on a reading of `read_at`; empty: refusals are no reason."""
        if now < self.until:
            return f"asked to wait another {self.until - now:.1f} s"
        if read_at <= self.at and self.at > float("-inf"):
            return "refused; waiting for a reading taken after that"
        return ""
