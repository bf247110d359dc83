"""Leases: which owner holds a request, for how long, and where it goes when the owner is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatcher.queue.contract import Lease, Permit, Release, Settlement, SettleStatus
from tests.conformance.worlds import (
    LEASE_S,
    NOW,
    World,
    answer,
    claim,
    claim_fully,
    member,
    permit,
)
from tests.support import wait_until


async def submit_requests(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def test_leases_of_all_owners_never_exceed_the_limit(world: World) -> None:
    await submit_requests(world, 20)
    first, second, third = (world.owner(f"owner-{number}") for number in range(3))
    assert len(await claim(first, 4, limit=7)) == 4
    assert len(await claim(second, 100, limit=7)) == 3
    assert await claim(third, 100, limit=7) == []
    assert await claim(first, 100, limit=5) == []
    assert len(await claim(third, 100, limit=8)) == 1


async def test_each_way_to_end_a_lease_frees_its_unit(world: World) -> None:
    await submit_requests(world, 20)
    owner = world.owner()
    done, given_back, delayed, lost = await claim(owner, limit=4)
    assert await claim(owner, limit=4) == []
    await owner.settle([answer(done)])
    await owner.release([Release(given_back), Release(delayed, delay_s=60)])
    assert len(await claim(owner, limit=4)) == 3
    await world.lose_leases(owner, lost)
    assert len(await claim(owner, limit=5, lost=1)) == 2


async def test_each_lease_lost_after_the_permit_lowers_the_limit_by_one(world: World) -> None:
    await submit_requests(world, 20)
    owner = world.owner()
    before = await claim_fully(owner, 3, limit=10)
    assert before.lease_counts.lost_units == 0
    await world.lose_leases(owner, *before.leases)
    after = await claim_fully(owner, limit=10, lost=0)
    assert len(after.leases) == 7
    assert after.lease_counts.lost_units == 3
    assert len(await claim(owner, limit=10, lost=3)) == 3


async def test_expired_lease_counts_until_it_is_reclaimed(world: World) -> None:
    await submit_requests(world, 5)
    owner = world.owner()
    leases = await claim(owner, limit=2)
    await world.expire_leases(*leases)
    assert await claim(owner, limit=2) == []


async def test_repeated_nonce_returns_the_same_leases_and_claims_nothing(world: World) -> None:
    await submit_requests(world, 10)
    owner = world.owner()
    first = await owner.claim(3, "again", permit())
    second = await owner.claim(5, "again", permit())
    assert [(lease.entry_id, lease.token, lease.member) for lease in second.leases] == [
        (lease.entry_id, lease.token, lease.member) for lease in first.leases
    ]
    assert [lease.deliveries for lease in second.leases] == [1, 1, 1]
    assert second.lease_counts.live_units == 3
    assert second.claimable_count == 7


async def test_repeated_nonce_returns_only_leases_that_the_caller_still_holds(world: World) -> None:
    await submit_requests(world, 3)
    owner, other = world.owner(), world.owner("owner-2")
    done, given_back, kept = (await owner.claim(3, "again", permit())).leases
    await owner.settle([answer(done)])
    await owner.release([Release(given_back)])
    await claim(other)
    assert [lease.entry_id for lease in (await owner.claim(3, "again", permit())).leases] == [kept.entry_id]


async def test_equal_nonces_of_two_owners_are_independent(world: World) -> None:
    await submit_requests(world, 4)
    first = await world.owner("owner-1").claim(2, "same", permit())
    second = await world.owner("owner-2").claim(2, "same", permit())
    assert len({lease.entry_id for lease in [*first.leases, *second.leases]}) == 4


async def test_repeated_empty_claim_stays_empty(world: World) -> None:
    owner = world.owner()
    assert (await owner.claim(3, "again", permit())).leases == []
    await submit_requests(world, 3)
    assert list((await owner.claim(3, "again", permit())).leases) == []
    assert len((await owner.claim(3, "another", permit())).leases) == 3


async def test_owner_that_counted_as_dead_cannot_write_a_second_result(world: World) -> None:
    await submit_requests(world, 1)
    old, new = world.owner("owner-1"), world.owner("owner-2")
    [stale] = await claim(old)
    await world.lose_leases(new, stale)
    assert await old.settle([answer(stale, b"late")]) == [SettleStatus.LOST]
    [fresh] = await claim(new)
    assert (fresh.entry_id, fresh.deliveries) == (stale.entry_id, 2)
    assert await old.settle([answer(stale, b"late")]) == [SettleStatus.LOST]
    assert await old.release([Release(stale)]) == [SettleStatus.LOST]
    assert list((await old.renew([stale])).lost_entry_ids) == [stale.entry_id]
    assert await new.settle([answer(fresh, b"the one")]) == [SettleStatus.DONE]
    assert await world.pop_results() == [b"the one"]


async def test_settled_lease_cannot_be_settled_released_or_renewed_again(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    assert await owner.settle([answer(lease, b"one")]) == [SettleStatus.DONE]
    assert await owner.settle([answer(lease, b"two")]) == [SettleStatus.LOST]
    assert await owner.release([Release(lease)]) == [SettleStatus.LOST]
    assert list((await owner.renew([lease])).lost_entry_ids) == [lease.entry_id]
    assert await world.pop_results() == [b"one"]


async def test_lease_named_twice_in_one_call_is_settled_once(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    decisions = await owner.settle([answer(lease, b"one"), answer(lease, b"two")])
    assert list(decisions) == [SettleStatus.DONE, SettleStatus.LOST]
    assert await world.pop_results() == [b"one"]


@pytest.mark.parametrize("forged", ["", "0" * 32, "*"])
async def test_call_with_the_token_of_an_earlier_lease_is_lost(world: World, forged: str) -> None:
    await submit_requests(world, 1)
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


async def test_renewed_lease_survives_and_an_unrenewed_one_expires(world: World) -> None:
    await submit_requests(world, 2)
    owner = world.owner()
    await owner.sweep()
    kept, left = await claim(owner)
    await world.expire_leases(kept, left)
    assert list((await owner.renew([kept])).lost_entry_ids) == []
    assert (await owner.sweep()).reclaimed_count == 1
    assert await owner.settle([answer(kept), answer(left)]) == [SettleStatus.DONE, SettleStatus.LOST]


async def test_expired_lease_can_be_settled_until_it_is_reclaimed(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    await world.expire_leases(lease)
    assert await owner.settle([answer(lease)]) == [SettleStatus.DONE]
    assert (await owner.sweep()).reclaimed_count == 0


async def test_release_counts_attempts_refusals_and_deliveries(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()

    async def after(**decisions: Any) -> tuple[int, int, int]:
        [lease] = await claim(owner)
        assert await owner.release([Release(lease, **decisions)]) == [SettleStatus.DONE]
        [lease] = await claim(owner)
        await owner.release([Release(lease, is_undelivered=True)])
        return lease.deliveries, lease.failed_attempts, lease.refusals

    assert await after() == (2, 0, 0)
    assert await after(is_undelivered=True) == (2, 0, 0)
    assert await after(is_failed_attempt=True) == (3, 1, 0)
    assert await after(is_refusal=True) == (4, 1, 1)
    assert await after(is_failed_attempt=True, is_refusal=True, is_undelivered=True) == (4, 2, 2)


@pytest.mark.server
async def test_outcome_of_the_last_attempt_is_kept_until_the_next_counted_attempt(
    world: World,
) -> None:
    await submit_requests(world, 2)
    owner = world.owner()
    one, other = await claim(owner)
    assert (one.last_attempt, other.last_attempt) == ("", "")

    async def after(last_try: str, delay_s: float = 0.0) -> tuple[str, str]:
        """Return the outcome as the next claim and the listing show it."""
        (lease,) = await claim(owner)
        await owner.release([Release(lease, delay_s, is_failed_attempt=True, last_attempt=last_try)])
        page = await world.queue_admin.search_requests([], entries_only=True)
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


async def test_delayed_request_returns_to_its_place_when_it_is_due(world: World) -> None:
    await submit_requests(world, 3)
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
    # It is never early: the offset of the clocks is known to a round trip on loopback.
    assert asyncio.get_running_loop().time() > released_at + 0.19
    [first, _] = await claim(owner)
    assert first.entry_id == leases[0].entry_id
    assert (await owner.sweep()).next_due_at == pytest.approx(released_at + 60, abs=0.5)


async def test_request_whose_owners_died_becomes_a_suspect_with_its_own_limit(world: World) -> None:
    await submit_requests(world, 4)
    owner = world.owner()
    two = await claim(owner, 2)
    await world.lose_leases(owner, *two)
    two = await claim(owner, 2)
    assert [(lease.deliveries, lease.deaths_as_suspect) for lease in two] == [(2, 0)] * 2
    await world.lose_leases(owner, *two)
    # Each was lost by two owners: from the third delivery on, only one of them is leased at a time.
    claimed = await claim_fully(owner, suspects=0)
    assert [lease.deliveries for lease in claimed.leases] == [1, 1]
    assert claimed.claimable_count == 0
    assert (await owner.count_requests()).pending == 2
    await owner.release([Release(lease, is_undelivered=True) for lease in claimed.leases])
    claimed = await claim_fully(owner, suspects=1)
    assert [(lease.deliveries, lease.deaths_as_suspect) for lease in claimed.leases] == [
        (3, 0),
        (1, 0),
        (1, 0),
    ]
    assert claimed.claimable_count == 0
    claimed = await claim_fully(owner, suspects=2)
    assert claimed.claimable_count == 0
    assert len(claimed.leases) == 1


async def test_lost_leases_of_a_suspect_are_counted(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    seen = []
    for _ in range(5):
        [lease] = await claim(owner)
        seen.append((lease.deliveries, lease.deaths_as_suspect))
        await world.lose_leases(owner, lease)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]


async def test_retries_do_not_make_a_request_a_suspect(world: World) -> None:
    await submit_requests(world, 2)
    owner = world.owner()
    for _ in range(5):
        await owner.release([Release(lease, is_failed_attempt=True) for lease in await claim(owner)])
    await world.lose_leases(owner, *await claim(owner))
    assert len(await claim(owner, suspects=0)) == 2


async def test_suspect_stays_a_suspect_after_delay_and_release(world: World) -> None:
    await submit_requests(world, 3)
    owner = world.owner()
    await world.lose_leases(owner, *await claim(owner, 2))
    leases = await claim(owner, 2)
    await world.lose_leases(owner, *leases)
    [_, suspect] = sorted(leases, key=lambda lease: lease.score)
    [first] = await claim(owner, 1)
    await owner.release([Release(first, delay_s=0.01)])

    async def due() -> bool:
        return (await owner.sweep()).due_count == 1

    await wait_until(due)
    assert [lease.score for lease in await claim(owner, suspects=0)] == [2.0]
    assert [lease.score for lease in await claim(owner, suspects=5)] == [0.0, 1.0]
    assert suspect.score == 1.0


async def test_no_lease_is_reclaimed_for_a_third_of_its_time_after_an_outage(world: World) -> None:
    await submit_requests(world, 2)
    living, dead = world.owner("owner-1"), world.owner("owner-2")
    await living.sweep()
    [kept] = await claim(living, 1)
    [lost] = await claim(dead, 1)
    await world.expire_leases(kept, lost)
    await world.skip_sweeps(LEASE_S / 3 + 1)
    assert (await living.sweep()).reclaimed_count == 0
    assert list((await living.renew([kept])).lost_entry_ids) == []
    # A third of a lease later, with sweeps all the time.
    await world.skip_sweeps(LEASE_S / 3 - 1)
    await living.sweep()
    await world.skip_sweeps(1.1)
    assert (await living.sweep()).reclaimed_count == 1
    assert await living.settle([answer(kept)]) == [SettleStatus.DONE]
    assert await dead.settle([answer(lost)]) == [SettleStatus.LOST]


async def test_gap_between_sweeps_below_a_third_of_a_lease_is_no_outage(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    await owner.sweep()
    [lease] = await claim(owner)
    await world.expire_leases(lease)
    await world.skip_sweeps(LEASE_S / 3 - 1)
    assert (await owner.sweep()).reclaimed_count == 1


async def test_lease_counts_distinguish_own_from_other_and_new_from_older_leases(world: World) -> None:
    await submit_requests(world, 5)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    mine = await claim(first, 2)
    theirs = await claim(second, 3)
    before = asyncio.get_running_loop().time()
    count = (await first.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (5, 3, 0)
    assert count.counted_at == pytest.approx(before, abs=0.5)
    count = (await second.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units) == (5, 2)

    async def get_new_lease_count() -> int:
        return (await first.renew([])).lease_counts.just_leased_units

    async def has_no_new_leases() -> bool:
        return await get_new_lease_count() == 0

    await wait_until(has_no_new_leases)
    await second.renew(theirs[:2])
    # On a busy machine, 20 ms may pass before the next call: ask until it was quick enough.
    seen = set()

    async def has_two_new_leases() -> bool:
        await second.renew(theirs[:2])
        seen.add(await get_new_lease_count())
        return 2 in seen

    await wait_until(has_two_new_leases)
    assert seen <= {0, 2}
    await first.renew(mine)


async def test_counts_show_the_locations_of_requests(world: World) -> None:
    await submit_requests(world, 6)
    owner = world.owner()
    leases = await claim(owner, 4)
    await owner.release([Release(leases[0]), Release(leases[1], delay_s=60)])
    counts = await owner.count_requests()
    assert (counts.pending, counts.leased, counts.delayed, counts.dead) == (3, 2, 1, 0)


async def test_calls_without_requests_do_nothing(world: World) -> None:
    owner = world.owner()
    assert list(await owner.settle([])) == []
    assert list(await owner.release([])) == []
    assert list(await owner.move_to_dead_letters([])) == []
    assert list(await owner.check_cancelled([])) == []
    assert await owner.settle_unleased([]) == 0
    swept = await owner.sweep()
    assert (swept.reclaimed_count, swept.due_count, swept.next_due_at) == (0, 0, None)


async def test_calls_on_unknown_leases_return_lost(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    never = Lease(4711, "0" * 32, b"", 0, 1, 0, 0, 0)
    assert list(await owner.settle([Settlement(never, b"x", "")])) == [SettleStatus.LOST]
    assert list(await owner.release([Release(never)])) == [SettleStatus.LOST]
    assert list((await owner.renew([never])).lost_entry_ids) == [4711]
    assert await world.pop_results() == []


async def test_hundreds_of_leases_are_handled_in_one_call(world: World) -> None:
    await submit_requests(world, 600)
    owner = world.owner()
    leases = (await owner.claim(600, "n", Permit(600, asyncio.get_running_loop().time(), 0))).leases
    assert [lease.score for lease in leases] == [float(number) for number in range(600)]
    assert list((await owner.renew(leases)).lost_entry_ids) == []
    assert set(await owner.settle([answer(lease) for lease in leases])) == {SettleStatus.DONE}
    assert await world.pop_results() == [answer(lease).result for lease in leases]


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
async def test_request_released_with_a_new_score_waits_behind_better_scores(
    world: World, delay_s: float
) -> None:
    await submit_requests(world, 3)
    owner = world.owner()
    first, *others = await claim(owner)
    await owner.release([Release(first, delay_s=delay_s, new_score=9e11 + NOW, is_undelivered=True)])
    await owner.release([Release(other) for other in others])

    async def due() -> bool:
        return (await owner.sweep()).due_count == 1

    if delay_s:
        await wait_until(due)
    again = await claim(owner)
    assert [lease.member for lease in again] == [*(lease.member for lease in others), first.member]
    assert (again[-1].score, again[-1].deliveries) == (9e11 + NOW, 1)
    assert [lease.score for lease in again[:-1]] == [1.0, 2.0]


async def test_request_that_was_released_with_a_new_score_keeps_it_after_a_lost_lease(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.release([Release(lease, new_score=float("inf"))])
    await world.lose_leases(owner, *await claim(owner))
    [again] = await claim(owner)
    assert again.score == float("inf")


async def test_overdue_request_is_found_under_its_new_score(world: World) -> None:
    await world.zadd(NOW - 50, member("late", deadline=NOW - 50))
    owner = world.owner()
    [lease] = await claim(owner)
    await owner.release([Release(lease, new_score=9e11 + NOW - 50)])
    found = [one for _ in range(12) for one in await owner.find_overdue(10)]
    assert {one.member for one in found} == {lease.member}
