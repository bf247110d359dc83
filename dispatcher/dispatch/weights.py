"""What requests weigh: known once they are read, and told to the queue where their leases count otherwise."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from dispatcher.core.requests.request import Request
from dispatcher.core.requests.units import Weights
from dispatcher.dispatch.completions import Ending, returned
from dispatcher.dispatch.in_flight import HeldLease, Holding, Try
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.ports import Permit

Read = tuple[HeldLease, Request]


class Bounded(Protocol):
    """What is known of the limit; asked where it matters."""

    @property
    def most(self) -> int | None:
        """All that it can be."""
        ...


class Weighing:
    """Sees to it that what is sent has room for all that it weighs.

    `units_of`: what a request weighs; less than 1: its share of a unit, which is known when it is sent.
    `drop`: the queue has taken back a lease.
    """

    def __init__(
        self,
        access: QueueAccess,
        holding: Holding,
        finish: Callable[[Ending], None],
        units_of: Callable[[HeldLease, Request], float],
        drop: Callable[[str], object],
    ) -> None:
        self._access = access
        self._holding = holding
        self._finish = finish
        self._units_of = units_of
        self._drop = drop
        self._weights = Weights()

    def claim(self, free: int, riding: int) -> tuple[int, int]:
        """How many requests to ask for where so many units are free, and what each counts until read.
        `riding`: those that are held, and will share a unit."""
        return self._weights.claim(free, riding)

    async def seat(self, tries: list[Try], permit: Permit) -> Set[str]:
        """Have each of these calls count one unit: its first lease, and its others nothing. The tokens of the
        leases that were given back, for there was no room: what they ride on is not to be sent."""
        weights: list[tuple[HeldLease, int]] = []
        for each in tries:
            first, *others = each.riders
            self._weights.seen(1 / len(each.riders))
            for _ in others:
                self._weights.seen(1 / len(each.riders))
            weights += [(held, 0) for held in others if held.lease.units]
            if first.lease.units != 1:
                weights.append((first, 1))
        return await self._weigh(weights, permit) if weights else frozenset()

    async def without_room(self, read: list[Read], permit: Permit, limit: Bounded) -> Set[str]:
        """The tokens of those that weigh more than there is room for. They are given back: by the queue, or
        where it cannot be asked by us.

        One that is heavier than `limit.most`, which is all that the limit can be, counts that: it goes alone,
        when the pool has room for all that it may take.
        """
        weighed = []
        for held, request in read:
            share = self._units_of(held, request)
            self._weights.seen(share)
            if share < 1:
                continue
            units = int(share)
            if units > 1 and (most := limit.most) is not None:
                units = min(units, max(1, most))
            if units != held.lease.units:
                weighed.append((held, units))
        return await self._weigh(weighed, permit) if weighed else frozenset()

    async def _weigh(self, weighed: list[tuple[HeldLease, int]], permit: Permit) -> Set[str]:
        """The tokens of those that have no room for what they weigh."""
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
                self._drop(held.lease.token)
        return gone
