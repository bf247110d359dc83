"""Leases count units of the limit: what their requests weigh, as soon as that is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dispatcher.ports import DeadLetter, Lease, Queue, Release, SettleStatus
from tests.conformance.worlds import World, answer, claim, full_claim, member, permit


async def fill(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def weigh(queue: Queue, *weights: tuple[Lease, int], limit: int = 1000, lost: int = 0) -> list[bool]:
    return list((await queue.set_lease_units(weights, permit(limit, lost=lost))).fits)


def entries(leases: Sequence[Lease]) -> list[int]:
    return [lease.entry_id for lease in leases]


async def test_what_was_not_weighed_is_taken_to_weigh_what_the_claim_says(world: World) -> None:
    await fill(world, 9)
    one, other = world.owner("one"), world.owner("other")
    told = await one.claim(9, "n", permit(10), assumed_units=3)
    assert [lease.units for lease in told.leases] == [3, 3, 3]
    assert (told.lease_counts.live_units, told.lease_counts.other_owners_units) == (9, 0)
    count = (await full_claim(other, limit=10)).lease_counts
    assert (count.live_units, count.other_owners_units) == (10, 9)
    assert count.just_leased_units in (9, 0), "20 ms may have passed"
    counts = await world.desk.count_requests()
    assert (counts.leased, counts.units) == (4, 10)


async def test_a_lighter_one_makes_room(world: World) -> None:
    await fill(world, 9)
    one, other = world.owner("one"), world.owner("other")
    leases = (await one.claim(2, "n", permit(8), assumed_units=4)).leases
    assert await claim(other, limit=8) == []
    assert await weigh(one, (leases[0], 1), (leases[1], 2), limit=8) == [True, True]
    assert len(await claim(other, limit=8)) == 5


async def test_units_that_no_lease_counts_leave_less_to_claim_and_to_weigh(world: World) -> None:
    await fill(world, 9)
    one, other = world.owner("one"), world.owner("other")
    leases = (await one.claim(9, "n", permit(8).copy_with(unleased_units=3))).leases
    assert len(leases) == 5
    weighed = await one.set_lease_units([(leases[0], 2)], permit(8).copy_with(unleased_units=3))
    assert list(weighed.fits) == [False]
    assert len((await other.claim(9, "n", permit(8).copy_with(unleased_units=4))).leases) == 0
    told = await other.claim(9, "m", permit(8))
    assert (told.lease_counts.live_units, len(told.leases)) == (8, 3), "each says for itself what it knows of"


async def test_what_is_heavier_than_what_other_units_leave_keeps_its_place(world: World) -> None:
    await fill(world, 2)
    queue = world.owner()
    (heavy,) = await claim(queue, limit=8, most=1)
    assert await weigh(queue, (heavy, 6), limit=8) == [True]
    await queue.release([Release(heavy)])
    assert (await queue.claim(2, "n", permit(8).copy_with(unleased_units=3))).leases == []
    assert entries((await queue.claim(1, "m", permit(8).copy_with(unleased_units=2))).leases) == [
        heavy.entry_id
    ]


async def test_a_heavier_one_fits_into_what_lighter_ones_before_it_leave(world: World) -> None:
    await fill(world, 4)
    queue = world.owner()
    leases = (await queue.claim(2, "n", permit(8), assumed_units=4)).leases
    assert await weigh(queue, (leases[0], 1), (leases[1], 7), limit=8) == [True, True]
    assert (await queue.renew(leases)).lease_counts.live_units == 8
    assert await claim(queue, limit=8) == []


async def test_what_does_not_fit_goes_back_undelivered_and_is_the_next(world: World) -> None:
    await fill(world, 5)
    one, other = world.owner("one"), world.owner("other")
    first, heavy, third = await claim(one, most=3, limit=5)
    assert await weigh(one, (heavy, 5), limit=5) == [False]
    assert list((await one.renew([first, heavy, third])).lost_entry_ids) == [heavy.entry_id]
    assert await one.settle([answer(heavy)]) == [SettleStatus.LOST]
    assert (await one.renew([])).lease_counts.live_units == 2
    assert await claim(other, limit=5) == [], "lighter ones behind it do not keep it waiting"
    assert await one.settle([answer(first), answer(third)]) == [SettleStatus.DONE] * 2
    (again,) = await claim(other, limit=5)
    assert (again.entry_id, again.units, again.deliveries) == (heavy.entry_id, 5, 1)
    assert await other.settle([answer(again)]) == [SettleStatus.DONE]
    assert len(await claim(other, limit=5)) == 2


async def test_one_that_is_heavier_than_the_limit_is_passed_over_until_that_has_risen(world: World) -> None:
    await fill(world, 6)
    queue = world.owner()
    heavy, *_ = held = await claim(queue, most=2, limit=4)
    assert await weigh(queue, (heavy, 8), limit=4) == [False]
    lighter = await claim(queue, limit=4)
    assert heavy.entry_id not in entries(lighter)
    assert len(lighter) == 3
    assert await claim(queue, limit=8) == []
    assert await queue.settle([answer(lease) for lease in (held[1], *lighter)]) == [SettleStatus.DONE] * 4
    told = await full_claim(queue, limit=8)
    assert (entries(told.leases), told.lease_counts.live_units) == ([heavy.entry_id], 8)
    assert await claim(queue, limit=8) == [], "it goes alone"


async def test_passed_over_suspects_leave_their_turn_to_others(world: World) -> None:
    await fill(world, 2)
    queue = world.owner()
    for _ in range(2):
        await world.lose(queue, *await claim(queue, suspects=2))
    heavy, light = await claim(queue, suspects=2)
    assert await weigh(queue, (heavy, 9), limit=4, lost=4) == [False]
    await queue.release([Release(light)])
    told = await full_claim(queue, limit=4, lost=4, suspects=1)
    assert entries(told.leases) == [light.entry_id]


@pytest.mark.parametrize("end", ["settle", "bury", "release", "delay", "lose"])
async def test_the_end_of_a_lease_frees_all_its_units(world: World, end: str) -> None:
    await fill(world, 3)
    queue = world.owner()
    (lease,) = await claim(queue, most=1)
    assert await weigh(queue, (lease, 6)) == [True]
    if end == "settle":
        await queue.settle([answer(lease)])
    elif end == "bury":
        await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    elif end == "lose":
        await world.lose(queue, lease)
    else:
        await queue.release([Release(lease, delay_s=60 if end == "delay" else 0)])
    count = (await queue.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units) == (0, 0)
    known = [each.units for each in await claim(queue, limit=100, lost=count.lost_units)]
    assert known == {"release": [6, 1, 1], "lose": [6, 1, 1]}.get(end, [1, 1]), "its weight is remembered"


async def test_the_units_of_an_owner_that_died_are_counted_until_it_is_swept(world: World) -> None:
    await fill(world, 4)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    leases = await claim(dead, most=2)
    assert await weigh(dead, (leases[0], 3), (leases[1], 4)) == [True, True]
    assert (await living.renew([])).lease_counts.other_owners_units == 7
    await world.fall_silent("dead")
    assert (await living.sweep()).reclaimed_count == 2
    count = (await living.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        0,
        0,
        7,
        7,
    )
    assert await weigh(dead, (leases[0], 1)) == [False]
    assert await dead.settle([answer(leases[0])]) == [SettleStatus.LOST]


async def test_what_was_lost_lowers_the_limit_by_all_its_units(world: World) -> None:
    """Its owner may be gone, and it runs on: as long as no newer reading knows of it, it takes its place."""
    await fill(world, 9)
    queue = world.owner()
    (lease,) = await claim(queue, most=1, limit=8)
    assert await weigh(queue, (lease, 5), limit=8) == [True]
    await world.lose(queue, lease)
    lighter = await claim(queue, limit=8, lost=0)
    assert (len(lighter), lease.entry_id in entries(lighter)) == (3, False)
    assert (await queue.renew([])).lease_counts.lost_units == 5


async def test_while_the_gate_is_closed_nothing_grows(world: World) -> None:
    await fill(world, 2)
    queue = world.owner()
    one, other = await claim(queue, most=2)
    await world.desk.pause("me", "why")
    assert await weigh(queue, (one, 2), (other, 1)) == [False, True]


async def test_a_repeated_call_says_the_same(world: World) -> None:
    await fill(world, 3)
    queue = world.owner()
    leases = await claim(queue, most=3, limit=4)
    weights = [(leases[0], 2), (leases[1], 3), (leases[2], 1)]
    for _ in range(2):
        assert await weigh(queue, *weights, limit=4) == [True, False, True]
    assert (await queue.renew([])).lease_counts.live_units == 3


async def test_what_counts_nothing_yet_may_be_claimed_beside_a_full_limit_and_counts_when_it_is_weighed(
    world: World,
) -> None:
    await fill(world, 6)
    queue = world.owner()
    told = await queue.claim(4, "n", permit(2), assumed_units=0)
    assert [lease.units for lease in told.leases] == [0, 0, 0, 0]
    assert told.lease_counts.live_units == 0
    assert (await world.desk.count_requests()).leased == 4
    first, second, third, fourth = told.leases
    weights = (first, 1), (second, 1), (third, 1), (fourth, 0)
    assert await weigh(queue, *weights, limit=2) == [True, True, False, True]
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


async def test_where_no_unit_is_left_a_claim_ends_before_what_counts_nothing_too(world: World) -> None:
    """As one that finds none from the beginning leases nothing."""
    await fill(world, 2)
    queue = world.owner()
    await queue.release([Release(lease) for lease in await claim(queue)])
    await world.zadd(9, member("last"))
    told = await queue.claim(9, "n", permit(2), assumed_units=0)
    assert [lease.units for lease in told.leases] == [1, 1], "they were leased before"
    assert told.claimable_count == 1
    assert (await queue.claim(9, "more", permit(2), assumed_units=0)).leases == []
    assert [lease.units for lease in (await queue.claim(9, "room", permit(3), assumed_units=0)).leases] == [0]


async def test_a_unit_passes_from_one_lease_to_another_in_a_full_pool(world: World) -> None:
    await fill(world, 4)
    queue = world.owner()
    one, other = await claim(queue, most=2, limit=2)
    assert await weigh(queue, (one, 0), limit=2) == [True]
    assert len(await claim(queue, limit=2)) == 1
    assert await weigh(queue, (one, 1), limit=2) == [False], "its unit is another's by now"
    (again,) = (await queue.claim(1, "again", permit(3))).leases
    assert (again.entry_id, again.units) == (one.entry_id, 1)
    assert await weigh(queue, (other, 0), (again, 2), limit=3) == [True, True]
    assert (await queue.renew([])).lease_counts.live_units == 3


@pytest.mark.parametrize("end", ["release", "lose"])
async def test_one_that_counted_nothing_counts_again_when_it_is_leased_anew(world: World, end: str) -> None:
    await fill(world, 1)
    queue = world.owner()
    (lease,) = await claim(queue)
    assert await weigh(queue, (lease, 0)) == [True]
    if end == "lose":
        await world.lose(queue, lease)
    else:
        await queue.release([Release(lease)])
    count = (await queue.renew([])).lease_counts
    assert (count.live_units, count.lost_units) == (0, 0)
    told = await queue.claim(1, "anew", permit(1), assumed_units=0)
    assert [lease.units for lease in told.leases] == [1]


async def test_leases_that_count_nothing_are_taken_back_from_an_owner_that_died(world: World) -> None:
    await fill(world, 3)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    leases = await claim(dead)
    assert await weigh(dead, (leases[1], 0), (leases[2], 0)) == [True, True]
    assert (await living.renew([])).lease_counts.other_owners_units == 1
    await world.fall_silent("dead")
    assert (await living.sweep()).reclaimed_count == 3
    count = (await living.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (0, 0, 1)


@pytest.mark.parametrize("seed", range(3))
async def test_three_owners_with_mixed_weights_never_pass_the_limit(world: World, seed: int) -> None:
    """Each request has its weight, which is seen when it is claimed. Owners die, and renew when it is too
    late; the limit rises and falls. At the end every request, however heavy, has one result."""
    drawn = random.Random(seed)
    count, most = 60, 12
    weight = {f"r-{number:03}": drawn.choice([1, 1, 1, 2, 3, 5, 8]) for number in range(count)}
    await fill(world, count)
    queues = [world.owner(f"owner-{number}") for number in range(3)]
    held: list[list[Lease]] = [[], [], []]
    done: Counter[int] = Counter()
    lost = turns = 0
    while sum(done.values()) < count:
        turns += 1
        assert turns < 2000
        who = drawn.randrange(3)
        queue, limit = queues[who], drawn.choice([3, 8, most]) if turns < 300 else most
        live_before = sum(lease.units for some in held for lease in some)
        typical = drawn.choice([1, 1, 2, 4])
        told = await queue.claim(4, f"n-{turns}", permit(limit, lost=lost), assumed_units=typical)
        assert told.lease_counts.live_units <= max(limit, live_before)
        weights = [(lease, weight[name_of(lease)]) for lease in told.leases]
        if weights:
            weighed = await queue.set_lease_units(weights, permit(limit, lost=lost))
            assert weighed.lease_counts.live_units <= max(limit, live_before)
            held[who] += [
                lease.copy_with(units=units)
                for (lease, units), fits in zip(weights, weighed.fits, strict=True)
                if fits
            ]
        match drawn.randrange(8):
            case 0 if held[who]:  # dies with all it holds; what it writes later is refused
                await world.lose(queues[who - 1], *held[who])
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
    assert len(await world.results()) == count


def name_of(lease: Lease) -> str:
    return lease.member.partition(b'"id": "')[2].partition(b'"')[0].decode()
