"""The lanes (core/requests/lanes.py) as one process sees them: how many requests of each it may claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dispatcher.core.requests.lanes import Lane
from dispatcher.dispatch.completions import Ending
from dispatcher.dispatch.suspects import Suspects
from dispatcher.ports import Lease


class LaneRule(Protocol):
    """How many requests of a lane one process may run at once, by what it has seen of them."""

    def room(self, held: int, now: float) -> int:
        """How many more may be claimed while `held` are here."""
        ...

    def claimed(self, waiting: int) -> bool:
        """Told how many requests a claim left. True where requests of the lane were held back for others, and
        there are none: claim again, with room for them."""
        ...

    def ended(self, ending: Ending) -> bool:
        """The lease of one has ended. True where that makes room for others."""
        ...


class Lanes:
    """The rule of each lane."""

    def __init__(self) -> None:
        self._rules: Mapping[Lane, LaneRule] = {Lane.SUSPECTS: Suspects()}

    def room(self, held: Mapping[Lane, int], now: float) -> dict[Lane, int]:
        """How many more of each may be claimed while so many are here."""
        return {lane: rule.room(held.get(lane, 0), now) for lane, rule in self._rules.items()}

    def claimed(self, waiting: int) -> bool:
        """Told how many requests a claim left. True where a lane held back some for nothing: claim again."""
        again = [rule.claimed(waiting) for rule in self._rules.values()]
        return any(again)

    def ended(self, lease: Lease, ending: Ending) -> bool:
        """A lease has ended. True where that makes room in its lane."""
        return lease.lane is not None and self._rules[lease.lane].ended(ending)
