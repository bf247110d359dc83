"""Leases: who holds a request, for how long, and what becomes of it when its owner is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatcher.ports import Lease, Permit, Release, Settlement, SettleStatus
from tests.conformance.worlds import (
    LEASE_S,
    World,
    answer,
    claim,
    full_claim,
    member,
    permit,
)
from tests.support import wait_until


async def fill(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def test_live_leases_of_all_owners_never_pass_the_limit(world: World) -> None:
    await fill(world, 20)
    first, second, third = (world.owner(f"owner-{number}") for number in range(3))
    assert len(await claim(first, 4, limit=7)) == 4
    assert len(await claim(second, 100, limit=7)) == 3
    assert await claim(third, 100, limit=7) == []
    assert await claim(first, 100, limit=5) == []
    assert len(await claim(third, 100, limit=8)) == 1


async def test_room_comes_back_however_a_lease_ends(world: World) -> None:
    await fill(world, 20)
    owner = world.owner()
    done, given_back, delayed, lost = await claim(owner, limit=4)
    assert await claim(owner, limit=4) == []
    await owner.settle([answer(done)])
    await owner.release([Release(given_back), Release(delayed, delay_s=60)])
    assert len(await claim(owner, limit=4)) == 3
    await world.lose(owner, lost)
    assert len(await claim(owner, limit=5, lost=1)) == 2


async def test_each_lease_lost_since_the_permit_lowers_it_by_one(world: World) -> None:
    await fill(world, 20)
    owner = world.owner()
    before = await full_claim(owner, 3, limit=10)
    assert before.lease_counts.lost_units == 0
    await world.lose(owner, *before.leases)
    after = await full_claim(owner, limit=10, lost=0)
    assert len(after.leases) == 7
    assert after.lease_counts.lost_units == 3
    assert len(await claim(owner, limit=10, lost=3)) == 3


async def test_lease_that_ran_out_counts_until_it_is_reclaimed(world: World) -> None:
    await fill(world, 5)
    owner = world.owner()
    leases = await claim(owner, limit=2)
    await world.run_out(*leases)
    assert await claim(owner, limit=2) == []


async def test_same_nonce_returns_the_same_leases_and_claims_nothing(world: World) -> None:
    await fill(world, 10)
    owner = world.owner()
    first = await owner.claim(3, "again", permit())
    second = await owner.claim(5, "again", permit())
    assert [(lease.entry_id, lease.token, lease.member) for lease in second.leases] == [
        (lease.entry_id, lease.token, lease.member) for lease in first.leases
    ]
    assert [lease.deliveries for lease in second.leases] == [1, 1, 1]
    assert second.lease_counts.live_units == 3
    assert second.claimable_count == 7


async def test_same_nonce_returns_only_what_is_still_the_caller_s(world: World) -> None:
    await fill(world, 3)
    owner, other = world.owner(), world.owner("owner-2")
    done, given_back, kept = (await owner.claim(3, "again", permit())).leases
    await owner.settle([answer(done)])
    await owner.release([Release(given_back)])
    await claim(other)
    assert [lease.entry_id for lease in (await owner.claim(3, "again", permit())).leases] == [kept.entry_id]


async def test_nonces_of_two_owners_are_two(world: World) -> None:
    await fill(world, 4)
    first = await world.owner("owner-1").claim(2, "same", permit())
    second = await world.owner("owner-2").claim(2, "same", permit())
    assert len({lease.entry_id for lease in [*first.leases, *second.leases]}) == 4


async def test_empty_claim_is_repeated_empty(world: World) -> None:
    owner = world.owner()
    assert (await owner.claim(3, "again", permit())).leases == []
    await fill(world, 3)
    assert list((await owner.claim(3, "again", permit())).leases) == []
    assert len((await owner.claim(3, "another", permit())).leases) == 3


async def test_owner_that_was_thought_dead_cannot_write_a_second_result(world: World) -> None:
    await fill(world, 1)
    old, new = world.owner("owner-1"), world.owner("owner-2")
    [stale] = await claim(old)
    await world.lose(new, stale)
    assert await old.settle([answer(stale, b"late")]) == [SettleStatus.LOST]
    [fresh] = await claim(new)
    assert (fresh.entry_id, fresh.deliveries) == (stale.entry_id, 2)
    assert await old.settle([answer(stale, b"late")]) == [SettleStatus.LOST]
    assert await old.release([Release(stale)]) == [SettleStatus.LOST]
    assert list((await old.renew([stale])).lost_entry_ids) == [stale.entry_id]
    assert await new.settle([answer(fresh, b"the one")]) == [SettleStatus.DONE]
    assert await world.results() == [b"the one"]


async def test_settled_lease_cannot_be_settled_released_or_renewed_again(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    assert await owner.settle([answer(lease, b"one")]) == [SettleStatus.DONE]
    assert await owner.settle([answer(lease, b"two")]) == [SettleStatus.LOST]
    assert await owner.release([Release(lease)]) == [SettleStatus.LOST]
    assert list((await owner.renew([lease])).lost_entry_ids) == [lease.entry_id]
    assert await world.results() == [b"one"]


async def test_one_lease_twice_in_one_call_is_settled_once(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    said = await owner.settle([answer(lease, b"one"), answer(lease, b"two")])
    assert list(said) == [SettleStatus.DONE, SettleStatus.LOST]
    assert await world.results() == [b"one"]


@pytest.mark.parametrize("forged", ["", "0" * 32, "*"])
async def test_token_fences(world: World, forged: str) -> None:
    await fill(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    fields = (
        lease.member,
        lease.score,
        lease.deliveries,
        lease.failed_attempts,
        lease.refusals,
        lease.deaths_as_suspect,
    )
    false = Lease(lease.entry_id, forged, *fields)
    assert await owner.settle([answer(false)]) == [SettleStatus.LOST]
    assert await owner.release([Release(false)]) == [SettleStatus.LOST]
    assert list((await owner.renew([false])).lost_entry_ids) == [lease.entry_id]
    assert await owner.settle([answer(lease)]) == [SettleStatus.DONE]


async def test_renewed_lease_lives_on_and_another_does_not(world: World) -> None:
    await fill(world, 2)
    owner = world.owner()
    await owner.sweep()
    kept, left = await claim(owner)
    await world.run_out(kept, left)
    assert list((await owner.renew([kept])).lost_entry_ids) == []
    assert (await owner.sweep()).reclaimed_count == 1
    assert await owner.settle([answer(kept), answer(left)]) == [SettleStatus.DONE, SettleStatus.LOST]


async def test_lease_that_ran_out_unreclaimed_can_still_be_settled(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    await world.run_out(lease)
    assert await owner.settle([answer(lease)]) == [SettleStatus.DONE]
    assert (await owner.sweep()).reclaimed_count == 0


async def test_release_counts_what_it_says(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()

    async def after(**said: Any) -> tuple[int, int, int]:
        [lease] = await claim(owner)
        assert await owner.release([Release(lease, **said)]) == [SettleStatus.DONE]
        [lease] = await claim(owner)
        await owner.release([Release(lease, is_undelivered=True)])
        return lease.deliveries, lease.failed_attempts, lease.refusals

    assert await after() == (2, 0, 0)
    assert await after(is_undelivered=True) == (2, 0, 0)
    assert await after(is_failed_attempt=True) == (3, 1, 0)
    assert await after(is_refusal=True) == (4, 1, 1)
    assert await after(is_failed_attempt=True, is_refusal=True, is_undelivered=True) == (4, 2, 2)


async def test_what_the_last_try_came_to_stays_with_the_request_until_another_one_counts(
    world: World,
) -> None:
    await fill(world, 2)
    owner = world.owner()
    one, other = await claim(owner)
    assert (one.last_attempt, other.last_attempt) == ("", "")

    async def after(last_try: str, delay_s: float = 0.0) -> tuple[str, str]:
        """As the next claim has it, and who looks."""
        (lease,) = await claim(owner)
        await owner.release([Release(lease, delay_s, is_failed_attempt=True, last_attempt=last_try)])
        page = await world.desk.search_requests([], entries_only=True)
        if delay_s:
            return "", next(each.reason for each in page.requests if each.entry == lease.entry_id)
        (lease,) = await claim(owner)
        await owner.release([Release(lease, is_undelivered=True)])
        return lease.last_attempt, next(each.reason for each in page.requests if each.entry == lease.entry_id)

    await owner.release([Release(one)])
    assert await after("no healthy upstream") == ("no healthy upstream",) * 2
    assert await after("") == ("no healthy upstream",) * 2
    assert await after("ä\n") == ("ä\n",) * 2
    assert await after("reset", delay_s=60) == ("", "reset")


async def test_delayed_request_comes_back_to_its_place_when_it_is_due(world: World) -> None:
    await fill(world, 3)
    owner = world.owner()
    leases = await claim(owner, 2)
    released_at = asyncio.get_running_loop().time()
    await owner.release(
        [Release(leases[0], delay_s=0.2, is_failed_attempt=True), Release(leases[1], delay_s=60)]
    )
    counts = await owner.count_requests()
    assert (counts.pending, counts.delayed) == (1, 2)
    swept = await owner.sweep()
    assert swept.next_due_at == pytest.approx(released_at + 0.2, abs=0.5)

    async def due() -> bool:
        return (await owner.sweep()).due_count == 1

    await wait_until(due)
    # Never before its time: the clocks' offset is known to a round trip on loopback.
    assert asyncio.get_running_loop().time() > released_at + 0.19
    [first, _] = await claim(owner)
    assert first.entry_id == leases[0].entry_id
    assert (await owner.sweep()).next_due_at == pytest.approx(released_at + 60, abs=0.5)


async def test_losses_make_a_suspect_that_runs_apart(world: World) -> None:
    await fill(world, 4)
    owner = world.owner()
    two = await claim(owner, 2)
    await world.lose(owner, *two)
    two = await claim(owner, 2)
    assert [(lease.deliveries, lease.deaths_as_suspect) for lease in two] == [(2, 0)] * 2
    await world.lose(owner, *two)
    # Two owners died holding each: from the third delivery on there is one of them at a time.
    claimed = await full_claim(owner, suspects=0)
    assert [lease.deliveries for lease in claimed.leases] == [1, 1]
    assert claimed.claimable_count == 0
    assert (await owner.count_requests()).pending == 2
    await owner.release([Release(lease, is_undelivered=True) for lease in claimed.leases])
    claimed = await full_claim(owner, suspects=1)
    assert [(lease.deliveries, lease.deaths_as_suspect) for lease in claimed.leases] == [
        (3, 0),
        (1, 0),
        (1, 0),
    ]
    assert claimed.claimable_count == 0
    claimed = await full_claim(owner, suspects=2)
    assert claimed.claimable_count == 0
    assert len(claimed.leases) == 1


async def test_losses_of_a_suspect_are_counted(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    seen = []
    for _ in range(5):
        [lease] = await claim(owner)
        seen.append((lease.deliveries, lease.deaths_as_suspect))
        await world.lose(owner, lease)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]


async def test_retries_do_not_make_a_suspect(world: World) -> None:
    await fill(world, 2)
    owner = world.owner()
    for _ in range(5):
        await owner.release([Release(lease, is_failed_attempt=True) for lease in await claim(owner)])
    await world.lose(owner, *await claim(owner))
    assert len(await claim(owner, suspects=0)) == 2


async def test_suspect_keeps_its_place_through_delay_and_release(world: World) -> None:
    await fill(world, 3)
    owner = world.owner()
    await world.lose(owner, *await claim(owner, 2))
    leases = await claim(owner, 2)
    await world.lose(owner, *leases)
    [_, suspect] = sorted(leases, key=lambda lease: lease.score)
    [first] = await claim(owner, 1)
    await owner.release([Release(first, delay_s=0.01)])

    async def due() -> bool:
        return (await owner.sweep()).due_count == 1

    await wait_until(due)
    assert [lease.score for lease in await claim(owner, suspects=0)] == [2.0]
    assert [lease.score for lease in await claim(owner, suspects=5)] == [0.0, 1.0]
    assert suspect.score == 1.0


async def test_nothing_is_reclaimed_for_a_third_of_a_lease_after_the_queue_was_away(world: World) -> None:
    await fill(world, 2)
    living, dead = world.owner("owner-1"), world.owner("owner-2")
    await living.sweep()
    [kept] = await claim(living, 1)
    [lost] = await claim(dead, 1)
    await world.run_out(kept, lost)
    await world.skip_sweeps(LEASE_S / 3 + 1)
    assert (await living.sweep()).reclaimed_count == 0
    assert list((await living.renew([kept])).lost_entry_ids) == []
    # A third of a lease later, swept all along.
    await world.skip_sweeps(LEASE_S / 3 - 0.1)
    await living.sweep()
    await world.skip_sweeps(0.2)
    assert (await living.sweep()).reclaimed_count == 1
    assert await living.settle([answer(kept)]) == [SettleStatus.DONE]
    assert await dead.settle([answer(lost)]) == [SettleStatus.LOST]


async def test_pause_between_sweeps_of_less_than_a_third_of_a_lease_means_nothing(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    await owner.sweep()
    [lease] = await claim(owner)
    await world.run_out(lease)
    await world.skip_sweeps(LEASE_S / 3 - 1)
    assert (await owner.sweep()).reclaimed_count == 1


async def test_counts_of_leases_tell_own_from_others_and_young_from_old(world: World) -> None:
    await fill(world, 5)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    mine = await claim(first, 2)
    theirs = await claim(second, 3)
    before = asyncio.get_running_loop().time()
    count = (await first.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (5, 3, 0)
    assert count.counted_at == pytest.approx(before, abs=0.5)
    count = (await second.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units) == (5, 2)

    async def young() -> int:
        return (await first.renew([])).lease_counts.just_leased_units

    async def none_young() -> bool:
        return await young() == 0

    await wait_until(none_young)
    await second.renew(theirs[:2])
    # 20 ms may have passed on a busy machine before the next call is there: ask until it was quick enough.
    seen = set()

    async def both_young() -> bool:
        await second.renew(theirs[:2])
        seen.add(await young())
        return 2 in seen

    await wait_until(both_young)
    assert seen <= {0, 2}
    await first.renew(mine)


async def test_counts_say_where_the_requests_are(world: World) -> None:
    await fill(world, 6)
    owner = world.owner()
    leases = await claim(owner, 4)
    await owner.release([Release(leases[0]), Release(leases[1], delay_s=60)])
    counts = await owner.count_requests()
    assert (counts.pending, counts.leased, counts.delayed, counts.dead) == (3, 2, 1, 0)


async def test_empty_calls_do_nothing(world: World) -> None:
    owner = world.owner()
    assert list(await owner.settle([])) == []
    assert list(await owner.release([])) == []
    assert list(await owner.move_to_dead_letters([])) == []
    assert list(await owner.check_cancelled([])) == []
    assert await owner.settle_unleased([]) == 0
    swept = await owner.sweep()
    assert (swept.reclaimed_count, swept.due_count, swept.next_due_at) == (0, 0, None)


async def test_calls_on_leases_that_never_were_are_lost(world: World) -> None:
    await fill(world, 1)
    owner = world.owner()
    never = Lease(4711, "0" * 32, b"", 0, 1, 0, 0, 0)
    assert list(await owner.settle([Settlement(never, b"x", "")])) == [SettleStatus.LOST]
    assert list(await owner.release([Release(never)])) == [SettleStatus.LOST]
    assert list((await owner.renew([never])).lost_entry_ids) == [4711]
    assert await world.results() == []


async def test_many_at_once(world: World) -> None:
    await fill(world, 600)
    owner = world.owner()
    leases = (await owner.claim(600, "n", Permit(600, asyncio.get_running_loop().time(), 0))).leases
    assert [lease.score for lease in leases] == [float(number) for number in range(600)]
    assert list((await owner.renew(leases)).lost_entry_ids) == []
    assert set(await owner.settle([answer(lease) for lease in leases])) == {SettleStatus.DONE}
    assert await world.results() == [answer(lease).result for lease in leases]
