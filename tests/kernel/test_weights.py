"""Weighing claimed requests: when the queue is asked, and what happens to requests without room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.completions import build_return
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.in_flight import InFlightLease, InFlightTable
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.options import Options
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.kernel.weights import UnitAllocator
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.queue.contract import Lease, LeaseUnitsResult, Permit
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.telemetry.metrics import Metrics
from tests.kernel.scene import AnsweringGateway, open_limiter, request
from tests.memory_queue import MemoryStore
from tests.queue.factories import member


class RecordingQueue(MemoryQueue):
    """Queue that records the units of each call."""

    def __init__(self, store: MemoryStore, owner: str) -> None:
        super().__init__(store, owner)
        self.reported_units: list[list[int]] = []

    async def set_lease_units(
        self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
    ) -> LeaseUnitsResult:
        self.reported_units.append([units for _, units in lease_units])
        return await super().set_lease_units(lease_units, permit)


@dataclass
class FixedMaxLimit:
    """Limiter whose largest possible limit is fixed."""

    max_limit: int | None


class Bench:
    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.store = MemoryStore(clock=clock)
        self.queue = RecordingQueue(self.store, "a")
        self.table = InFlightTable()
        self.limiter = open_limiter()
        self.access = QueueAccess(self.queue, self.limiter, LeaseValidity(30.0, 5.0), clock)
        context = KernelContext(
            self.access,
            self.limiter,
            AnsweringGateway(),
            Journal(Metrics()),
            Options(RetryPolicy()),
            in_flight=self.table,
        )
        self.completed = context.pending
        self.weights = UnitAllocator(context, lambda each: int(each.metadata["weight"]))

    async def claim(self, *weights: int, limit: int = 100) -> list[InFlightLease]:
        """Claim one request of each weight."""
        for number in range(len(weights)):
            self.store.add_member(member(f"r-{number}", 10**10), float(number))
        max_count, assumed_units = self.weights.plan_claim(limit)
        claimed = await self.queue.claim(max_count, "n", self.permit(limit), assumed_units=assumed_units)
        entries = self.table.add_leases(claimed.leases, 2.0)
        for entry, weight in zip(entries, weights, strict=True):
            self.table.set_request(entry, request(metadata={"weight": str(weight)}))
        return entries

    def permit(self, limit: int) -> Permit:
        return Permit(limit, read_at=2.0, lost_units=0)

    async def weigh(
        self, entries: list[InFlightLease], *, limit: int = 100, most: int | None = None
    ) -> set[int]:
        """Weigh the requests. Return the entry ids of those without room."""
        claimed = [ClaimedRequest(entry, entry.request) for entry in entries if entry.request is not None]
        continuing = await self.weights.apply(claimed, self.permit(limit), FixedMaxLimit(most))
        return {entry.lease.entry_id for entry in entries} - {
            each.entry.lease.entry_id for each in continuing
        }


def run_on_bench(check: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        await check(Bench())

    run_in_virtual_time(main(), start=2.0)


def test_queue_is_not_asked_if_every_request_weighs_one_unit() -> None:
    async def check(bench: Bench) -> None:
        assert await bench.weigh(await bench.claim(1, 1, 1)) == set()
        assert bench.queue.reported_units == []

    run_on_bench(check)


def test_changed_units_are_sent_in_one_call() -> None:
    async def check(bench: Bench) -> None:
        entries = await bench.claim(1, 3, 2)
        assert await bench.weigh(entries) == set()
        assert bench.queue.reported_units == [[3, 2]]
        assert [each.lease.units for each in entries] == [1, 3, 2]
        assert bench.table.units == bench.store.pool.leased_units == 6

    run_on_bench(check)


def test_request_without_room_returns_to_the_queue() -> None:
    async def check(bench: Bench) -> None:
        light, heavy = await bench.claim(1, 5, limit=4)
        assert await bench.weigh([light, heavy], limit=4) == {heavy.lease.entry_id}
        assert list(bench.table) == [light]
        assert bench.completed == [], "the queue itself has ended the lease"
        assert bench.store.queue.count_requests().pending == 1

    run_on_bench(check)


def test_request_is_returned_if_the_queue_cannot_be_asked() -> None:
    async def check(bench: Bench) -> None:
        light, heavy = await bench.claim(1, 5)
        bench.store.outage_message = "Redis refuses connections"
        assert await bench.weigh([light, heavy]) == {heavy.lease.entry_id}
        assert bench.completed == [build_return(heavy.lease)]
        assert list(bench.table) == [light, heavy], "a lease is kept until the queue has confirmed its end"

    run_on_bench(check)


@pytest.mark.parametrize(("most", "counts"), [(None, 50), (38, 38), (0, 1)])
def test_request_heavier_than_the_largest_limit_counts_that_limit(most: int | None, counts: int) -> None:
    async def check(bench: Bench) -> None:
        (huge,) = await bench.claim(50)
        await bench.weigh([huge], most=most)
        assert huge.lease.units == counts

    run_on_bench(check)


def test_next_claim_assumes_the_recent_average_weight() -> None:
    async def check(bench: Bench) -> None:
        assert bench.weights.plan_claim(8) == (8, 1)
        await bench.weigh(await bench.claim(*[4] * 20))
        assert bench.weights.plan_claim(8) == (2, 3)

    run_on_bench(check)


def test_call_renews_the_leases_and_returns_the_units_of_other_owners() -> None:
    async def check(bench: Bench) -> None:
        (heavy,) = await bench.claim(2)
        bench.store.pool.add_owner_units("b", 3)
        assert not bench.access.is_lease_valid(heavy)
        await bench.weigh([heavy])
        assert bench.access.is_lease_valid(heavy)
        assert bench.limiter.other_owners_units == 3

    run_on_bench(check)
