"""Stage that weighs requests: it computes their units, and tells the queue if a lease counts a different
number."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.completions import build_return
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.in_flight import Attempt, InFlightLease
from dispatcher.kernel.queue_steps import QueueStep
from dispatcher.queue.contract import Permit
from dispatcher.requests.request import Request
from dispatcher.requests.units import UnitsEstimate


class LimitSource(Protocol):
    """Source of the largest possible limit."""

    @property
    def max_limit(self) -> int | None:
        """Largest value that the limit can have. `None` if it is not known."""
        ...


class UnitAllocator:
    """Makes sure that a request is sent only if there is room for its units.

    `weigh_request` returns the units of a request that is sent alone.
    """

    def __init__(self, context: KernelContext, weigh_request: Callable[[Request], int]) -> None:
        self._context = context
        self._access = context.access
        self._in_flight = context.in_flight
        self._weigh_request = weigh_request
        self._weights = UnitsEstimate()

    def plan_claim(self, free_units: int) -> tuple[int, int]:
        """Return how many requests to claim for the free units, and the units that each counts until it is
        parsed."""
        grouping = self._context.hooks.grouping
        unweighted_count = 0 if grouping is None else grouping.groups.unweighted_count
        max_count, units = self._weights.plan_claim(free_units, unweighted_count)
        for room in self._context.hooks.rooms:
            max_count = room.plan_claim(max_count)
            if max_count < 1 and room.problem:
                self._context.limiter.set_withheld_reason(room.problem)
        return max_count, units

    async def allocate_for_calls(self, attempts: list[Attempt], permit: Permit) -> Set[str]:
        """Count one unit for each of these calls: on its first lease, and nothing on the others.

        Return the tokens of leases that were given back because there was no room. Attempts with such a lease
        must not be sent.
        """
        changes: list[tuple[InFlightLease, int]] = []
        for attempt in attempts:
            first, *others = attempt.leases
            self._weights.record_units(1 / len(attempt.leases))
            for _ in others:
                self._weights.record_units(1 / len(attempt.leases))
            # Lower units first: the queue applies them in order, and these make room for the increase.
            changes += [(entry, 0) for entry in others if entry.lease.units]
            if first.lease.units != 1:
                changes.append((first, 1))
        return await self._set_units(changes, permit) if changes else frozenset()

    async def apply(
        self, requests: list[ClaimedRequest], permit: Permit, limit_source: LimitSource
    ) -> list[ClaimedRequest]:
        """Set the units of these requests, and return those that there is room for. The others are returned,
        as are all that change if the queue cannot be asked.

        A request heavier than the largest possible limit counts that limit: it is sent alone, when the whole
        pool is free for it.
        """
        changes, grouping = [], self._context.hooks.grouping
        for claimed in requests:
            entry = claimed.entry
            token = entry.lease.token
            if grouping is not None and token in grouping.leases:
                weight = grouping.weigh(token)
            else:
                weight = self._weigh_request(claimed.request)
            self._weights.record_units(weight)
            # It shares the unit of a call for several requests, which is allocated with the call.
            if weight < 1:
                continue
            units = int(weight)
            if units > 1 and (limit := limit_source.max_limit) is not None:
                units = min(units, max(1, limit))
            if units != entry.lease.units:
                changes.append((entry, units))
        if not changes:
            return requests
        without_room = await self._set_units(changes, permit)
        return [claimed for claimed in requests if claimed.entry.lease.token not in without_room]

    async def _set_units(self, changes: list[tuple[InFlightLease, int]], permit: Permit) -> Set[str]:
        """Send the units to the queue. Return the tokens of leases without room."""
        asked_at = self._access.clock()
        lease_units = [(entry.lease, units) for entry, units in changes]
        reply = await self._access.call_queue(
            QueueStep.SET_UNITS, self._access.queue.set_lease_units(lease_units, permit)
        )
        without_room = set()
        if reply is None:
            for entry, _ in changes:
                without_room.add(entry.lease.token)
                self._context.complete(build_return(entry.lease))
            return without_room
        self._access.record_sign_of_life(asked_at)
        self._access.update_from_reply(reply)
        for (entry, units), fits in zip(changes, reply.fits, strict=True):
            if fits:
                self._in_flight.set_units(entry, units)
            else:
                without_room.add(entry.lease.token)
                self._context.remove_lost_lease(entry.lease.token)
        return without_room
