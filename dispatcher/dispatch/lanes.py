"""Lanes (core/requests/lanes.py) as one process sees them: how many requests of each lane it may claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dispatcher.core.requests.lanes import Lane
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.suspects import Suspects
from dispatcher.ports import Lease


class LaneRule(Protocol):
    """Rule for the number of requests of a lane that one process may run at once."""

    def room(self, held: int, now: float) -> int:
        """Return how many more requests may be claimed while `in_flight_count` are in flight here."""
        ...

    def claimed(self, waiting: int) -> bool:
        """Record how many requests a claim left in the queue.

        Return True if requests of the lane were held back for other work and there is none: claim again, with
        room for the lane.
        """
        ...

    def ended(self, ending: Ending) -> bool:
        """Record the end of a lease of the lane. Return True if that makes room for others."""
        ...


class Lanes:
    """The rules of all lanes."""

    def __init__(self) -> None:
        self._rules: Mapping[Lane, LaneRule] = {Lane.SUSPECTS: Suspects()}

    def room(self, held: Mapping[Lane, int], now: float) -> dict[Lane, int]:
        """Return for each lane how many more requests may be claimed."""
        return {lane: rule.room(held.get(lane, 0), now) for lane, rule in self._rules.items()}

    def claimed(self, waiting: int) -> bool:
        """Record how many requests a claim left. Return True to claim again, because a lane was held back
        needlessly."""
        # Build the whole list first, because `any` would stop before every rule has recorded the claim.
        again = [rule.claimed(waiting) for rule in self._rules.values()]
        return any(again)

    def ended(self, lease: Lease, ending: Ending) -> bool:
        """Record the end of a lease. Return True if that makes room in its lane."""
        return lease.lane is not None and self._rules[lease.lane].ended(ending)
