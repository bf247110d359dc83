"""Queue in memory as one dispatcher uses it: translates between the owner's clock and the pool's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from dispatcher.lab.memory_queue import results, steps
from dispatcher.lab.memory_queue.entries import Entry
from dispatcher.lab.memory_queue.state import LeaseRecord
from dispatcher.lab.memory_queue.steps import Caller
from dispatcher.lab.memory_queue.store import MemoryStore
from dispatcher.lab.memory_queue.sweep import sweep
from dispatcher.queue.contract import (
    ClaimResult,
    DeadLetter,
    EndAndClaimResult,
    Lease,
    LeaseCounts,
    LeaseUnitsResult,
    Overload,
    Permit,
    Release,
    RenewResult,
    Settlement,
    SettleStatus,
    SharedState,
    SweepSummary,
    UnleasedRequest,
)
from dispatcher.requests.forecast import QueueSnapshot
from dispatcher.requests.lanes import ONE_PER_LANE, Lane
from dispatcher.requests.queue_counts import QueueCounts

T = TypeVar("T")


class MemoryQueue:
    """One owner's access to a MemoryStore. Implements `ports.Queue`.

    `clock` is the clock of the owner if it is not that of the pool. All else is as in RedisQueue.
    """

    def __init__(
        self,
        store: MemoryStore,
        owner: str,
        *,
        clock: Callable[[], float] | None = None,
        poll_s: float = 0.2,
        owner_timeout_s: float = 5.0,
    ) -> None:
        self.store = store
        self.owner = owner
        self._queue = store.queue
        self._pool = store.pool
        self._clock = clock
        self._poll_s = poll_s
        self._timeout_s = owner_timeout_s
        self._wake_event = asyncio.Event()
        self._pool.wake_events.append(self._wake_event)

    def __repr__(self) -> str:
        return f"<MemoryQueue {self.owner} of {self.store!r}>"

    def close(self) -> None:
        """Fall silent, as if the process had ended."""
        if self._wake_event in self._pool.wake_events:
            self._pool.wake_events.remove(self._wake_event)

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return this queue, which has those calls of features itself that every dispatcher makes."""
        itself: Any = self
        return cast("T", itself)

    async def count_waiting_by_model(self) -> Mapping[str, int]:
        return {}

    async def find_remaining_requests(self, max_count: int) -> Sequence[Any]:
        return ()

    def unix_now(self) -> float:
        return self._pool.unix_now()

    async def find_invalid_result_lists(self, names: Iterable[str]) -> Mapping[str, str]:
        found = ((name, self._queue.find_list_problem(name)) for name in names)
        return {name: why for name, why in found if why is not None}

    async def claim(
        self,
        max_count: int,
        nonce: str,
        permit: Permit,
        *,
        max_per_lane: Mapping[Lane, int] = ONE_PER_LANE,
        assumed_units: int = 1,
        max_blocked: int = 0,
    ) -> ClaimResult:
        return self._claim_requests(max_count, nonce, permit, max_per_lane, assumed_units, max_blocked)

    async def claim_probe(self, nonce: str, permit: Permit) -> ClaimResult:
        return self._claim_requests(1, nonce, permit, ONE_PER_LANE, 1, is_probe=True)

    def _claim_requests(
        self,
        max_count: int,
        nonce: str,
        permit: Permit,
        max_per_lane: Mapping[Lane, int],
        assumed_units: int,
        max_blocked: int = 0,
        *,
        is_probe: bool = False,
    ) -> ClaimResult:
        caller = self._begin_step()
        pool_permit = self._permit_in_pool_time(permit)
        taken, waiting, blocked = steps.claim(
            self._queue,
            caller,
            nonce,
            pool_permit,
            max_count=max_count,
            max_per_lane=max_per_lane,
            assumed_units=assumed_units,
            max_blocked=max_blocked,
            is_probe=is_probe,
        )
        return self._build_claim_result(caller, taken, waiting, blocked)

    async def renew(self, leases: Sequence[Lease]) -> RenewResult:
        caller = self._begin_step()
        return RenewResult(
            steps.renew(self._queue, caller, leases), self._count_leases(caller), self._read_shared_state()
        )

    async def set_lease_units(
        self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
    ) -> LeaseUnitsResult:
        caller = self._begin_step()
        fits = steps.set_lease_units(self._queue, caller, lease_units, self._permit_in_pool_time(permit))
        return LeaseUnitsResult(fits, self._count_leases(caller), self._read_shared_state())

    async def share_state(self, permit: Permit, overload: Overload | None) -> RenewResult:
        caller = self._begin_step()
        if overload is not None:
            overload = replace(
                overload,
                refused_at=self._to_pool_time(overload.refused_at),
                retry_at=self._to_pool_time(overload.retry_at),
            )
        steps.renew(self._queue, caller, permit=self._permit_in_pool_time(permit), overload=overload)
        return RenewResult((), self._count_leases(caller), self._read_shared_state())

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        self._begin_step()
        return results.settle(self._queue, settlements)

    async def settle_and_claim_next(
        self, settlements: Sequence[Settlement], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        caller, queue, ready_entries = self._begin_step(), self._queue, list[Entry]()
        statuses, taken = results.settle(queue, settlements, ready_entries), list[LeaseRecord]()
        if ready_entries:
            # An entry that waits in a lane waits for a claim.
            in_no_lane = [entry for entry in ready_entries if entry.lane is None]
            taken = steps.claim_first_of(queue, caller, nonce, self._permit_in_pool_time(permit), in_no_lane)
        waiting = queue.waiting_count - queue.count_passed_over({}, taken)
        return EndAndClaimResult(
            statuses,
            self._build_claim_result(caller, taken, waiting),
            [queue.get_extra(each.entry) for each in taken],
        )

    def _build_claim_result(
        self,
        caller: Caller,
        taken: Sequence[LeaseRecord],
        claimable_count: int,
        blocked_entry_id: int | None = None,
    ) -> ClaimResult:
        return ClaimResult(
            [_to_lease(each) for each in taken],
            self._count_leases(caller),
            self._read_shared_state(),
            claimable_count,
            blocked_entry_id,
        )

    async def release(self, releases: Sequence[Release]) -> Sequence[SettleStatus]:
        return steps.release(self._queue, self._begin_step().now, releases)

    async def release_and_claim_again(
        self, releases: Sequence[Release], nonce: str, permit: Permit
    ) -> EndAndClaimResult:
        caller, queue, continued = self._begin_step(), self._queue, list[Entry]()
        statuses = steps.release(queue, caller.now, releases, continued)
        if not continued:
            return EndAndClaimResult(statuses, None)
        taken = steps.claim_first_of(queue, caller, nonce, self._permit_in_pool_time(permit), continued)
        waiting = queue.waiting_count - queue.count_passed_over({Lane.STARTED: len(taken) + 1}, taken)
        return EndAndClaimResult(statuses, self._build_claim_result(caller, taken, waiting))

    async def move_to_dead_letters(self, dead_letters: Sequence[DeadLetter]) -> Sequence[SettleStatus | None]:
        self._begin_step()
        return results.settle(self._queue, dead_letters)

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self._begin_step()
        return [steps.is_cancelled(self._queue, name, token) for name, token in requests]

    async def sweep(self) -> SweepSummary:
        caller = self._begin_step()
        reclaimed, due, due_at, freed = sweep(self._queue, caller)
        due_at = None if due_at is None else self._to_own_time(due_at)
        return SweepSummary(reclaimed, due, due_at, self._pool.lost_units, freed)

    async def find_overdue(self, max_count: int) -> Sequence[UnleasedRequest]:
        self._begin_step()
        return results.find_overdue(self._queue, max_count)

    async def settle_unleased(self, items: Sequence[tuple[UnleasedRequest, Settlement]]) -> int:
        self._begin_step()
        return results.settle_unleased(self._queue, items)

    async def count_requests(self) -> QueueCounts:
        self._begin_step()
        return self._queue.count_requests()

    async def take_snapshot(self, rate: float | None = None, service_s: float = 0.0) -> QueueSnapshot:
        """Return a snapshot in which each score is a span of its own, whatever the rate."""
        return steps.take_snapshot(self._queue, self._begin_step())

    async def wait_for_work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake_event.wait()
            except TimeoutError:
                self._begin_step()
                if self._queue.claimable_count:
                    return
            else:
                self._wake_event.clear()
                return

    def _begin_step(self) -> Caller:
        return Caller(self.owner, self._timeout_s, steps.begin_step(self._pool))

    def _clock_offset_s(self) -> float:
        return 0.0 if self._clock is None else self._clock() - self._pool.clock()

    def _to_own_time(self, at: float) -> float:
        return at + self._clock_offset_s()

    def _to_pool_time(self, at: float) -> float:
        return at - self._clock_offset_s()

    def _permit_in_pool_time(self, permit: Permit) -> Permit:
        return permit if self._clock is None else permit.copy_with(read_at=self._to_pool_time(permit.read_at))

    def _count_leases(self, caller: Caller) -> LeaseCounts:
        pool = self._pool
        others = pool.leased_units - pool.units_by_owner[self.owner]
        return LeaseCounts(
            self._to_own_time(caller.now),
            pool.leased_units,
            others,
            steps.count_just_leased_units(pool, caller),
            pool.lost_units,
            pool.orphaned_units,
        )

    def _read_shared_state(self) -> SharedState:
        pool = self._pool
        overload = pool.overload
        if overload is not None and self._clock is not None:
            overload = replace(
                overload,
                refused_at=self._to_own_time(overload.refused_at),
                retry_at=self._to_own_time(overload.retry_at),
            )
        permit = pool.shared_permit
        return SharedState(
            limit=None if permit is None else permit.limit,
            read_at=0.0 if permit is None else self._to_own_time(permit.read_at),
            overload=overload,
            probing_owner=pool.probing_owner,
            is_paused=pool.pause is not None,
        )


def _to_lease(lease: LeaseRecord) -> Lease:
    entry, lane = lease.entry, lease.entry.lane
    return Lease(
        entry.id,
        lease.token,
        entry.member,
        entry.score,
        entry.deliveries,
        entry.failed_attempts,
        entry.refusals,
        entry.deaths_as_suspect,
        lane if isinstance(lane, Lane) else None,
        entry.units,
        entry.last_attempt,
        entry.progress,
    )
