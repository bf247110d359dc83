"""Two queues of one pool share the limit, the pause and the probe, and each has its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.queue.contract import Lease, Overload, Queue, Release, SettleStatus
from tests.conformance.worlds import LEASE_S, World, answer, claim, claim_fully, member, permit

pytestmark = pytest.mark.server
URGENT = "batch:{qwen}:urgent"


class TwoQueues:
    """Two queues of one pool, with ten requests each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.urgent = world.open_other_queue(URGENT)

    async def submit_requests(self) -> None:
        for number in range(10):
            await self.world.zadd(number, member(f"usual-{number}"))
            await self.urgent.zadd(number, member(f"urgent-{number}"))

    def owner(self, name: str) -> tuple[Queue, Queue]:
        """Return the two queue objects of one dispatcher."""
        return self.world.owner(name), self.urgent.owner(name)


@pytest.fixture
async def two_queues(world: World) -> TwoQueues:
    made = TwoQueues(world)
    await made.submit_requests()
    return made


async def test_one_limit_applies_to_both_queues(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    others_usual, others_urgent = two_queues.owner("b")
    assert len(await claim(usual, limit=5, max_count=3)) == 3
    assert len(await claim(urgent, limit=5)) == 2
    assert len(await claim(others_urgent, limit=5)) == 0
    reply = await claim_fully(others_usual, limit=6)
    assert len(reply.leases) == 1
    assert (reply.lease_counts.live_units, reply.lease_counts.other_owners_units) == (6, 5)


async def test_no_entry_number_is_used_in_two_queues(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    entries = [
        lease.entry_id for queue in (usual, urgent, usual) for lease in await claim(queue, max_count=4)
    ]
    assert len(set(entries)) == len(entries) == 12


async def test_lease_can_only_be_ended_in_its_own_queue(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    first, second, third = await claim(urgent, max_count=3)
    assert b"urgent-0" in first.member
    assert await usual.settle([answer(first)]) == [SettleStatus.LOST]
    assert await usual.release([Release(second)]) == [SettleStatus.LOST]
    assert list((await usual.renew([third])).lost_entry_ids) == [third.entry_id]
    assert await urgent.settle([answer(first)]) == [SettleStatus.DONE]
    assert await urgent.release([Release(second)]) == [SettleStatus.DONE]
    assert list((await urgent.renew([third])).lost_entry_ids) == []
    counts, urgent_counts = (
        await two_queues.world.queue_admin.count_requests(),
        await two_queues.urgent.queue_admin.count_requests(),
    )
    assert (counts.pending, urgent_counts.pending) == (10, 8)
    assert counts.leased == urgent_counts.leased == 1


async def test_shared_state_of_one_queue_applies_to_the_other(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    older = permit(9)
    await usual.share_state(permit(2), None)
    reply = await urgent.claim(9, "n", older)
    assert (len(reply.leases), reply.shared.limit) == (2, 2)
    now = asyncio.get_running_loop().time()
    await urgent.share_state(permit(9), Overload(now, now + 60, is_out_of_capacity=True, in_flight=2))
    assert await claim(usual, limit=9) == []
    assert (await usual.renew([])).shared.overload is not None


async def test_pause_stops_all_queues_of_the_pool(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    await two_queues.urgent.queue_admin.pause("me", "maintenance")
    assert await two_queues.world.queue_admin.read_pause() == ("me", "maintenance")
    assert (await claim_fully(usual)).shared.is_paused
    assert await claim(urgent) == []
    await two_queues.world.queue_admin.resume()
    assert len(await claim(urgent, max_count=1)) == 1


async def test_only_one_probe_runs_in_all_queues(two_queues: TwoQueues) -> None:
    usual, _ = two_queues.owner("a")
    _, others_urgent = two_queues.owner("b")
    assert len((await usual.claim_probe("p", permit(1))).leases) == 1
    reply = await others_urgent.claim_probe("p", permit(1))
    assert (list(reply.leases), reply.shared.probing_owner) == ([], "a")
    await usual.claim(0, "c", permit(1))
    assert (await others_urgent.renew([])).shared.probing_owner is None


async def test_requests_of_a_dead_owner_return_to_their_own_queue(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("living")
    dead_usual, dead_urgent = two_queues.owner("dead")
    await usual.sweep()
    await claim(dead_usual, max_count=2)
    await claim(dead_urgent, max_count=3)
    await two_queues.world.silence_owners("dead")
    assert (await usual.sweep()).reclaimed_count == 2
    assert (await usual.sweep()).reclaimed_count == 0, "the other three are of another queue"
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        3,
        3,
        2,
        2,
    )
    assert (await urgent.sweep()).reclaimed_count == 3
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        0,
        0,
        5,
        5,
    )
    assert await peek_both_queues(two_queues) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])
    await urgent.sweep()
    assert await two_queues.world.get_owners_with_heartbeats() == {"living"}


async def peek_both_queues(two_queues: TwoQueues) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Return the ids of the first two requests of each queue."""
    found = [await world.queue_admin.peek_next(2) for world in (two_queues.world, two_queues.urgent)]
    usual, urgent = ([one.partition(b'"id": "')[2].partition(b'"')[0] for _, one in some] for some in found)
    return usual, urgent


async def test_requests_of_expired_leases_return_to_their_own_queue(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    await usual.sweep()
    await urgent.sweep()
    held = [*await claim(usual, max_count=1), *await claim(urgent, max_count=2)]
    await two_queues.world.expire_leases(*held)
    assert [(await queue.sweep()).reclaimed_count for queue in (usual, usual, urgent, urgent)] == [1, 0, 2, 0]
    assert await peek_both_queues(two_queues) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])


class FixedDeadOwners:
    """Detector that reports fixed owners as ended."""

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        return [owner for owner in owners if owner == "dead"]


async def test_leases_of_an_ended_owner_are_reclaimed_in_each_queue(two_queues: TwoQueues) -> None:
    dead_usual, dead_urgent = two_queues.owner("dead")
    await claim(dead_usual, max_count=2)
    await claim(dead_urgent, max_count=3)
    usual = two_queues.world.owner("living", dead_owner_detector=FixedDeadOwners())
    urgent = two_queues.urgent.owner("living", dead_owner_detector=FixedDeadOwners())
    assert (await usual.sweep()).reclaimed_count == 2
    assert (await urgent.sweep()).reclaimed_count == 3
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.lost_units, count.orphaned_units) == (0, 5, 0)


async def test_delays_of_each_queue_follow_a_clock_that_steps_back(two_queues: TwoQueues) -> None:
    usual, urgent = two_queues.owner("a")
    for queue in (usual, urgent):
        await queue.sweep()
        (lease,) = await claim(queue, max_count=1)
        await queue.release([Release(lease, delay_s=100)])
    await two_queues.world.step_clock_back(5000)
    await two_queues.urgent.step_queue_clock_back(5000)
    for queue in (usual, urgent):
        due_at = (await queue.sweep()).next_due_at
        assert due_at is not None
        assert due_at - asyncio.get_running_loop().time() == pytest.approx(100, abs=30)


# A queue that is no longer swept while requests of it are leased.


async def abandoned(two_queues: TwoQueues) -> tuple[Queue, Queue, Sequence[Lease]]:
    """Return the usual queue of a living owner, the urgent queue of an absent owner, and three leases (six
    units) of the absent owner that the living one has found abandoned."""
    usual, _ = two_queues.owner("living")
    _, urgent = two_queues.owner("away")
    await usual.sweep()
    held = [*(await urgent.claim(3, "held", permit())).leases]
    assert (await urgent.set_lease_units([(held[0], 4)], permit())).fits == [True]
    await two_queues.world.expire_leases(*held, ago_s=LEASE_S - 5)
    assert (await usual.sweep()).lost_units == 0, "its own queue may still reclaim it"
    assert (await usual.renew([])).lease_counts.live_units == 6
    await two_queues.world.expire_leases(*held, ago_s=LEASE_S + 1)
    assert (await usual.sweep()).reclaimed_count == 0, "no request of this queue"
    return usual, urgent, held


async def test_leases_of_a_queue_that_is_not_swept_stop_counting(two_queues: TwoQueues) -> None:
    usual, *_ = await abandoned(two_queues)
    for _ in range(2):
        count = (await usual.renew([])).lease_counts
        assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
            0,
            0,
            6,
            6,
        ), "once"
        await usual.sweep()
    assert len(await claim(usual, limit=9, lost=0)) == 3, "its requests may still run"
    assert len(await claim(usual, limit=9, lost=6)) == 6, "a later reading includes them"


async def test_abandoned_requests_return_when_their_queue_is_swept_again(two_queues: TwoQueues) -> None:
    usual, urgent, held = await abandoned(two_queues)
    assert await peek_both_queues(two_queues) == ([b"usual-0", b"usual-1"], [b"urgent-3", b"urgent-4"])
    assert (await urgent.sweep()).reclaimed_count == 3
    assert (await urgent.sweep()).reclaimed_count == 0
    assert await peek_both_queues(two_queues) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (0, 0, 6), "lost once"
    again = await claim(urgent, max_count=3, lost=6)
    assert [lease.entry_id for lease in again] == [lease.entry_id for lease in held]
    assert [(lease.units, lease.deliveries) for lease in again] == [(4, 2), (1, 2), (1, 2)]
    assert (await usual.renew([])).lease_counts.live_units == 6


async def test_owner_that_returns_has_lost_its_abandoned_leases(two_queues: TwoQueues) -> None:
    """Otherwise they would count again without a claim, and exceed the limit."""
    usual, urgent, held = await abandoned(two_queues)
    renewed = await urgent.renew(held)
    assert sorted(renewed.lost_entry_ids) == sorted(lease.entry_id for lease in held)
    assert (await urgent.set_lease_units([(held[1], 2)], permit())).fits == [False]
    assert list((await urgent.claim(3, "held", permit())).leases) == []
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_result_of_an_abandoned_lease_is_accepted(two_queues: TwoQueues) -> None:
    usual, urgent, held = await abandoned(two_queues)
    assert await urgent.settle([answer(held[0])]) == [SettleStatus.DONE]
    assert await urgent.settle([answer(held[0])]) == [SettleStatus.LOST]
    assert await urgent.release([Release(held[1])]) == [SettleStatus.DONE]
    assert len(await two_queues.world.pop_results()) == 1
    assert (await urgent.sweep()).reclaimed_count == 1
    counts = await two_queues.urgent.queue_admin.count_requests()
    assert (counts.pending, counts.leased, counts.units) == (9, 0, 0)
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_leases_of_another_queue_are_not_abandoned_right_after_an_outage(two_queues: TwoQueues) -> None:
    usual, _ = two_queues.owner("living")
    _, urgent = two_queues.owner("away")
    await usual.sweep()
    held = await claim(urgent, max_count=3)
    await two_queues.world.skip_sweeps(3 * LEASE_S)
    await two_queues.world.expire_leases(*held, ago_s=2 * LEASE_S)
    await two_queues.world.sweep_each_second(usual, int(LEASE_S))
    assert (await usual.renew([])).lease_counts.live_units == 3
    await two_queues.world.sweep_each_second(usual, int(LEASE_S / 3) + 1)
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_abandoned_probe_does_not_block_other_probes(two_queues: TwoQueues) -> None:
    usual, _ = two_queues.owner("living")
    _, urgent = two_queues.owner("away")
    await usual.sweep()
    (probe,) = (await urgent.claim_probe("p", permit(1))).leases
    assert list((await usual.claim_probe("q", permit(1))).leases) == []
    await two_queues.world.expire_leases(probe, ago_s=LEASE_S + 1)
    await usual.sweep()
    assert len((await usual.claim_probe("r", permit(1, lost=1))).leases) == 1
