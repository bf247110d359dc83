"""Lanes (requests/lanes.py) as one process sees them: how many requests of each lane it may claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dispatcher.kernel.completions import Completion
from dispatcher.kernel.suspects import SuspectRule
from dispatcher.queue.contract import Lease
from dispatcher.requests.lanes import Lane

_ANY_NUMBER = 10**6
"""Room of a lane without a limit of its own: more than any claim may take."""


class LaneRule(Protocol):
    """Rule for the number of requests of a lane that one process may run at once."""

    def compute_room(self, in_flight_count: int, now: float) -> int:
        """Return how many more requests may be claimed while `in_flight_count` are in flight here."""
        ...

    def record_claim(self, claimable_count: int) -> bool:
        """Record how many requests a claim left in the queue.

        Return True if requests of the lane were held back for other work and there is none: claim again, with
        room for the lane.
        """
        ...

    def record_completion(self, completion: Completion) -> bool:
        """Record the end of a lease of the lane. Return True if that makes room for others."""
        ...


class AnyNumberRule:
    """Rule of a lane without a limit of its own."""

    def compute_room(self, in_flight_count: int, now: float) -> int:
        return _ANY_NUMBER

    def record_claim(self, claimable_count: int) -> bool:
        return False

    def record_completion(self, completion: Completion) -> bool:
        return False


class LaneRules:
    """The rules of all lanes."""

    def __init__(self) -> None:
        self._rules: Mapping[Lane, LaneRule] = {
            Lane.SUSPECTS: SuspectRule(),
            Lane.STARTED: AnyNumberRule(),
        }

    def compute_rooms(self, lane_counts: Mapping[Lane, int], now: float) -> dict[Lane, int]:
        """Return for each lane how many more requests may be claimed."""
        return {lane: rule.compute_room(lane_counts.get(lane, 0), now) for lane, rule in self._rules.items()}

    def record_claim(self, claimable_count: int) -> bool:
        """Record how many requests a claim left. Return True to claim again, because a lane was held back
        needlessly."""
        # Build the whole list first, because `any` would stop before every rule has recorded the claim.
        must_claim_again = [rule.record_claim(claimable_count) for rule in self._rules.values()]
        return any(must_claim_again)

    def record_completion(self, lease: Lease, completion: Completion) -> bool:
        """Record the end of a lease. Return True if that makes room in its lane."""
        return lease.lane is not None and self._rules[lease.lane].record_completion(completion)
