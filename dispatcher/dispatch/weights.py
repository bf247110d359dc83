"""Units of requests: computed when a request is parsed, and sent to the queue if its lease counts a different
number."""

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
    """Source of the largest possible limit."""

    @property
    def most(self) -> int | None:
        """Largest value that the limit can have. `None` if it is not known."""
        ...


class Weighing:
    """Makes sure that a request is sent only if there is room for its units.

    `weigh_entry` returns the units of a request; less than 1 is its share of a merged call, which is
    allocated when the call is sent. `remove_lease` removes a lease that the queue has taken back.
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
        """Return how many requests to claim for the free units, and the units that each counts until it is
        parsed.

        `grouped_count` is the number of requests in batch groups that will share a unit.
        """
        return self._weights.claim(free, riding)

    async def seat(self, tries: list[Try], permit: Permit) -> Set[str]:
        """Count one unit for each of these calls: on its first lease, and nothing on the others.

        Return the tokens of leases that were given back because there was no room. Attempts with such a lease
        must not be sent.
        """
        weights: list[tuple[HeldLease, int]] = []
        for each in tries:
            first, *others = each.riders
            self._weights.seen(1 / len(each.riders))
            for _ in others:
                self._weights.seen(1 / len(each.riders))
            # Lower units first: the queue applies them in order, and these make room for the increase.
            weights += [(held, 0) for held in others if held.lease.units]
            if first.lease.units != 1:
                weights.append((first, 1))
        return await self._weigh(weights, permit) if weights else frozenset()

    async def without_room(self, read: list[Read], permit: Permit, limit: Bounded) -> Set[str]:
        """Set the units of parsed requests. Return the tokens of leases that were returned, because there was
        no room or the queue could not be asked.

        A request heavier than the largest possible limit counts that limit: it is sent alone, when the whole
        pool is free for it.
        """
        weighed = []
        for held, request in read:
            share = self._units_of(held, request)
            self._weights.seen(share)
            # A member of a merged call: its unit is allocated with the call.
            if share < 1:
                continue
            units = int(share)
            if units > 1 and (most := limit.most) is not None:
                units = min(units, max(1, most))
            if units != held.lease.units:
                weighed.append((held, units))
        return await self._weigh(weighed, permit) if weighed else frozenset()

    async def _weigh(self, weighed: list[tuple[HeldLease, int]], permit: Permit) -> Set[str]:
        """Send the units to the queue. Return the tokens of leases without room."""
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
