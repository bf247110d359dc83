"""What requests weigh: known once they are read, and told to the queue where their leases count otherwise."""

from __future__ import annotations

from collections.abc import Callable, Set

from dispatcher.core.request import Request
from dispatcher.core.units import Weights
from dispatcher.dispatch.access import QueueAccess
from dispatcher.dispatch.endings import Ending, returned
from dispatcher.dispatch.holding import HeldLease, Holding
from dispatcher.ports import Permit

Read = tuple[HeldLease, Request]


class Weighing:
    """Sees to it that what is sent has room for all that it weighs.

    `units_of`: what a request weighs, at least 1.
    """

    def __init__(
        self,
        access: QueueAccess,
        holding: Holding,
        finish: Callable[[Ending], None],
        units_of: Callable[[Request], int],
    ) -> None:
        self._access = access
        self._holding = holding
        self._finish = finish
        self._units_of = units_of
        self._weights = Weights()

    def claim(self, free: int) -> tuple[int, int]:
        """How many requests to ask for where so many units are free, and what each counts until read."""
        return self._weights.claim(free)

    async def without_room(self, read: list[Read], permit: Permit, most: int | None) -> Set[str]:
        """The tokens of those that weigh more than there is room for. They are given back: by the queue, or
        where it cannot be asked by us.

        One that is heavier than `most`, which is all that the limit can be, counts that: it goes alone, when
        the pool has room for all that it may take.
        """
        weighed = []
        for held, request in read:
            units = self._units_of(request)
            self._weights.seen(units)
            units = units if most is None else min(units, max(1, most))
            if units != held.lease.units:
                weighed.append((held, units))
        if not weighed:
            return frozenset()
        asked_at = self._access.clock()
        weights = [(held.lease, units) for held, units in weighed]
        told = await self._access.ask("weigh", self._access.queue.weigh(weights, permit))
        gone = set()
        if told is None:
            for held, _ in weighed:
                gone.add(held.lease.token)
                self._finish(returned(held.lease))
            return gone
        self._access.heard(asked_at)
        self._access.learn(told)
        for (held, units), fits in zip(weighed, told.fits, strict=True):
            if fits:
                self._holding.weighs(held, units)
            else:
                gone.add(held.lease.token)
                self._holding.drop(held.lease.token)
        return gone
