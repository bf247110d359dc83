"""What requests weigh, once they are read: who is told, what goes back, and what the heaviest counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.dispatch.completions import Completion, build_return
from dispatcher.dispatch.in_flight import InFlightLease, InFlightTable
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.dispatch.weights import UnitAllocator
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import Lease, LeaseUnitsResult, Permit
from tests.dispatch.scene import open_limiter, request
from tests.queue.made import member


class Counting(MemoryQueue):
    """It keeps what it was told of weights."""

    def __init__(self, store: MemoryStore, owner: str) -> None:
        super().__init__(store, owner)
        self.weighed: list[list[int]] = []

    async def set_lease_units(
        self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
    ) -> LeaseUnitsResult:
        self.weighed.append([units for _, units in lease_units])
        return await super().set_lease_units(lease_units, permit)


@dataclass
class Most:
    """As the limiter says it."""

    max_limit: int | None


class Bench:
    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.store = MemoryStore(clock=clock)
        self.queue = Counting(self.store, "a")
        self.holding = InFlightTable()
        self.finished: list[Completion] = []
        self.limiter = open_limiter()
        self.access = QueueAccess(self.queue, self.limiter, LeaseValidity(30.0, 5.0), clock)
        self.weighing = UnitAllocator(
            self.access,
            self.holding,
            self.finished.append,
            lambda _held, each: int(each.metadata["weight"]),
            self.holding.remove_lease,
        )

    async def claim(self, *weights: int, limit: int = 100) -> list[InFlightLease]:
        """Claim a request of each weight, and read them."""
        for number in range(len(weights)):
            self.store.add_member(member(f"r-{number}", 10**10), float(number))
        max_count, assumed_units = self.weighing.plan_claim(limit, 0)
        claimed = await self.queue.claim(max_count, "n", self.permit(limit), assumed_units=assumed_units)
        held = [self.holding.add_lease(lease, 2.0, is_probe=False) for lease in claimed.leases]
        for each, weight in zip(held, weights, strict=True):
            each.request = request(metadata={"weight": str(weight)})
        return held

    def permit(self, limit: int) -> Permit:
        return Permit(limit, read_at=2.0, lost_units=0)

    async def set_lease_units(
        self, held: list[InFlightLease], *, limit: int = 100, most: int | None = None
    ) -> set[int]:
        """The entries of those that there is no room for."""
        read = [(each, each.request) for each in held if each.request is not None]
        gone = await self.weighing.allocate_for_requests(read, self.permit(limit), Most(most))
        return {each.lease.entry_id for each in held if each.lease.token in gone}


def at_bench(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(Bench())

    run_in_virtual_time(main(), start=2.0)


def test_where_every_request_weighs_one_nobody_is_asked() -> None:
    async def check(bench: Bench) -> None:
        assert await bench.set_lease_units(await bench.claim(1, 1, 1)) == set()
        assert bench.queue.weighed == []

    at_bench(check)


def test_all_that_count_otherwise_are_told_in_one_call() -> None:
    async def check(bench: Bench) -> None:
        held = await bench.claim(1, 3, 2)
        assert await bench.set_lease_units(held) == set()
        assert bench.queue.weighed == [[3, 2]]
        assert [each.lease.units for each in held] == [1, 3, 2]
        assert bench.holding.units == bench.store.pool.leased_units == 6

    at_bench(check)


def test_what_has_no_room_is_held_no_more_and_lies_in_the_queue() -> None:
    async def check(bench: Bench) -> None:
        light, heavy = await bench.claim(1, 5, limit=4)
        assert await bench.set_lease_units([light, heavy], limit=4) == {heavy.lease.entry_id}
        assert list(bench.holding) == [light]
        assert bench.finished == [], "the queue itself has taken it back"
        assert bench.store.queue.count_requests().pending == 1

    at_bench(check)


def test_what_cannot_be_weighed_is_given_back_by_us() -> None:
    async def check(bench: Bench) -> None:
        light, heavy = await bench.claim(1, 5)
        bench.store.outage_message = "Redis refuses connections"
        assert await bench.set_lease_units([light, heavy]) == {heavy.lease.entry_id}
        assert bench.finished == [build_return(heavy.lease)]
        assert list(bench.holding) == [light, heavy], "held until the queue has confirmed it"

    at_bench(check)


@pytest.mark.parametrize(("most", "counts"), [(None, 50), (38, 38), (0, 1)])
def test_one_that_is_heavier_than_all_the_limit_can_be_counts_just_that(
    most: int | None, counts: int
) -> None:
    async def check(bench: Bench) -> None:
        (huge,) = await bench.claim(50)
        await bench.set_lease_units([huge], most=most)
        assert huge.lease.units == counts

    at_bench(check)


def test_next_claim_takes_unread_requests_to_weigh_what_these_did() -> None:
    async def check(bench: Bench) -> None:
        assert bench.weighing.plan_claim(8, 0) == (8, 1)
        await bench.set_lease_units(await bench.claim(*[4] * 20))
        assert bench.weighing.plan_claim(8, 0) == (2, 3)

    at_bench(check)


def test_call_that_weighs_shows_that_we_live_and_tells_what_others_hold() -> None:
    async def check(bench: Bench) -> None:
        (heavy,) = await bench.claim(2)
        bench.store.pool.add_owner_units("b", 3)
        assert not bench.access.is_lease_valid(heavy)
        await bench.set_lease_units([heavy])
        assert bench.access.is_lease_valid(heavy)
        assert bench.limiter.other_owners_units == 3

    at_bench(check)
