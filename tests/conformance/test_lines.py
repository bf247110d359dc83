"""Two lines of one pool: one limit, one pause, one probe, and each line's requests its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.ports import Lease, Overload, Queue, Release, SettleStatus
from tests.conformance.worlds import LEASE_S, World, answer, claim, full_claim, member, permit

URGENT = "batch:{qwen}:urgent"


class Lines:
    """Both lines, filled with ten requests each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.urgent = world.take_snapshot(URGENT)

    async def fill(self) -> None:
        for number in range(10):
            await self.world.zadd(number, member(f"usual-{number}"))
            await self.urgent.zadd(number, member(f"urgent-{number}"))

    def owner(self, name: str) -> tuple[Queue, Queue]:
        """One dispatcher, as it works on both."""
        return self.world.owner(name), self.urgent.owner(name)


@pytest.fixture
async def lines(world: World) -> Lines:
    made = Lines(world)
    await made.fill()
    return made


async def test_one_limit_holds_over_both_lines(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    others_usual, others_urgent = lines.owner("b")
    assert len(await claim(usual, limit=5, most=3)) == 3
    assert len(await claim(urgent, limit=5)) == 2
    assert len(await claim(others_urgent, limit=5)) == 0
    told = await full_claim(others_usual, limit=6)
    assert len(told.leases) == 1
    assert (told.lease_counts.live_units, told.lease_counts.other_owners_units) == (6, 5)


async def test_no_entry_is_of_two_lines(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    entries = [lease.entry_id for queue in (usual, urgent, usual) for lease in await claim(queue, most=4)]
    assert len(set(entries)) == len(entries) == 12


async def test_a_lease_ends_in_its_own_line_alone(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    first, second, third = await claim(urgent, most=3)
    assert b"urgent-0" in first.member
    assert await usual.settle([answer(first)]) == [SettleStatus.LOST]
    assert await usual.release([Release(second)]) == [SettleStatus.LOST]
    assert list((await usual.renew([third])).lost_entry_ids) == [third.entry_id]
    assert await urgent.settle([answer(first)]) == [SettleStatus.DONE]
    assert await urgent.release([Release(second)]) == [SettleStatus.DONE]
    assert list((await urgent.renew([third])).lost_entry_ids) == []
    counts, urgent_counts = await lines.world.desk.count_requests(), await lines.urgent.desk.count_requests()
    assert (counts.pending, urgent_counts.pending) == (10, 8)
    assert counts.leased == urgent_counts.leased == 1


async def test_what_one_line_learns_holds_for_the_other(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    older = permit(9)
    await usual.share_state(permit(2), None)
    told = await urgent.claim(9, "n", older)
    assert (len(told.leases), told.shared.limit) == (2, 2)
    now = asyncio.get_running_loop().time()
    await urgent.share_state(permit(9), Overload(now, now + 60, is_out_of_capacity=True, in_flight=2))
    assert await claim(usual, limit=9) == []
    assert (await usual.renew([])).shared.overload is not None


async def test_a_pause_stops_all_lines(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    await lines.urgent.desk.pause("me", "maintenance")
    assert await lines.world.desk.read_pause() == ("me", "maintenance")
    assert (await full_claim(usual)).shared.is_paused
    assert await claim(urgent) == []
    await lines.world.desk.resume()
    assert len(await claim(urgent, most=1)) == 1


async def test_one_probe_runs_over_all_lines(lines: Lines) -> None:
    usual, _ = lines.owner("a")
    _, others_urgent = lines.owner("b")
    assert len((await usual.claim_probe("p", permit(1))).leases) == 1
    told = await others_urgent.claim_probe("p", permit(1))
    assert (list(told.leases), told.shared.probing_owner) == ([], "a")
    await usual.claim(0, "c", permit(1))
    assert (await others_urgent.renew([])).shared.probing_owner is None


async def test_what_a_dead_owner_held_returns_to_its_own_line(lines: Lines) -> None:
    usual, urgent = lines.owner("living")
    dead_usual, dead_urgent = lines.owner("dead")
    await usual.sweep()
    await claim(dead_usual, most=2)
    await claim(dead_urgent, most=3)
    await lines.world.fall_silent("dead")
    assert (await usual.sweep()).reclaimed_count == 2
    assert (await usual.sweep()).reclaimed_count == 0, "the other three are none of this line's"
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
    assert await heads(lines) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])
    await urgent.sweep()
    assert await lines.world.beating() == {"living"}


async def heads(lines: Lines) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """The first two requests of each line, by their names."""
    found = [await world.desk.peek_next(2) for world in (lines.world, lines.urgent)]
    usual, urgent = ([one.partition(b'"id": "')[2].partition(b'"')[0] for _, one in some] for some in found)
    return usual, urgent


async def test_leases_that_ran_out_return_to_their_own_line(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    await usual.sweep()
    await urgent.sweep()
    held = [*await claim(usual, most=1), *await claim(urgent, most=2)]
    await lines.world.run_out(*held)
    assert [(await queue.sweep()).reclaimed_count for queue in (usual, usual, urgent, urgent)] == [1, 0, 2, 0]
    assert await heads(lines) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])


class Knows:
    """A prover that knows one owner to have ended."""

    def find_ended_owners(self, owners: Sequence[str]) -> Sequence[str]:
        return [owner for owner in owners if owner == "dead"]


async def test_an_owner_that_is_proven_gone_is_swept_from_each_line(lines: Lines) -> None:
    dead_usual, dead_urgent = lines.owner("dead")
    await claim(dead_usual, most=2)
    await claim(dead_urgent, most=3)
    usual = lines.world.owner("living", prover=Knows())
    urgent = lines.urgent.owner("living", prover=Knows())
    assert (await usual.sweep()).reclaimed_count == 2
    assert (await urgent.sweep()).reclaimed_count == 3
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.lost_units, count.orphaned_units) == (0, 5, 0)


async def test_what_is_delayed_follows_a_clock_that_steps_back_in_each_line(lines: Lines) -> None:
    usual, urgent = lines.owner("a")
    for queue in (usual, urgent):
        await queue.sweep()
        (lease,) = await claim(queue, most=1)
        await queue.release([Release(lease, delay_s=100)])
    await lines.world.step_back(5000)
    await lines.urgent.step_line_back(5000)
    for queue in (usual, urgent):
        due_at = (await queue.sweep()).next_due_at
        assert due_at is not None
        assert due_at - asyncio.get_running_loop().time() == pytest.approx(100, abs=30)


# A line that nobody sweeps any more, while requests of it are leased.


async def abandoned(lines: Lines) -> tuple[Queue, Queue, Sequence[Lease]]:
    """The usual line as a living owner sees it, the urgent one as an owner that is away sees it, and its
    leases there: three of six units, which the living one has found abandoned."""
    usual, _ = lines.owner("living")
    _, urgent = lines.owner("away")
    await usual.sweep()
    held = [*(await urgent.claim(3, "held", permit())).leases]
    assert (await urgent.set_lease_units([(held[0], 4)], permit())).fits == [True]
    await lines.world.run_out(*held, ago_s=LEASE_S - 5)
    assert (await usual.sweep()).lost_units == 0, "its own line may take it back yet"
    assert (await usual.renew([])).lease_counts.live_units == 6
    await lines.world.run_out(*held, ago_s=LEASE_S + 1)
    assert (await usual.sweep()).reclaimed_count == 0, "no request of this line"
    return usual, urgent, held


async def test_leases_of_a_line_that_nobody_sweeps_stop_counting(lines: Lines) -> None:
    usual, *_ = await abandoned(lines)
    for _ in range(2):
        count = (await usual.renew([])).lease_counts
        assert (count.live_units, count.other_owners_units, count.lost_units, count.orphaned_units) == (
            0,
            0,
            6,
            6,
        ), "once"
        await usual.sweep()
    assert len(await claim(usual, limit=9, lost=0)) == 3, "what it held may run on"
    assert len(await claim(usual, limit=9, lost=6)) == 6, "a later reading has seen what became of it"


async def test_abandoned_requests_return_when_their_line_is_swept_again(lines: Lines) -> None:
    usual, urgent, held = await abandoned(lines)
    assert await heads(lines) == ([b"usual-0", b"usual-1"], [b"urgent-3", b"urgent-4"])
    assert (await urgent.sweep()).reclaimed_count == 3
    assert (await urgent.sweep()).reclaimed_count == 0
    assert await heads(lines) == ([b"usual-0", b"usual-1"], [b"urgent-0", b"urgent-1"])
    count = (await usual.renew([])).lease_counts
    assert (count.live_units, count.other_owners_units, count.lost_units) == (0, 0, 6), "lost once"
    again = await claim(urgent, most=3, lost=6)
    assert [lease.entry_id for lease in again] == [lease.entry_id for lease in held]
    assert [(lease.units, lease.deliveries) for lease in again] == [(4, 2), (1, 2), (1, 2)]
    assert (await usual.renew([])).lease_counts.live_units == 6


async def test_who_comes_back_to_abandoned_leases_has_lost_them(lines: Lines) -> None:
    """Else they would count again without a claim, past the limit."""
    usual, urgent, held = await abandoned(lines)
    renewed = await urgent.renew(held)
    assert sorted(renewed.lost_entry_ids) == sorted(lease.entry_id for lease in held)
    assert (await urgent.set_lease_units([(held[1], 2)], permit())).fits == [False]
    assert list((await urgent.claim(3, "held", permit())).leases) == []
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_result_of_an_abandoned_request_is_taken(lines: Lines) -> None:
    usual, urgent, held = await abandoned(lines)
    assert await urgent.settle([answer(held[0])]) == [SettleStatus.DONE]
    assert await urgent.settle([answer(held[0])]) == [SettleStatus.LOST]
    assert await urgent.release([Release(held[1])]) == [SettleStatus.DONE]
    assert len(await lines.world.results()) == 1
    assert (await urgent.sweep()).reclaimed_count == 1
    counts = await lines.urgent.desk.count_requests()
    assert (counts.pending, counts.leased, counts.units) == (9, 0, 0)
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_a_line_has_time_to_be_swept_after_all_were_away(lines: Lines) -> None:
    usual, _ = lines.owner("living")
    _, urgent = lines.owner("away")
    await usual.sweep()
    held = await claim(urgent, most=3)
    await lines.world.skip_sweeps(3 * LEASE_S)
    await lines.world.run_out(*held, ago_s=2 * LEASE_S)
    await lines.world.pass_time(usual, int(LEASE_S))
    assert (await usual.renew([])).lease_counts.live_units == 3
    await lines.world.pass_time(usual, int(LEASE_S / 3) + 1)
    assert (await usual.renew([])).lease_counts.live_units == 0


async def test_abandoned_probe_keeps_nobody_from_probing(lines: Lines) -> None:
    usual, _ = lines.owner("living")
    _, urgent = lines.owner("away")
    await usual.sweep()
    (probe,) = (await urgent.claim_probe("p", permit(1))).leases
    assert list((await usual.claim_probe("q", permit(1))).leases) == []
    await lines.world.run_out(probe, ago_s=LEASE_S + 1)
    await usual.sweep()
    assert len((await usual.claim_probe("r", permit(1, lost=1))).leases) == 1
