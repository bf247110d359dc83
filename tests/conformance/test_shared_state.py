"""State that the owners of one queue share: limit, overload, probe, and the pause of an operator."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.queue.contract import Overload, Permit, Queue, Release
from tests.conformance.worlds import World, answer, claim, claim_fully, permit
from tests.support import wait_until

SLOP_S = 60.0
"""Longest time in seconds that a few calls take on a busy machine. It is much less than STEP_S."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def submit_requests(world: World, count: int = 20) -> None:
    for number in range(count):
        await world.zadd(number, b"%03d" % number)


async def claim_count(queue: Queue, limit: int, read_at: float, nonce: str) -> int:
    return len((await queue.claim(100, nonce, Permit(limit, read_at, 0))).leases)


async def test_older_and_larger_limit_grants_nothing(world: World) -> None:
    await submit_requests(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await claim_count(fresh, 4, at, "a") == 4
    assert await claim_count(stale, 10, at - 5, "b") == 0
    assert (await stale.share_state(Permit(10, at - 5, 0), None)).shared.limit == 4


async def test_older_and_smaller_limit_applies_to_its_owner(world: World) -> None:
    await submit_requests(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await claim_count(fresh, 10, at, "a") == 10
    for lease in (await fresh.claim(10, "a", Permit(10, at, 0))).leases[:8]:
        await fresh.settle([answer(lease)])
    assert await claim_count(stale, 3, at - 5, "b") == 1
    assert await claim_count(fresh, 10, at, "c") == 7


async def test_newer_limit_applies_to_all_owners(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    assert await claim_count(first, 2, at - 1, "a") == 2
    shared = (await second.share_state(Permit(9, at, 0), None)).shared
    assert (shared.limit, shared.is_paused, shared.probing_owner, shared.overload) == (9, False, None, None)
    assert shared.read_at == pytest.approx(at, abs=0.25)
    assert await claim_count(first, 2, at - 1, "b") == 0
    assert await claim_count(second, 9, at, "c") == 7


async def test_limit_by_the_same_reading_replaces_the_shared_limit(world: World) -> None:
    await submit_requests(world)
    owner = world.owner()
    for _ in range(5):  # the first reply over a new connection shows the server's clock only roughly
        await owner.renew([])
    at = now()
    assert await claim_count(owner, 2, at, "a") == 2
    assert await claim_count(owner, 5, at, "b") == 3


async def test_shared_limit_is_lowered_by_later_losses(world: World) -> None:
    await submit_requests(world)
    fresh, stale = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    leases = (await fresh.claim(3, "a", Permit(6, at, 0))).leases
    await world.lose_leases(fresh, *leases)
    claimed = await stale.claim(100, "b", Permit(100, at - 5, 3))
    assert len(claimed.leases) == 3
    assert claimed.lease_counts.lost_units == 3


async def test_no_state_is_shared_before_the_first_permit(world: World) -> None:
    shared = (await world.owner().renew([])).shared
    assert (shared.limit, shared.overload, shared.probing_owner, shared.is_paused) == (
        None,
        None,
        None,
        False,
    )


async def test_overload_of_one_owner_stops_all_owners_until_a_newer_reading(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    reply = await first.share_state(
        Permit(10, at - 1, 0), Overload(at, at, is_out_of_capacity=True, in_flight=7)
    )
    seen = reply.shared.overload
    assert seen is not None
    assert (seen.is_out_of_capacity, seen.in_flight) == (True, 7)
    assert seen.refused_at == pytest.approx(at, abs=0.25)
    assert await claim_count(second, 10, at - 0.5, "a") == 0
    learned = (await claim_fully(second, 0)).shared.overload
    assert learned is not None
    assert learned.in_flight == 7
    assert await claim_count(second, 10, at + 0.5, "b") == 10


async def test_retry_after_applies_despite_a_newer_reading(world: World) -> None:
    await submit_requests(world)
    owner = world.owner()
    at = now()
    await owner.share_state(Permit(10, at, 0), Overload(at, at + 0.6, is_out_of_capacity=True, in_flight=7))
    assert await claim_count(owner, 10, at + 0.2, "a") == 0

    async def is_claimable_again() -> bool:
        return await claim_count(owner, 10, now(), f"n-{now()}") == 10

    await wait_until(is_claimable_again)
    assert now() > at + 0.4


@pytest.mark.parametrize("retry_after_max_s", [0.4, 86400.0])
async def test_stored_retry_after_is_bounded_by_the_retry_setting_of_the_claiming_owner(
    world: World, retry_after_max_s: float
) -> None:
    """The owner that stored it may have had another retry.max_s."""
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    overload = Overload(at, at + 80_000, is_out_of_capacity=True, in_flight=7)
    kept = (
        await first.share_state(Permit(10, at, 0, retry_after_max_s=retry_after_max_s), overload)
    ).shared.overload
    assert kept is not None
    assert kept.retry_at == pytest.approx(at + min(retry_after_max_s, 80_000), abs=0.25)

    async def claimed() -> int:
        permit = Permit(10, now() + 0.5, 0, retry_after_max_s=0.4)
        return len((await second.claim(100, f"n-{now()}", permit)).leases)

    assert await claimed() == 0

    async def is_claimable_again() -> bool:
        return await claimed() == 10

    await wait_until(is_claimable_again)
    assert now() > at + 0.3


async def test_newest_overload_is_kept_and_its_retry_time_never_moves_back(world: World) -> None:
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


async def test_sharing_state_returns_the_shared_state_and_claims_nothing(world: World) -> None:
    await submit_requests(world, 3)
    reply = await world.owner().share_state(permit(10), None)
    assert list(reply.lost_entry_ids) == []
    assert (reply.lease_counts.live_units, reply.shared.limit) == (0, 10)
    assert (await world.queue_admin.count_requests()).pending == 3


async def test_only_one_probe_runs_among_all_owners(world: World) -> None:
    await submit_requests(world)
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
async def test_another_owner_may_probe_once_the_lease_of_the_probe_has_ended(world: World, end: str) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    [lease] = (await first.claim_probe("a", permit())).leases
    if end == "settled":
        await first.settle([answer(lease)])
    elif end == "lost":
        await world.lose_leases(second, lease)
    else:
        await first.release([Release(lease, delay_s=60 if end == "delayed" else 0)])
    assert (await first.renew([])).shared.probing_owner is None
    probe = await second.claim_probe("b", permit())
    assert len(probe.leases) == 1
    assert probe.shared.probing_owner == "owner-2"


async def test_ordinary_claim_of_the_probing_owner_ends_the_probing_while_the_probe_still_runs(
    world: World,
) -> None:
    """An owner that claims has a reachable gateway. The answer to a long probe may take minutes, and other
    owners need not wait for it."""
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    [lease] = (await first.claim_probe("a", permit())).leases
    claimed = await claim_fully(first, 2)
    assert (len(claimed.leases), claimed.shared.probing_owner) == (2, None)
    probe = await second.claim_probe("b", permit())
    assert (len(probe.leases), probe.shared.probing_owner) == (1, "owner-2")
    await first.settle([answer(lease)])
    assert (await first.renew([])).shared.probing_owner == "owner-2"


async def test_claim_of_the_probing_owner_without_room_ends_the_probing_too(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await first.claim_probe("a", permit())
    claimed = await claim_fully(first, limit=1)
    assert (list(claimed.leases), claimed.shared.probing_owner) == ([], None)
    assert len((await second.claim_probe("b", permit())).leases) == 1


async def test_claim_of_another_owner_does_not_end_the_probing(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await first.claim_probe("a", permit())
    assert (await claim_fully(second, 2)).shared.probing_owner == "owner-1"
    assert list((await second.claim_probe("b", permit())).leases) == []


async def test_repeated_claim_from_before_the_probe_does_not_end_the_probing(world: World) -> None:
    """It proves nothing about the gateway now, because only its first reply was lost."""
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    granted = permit()
    before = await first.claim(2, "early", granted)
    await first.claim_probe("a", permit())
    again = await first.claim(2, "early", granted)
    assert [lease.token for lease in again.leases] == [lease.token for lease in before.leases]
    assert again.shared.probing_owner == "owner-1"
    assert list((await second.claim_probe("b", permit())).leases) == []


async def test_probe_counts_as_a_lease_within_the_limit(world: World) -> None:
    await submit_requests(world)
    owner = world.owner()
    held = await claim(owner, limit=3)
    assert list((await owner.claim_probe("a", permit(3))).leases) == []
    await owner.settle([answer(held[0])])
    assert len((await owner.claim_probe("b", permit(3))).leases) == 1
    assert (await owner.renew([])).lease_counts.live_units == 3


async def test_next_free_unit_is_reserved_for_an_owner_that_wants_to_probe(world: World) -> None:
    """Owners that use up the limit replace each request that ends, and would keep the probe out for ever."""
    await submit_requests(world)
    works, probes = world.owner("owner-1"), world.owner("owner-2")
    held = list(await claim(works, limit=3))
    assert list((await probes.claim_probe("a", permit(3))).leases) == []
    await works.settle([answer(held.pop())])
    assert list(await claim(works, limit=3)) == []
    assert len((await probes.claim_probe("b", permit(3))).leases) == 1
    await works.settle([answer(held.pop())])
    held += await claim(works, limit=3)
    assert len(held) == 2, "one unit, once"
    assert list((await probes.claim_probe("c", permit(3))).leases) == [], "its first probe runs"
    await works.settle([answer(held.pop())])
    assert len(await claim(works, limit=3)) == 1


async def test_reservation_for_a_probe_ends_if_the_owner_does_not_return(world: World) -> None:
    await submit_requests(world)
    works, gone = world.owner("owner-1"), world.owner("owner-2", timeout_s=1.0)
    held = list(await claim(works, limit=1))
    await gone.claim_probe("a", permit(1))
    await works.settle([answer(held.pop())])
    assert list(await claim(works, limit=1)) == []
    await wait_until(lambda: claim(works, limit=1), timeout_s=3.0, what="the place to be given to others")


async def test_no_probe_is_claimed_while_the_gateway_asked_to_wait(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    refused_at, patient, hasty = now() - 5, 600.0, 0.001
    await first.share_state(Permit(1000, refused_at - 1, 0), Overload(refused_at, refused_at + 600, False, 0))
    assert list((await second.claim_probe("a", Permit(1000, now(), 0, patient))).leases) == []
    of_before = Permit(1000, refused_at - 1, 0, hasty)
    assert list((await second.claim_probe("b", of_before)).leases) == [], "an older reading"
    assert len((await second.claim_probe("c", Permit(1000, now(), 0, hasty))).leases) == 1


async def test_probe_of_an_empty_queue_does_not_block_other_probes(world: World) -> None:
    probe = await world.owner().claim_probe("a", permit())
    assert (list(probe.leases), probe.shared.probing_owner) == ([], None)


@pytest.mark.server
async def test_paused_queue_grants_no_leases_and_keeps_existing_ones(world: World) -> None:
    await submit_requests(world)
    owner = world.owner()
    [held] = await claim(owner, 1)
    assert await world.queue_admin.read_pause() is None
    await world.queue_admin.pause("ada", "maintenance of the pool")
    assert await world.queue_admin.read_pause() == ("ada", "maintenance of the pool")
    claimed = await claim_fully(owner)
    assert (list(claimed.leases), claimed.shared.is_paused) == ([], True)
    assert list((await owner.claim_probe("a", permit())).leases) == []
    assert list((await owner.renew([held])).lost_entry_ids) == []
    assert await owner.settle([answer(held)]) == ["done"]
    await world.queue_admin.resume()
    assert await world.queue_admin.read_pause() is None
    claimed = await claim_fully(owner)
    assert (len(claimed.leases), claimed.shared.is_paused) == (19, False)


STEP_S = 600.0


async def test_newer_readings_apply_at_once_after_the_server_clock_stepped_back(world: World) -> None:
    """After a failover to a host whose clock is behind, times that were shared before are in the future."""
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    assert await claim_count(first, 5, now(), "a") == 5
    await world.step_clock_back(STEP_S)
    reply = (await second.renew([])).shared
    assert reply.limit == 5
    assert reply.read_at == pytest.approx(now(), abs=SLOP_S)
    assert await claim_count(second, 20, now() - 1, "b") == 0  # older than what was shared

    async def claimed() -> bool:
        return await claim_count(first, 12, now(), f"n-{now()}") == 7

    await wait_until(claimed)


async def test_refusal_lasts_no_longer_after_the_server_clock_stepped_back(world: World) -> None:
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    at = now()
    await first.share_state(
        Permit(10, at - 1, 0), Overload(at, at + 0.6, is_out_of_capacity=True, in_flight=7)
    )
    await world.step_clock_back(STEP_S)
    for owner in (second, first):
        overload = (await owner.renew([])).shared.overload
        assert overload is not None
        assert overload.refused_at == pytest.approx(now(), abs=SLOP_S)
        assert overload.retry_at == pytest.approx(overload.refused_at + 0.6, abs=0.01)
        assert (
            not overload.is_out_of_capacity
        )  # otherwise they would treat it as a new one, and lower their limits again
        assert await claim_count(owner, 10, at - 0.5, f"n-{now()}") == 0

    async def is_claimable_again() -> bool:
        return await claim_count(second, 10, now(), f"n-{now()}") == 10

    await wait_until(is_claimable_again)
    assert now() > at + 0.4


async def test_reading_from_the_future_claims_nothing(world: World) -> None:
    """An owner's first call after such a step still goes by the clock of before: nobody knows of when its
    reading is. It may be of before a refusal, or older than another's."""
    await submit_requests(world)
    first, second = world.owner("owner-1"), world.owner("owner-2")
    assert await claim_count(first, 5, now(), "a") == 5
    assert await claim_count(second, 20, now() + STEP_S, "b") == 0
    assert (await second.renew([])).shared.limit == 5
    at = now()
    # Longer than the difference of the owners' clocks after slow replies: none claims before `until`.
    refused_at = at - 5
    overload = Overload(refused_at, refused_at, is_out_of_capacity=True, in_flight=7)
    await first.share_state(Permit(10, refused_at - 1, 0), overload)
    assert await claim_count(second, 20, at + STEP_S, "c") == 0
    assert await claim_count(second, 20, at + 0.5, "d") == 15


async def test_refusal_from_the_future_counts_as_one_from_now(world: World) -> None:
    await submit_requests(world)
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


async def test_leases_and_delays_last_no_longer_after_the_server_clock_stepped_back(world: World) -> None:
    await submit_requests(world, 3)
    dead, living = world.owner("owner-1"), world.owner("owner-2")
    held, delayed = await claim(dead, 2)
    await dead.release([Release(delayed, delay_s=5)])
    await living.sweep()
    [mine] = await claim(living, 1)
    await world.step_clock_back(STEP_S)
    assert list((await living.renew([mine])).lost_entry_ids) == []
    swept = await living.sweep()
    assert swept.reclaimed_count == 0
    assert swept.next_due_at is not None
    assert 0 < swept.next_due_at - now() < 6

    async def settled() -> bool:
        return (await living.renew([])).lease_counts.just_leased_units == 0

    await wait_until(settled)
    assert (
        await world.sweep_each_second(living, 60) == 0
    )  # the first lease is renewed, and the owner of the second may be silent for so long
    await world.silence_owners("owner-1")
    assert (await living.sweep()).reclaimed_count == 1
    assert list((await dead.renew([held])).lost_entry_ids) == [held.entry_id]
    assert list((await living.renew([mine])).lost_entry_ids) == []
