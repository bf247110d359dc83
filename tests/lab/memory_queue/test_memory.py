"""Properties of the in-memory queue alone: clock, speed and outage. The conformance tests cover the rest."""

from __future__ import annotations

import time

import pytest

from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.queue.contract import Overload, Permit, Release, Settlement
from dispatcher.requests.submission import QueueUnavailableError
from tests.memory_queue import MemoryStore


class Clock:
    """Clock whose time is set by the test."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def test_leases_delays_and_deadlines_follow_the_given_clock() -> None:
    clock = Clock()
    store = MemoryStore(clock, unix_origin=1_700_000_000, lease_s=30)
    queue = MemoryQueue(store, "owner")
    for number in range(3):
        store.add_member(b"%d" % number, 1_700_001_000 + 100 + number)
    held, delayed = (await queue.claim(2, "a", Permit(9, clock.now, 0))).leases
    await queue.release([Release(delayed, delay_s=25)])
    swept = await queue.sweep()
    assert (swept.reclaimed_count, swept.due_count, swept.next_due_at) == (0, 0, 1025.0)
    for step, expected in ((9.9, (0, 0)), (9.9, (0, 0)), (5.2, (0, 1)), (4.9, (0, 0)), (0.2, (1, 0))):
        clock.now += step
        swept = await queue.sweep()
        assert (swept.reclaimed_count, swept.due_count) == expected
    assert await queue.find_overdue(9) == []
    clock.now += 71
    assert [one.member for one in await queue.find_overdue(9)] == [b"0", b"1"]
    assert queue.unix_now() == 1_700_000_000 + clock.now
    assert held.member == b"0"


async def test_owners_with_different_clocks_share_the_same_times() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    here = MemoryQueue(store, "here", clock=lambda: clock.now - 400)
    there = MemoryQueue(store, "there", clock=lambda: clock.now + 1e6)
    reply = await here.share_state(
        Permit(7, 598.0, 0), Overload(599.0, 630.0, is_out_of_capacity=True, in_flight=3)
    )
    assert reply.lease_counts.counted_at == 600.0
    assert reply.shared.overload == Overload(599.0, 630.0, is_out_of_capacity=True, in_flight=3)
    reply_there = await there.renew([])
    assert reply_there.lease_counts.counted_at == 1_001_000.0
    assert (reply_there.shared.limit, reply_there.shared.read_at) == (7, 1_000_998.0)
    assert reply_there.shared.overload == Overload(
        1_000_999.0, 1_001_030.0, is_out_of_capacity=True, in_flight=3
    )
    store.add_member(b"x", 1)
    clock.now += 31
    assert len((await there.claim(1, "a", Permit(7, 1_000_999.0, 0))).leases) == 0
    assert len((await there.claim(1, "b", Permit(7, 1_000_999.5, 0))).leases) == 1


async def test_unavailable_store_fails_every_call_and_keeps_its_data() -> None:
    store = MemoryStore(Clock())
    queue = MemoryQueue(store, "owner")
    store.add_member(b"x", 1)
    [lease] = (await queue.claim(1, "a", Permit(1, 0, 0))).leases
    store.outage_message = "Redis cannot be reached: test"
    for operation in (
        lambda: queue.claim(1, "b", Permit(9, 0, 0)),
        lambda: queue.settle([Settlement(lease, b"r", "")]),
        lambda: queue.renew([lease]),
        queue.sweep,
        queue.count_requests,
        queue.wait_for_work,
        lambda: store.submit([]),
    ):
        with pytest.raises(QueueUnavailableError, match="cannot be reached: test"):
            await operation()
    store.outage_message = None
    assert await queue.settle([Settlement(lease, b"r", "")]) == ["done"]
    assert store.pop_result() == b"r"


async def test_claims_do_not_get_slower_with_more_pending_requests() -> None:
    """No call scans the queue: ten times as many pending requests only make the heaps a little deeper."""

    async def cpu_s_per_request(pending: int) -> float:
        clock = Clock()
        store = MemoryStore(clock)
        queue = MemoryQueue(store, "owner")
        for number in range(pending):
            store.add_member(b"%d" % number, 4e9 + number % 97)
        rounds = 300
        began_at = time.process_time()
        for number in range(rounds):
            clock.now += 0.01
            leases = (await queue.claim(8, str(number), Permit(64, clock.now, 0))).leases
            await queue.renew(leases)
            await queue.sweep()
            await queue.find_overdue(8)
            await queue.release([Release(lease) for lease in leases[:4]])
            await queue.settle([Settlement(lease, b"r", "") for lease in leases[4:]])
        return (time.process_time() - began_at) / (8 * rounds)

    small = min([await cpu_s_per_request(3_000) for _ in range(3)])
    large = min([await cpu_s_per_request(30_000) for _ in range(3)])
    # A scan would be ten times slower.
    assert large < 3 * small


async def test_entries_of_moved_requests_do_not_accumulate() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    queue = MemoryQueue(store, "owner")
    store.add_member(b"x", 4e9)
    for number in range(20_000):
        clock.now += 0.01
        leases = (await queue.claim(1, str(number), Permit(1, clock.now, 0))).leases
        await queue.release([Release(lease) for lease in leases])
        if number % 100 == 0:
            await queue.sweep()
    await queue.sweep()
    kept_entries = (
        store.queue.deadlines.heap,
        store.queue.waiting_by_lane[None].heap,
        store.pool.expiries,
        store.pool.touched_entries,
        store.queue.claims_by_nonce,
    )
    assert max(len(one) for one in kept_entries) < 15_000
