"""What the owners of one queue share: limit, overload, who probes, the operator's pause."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.ports import Overload, Permit, Queue, Release
from tests.conformance.worlds import World, answer, claim, full_claim, permit
from tests.support import wait_until

SLOP_S = 60.0
"""Longest time in seconds that a few calls take on a busy machine. It is much less than STEP_S."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def fill(world: World, count: int = 20) -> None:
    for number in range(count):
        await world.zadd(number, b"%03d" % number)


async def take(queue: Queue, limit: int, read_at: float, nonce: str) -> int:
    return len((await queue.claim(100, nonce, Permit(limit, read_at, 0))).leases)


async def test_older_and_more_generous_belief_gives_nothing(world: World) -> None:
    await fill(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await take(fresh, 4, at, "a") == 4
    assert await take(stale, 10, at - 5, "b") == 0
    assert (await stale.share_state(Permit(10, at - 5, 0), None)).shared.limit == 4


async def test_older_and_smaller_belief_holds_for_its_owner(world: World) -> None:
    await fill(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await take(fresh, 10, at, "a") == 10
    for lease in (await fresh.claim(10, "a", Permit(10, at, 0))).leases[:8]:
        await fresh.settle([answer(lease)])
    assert await take(stale, 3, at - 5, "b") == 1
    assert await take(fresh, 10, at, "c") == 7


async def test_newer_belief_is_everyone_s(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await take(first, 2, at - 1, "a") == 2
    shared = (await second.share_state(Permit(9, at, 0), None)).shared
    assert (shared.limit, shared.is_paused, shared.probing_owner, shared.overload) == (9, False, None, None)
    assert shared.read_at == pytest.approx(at, abs=0.25)
    assert await take(first, 2, at - 1, "b") == 0
    assert await take(second, 9, at, "c") == 7


async def test_same_reading_may_be_believed_again_with_another_limit(world: World) -> None:
    await fill(world)
    owner = world.owner()
    for _ in range(5):  # the first reply over a new connection tells the server's clock but roughly
        await owner.renew([])
    at = now()
    assert await take(owner, 2, at, "a") == 2
    assert await take(owner, 5, at, "b") == 3


async def test_shared_limit_is_lowered_by_losses_since_as_well(world: World) -> None:
    await fill(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    leases = (await fresh.claim(3, "a", Permit(6, at, 0))).leases
    await world.lose(fresh, *leases)
    claimed = await stale.claim(100, "b", Permit(100, at - 5, 3))
    assert len(claimed.leases) == 3
    assert claimed.lease_counts.lost_units == 3


async def test_nothing_shared_before_the_first_permit(world: World) -> None:
    shared = (await world.owner().renew([])).shared
    assert (shared.limit, shared.overload, shared.probing_owner, shared.is_paused) == (
        None,
        None,
        None,
        False,
    )


async def test_one_owner_s_overload_stops_all_until_a_newer_reading(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    told = await first.share_state(
        Permit(10, at - 1, 0), Overload(at, at, is_out_of_capacity=True, in_flight=7)
    )
    seen = told.shared.overload
    assert seen is not None
    assert (seen.is_out_of_capacity, seen.in_flight) == (True, 7)
    assert seen.refused_at == pytest.approx(at, abs=0.25)
    assert await take(second, 10, at - 0.5, "a") == 0
    learned = (await full_claim(second, 0)).shared.overload
    assert learned is not None
    assert learned.in_flight == 7
    assert await take(second, 10, at + 0.5, "b") == 10


async def test_retry_after_holds_whatever_a_reading_says(world: World) -> None:
    await fill(world)
    owner = world.owner()
    at = now()
    await owner.share_state(Permit(10, at, 0), Overload(at, at + 0.6, is_out_of_capacity=True, in_flight=7))
    assert await take(owner, 10, at + 0.2, "a") == 0

    async def open_again() -> bool:
        return await take(owner, 10, now(), f"n-{now()}") == 10

    await wait_until(open_again)
    assert now() > at + 0.4


@pytest.mark.parametrize("told_most_s", [0.4, 86400.0])
async def test_stored_retry_after_is_kept_to_for_no_longer_than_whoever_claims_would(
    world: World, told_most_s: float
) -> None:
    """Whoever stored it may have had another retry.max_s, or be of a version that cut nothing."""
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    overload = Overload(at, at + 80_000, is_out_of_capacity=True, in_flight=7)
    kept = (
        await first.share_state(Permit(10, at, 0, retry_after_max_s=told_most_s), overload)
    ).shared.overload
    assert kept is not None
    assert kept.retry_at == pytest.approx(at + min(told_most_s, 80_000), abs=0.25)

    async def claimed() -> int:
        permit = Permit(10, now() + 0.5, 0, retry_after_max_s=0.4)
        return len((await second.claim(100, f"n-{now()}", permit)).leases)

    assert await claimed() == 0

    async def open_again() -> bool:
        return await claimed() == 10

    await wait_until(open_again)
    assert now() > at + 0.3


async def test_newest_overload_stays_and_its_until_never_moves_back(world: World) -> None:
    owner = world.owner()
    at = now() - 5
    await owner.share_state(
        Permit(10, at, 0), Overload(at + 2, at + 50, is_out_of_capacity=True, in_flight=9)
    )
    await owner.share_state(
        Permit(10, at, 0), Overload(at + 1, at + 60, is_out_of_capacity=False, in_flight=8)
    )
    kept = (await owner.renew([])).shared.overload
    assert kept is not None
    assert (kept.is_out_of_capacity, kept.in_flight) == (True, 9)
    assert kept.refused_at == pytest.approx(at + 2, abs=0.25)
    assert kept.retry_at == pytest.approx(at + 60, abs=0.25)
    await owner.share_state(
        Permit(10, at, 0), Overload(at + 3, at + 4, is_out_of_capacity=False, in_flight=5)
    )
    kept = (await owner.renew([])).shared.overload
    assert kept is not None
    assert (kept.is_out_of_capacity, kept.in_flight) == (False, 5)
    assert kept.retry_at == pytest.approx(at + 60, abs=0.25)


async def test_share_learns_and_claims_nothing(world: World) -> None:
    await fill(world, 3)
    told = await world.owner().share_state(permit(10), None)
    assert list(told.lost_entry_ids) == []
    assert (told.lease_counts.live_units, told.shared.limit) == (0, 10)
    assert (await world.desk.count_requests()).pending == 3


async def test_one_probe_at_a_time_over_all_owners(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    probe = await first.claim_probe("a", permit())
    assert [lease.score for lease in probe.leases] == [0.0]
    assert probe.shared.probing_owner == "owner-1"
    assert list((await second.claim_probe("b", permit())).leases) == []
    assert list((await first.claim_probe("c", permit())).leases) == []
    assert [lease.token for lease in (await first.claim_probe("a", permit())).leases] == [
        probe.leases[0].token
    ]
    assert (await second.renew([])).shared.probing_owner == "owner-1"


@pytest.mark.parametrize("end", ["settled", "released", "delayed", "lost"])
async def test_another_may_probe_when_the_probe_s_lease_has_ended(world: World, end: str) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    [lease] = (await first.claim_probe("a", permit())).leases
    if end == "settled":
        await first.settle([answer(lease)])
    elif end == "lost":
        await world.lose(second, lease)
    else:
        await first.release([Release(lease, delay_s=60 if end == "delayed" else 0)])
    assert (await first.renew([])).shared.probing_owner is None
    probe = await second.claim_probe("b", permit())
    assert len(probe.leases) == 1
    assert probe.shared.probing_owner == "owner-2"


async def test_ordinary_claim_of_the_prober_ends_the_probing_though_the_probe_runs_on(world: World) -> None:
    """Who claims has a gateway. The answer to a long request may take minutes: others may look before."""
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    [lease] = (await first.claim_probe("a", permit())).leases
    claimed = await full_claim(first, 2)
    assert (len(claimed.leases), claimed.shared.probing_owner) == (2, None)
    probe = await second.claim_probe("b", permit())
    assert (len(probe.leases), probe.shared.probing_owner) == (1, "owner-2")
    await first.settle([answer(lease)])
    assert (await first.renew([])).shared.probing_owner == "owner-2"


async def test_prober_s_claim_that_finds_no_room_says_the_same(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await first.claim_probe("a", permit())
    claimed = await full_claim(first, limit=1)
    assert (list(claimed.leases), claimed.shared.probing_owner) == ([], None)
    assert len((await second.claim_probe("b", permit())).leases) == 1


async def test_claim_by_another_than_the_prober_ends_no_probing(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await first.claim_probe("a", permit())
    assert (await full_claim(second, 2)).shared.probing_owner == "owner-1"
    assert list((await second.claim_probe("b", permit())).leases) == []


async def test_repeated_claim_of_before_the_probe_ends_no_probing(world: World) -> None:
    """It says nothing of the gateway now: its first reply was lost."""
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    granted = permit()
    before = await first.claim(2, "early", granted)
    await first.claim_probe("a", permit())
    again = await first.claim(2, "early", granted)
    assert [lease.token for lease in again.leases] == [lease.token for lease in before.leases]
    assert again.shared.probing_owner == "owner-1"
    assert list((await second.claim_probe("b", permit())).leases) == []


async def test_probe_counts_as_a_lease_and_passes_no_limit(world: World) -> None:
    await fill(world)
    owner = world.owner()
    held = await claim(owner, limit=3)
    assert list((await owner.claim_probe("a", permit(3))).leases) == []
    await owner.settle([answer(held[0])])
    assert len((await owner.claim_probe("b", permit(3))).leases) == 1
    assert (await owner.renew([])).lease_counts.live_units == 3


async def test_who_would_probe_has_the_next_place_that_comes_free(world: World) -> None:
    """Whoever fills the limit replaces each request that ends, and so would keep all others out for ever."""
    await fill(world)
    works, probes = world.owner("owner-1"), world.owner("owner-2")
    held = list(await claim(works, limit=3))
    assert list((await probes.claim_probe("a", permit(3))).leases) == []
    await works.settle([answer(held.pop())])
    assert list(await claim(works, limit=3)) == []
    assert len((await probes.claim_probe("b", permit(3))).leases) == 1
    await works.settle([answer(held.pop())])
    held += await claim(works, limit=3)
    assert len(held) == 2, "one place, once"
    assert list((await probes.claim_probe("c", permit(3))).leases) == [], "its first one runs"
    await works.settle([answer(held.pop())])
    assert len(await claim(works, limit=3)) == 1


async def test_a_place_that_nobody_comes_to_probe_with_is_not_kept_for_long(world: World) -> None:
    await fill(world)
    works, gone = world.owner("owner-1"), world.owner("owner-2", timeout_s=1.0)
    held = list(await claim(works, limit=1))
    await gone.claim_probe("a", permit(1))
    await works.settle([answer(held.pop())])
    assert list(await claim(works, limit=1)) == []
    await wait_until(lambda: claim(works, limit=1), timeout_s=3.0, what="the place to be given to others")


async def test_no_probe_is_sent_while_the_gateway_asked_to_wait(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    refused_at, patient, hasty = now() - 5, 600.0, 0.001
    await first.share_state(Permit(1000, refused_at - 1, 0), Overload(refused_at, refused_at + 600, False, 0))
    assert list((await second.claim_probe("a", Permit(1000, now(), 0, patient))).leases) == []
    of_before = Permit(1000, refused_at - 1, 0, hasty)
    assert list((await second.claim_probe("b", of_before)).leases) == [], "a reading of before"
    assert len((await second.claim_probe("c", Permit(1000, now(), 0, hasty))).leases) == 1


async def test_probe_of_an_empty_queue_takes_no_role(world: World) -> None:
    probe = await world.owner().claim_probe("a", permit())
    assert (list(probe.leases), probe.shared.probing_owner) == ([], None)


async def test_paused_queue_gives_nothing_and_keeps_what_is_held(world: World) -> None:
    await fill(world)
    owner = world.owner()
    [held] = await claim(owner, 1)
    assert await world.desk.read_pause() is None
    await world.desk.pause("ada", "maintenance of the pool")
    assert await world.desk.read_pause() == ("ada", "maintenance of the pool")
    claimed = await full_claim(owner)
    assert (list(claimed.leases), claimed.shared.is_paused) == ([], True)
    assert list((await owner.claim_probe("a", permit())).leases) == []
    assert list((await owner.renew([held])).lost_entry_ids) == []
    assert await owner.settle([answer(held)]) == ["done"]
    await world.desk.resume()
    assert await world.desk.read_pause() is None
    claimed = await full_claim(owner)
    assert (len(claimed.leases), claimed.shared.is_paused) == (19, False)


STEP_S = 600.0


async def test_newer_readings_count_at_once_though_the_queue_s_clock_stepped_back(world: World) -> None:
    """A failover to a host whose clock is behind: what was shared before lies in the future."""
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    assert await take(first, 5, now(), "a") == 5
    await world.step_back(STEP_S)
    told = (await second.renew([])).shared
    assert told.limit == 5
    assert told.read_at == pytest.approx(now(), abs=SLOP_S)
    assert await take(second, 20, now() - 1, "b") == 0  # older than what was shared

    async def claimed() -> bool:
        return await take(first, 12, now(), f"n-{now()}") == 7

    await wait_until(claimed)


async def test_refusal_is_over_as_soon_as_ever_though_the_queue_s_clock_stepped_back(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    await first.share_state(
        Permit(10, at - 1, 0), Overload(at, at + 0.6, is_out_of_capacity=True, in_flight=7)
    )
    await world.step_back(STEP_S)
    for owner in (second, first):
        overload = (await owner.renew([])).shared.overload
        assert overload is not None
        assert overload.refused_at == pytest.approx(now(), abs=SLOP_S)
        assert overload.retry_at == pytest.approx(overload.refused_at + 0.6, abs=0.01)
        assert (
            not overload.is_out_of_capacity
        )  # or they would take it for a new one, and lower their ceilings again
        assert await take(owner, 10, at - 0.5, f"n-{now()}") == 0

    async def open_again() -> bool:
        return await take(second, 10, now(), f"n-{now()}") == 10

    await wait_until(open_again)
    assert now() > at + 0.4


async def test_nothing_is_claimed_by_a_reading_of_later_than_now(world: World) -> None:
    """An owner's first call after such a step still goes by the clock of before: nobody knows of when its
    reading is. It may be of before a refusal, or older than another's."""
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    assert await take(first, 5, now(), "a") == 5
    assert await take(second, 20, now() + STEP_S, "b") == 0
    assert (await second.renew([])).shared.limit == 5
    at = now()
    # Over for longer than owners' clocks may be apart after slow replies: none claims before `until`.
    refused_at = at - 5
    overload = Overload(refused_at, refused_at, is_out_of_capacity=True, in_flight=7)
    await first.share_state(Permit(10, refused_at - 1, 0), overload)
    assert await take(second, 20, at + STEP_S, "c") == 0
    assert await take(second, 20, at + 0.5, "d") == 15


async def test_refusal_of_later_than_now_is_of_now(world: World) -> None:
    await fill(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now() + STEP_S
    await first.share_state(
        Permit(10, now(), 0), Overload(at, at + 0.3, is_out_of_capacity=True, in_flight=7)
    )
    overload = (await second.renew([])).shared.overload
    assert overload is not None
    assert overload.refused_at == pytest.approx(now(), abs=SLOP_S)
    assert overload.retry_at == pytest.approx(overload.refused_at + 0.3, abs=0.01)
    assert overload.is_out_of_capacity


async def test_leases_and_delays_last_no_longer_though_the_queue_s_clock_stepped_back(world: World) -> None:
    await fill(world, 3)
    dead, living = world.owner("owner-1"), world.owner("owner-2")
    held, delayed = await claim(dead, 2)
    await dead.release([Release(delayed, delay_s=5)])
    await living.sweep()
    [mine] = await claim(living, 1)
    await world.step_back(STEP_S)
    assert list((await living.renew([mine])).lost_entry_ids) == []
    swept = await living.sweep()
    assert swept.reclaimed_count == 0
    assert swept.next_due_at is not None
    assert 0 < swept.next_due_at - now() < 6

    async def settled() -> bool:
        return (await living.renew([])).lease_counts.just_leased_units == 0

    await wait_until(settled)
    assert (
        await world.pass_time(living, 60) == 0
    )  # the one is renewed, the other's owner may be silent that long
    await world.fall_silent("owner-1")
    assert (await living.sweep()).reclaimed_count == 1
    assert list((await dead.renew([held])).lost_entry_ids) == [held.entry_id]
    assert list((await living.renew([mine])).lost_entry_ids) == []
