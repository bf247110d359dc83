"""Owners that are gone: silent for too long, or proven to have ended. And those that only seemed so."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.core.requests.lanes import Lane
from dispatcher.ports import Permit, Release, SettleStatus
from tests.conformance.worlds import (
    LEASE_S,
    OWNER_TIMEOUT_S,
    World,
    answer,
    claim,
    full_claim,
    member,
    permit,
)

QUIET_S = 2.1
"""Between sweeps: more than a pause."""
PATIENT_S, BRISK_S = OWNER_TIMEOUT_S, 4.0
"""Timeouts of two owners of one queue."""


class Knows:
    """A prover that knows these to have ended."""

    def __init__(self, *ended: str) -> None:
        self.record_completion = {*ended}
        self.asked: list[list[str]] = []

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        self.asked.append(sorted(owners))
        return [owner for owner in owners if owner in self.record_completion]


async def fill(world: World, count: int) -> None:
    for number in range(count):
        await world.zadd(number, member(f"r-{number:03}"))


async def test_silent_owner_s_requests_return_to_their_place_long_before_their_leases_run_out(
    world: World,
) -> None:
    await fill(world, 6)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    lost = await claim(dead, 2)
    kept = await claim(living, 2)
    await world.fall_silent("dead")
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


async def test_each_call_of_an_owner_shows_that_it_lives(world: World) -> None:
    await fill(world, 1)
    watcher, owner = world.owner("watcher"), world.owner("owner")
    await watcher.sweep()
    await claim(owner)

    async def still_there_after(call: str) -> bool:
        await world.fall_silent("owner")
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
        assert await still_there_after(call), call
    await world.fall_silent("owner")
    assert (await watcher.sweep()).reclaimed_count == 1


async def test_owner_that_never_beats_is_judged_by_its_leases_alone(world: World) -> None:
    """As those of older versions, beside newer ones."""
    await fill(world, 2)
    old, new = world.owner("old", timeout_s=0), world.owner("new")
    await new.sweep()
    [lease, _] = await claim(old)
    await world.fall_silent("old")
    assert (await new.sweep()).reclaimed_count == 0
    assert list((await old.renew([lease])).lost_entry_ids) == []
    await world.run_out(lease)
    assert (await new.sweep()).reclaimed_count == 1
    count = (await new.renew([])).lease_counts
    assert (count.lost_units, count.orphaned_units) == (1, 1)


async def test_silence_counts_for_nothing_after_the_queue_was_away(world: World) -> None:
    await fill(world, 2)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    [kept] = await claim(living, 1)
    await claim(dead, 1)
    await world.fall_silent("living", "dead")
    await world.skip_sweeps(QUIET_S)
    assert (await world.owner("another").sweep()).reclaimed_count == 0
    await living.renew([kept])
    assert await world.pass_time(living, int(OWNER_TIMEOUT_S) - 1) == 0
    assert await world.pass_time(living, 2) == 1
    assert await living.settle([answer(kept)]) == [SettleStatus.DONE]


async def test_pause_between_sweeps_of_a_second_means_nothing(world: World) -> None:
    await fill(world, 1)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    await claim(dead)
    await world.fall_silent("dead")
    await world.skip_sweeps(1.0)
    assert (await living.sweep()).reclaimed_count == 1


async def test_outage_shorter_than_the_sweeper_s_own_timeout_costs_brisker_owners_nothing(
    world: World,
) -> None:
    await fill(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    await patient.sweep()
    [kept] = await claim(brisk)
    await world.be_away(BRISK_S + 1)
    assert (await patient.sweep()).reclaimed_count == 0
    assert await brisk.settle([answer(kept)]) == [SettleStatus.DONE]


async def test_after_an_outage_each_owner_s_silence_is_borne_for_its_own_timeout(world: World) -> None:
    """Whoever sweeps first, and however brisk it is itself."""
    await fill(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    await brisk.sweep()
    await claim(patient)
    await world.be_away(PATIENT_S + 5)
    assert (await brisk.sweep()).reclaimed_count == 0
    assert await world.pass_time(brisk, int(PATIENT_S) - 1) == 0
    assert await world.pass_time(brisk, 3) == 1


async def test_quiet_time_is_never_cut_short(world: World) -> None:
    """By a second outage, which a brisk owner notices."""
    await fill(world, 1)
    patient, brisk = world.owner("patient", timeout_s=PATIENT_S), world.owner("brisk", timeout_s=BRISK_S)
    other = world.owner("other", timeout_s=PATIENT_S)
    await brisk.sweep()
    await claim(patient)
    await world.be_away(PATIENT_S + 5)
    await other.sweep()
    await world.fall_silent("other", "patient")
    await world.skip_sweeps(QUIET_S)
    await brisk.sweep()
    assert await world.pass_time(brisk, int(PATIENT_S - QUIET_S) - 2) == 0
    assert await world.pass_time(brisk, 5) == 1


async def test_quiet_time_after_a_long_outage_is_no_longer_than_a_lease(world: World) -> None:
    """Though somebody speaks before the first sweep: how long its silence may be cannot be told from that."""
    await fill(world, 1)
    living, dead = world.owner("living"), world.owner("dead")
    await living.sweep()
    await claim(dead)
    await world.be_away(7200)
    await living.renew([])
    assert (await living.sweep()).reclaimed_count == 0
    assert await world.pass_time(living, int(LEASE_S) + 1) == 1


async def test_owner_that_never_beats_may_sweep_as_well(world: World) -> None:
    await fill(world, 1)
    old, dead = world.owner("old", timeout_s=0), world.owner("dead")
    await old.sweep()
    await claim(dead)
    await world.fall_silent("dead")
    assert (await old.sweep()).reclaimed_count == 1


async def test_owner_taken_for_dead_hears_that_leases_were_lost_and_goes_on(world: World) -> None:
    """However its next call is answered, or how often it must be repeated: a counter loses no news."""
    await fill(world, 3)
    stalled, other = world.owner("stalled"), world.owner("other")
    await other.sweep()
    claimed = await full_claim(stalled, 1)
    [lease] = claimed.leases
    assert claimed.lease_counts.lost_units == 0
    await world.fall_silent("stalled")
    await other.sweep()
    for _ in range(2):
        assert (await stalled.share_state(permit(lost=0), None)).lease_counts.lost_units == 1
        assert (await stalled.sweep()).lost_units == 1
    assert list((await stalled.renew([lease])).lost_entry_ids) == [lease.entry_id]
    again = await claim(stalled, 1)
    assert len(again) == 1
    assert (await other.sweep()).reclaimed_count == 0
    assert await stalled.settle([answer(one) for one in again]) == [SettleStatus.DONE]


async def test_owner_proven_gone_is_waited_for_by_nobody_and_leaves_no_strays(world: World) -> None:
    await fill(world, 4)
    knows = Knows("dead")
    dead, next_one = world.owner("dead"), world.owner("next", prover=knows)
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


async def test_proof_holds_even_right_after_the_queue_was_away(world: World) -> None:
    await fill(world, 2)
    dead, next_one = world.owner("dead"), world.owner("next", prover=Knows("dead"))
    await dead.sweep()
    await claim(dead)
    await world.skip_sweeps(1000)
    assert (await next_one.sweep()).reclaimed_count == 2


async def test_nobody_proves_himself_gone(world: World) -> None:
    await fill(world, 1)
    owner = world.owner("owner", prover=Knows("owner"))
    [lease] = await claim(owner)
    assert (await owner.sweep()).reclaimed_count == 0
    assert await owner.settle([answer(lease)]) == [SettleStatus.DONE]


async def test_deaths_are_counted_however_they_are_known(world: World) -> None:
    await fill(world, 1)
    watcher = world.owner("watcher", prover=Knows("proven"))
    await watcher.sweep()
    for name in ("silent", "proven"):
        await claim(world.owner(name))
        await world.fall_silent("silent")
        assert (await watcher.sweep()).reclaimed_count == 1
    [suspect] = await claim(watcher)
    assert (suspect.deliveries, suspect.lane) == (3, Lane.SUSPECTS)


async def test_probe_of_a_dead_owner_may_be_another_s(world: World) -> None:
    await fill(world, 2)
    watcher, dead = world.owner("watcher"), world.owner("dead")
    await watcher.sweep()
    await dead.claim_probe("a", permit())
    await world.fall_silent("dead")
    await watcher.sweep()
    assert (await watcher.renew([])).shared.probing_owner is None
    assert len((await watcher.claim_probe("b", permit())).leases) == 1


async def test_owner_that_left_in_peace_is_forgotten_when_it_is_silent(world: World) -> None:
    await fill(world, 1)
    watcher, leaver = world.owner("watcher"), world.owner("leaver")
    await watcher.sweep()
    [lease] = await claim(leaver)
    await leaver.release([Release(lease, is_undelivered=True)])
    await world.fall_silent("leaver")
    swept = await watcher.sweep()
    assert (swept.reclaimed_count, swept.lost_units) == (0, 0)
    assert await world.beating() == {"watcher"}


async def test_hundreds_of_leases_of_several_dead_owners_go_in_one_sweep(world: World) -> None:
    await fill(world, 1300)
    watcher = world.owner("watcher", prover=Knows("proven"))
    await watcher.sweep()
    for name, most in (("silent-1", 600), ("proven", 600), ("silent-2", 50)):
        await claim(world.owner(name), most, limit=2000)
    [kept, *_] = await claim(watcher, 50, limit=2000)
    await world.fall_silent("silent-1", "silent-2")
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
