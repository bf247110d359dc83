"""Leases count the units of their requests, as soon as these are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dispatcher.queue.contract import ClaimResult, DeadLetter, Lease, Queue, Release, SettleStatus
from tests.conformance.worlds import World, answer, claim, claim_fully, member, permit


async def submit_requests(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def set_units(
    queue: Queue, *weights: tuple[Lease, int], limit: int = 1000, lost: int = 0
) -> list[bool]:
    return list((await queue.set_lease_units(weights, permit(limit, lost=lost))).fits)


def get_entry_ids(leases: Sequence[Lease]) -> list[int]:
    return [lease.entry_id for lease in leases]


async def test_request_without_known_units_counts_the_assumed_units(world: World) -> None:
    await submit_requests(world, 9)
    one, other = world.owner("one"), world.owner("other")
    reply = await one.claim(9, "n", permit(10), assumed_units=3)
    assert [lease.units for lease in reply.leases] == [3, 3, 3]
    assert (reply.lease_counts.live_units, reply.lease_counts.other_owners_units) == (9, 0)
    count = (await claim_fully(other, limit=10)).lease_counts
    assert (count.live_units, count.other_owners_units) == (10, 9)
    assert count.just_leased_units in (9, 0), "20 ms may have passed"
    counts = await world.queue_admin.count_requests()
    assert (counts.leased, counts.units) == (4, 10)


async def test_request_with_fewer_units_frees_room(world: World) -> None:
    await submit_requests(world, 9)
    one, other = world.owner("one"), world.owner("other")
    leases = (await one.claim(2, "n", permit(8), assumed_units=4)).leases
    assert await claim(other, limit=8) == []
    assert await set_units(one, (leases[0], 1), (leases[1], 2), limit=8) == [True, True]
    assert len(await claim(other, limit=8)) == 5


async def test_unleased_units_leave_less_room(world: World) -> None:
    await submit_requests(world, 9)
    one, other = world.owner("one"), world.owner("other")
    leases = (await one.claim(9, "n", permit(8).copy_with(unleased_units=3))).leases
    assert len(leases) == 5
    weighed = await one.set_lease_units([(leases[0], 2)], permit(8).copy_with(unleased_units=3))
    assert list(weighed.fits) == [False]
    assert len((await other.claim(9, "n", permit(8).copy_with(unleased_units=4))).leases) == 0
    reply = await other.claim(9, "m", permit(8))
    assert (reply.lease_counts.live_units, len(reply.leases)) == (8, 3), "each owner reports its own"


async def test_request_that_does_not_fit_beside_unleased_units_keeps_its_place(world: World) -> None:
    await submit_requests(world, 2)
    queue = world.owner()
    (heavy,) = await claim(queue, limit=8, max_count=1)
    assert await set_units(queue, (heavy, 6), limit=8) == [True]
    await queue.release([Release(heavy)])
    assert (await queue.claim(2, "n", permit(8).copy_with(unleased_units=3))).leases == []
    assert get_entry_ids((await queue.claim(1, "m", permit(8).copy_with(unleased_units=2))).leases) == [
        heavy.entry_id
    ]


async def test_heavier_request_fits_into_units_that_lighter_ones_freed(world: World) -> None:
    await submit_requests(world, 4)
    queue = world.owner()
    leases = (await queue.claim(2, "n", permit(8), assumed_units=4)).leases
    assert await set_units(queue, (leases[0], 1), (leases[1], 7), limit=8) == [True, True]
    assert (await queue.renew(leases)).lease_counts.live_units == 8
    assert await claim(queue, limit=8) == []


async def test_request_that_does_not_fit_is_returned_undelivered_and_claimed_next(world: World) -> None:
    await submit_requests(world, 5)
    one, other = world.owner("one"), world.owner("other")
    first, heavy, third = await claim(one, max_count=3, limit=5)
    assert await set_units(one, (heavy, 5), limit=5) == [False]
    assert list((await one.renew([first, heavy, third])).lost_entry_ids) == [heavy.entry_id]
    assert await one.settle([answer(heavy)]) == [SettleStatus.LOST]
    assert (await one.renew([])).lease_counts.live_units == 2
    assert await claim(other, limit=5) == [], "lighter requests behind it do not delay it"
    assert await one.settle([answer(first), answer(third)]) == [SettleStatus.DONE] * 2
    (again,) = await claim(other, limit=5)
    assert (again.entry_id, again.units, again.deliveries) == (heavy.entry_id, 5, 1)
    assert await other.settle([answer(again)]) == [SettleStatus.DONE]
    assert len(await claim(other, limit=5)) == 2


async def test_lighter_requests_overtake_as_many_requests_without_room_as_the_claim_allows(
    world: World,
) -> None:
    await submit_requests(world, 7)
    one, other = world.owner("one"), world.owner("other")
    first, heavy, next_heavy = await claim(one, max_count=3, limit=6)
    assert await set_units(one, (heavy, 6), (next_heavy, 6), limit=6) == [False, False]

    async def claim_others(count: int, max_blocked: int) -> ClaimResult:
        return await other.claim(count, f"n-{count}-{max_blocked}", permit(6), max_blocked=max_blocked)

    for max_blocked in (0, 1):
        reply = await claim_others(4, max_blocked)
        assert (reply.leases, reply.blocked_entry_id) == ([], heavy.entry_id)
    reply = await claim_others(2, 2)
    lighter = reply.leases
    assert ([lease.deliveries for lease in lighter], reply.blocked_entry_id) == ([1, 1], heavy.entry_id)
    assert await one.settle([answer(first)]) == [SettleStatus.DONE]
    assert await other.settle([answer(lease) for lease in lighter]) == [SettleStatus.DONE] * 2
    reply = await claim_others(1, 16)
    assert (get_entry_ids(reply.leases), reply.blocked_entry_id) == ([heavy.entry_id], None)
    assert (await claim_others(9, 16)).blocked_entry_id is None, "no unit is free, so nothing is read"
    assert await other.settle([answer(reply.leases[0])]) == [SettleStatus.DONE]
    assert get_entry_ids((await claim_others(8, 16)).leases) == [next_heavy.entry_id]


async def test_request_whose_units_are_not_known_is_not_overtaken(world: World) -> None:
    await submit_requests(world, 3)
    queue = world.owner()
    reply = await queue.claim(2, "n", permit(3), assumed_units=2, max_blocked=16)
    assert ([lease.units for lease in reply.leases], reply.blocked_entry_id) == ([2], None)


async def test_request_above_the_limit_is_passed_over_until_the_limit_rises(world: World) -> None:
    await submit_requests(world, 6)
    queue = world.owner()
    heavy, *_ = held = await claim(queue, max_count=2, limit=4)
    assert await set_units(queue, (heavy, 8), limit=4) == [False]
    lighter = await claim(queue, limit=4)
    assert heavy.entry_id not in get_entry_ids(lighter)
    assert len(lighter) == 3
    assert await claim(queue, limit=8) == []
    assert await queue.settle([answer(lease) for lease in (held[1], *lighter)]) == [SettleStatus.DONE] * 4
    reply = await claim_fully(queue, limit=8)
    assert (get_entry_ids(reply.leases), reply.lease_counts.live_units) == ([heavy.entry_id], 8)
    assert await claim(queue, limit=8) == [], "it is claimed alone"


async def test_suspects_that_are_passed_over_do_not_block_other_suspects(world: World) -> None:
    await submit_requests(world, 2)
    queue = world.owner()
    for _ in range(2):
        await world.lose_leases(queue, *await claim(queue, suspects=2))
    heavy, light = await claim(queue, suspects=2)
    assert await set_units(queue, (heavy, 9), limit=4, lost=4) == [False]
    await queue.release([Release(light)])
    reply = await claim_fully(queue, limit=4, lost=4, suspects=1)
    assert get_entry_ids(reply.leases) == [light.entry_id]


@pytest.mark.parametrize("end", ["settle", "dead-letter", "release", "delay", "lose"])
async def test_end_of_a_lease_frees_all_its_units(world: World, end: str) -> None:
    await submit_requests(world, 3)
    queue = world.owner()
    (lease,) = await claim(queue, max_count=1)
    assert await set_units(queue, (lease, 6)) == [True]
    if end == "settle":
        await queue.settle([answer(lease)])
    elif end == "dead-letter":
        await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    elif end == "lose":
        await world.lose_leases(queue, lease)
    else:
        await queue.release([Release(lease, delay_s=60 if end == "delay" else 0)])
    count = (await queue.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units) == (0, 0)
    known = [each.units for each in await claim(queue, limit=100, lost=count.lost_units)]
    assert known == {"release": [6, 1, 1], "lose": [6, 1, 1]}.get(end, [1, 1]), "its units are remembered"


async def test_units_of_a_dead_owner_count_until_they_are_reclaimed(world: World) -> None:
    await submit_requests(world, 4)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    leases = await claim(dead, max_count=2)
    assert await set_units(dead, (leases[0], 3), (leases[1], 4)) == [True, True]
    assert (await living.renew([])).lease_counts.other_owners_units == 7
    await world.silence_owners("dead")
    assert (await living.sweep()).reclaimed_count == 2
    count = (await living.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        0,
        0,
        7,
        7,
    )
    assert await set_units(dead, (leases[0], 1)) == [False]
    assert await dead.settle([answer(leases[0])]) == [SettleStatus.LOST]


async def test_lost_lease_lowers_the_limit_by_all_its_units(world: World) -> None:
    """The request may still run, so it counts until a newer reading includes it."""
    await submit_requests(world, 9)
    queue = world.owner()
    (lease,) = await claim(queue, max_count=1, limit=8)
    assert await set_units(queue, (lease, 5), limit=8) == [True]
    await world.lose_leases(queue, lease)
    lighter = await claim(queue, limit=8, lost=0)
    assert (len(lighter), lease.entry_id in get_entry_ids(lighter)) == (3, False)
    assert (await queue.renew([])).lease_counts.lost_units == 5


async def test_no_lease_gets_more_units_while_the_gate_is_closed(world: World) -> None:
    await submit_requests(world, 2)
    queue = world.owner()
    one, other = await claim(queue, max_count=2)
    await world.queue_admin.pause("me", "why")
    assert await set_units(queue, (one, 2), (other, 1)) == [False, True]


async def test_repeated_call_sets_the_same_units(world: World) -> None:
    await submit_requests(world, 3)
    queue = world.owner()
    leases = await claim(queue, max_count=3, limit=4)
    weights = [(leases[0], 2), (leases[1], 3), (leases[2], 1)]
    for _ in range(2):
        assert await set_units(queue, *weights, limit=4) == [True, False, True]
    assert (await queue.renew([])).lease_counts.live_units == 3


async def test_request_with_zero_assumed_units_counts_once_its_units_are_set(
    world: World,
) -> None:
    await submit_requests(world, 6)
    queue = world.owner()
    reply = await queue.claim(4, "n", permit(2), assumed_units=0)
    assert [lease.units for lease in reply.leases] == [0, 0, 0, 0]
    assert reply.lease_counts.live_units == 0
    assert (await world.queue_admin.count_requests()).leased == 4
    first, second, third, fourth = reply.leases
    weights = (first, 1), (second, 1), (third, 1), (fourth, 0)
    assert await set_units(queue, *weights, limit=2) == [True, True, False, True]
    assert (await queue.renew([])).lease_counts.live_units == 2
    assert await claim(queue, limit=2) == []
    assert await queue.settle([answer(first), answer(second), answer(third), answer(fourth)]) == [
        SettleStatus.DONE,
        SettleStatus.DONE,
        SettleStatus.LOST,
        SettleStatus.DONE,
    ]
    assert (await queue.renew([])).lease_counts.live_units == 0
    assert [lease.units for lease in await claim(queue)] == [1, 1, 1]


async def test_claim_without_a_free_unit_takes_no_request_with_zero_units(world: World) -> None:
    """A claim that finds no free unit at its beginning leases nothing, either."""
    await submit_requests(world, 2)
    queue = world.owner()
    await queue.release([Release(lease) for lease in await claim(queue)])
    await world.zadd(9, member("last"))
    reply = await queue.claim(9, "n", permit(2), assumed_units=0)
    assert [lease.units for lease in reply.leases] == [1, 1], "they were leased before"
    assert reply.claimable_count == 1
    assert (await queue.claim(9, "more", permit(2), assumed_units=0)).leases == []
    assert [lease.units for lease in (await queue.claim(9, "room", permit(3), assumed_units=0)).leases] == [0]


async def test_unit_can_move_between_leases_of_a_full_pool(world: World) -> None:
    await submit_requests(world, 4)
    queue = world.owner()
    one, other = await claim(queue, max_count=2, limit=2)
    assert await set_units(queue, (one, 0), limit=2) == [True]
    assert len(await claim(queue, limit=2)) == 1
    assert await set_units(queue, (one, 1), limit=2) == [False], "another lease has its unit now"
    (again,) = (await queue.claim(1, "again", permit(3))).leases
    assert (again.entry_id, again.units) == (one.entry_id, 1)
    assert await set_units(queue, (other, 0), (again, 2), limit=3) == [True, True]
    assert (await queue.renew([])).lease_counts.live_units == 3


@pytest.mark.parametrize("end", ["release", "lose"])
async def test_request_with_zero_units_counts_again_in_its_next_lease(world: World, end: str) -> None:
    await submit_requests(world, 1)
    queue = world.owner()
    (lease,) = await claim(queue)
    assert await set_units(queue, (lease, 0)) == [True]
    if end == "lose":
        await world.lose_leases(queue, lease)
    else:
        await queue.release([Release(lease)])
    count = (await queue.renew([])).lease_counts
    assert (count.live_units, count.lost_units) == (0, 0)
    reply = await queue.claim(1, "anew", permit(1), assumed_units=0)
    assert [lease.units for lease in reply.leases] == [1]


async def test_leases_with_zero_units_of_a_dead_owner_are_reclaimed(world: World) -> None:
    await submit_requests(world, 3)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    leases = await claim(dead)
    assert await set_units(dead, (leases[1], 0), (leases[2], 0)) == [True, True]
    assert (await living.renew([])).lease_counts.other_owners_units == 1
    await world.silence_owners("dead")
    assert (await living.sweep()).reclaimed_count == 3
    count = (await living.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (0, 0, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_three_owners_with_mixed_units_never_exceed_the_limit(world: World, seed: int) -> None:
    """The units of a request are known once it is claimed. Owners die and renew too late, and the limit rises
    and falls. At the end each request has exactly one result, however many units it needs."""
    drawn = random.Random(seed)
    count, max_count = 60, 12
    weight = {f"r-{number:03}": drawn.choice([1, 1, 1, 2, 3, 5, 8]) for number in range(count)}
    await submit_requests(world, count)
    queues = [world.owner(f"owner-{number}") for number in range(3)]
    held: list[list[Lease]] = [[], [], []]
    done: Counter[int] = Counter()
    lost = turns = 0
    while sum(done.values()) < count:
        turns += 1
        assert turns < 2000
        who = drawn.randrange(3)
        queue, limit = queues[who], drawn.choice([3, 8, max_count]) if turns < 300 else max_count
        live_before = sum(lease.units for some in held for lease in some)
        typical = drawn.choice([1, 1, 2, 4])
        reply = await queue.claim(4, f"n-{turns}", permit(limit, lost=lost), assumed_units=typical)
        assert reply.lease_counts.live_units <= max(limit, live_before)
        weights = [(lease, weight[get_request_id(lease)]) for lease in reply.leases]
        if weights:
            weighed = await queue.set_lease_units(weights, permit(limit, lost=lost))
            assert weighed.lease_counts.live_units <= max(limit, live_before)
            held[who] += [
                lease.copy_with(units=units)
                for (lease, units), fits in zip(weights, weighed.fits, strict=True)
                if fits
            ]
        match drawn.randrange(8):
            case 0 if held[who]:  # the owner dies with all its leases, and its later calls are rejected
                await world.lose_leases(queues[who - 1], *held[who])
                lost += sum(lease.units for lease in held[who])
                assert set(await queue.settle([answer(lease) for lease in held[who]])) == {SettleStatus.LOST}
                assert len((await queue.renew(held[who])).lost_entry_ids) == len(held[who])
                held[who] = []
            case 1 | 2 if held[who]:
                assert await queue.release([Release(held[who].pop())]) == [SettleStatus.DONE]
            case _ if held[who]:
                lease = held[who].pop(0)
                assert await queue.settle([answer(lease)]) == [SettleStatus.DONE]
                done[lease.entry_id] += 1
        live = (await queues[who - 1].renew([])).lease_counts.live_units
        assert live == sum(lease.units for some in held for lease in some)
    assert set(done.values()) == {1}
    assert len(await world.pop_results()) == count


def get_request_id(lease: Lease) -> str:
    return lease.member.partition(b'"id": "')[2].partition(b'"')[0].decode()
