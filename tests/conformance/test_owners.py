"""Owners that are gone, because they were silent for too long or are proven to have ended, and owners that
are alive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dispatcher.queue.contract import Permit, Release, SettleStatus
from dispatcher.requests.lanes import Lane
from tests.conformance.worlds import (
    LEASE_S,
    OWNER_TIMEOUT_S,
    World,
    answer,
    claim,
    claim_fully,
    member,
    permit,
)

QUIET_S = 2.1
"""Between sweeps: more than a pause."""
PATIENT_S, BRISK_S = OWNER_TIMEOUT_S, 4.0
"""Timeouts of two owners of one queue."""


class FixedDeadOwners:
    """Detector that reports fixed owners as ended."""

    def __init__(self, *ended: str) -> None:
        self.record_completion = {*ended}
        self.asked: list[list[str]] = []

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        self.asked.append(sorted(owners))
        return [owner for owner in owners if owner in self.record_completion]


async def submit_requests(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def test_requests_of_a_silent_owner_return_long_before_their_leases_expire(
    world: World,
) -> None:
    await submit_requests(world, 6)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    lost = await claim(dead, 2)
    kept = await claim(living, 2)
    await world.silence_owners("dead")
    swept = await living.sweep()
    assert (swept.reclaimed_count, swept.lost_units) == (2, 2)
    count = (await living.renew(kept)).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        2,
        0,
        2,
        2,
    )
    assert list((await living.renew(kept)).lost_entry_ids) == []
    again = await claim(living, 2)
    assert [(lease.entry_id, lease.deliveries) for lease in again] == [(lease.entry_id, 2) for lease in lost]
    assert list(await dead.settle([answer(lease) for lease in lost])) == [SettleStatus.LOST] * 2


async def test_each_call_of_an_owner_records_a_heartbeat(world: World) -> None:
    await submit_requests(world, 1)
    watcher, owner = world.owner("watcher"), world.owner("owner")
    await watcher.sweep()
    await claim(owner)

    async def is_owner_alive_after(call: str) -> bool:
        await world.silence_owners("owner")
        match call:
            case "claim":
                await claim(owner, 0)
            case "probe":
                await owner.claim_probe(f"nonce-of-{call}", permit())
            case "renew":
                await owner.renew([])
            case "share":
                await owner.share_state(permit(), None)
            case "sweep":
                assert (await owner.sweep()).reclaimed_count == 0
        return (await watcher.sweep()).reclaimed_count == 0

    for call in ("claim", "probe", "renew", "share", "sweep"):
        assert await is_owner_alive_after(call), call
    await world.silence_owners("owner")
    assert (await watcher.sweep()).reclaimed_count == 1


async def test_owner_without_heartbeats_is_only_judged_by_its_leases(world: World) -> None:
    """An owner with owner_timeout_s 0 sends no heartbeats."""
    await submit_requests(world, 2)
    old, new = world.owner("old", timeout_s=0), world.owner("new")
    await new.sweep()
    [lease, _] = await claim(old)
    await world.silence_owners("old")
    assert (await new.sweep()).reclaimed_count == 0
    assert list((await old.renew([lease])).lost_entry_ids) == []
    await world.expire_leases(lease)
    assert (await new.sweep()).reclaimed_count == 1
    count = (await new.renew([])).lease_counts
    assert (count.lost_units, count.orphaned_units) == (1, 1)


async def test_silence_is_ignored_right_after_an_outage(world: World) -> None:
    await submit_requests(world, 2)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    [kept] = await claim(living, 1)
    await claim(dead, 1)
    await world.silence_owners("living", "dead")
    await world.skip_sweeps(QUIET_S)
    assert (await world.owner("another").sweep()).reclaimed_count == 0
    await living.renew([kept])
    assert await world.sweep_each_second(living, int(OWNER_TIMEOUT_S) - 1) == 0
    assert await world.sweep_each_second(living, 2) == 1
    assert await living.settle([answer(kept)]) == [SettleStatus.DONE]


async def test_gap_of_a_second_between_sweeps_is_no_outage(world: World) -> None:
    await submit_requests(world, 1)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    await claim(dead)
    await world.silence_owners("dead")
    await world.skip_sweeps(1.0)
    assert (await living.sweep()).reclaimed_count == 1


async def test_short_outage_costs_owners_with_a_shorter_timeout_nothing(
    world: World,
) -> None:
    await submit_requests(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    await patient.sweep()
    [kept] = await claim(brisk)
    await world.simulate_outage(BRISK_S + 1)
    assert (await patient.sweep()).reclaimed_count == 0
    assert await brisk.settle([answer(kept)]) == [SettleStatus.DONE]


async def test_after_an_outage_each_owner_may_be_silent_for_its_own_timeout(world: World) -> None:
    """It does not matter which owner sweeps first, and how short its own timeout is."""
    await submit_requests(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    await brisk.sweep()
    await claim(patient)
    await world.simulate_outage(PATIENT_S + 5)
    assert (await brisk.sweep()).reclaimed_count == 0
    assert await world.sweep_each_second(brisk, int(PATIENT_S) - 1) == 0
    assert await world.sweep_each_second(brisk, 3) == 1


async def test_quiet_time_after_an_outage_is_never_shortened(world: World) -> None:
    """A second outage, which an owner with a short timeout notices, does not shorten it."""
    await submit_requests(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    other = world.owner("other", timeout_s=PATIENT_S)
    await brisk.sweep()
    await claim(patient)
    await world.simulate_outage(PATIENT_S + 5)
    await other.sweep()
    await world.silence_owners("other", "patient")
    await world.skip_sweeps(QUIET_S)
    await brisk.sweep()
    assert await world.sweep_each_second(brisk, int(PATIENT_S - QUIET_S) - 2) == 0
    assert await world.sweep_each_second(brisk, 5) == 1


async def test_quiet_time_after_a_long_outage_is_no_longer_than_a_lease(world: World) -> None:
    """An owner may call before the first sweep, and then its timeout is not known from its heartbeat."""
    await submit_requests(world, 1)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    await claim(dead)
    await world.simulate_outage(7200)
    await living.renew([])
    assert (await living.sweep()).reclaimed_count == 0
    assert await world.sweep_each_second(living, int(LEASE_S) + 1) == 1


async def test_owner_without_heartbeats_may_sweep(world: World) -> None:
    await submit_requests(world, 1)
    old, dead = world.owner("old", timeout_s=0), world.owner("dead")
    await old.sweep()
    await claim(dead)
    await world.silence_owners("dead")
    assert (await old.sweep()).reclaimed_count == 1


async def test_owner_that_counted_as_dead_learns_its_lost_leases_and_continues(world: World) -> None:
    """This holds for every kind of next call, and for repeated calls, because losses are a counter."""
    await submit_requests(world, 3)
    stalled, other = world.owner("stalled"), world.owner("other")
    await other.sweep()
    claimed = await claim_fully(stalled, 1)
    [lease] = claimed.leases
    assert claimed.lease_counts.lost_units == 0
    await world.silence_owners("stalled")
    await other.sweep()
    for _ in range(2):
        assert (await stalled.share_state(permit(lost=0), None)).lease_counts.lost_units == 1
        assert (await stalled.sweep()).lost_units == 1
    assert list((await stalled.renew([lease])).lost_entry_ids) == [lease.entry_id]
    again = await claim(stalled, 1)
    assert len(again) == 1
    assert (await other.sweep()).reclaimed_count == 0
    assert await stalled.settle([answer(one) for one in again]) == [SettleStatus.DONE]


@pytest.mark.server
async def test_leases_of_an_owner_proven_ended_are_reclaimed_at_once_and_are_not_orphaned(
    world: World,
) -> None:
    await submit_requests(world, 4)
    knows = FixedDeadOwners("dead")
    dead, next_one = world.owner("dead"), world.owner("next", dead_owner_detector=knows)
    old = world.owner("old", timeout_s=0)
    lost = await claim(dead, 2)
    await claim(old, 1)
    swept = await next_one.sweep()
    assert (swept.reclaimed_count, swept.lost_units) == (2, 2)
    assert knows.asked[0] == ["dead", "old"]
    count = (await next_one.renew([])).lease_counts
    assert (count.live_units, count.lost_units, count.orphaned_units) == (1, 2, 0)
    again = await claim(next_one, 2)
    assert [(lease.entry_id, lease.deliveries) for lease in again] == [(lease.entry_id, 2) for lease in lost]
    assert list(await dead.settle([answer(lost[0])])) == [SettleStatus.LOST]


@pytest.mark.server
async def test_proof_that_an_owner_ended_applies_right_after_an_outage(world: World) -> None:
    await submit_requests(world, 2)
    dead, next_one = world.owner("dead"), world.owner("next", dead_owner_detector=FixedDeadOwners("dead"))
    await dead.sweep()
    await claim(dead)
    await world.skip_sweeps(1000)
    assert (await next_one.sweep()).reclaimed_count == 2


@pytest.mark.server
async def test_owner_never_counts_itself_as_ended(world: World) -> None:
    await submit_requests(world, 1)
    owner = world.owner("owner", dead_owner_detector=FixedDeadOwners("owner"))
    [lease] = await claim(owner)
    assert (await owner.sweep()).reclaimed_count == 0
    assert await owner.settle([answer(lease)]) == [SettleStatus.DONE]


@pytest.mark.server
async def test_deaths_are_counted_for_proven_and_silent_owners(world: World) -> None:
    await submit_requests(world, 1)
    watcher = world.owner("watcher", dead_owner_detector=FixedDeadOwners("proven"))
    await watcher.sweep()
    for name in ("silent", "proven"):
        await claim(world.owner(name))
        await world.silence_owners("silent")
        assert (await watcher.sweep()).reclaimed_count == 1
    [suspect] = await claim(watcher)
    assert (suspect.deliveries, suspect.lane) == (3, Lane.SUSPECTS)


async def test_probe_of_a_dead_owner_does_not_block_other_probes(world: World) -> None:
    await submit_requests(world, 2)
    watcher, dead = world.owner("watcher"), world.owner("dead")
    await watcher.sweep()
    await dead.claim_probe("a", permit())
    await world.silence_owners("dead")
    await watcher.sweep()
    assert (await watcher.renew([])).shared.probing_owner is None
    assert len((await watcher.claim_probe("b", permit())).leases) == 1


async def test_silent_owner_without_leases_is_forgotten(world: World) -> None:
    await submit_requests(world, 1)
    watcher, leaver = world.owner("watcher"), world.owner("leaver")
    await watcher.sweep()
    [lease] = await claim(leaver)
    await leaver.release([Release(lease, is_undelivered=True)])
    await world.silence_owners("leaver")
    swept = await watcher.sweep()
    assert (swept.reclaimed_count, swept.lost_units) == (0, 0)
    assert await world.get_owners_with_heartbeats() == {"watcher"}


@pytest.mark.server
async def test_hundreds_of_leases_of_several_dead_owners_are_reclaimed_in_one_sweep(world: World) -> None:
    await submit_requests(world, 1300)
    watcher = world.owner("watcher", dead_owner_detector=FixedDeadOwners("proven"))
    await watcher.sweep()
    for name, max_count in (("silent-1", 600), ("proven", 600), ("silent-2", 50)):
        await claim(world.owner(name), max_count, limit=2000)
    [kept, *_] = await claim(watcher, 50, limit=2000)
    await world.silence_owners("silent-1", "silent-2")
    assert (await watcher.sweep()).reclaimed_count == 1250
    count = (await watcher.renew([kept])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
        50,
        0,
        1250,
        650,
    )
    everything = await watcher.claim(1000, "all", Permit(2000, permit().read_at, 1250), max_per_lane={})
    assert everything.claimable_count == 250
