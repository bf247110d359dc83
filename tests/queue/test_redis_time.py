"""Clocks: loop time against server time, gaps between sweeps, and steps of the server clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.queue.contract import Lease, Overload, Permit, Release, UnleasedRequest
from dispatcher.queue.redis.clock import ServerClock
from dispatcher.queue.redis.owner import RedisQueue
from tests.queue.factories import (
    NAMES,
    OwnerAndAdmin,
    answer,
    claim,
    claim_one,
    ids,
    member,
    permit,
    queues,
    submission,
)
from tests.queue.key_checks import assert_only_known_keys
from tests.queue.servers import Server
from tests.support import wait_until

CONTROL = f"{NAMES.queue_prefix}:control"
LEASES = f"{NAMES.queue_prefix}:leases"
HEARTBEATS = f"{NAMES.queue_prefix}:heartbeats"


@pytest.fixture
async def queue(any_server: Server, client: redis.asyncio.Redis) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_server.url, "a", lease_s=30) as (one,):
        yield one
    await assert_only_known_keys(client, NAMES)


async def shift_server_clock(client: redis.asyncio.Redis, by_s: float) -> None:
    """Step the server clock: all times that scripts have stored move the other way."""
    for key in (LEASES, HEARTBEATS, f"{NAMES.queue_prefix}:delayed"):
        scores: Any = await client.zrange(key, 0, -1, withscores=True)
        for name, score in scores:
            await client.zadd(key, {name: score - by_s}, xx=True)
    ticks = ("tick", f"tick:{NAMES.queue}", "quiet_until", "heartbeats_quiet_until")
    for field in ("read_at", "overload_at", "overload_until", *ticks):
        if (at := await client.hget(CONTROL, field)) is not None:
            await client.hset(CONTROL, field, f"{float(at) - by_s:.6f}")


async def ahead_s(client: redis.asyncio.Redis, key: str, name: str) -> float:
    """Return how many seconds the time in the score of a member is in the future."""
    score = await client.zscore(key, name)
    assert score is not None
    return score - time.time()


@given(
    start=st.floats(0, 1e6),
    offset=st.floats(-1e6, 2e9),
    trips=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1),
)
def test_clock_offset_stays_within_the_shortest_round_trip(
    start: float, offset: float, trips: list[tuple[float, float, float]]
) -> None:
    """If both clocks run alike, a slow reply does not undo what a fast one proved."""
    clock, now, tightest = ServerClock(), start, float("inf")
    for pause, there, back in trips:
        sent, ran, received = now + pause, now + pause + there, now + pause + there + back
        clock.observe_reply(sent, received, ran + offset)
        now = received
        tightest = min(tightest, received - sent)
        assert abs(clock.get_offset(now) - offset) <= tightest + 1e-5


@given(jump=st.floats(-1e6, 1e6), trip=st.floats(0, 0.5))
def test_first_reply_after_a_clock_step_corrects_the_offset(jump: float, trip: float) -> None:
    clock = ServerClock()
    clock.observe_reply(10.0, 10.001, 1000.0)
    clock.observe_reply(20.0, 20.0 + trip, 1010.0 + jump)
    assert abs(clock.to_server_time(20.0 + trip) - (1010.0 + jump)) <= trip + 1e-5


async def test_times_are_translated_to_the_server_and_back(queue: RedisQueue) -> None:
    loop = asyncio.get_running_loop()
    await queue.count_requests()
    read_at, seen_at = loop.time() - 3, loop.time() - 1
    await queue.share_state(
        Permit(9, read_at, 0), Overload(seen_at, seen_at + 50, is_out_of_capacity=True, in_flight=4)
    )
    shared = (await queue.renew([])).shared
    assert shared.overload is not None
    assert abs(shared.read_at - read_at) < 0.5
    assert abs(shared.overload.refused_at - seen_at) < 0.5
    assert shared.overload.retry_at - shared.overload.refused_at == pytest.approx(50, abs=1e-3)
    assert abs(queue.unix_now() - time.time()) < 5


async def test_owners_with_different_clocks_agree_which_reading_is_newer(
    any_server: Server, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loop clocks of two processes have only the server time in common."""
    async with queues(any_server.url, "a", "b") as (near, far):
        await near.count_requests()
        await far.count_requests()
        assert far.backend.clock._offset is not None
        far.backend.clock._offset -= 5000.0  # as if its loop had started 5,000 s earlier
        monkeypatch.setattr(far.backend.clock, "observe_reply", lambda *_: None)
        await near.submit([submission(f"r-{number}") for number in range(9)])
        now = asyncio.get_running_loop().time()
        newer_by_far = Permit(2, now + 5000 - 1, 0)
        assert len((await far.claim(9, "n-1", newer_by_far)).leases) == 2
        older_by_near = Permit(9, now - 2, 0)
        assert (await near.claim(9, "n-2", older_by_near)).leases == []


async def test_no_lease_is_reclaimed_right_after_a_gap(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """After an outage of Redis, living owners get lease_s/3 to renew, and only then do dead owners lose their
    leases."""
    await queue.submit([submission("r-1"), submission("r-2")])
    alive, _dead = (await claim(queue)).leases
    await queue.sweep()
    await shift_server_clock(client, 60)
    assert (await queue.sweep()).reclaimed_count == 0
    assert (await queue.renew([alive])).lost_entry_ids == []
    await client.hset(CONTROL, "quiet_until", "0")
    assert (await queue.sweep()).reclaimed_count == 1
    assert (await queue.renew([])).lease_counts.lost_units == 1
    assert (await queue.renew([alive])).lost_entry_ids == []


async def test_all_stored_times_follow_a_clock_that_steps_back(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """Otherwise leases of dead owners and delays would last longer by the step."""
    loop = asyncio.get_running_loop()
    await queue.submit([submission("r-1"), submission("r-2")])
    held, delayed = (await claim(queue)).leases
    await queue.release([Release(delayed, delay_s=5)])
    await queue.share_state(
        permit(), Overload(loop.time(), loop.time() + 3, is_out_of_capacity=False, in_flight=0)
    )
    await queue.sweep()
    await shift_server_clock(client, -3600)
    swept = await queue.sweep()
    assert swept.next_due_at is not None
    assert 0 < swept.next_due_at - loop.time() < 6
    assert await ahead_s(client, LEASES, f"{held.entry_id}:a") < 31
    overload = (await queue.renew([])).shared.overload
    assert overload is not None
    assert overload.retry_at - loop.time() < 4


async def test_heartbeats_follow_a_clock_that_steps_back(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, any_server: Server
) -> None:
    async with queues(any_server.url, "dead") as (dead,):
        await queue.submit([submission("r-1"), submission("r-2")])
        await queue.sweep()
        await claim_one(dead)
        mine = await claim_one(queue)
        await shift_server_clock(client, -3600)
        await queue.renew([mine])  # the first call since the step, before any sweep
        assert (await queue.sweep()).reclaimed_count == 0
        assert await ahead_s(client, HEARTBEATS, "dead") < 6
        await client.zadd(HEARTBEATS, {"dead": 0}, xx=True)
        assert (await queue.sweep()).reclaimed_count == 0
        await client.hset(CONTROL, "heartbeats_quiet_until", "0")
        assert (await queue.sweep()).reclaimed_count == 1


async def test_lease_claimed_after_a_clock_step_stays_with_its_owner(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    await queue.submit([submission("r-1"), submission("r-2")])
    await queue.sweep()
    before = await claim_one(queue)
    await shift_server_clock(client, -3600)
    since = await claim_one(queue)
    assert (await queue.sweep()).reclaimed_count == 0
    assert (await queue.sweep()).reclaimed_count == 0
    for lease in (before, since):
        assert 0 < await ahead_s(client, LEASES, f"{lease.entry_id}:a") < 31


@pytest.mark.parametrize(("gap_s", "reclaimed"), [(1.0, 1), (2.5, 0), (-7200.0, 0)])
async def test_silence_is_ignored_after_a_gap_between_sweeps(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis, any_server: Server, gap_s: float, reclaimed: int
) -> None:
    async with queues(any_server.url, "dead") as (dead,):
        await queue.submit([submission("r-1")])
        await queue.sweep()
        await claim_one(dead)
        await client.zadd(HEARTBEATS, {"dead": 0}, xx=True)
        await client.hset(CONTROL, "tick", f"{time.time() - gap_s:.6f}")
        assert (await queue.sweep()).reclaimed_count == reclaimed


async def test_requests_of_a_silent_owner_return_within_its_timeout(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """Another owner was there all the time, and no time is shifted by hand."""
    async with queues(any_server.url, "dead", "next", owner_timeout_s=1.0) as (dead, successor):
        await dead.submit([submission("r-1")])
        await successor.sweep()
        await claim_one(dead)
        died_at = time.monotonic()

        async def reclaimed() -> bool:
            return (await successor.sweep()).reclaimed_count == 1

        await wait_until(reclaimed, 10, every_s=0.1)
        assert time.monotonic() - died_at > 0.9
        assert (await claim_one(successor)).deliveries == 2


async def test_requests_of_a_dead_owner_return_within_its_lease(
    any_server: Server, client: redis.asyncio.Redis
) -> None:
    """This takes at most lease_s + 2 s after the death, with a dispatcher that starts at once."""
    async with queues(any_server.url, "dead", "next", lease_s=1.5) as (dead, successor):
        await dead.submit([submission("r-1")])
        await dead.sweep()
        await claim_one(dead)
        died_at = time.monotonic()
        sweeps_began_at = []

        async def reclaimed() -> bool:
            sweeps_began_at.append(time.monotonic())
            return (await successor.sweep()).reclaimed_count == 1

        await wait_until(reclaimed, 10, every_s=0.2)
        again = await claim_one(successor)
        # The sweep that reclaims may be late on a busy machine, but none before it may have left the lease.
        assert all(began_at - died_at < 1.5 + 2 for began_at in sweeps_began_at[:-1])
        assert (again.deliveries, again.deaths_as_suspect) == (2, 0)


async def sweep_deadlines(queue: RedisQueue, most: int) -> list[bytes]:
    """Run the deadline sweep of the dispatcher once, with members that contain their deadline."""
    items = await queue.find_overdue(most)
    now = time.time()
    late = [item for item in items if int(item.member.split(b'"deadline":')[1].split(b",")[0]) <= now]
    await queue.settle_unleased([(item, answer(fake_lease(item.member))) for item in late])
    return [item.member for item in late]


def fake_lease(found: bytes) -> Lease:
    return Lease(0, "", found, 0, 0, 0, 0, 0)


async def test_overdue_request_is_found_beside_thousands_of_scores_without_a_deadline(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """Foreign producers may use any scores, so requests that only look overdue must not hide real ones."""
    future = int(time.time()) + 600
    fill = {member(f"f-{number}", future): number for number in range(5000)}
    await client.zadd(NAMES.queue, fill)
    await queue.find_overdue(10)
    late = int(time.time()) + 1
    await client.zadd(NAMES.queue, {member("late", late): late, member("late-p3", late): 3 * 10**11 + late})
    found: list[bytes] = []

    async def swept() -> bool:
        found.extend(await sweep_deadlines(queue, 10))
        return len(found) == 2

    await wait_until(swept, 10, every_s=0.05)
    assert set(ids(found)) == {"late", "late-p3"}
    assert await client.llen(NAMES.result_list) == 2
    assert (await queue.count_requests()).pending == 5000


async def test_search_finds_an_overdue_request_among_old_scores(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    past, future = int(time.time()) - 50, int(time.time()) + 600
    fill = {member(f"f-{number}", future): number % 7 for number in range(500)}
    await client.zadd(NAMES.queue, fill | {member("late", past): 3})
    found: list[bytes] = []
    for _ in range(2 * 500 // 20 + 4):
        found += await sweep_deadlines(queue, 20)
    assert ids(found) == ["late"]


async def test_overdue_requests_are_found_in_every_location_but_leases(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    """This includes returned, suspect and delayed requests, whether the gate is open or not."""
    soon = int(time.time()) + 2
    await queue.submit([submission(f"r-{number}", soon) for number in range(4)])
    leases = (await claim(queue)).leases
    await queue.release([Release(leases[0]), Release(leases[1], delay_s=600)])
    await make_request_suspect(queue, client, leases[2].entry_id)
    await queue.pause("test", "expiry runs all the same")
    found: list[bytes] = []

    async def swept() -> bool:
        found.extend(await sweep_deadlines(queue, 100))
        return len(found) == 3

    await wait_until(swept, 10, every_s=0.05)
    counts = await queue.count_requests()
    assert (counts.pending, counts.delayed, counts.leased) == (0, 0, 1)
    assert await client.hlen(f"{NAMES.queue_prefix}:entries") == 1
    assert await client.hlen(f"{NAMES.queue_prefix}:members") == 1
    await queue.resume()


async def make_request_suspect(queue: OwnerAndAdmin, client: redis.asyncio.Redis, entry: int) -> None:
    """Let the owner of a request die twice."""
    for round_ in range(2):
        if round_:
            others = [lease for lease in (await claim(queue)).leases if lease.entry_id != entry]
            await queue.release([Release(lease, is_undelivered=True) for lease in others])
        await client.zadd(LEASES, {f"{entry}:a": 0}, xx=True)
        assert (await queue.sweep()).reclaimed_count == 1


async def test_overdue_requests_are_returned_by_the_megabyte(
    queue: OwnerAndAdmin, client: redis.asyncio.Redis
) -> None:
    past = int(time.time()) - 5
    large = [member(f"r-{number}", past) + b" " * 300_000 for number in range(8)]
    await client.zadd(NAMES.queue, dict.fromkeys(large, past))
    seen: list[bytes] = []
    while len(seen) < len(large):
        items = await queue.find_overdue(100)
        assert 0 < sum(len(item.member) for item in items) <= 2**20
        seen += await sweep_deadlines_of(queue, items)
    assert (await queue.count_requests()).pending == 0


async def sweep_deadlines_of(queue: RedisQueue, items: Sequence[UnleasedRequest]) -> list[bytes]:
    await queue.settle_unleased([(item, answer(fake_lease(item.member.strip()))) for item in items])
    return [item.member for item in items]
