"""Snapshot of the queue: which requests miss their deadlines, the first requests, and the replicas."""

from __future__ import annotations

import random
import time

import pytest

from dispatcher.queue.contract import DeadLetter, Release
from dispatcher.requests.forecast import QueueSnapshot, compute_forecast, count_at_risk
from dispatcher.requests.request import encode_member
from dispatcher.requests.score import compute_score
from tests.conformance.worlds import OWNER_TIMEOUT_S, World, answer, claim
from tests.requests.late_requests import count_late_one_by_one


async def submit_with_deadlines(world: World, *deadlines: float, priority: int | None = None) -> None:
    for number, deadline in enumerate(deadlines):
        await world.zadd(compute_score(int(deadline), priority), b"%d-%r" % (number, priority))


def count_by_deadline(snapshot: QueueSnapshot) -> dict[float, int]:
    """Return the number of requests by deadline, where spans are narrow."""
    return {span.low: span.count for span in snapshot.spans if span.low is not None}


async def test_snapshot_of_an_empty_queue_has_no_spans(world: World) -> None:
    snapshot = await world.owner().take_snapshot(1.0, 1.0)
    assert (
        snapshot.pending_count,
        list(snapshot.spans),
        list(snapshot.first_requests),
        snapshot.settled_count,
        snapshot.leased_count,
    ) == (0, [], [], 0, 0)
    assert compute_forecast(snapshot, None, 0.0).at_risk == 0
    assert snapshot.now == pytest.approx(time.time(), abs=30)


async def test_deadlines_that_decide_are_resolved_to_the_second(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 400] * 30, *[now + 800] * 30)
    snapshot = await world.owner().take_snapshot(0.08, 1.0)
    assert snapshot.pending_count == 60
    assert count_at_risk(snapshot.spans, snapshot.now, 0.08, 1.0) == count_late_one_by_one(
        [now + at - snapshot.now for at in [400] * 30 + [800] * 30], 0.08, 1.0
    )


async def test_spans_are_in_the_order_of_the_queue(world: World) -> None:
    """Priority 0 is served first whatever its deadlines are, so urgent requests of priority 1 wait for it."""
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 9000] * 50, priority=0)
    await submit_with_deadlines(world, *[now + 100] * 10, priority=1)
    snapshot = await world.owner().take_snapshot(1.0, 0.0)
    assert count_at_risk(snapshot.spans, snapshot.now, 1.0, 0.0) == pytest.approx(0, abs=0)
    snapshot = await world.owner().take_snapshot(0.1, 0.0)
    assert count_at_risk(snapshot.spans, snapshot.now, 0.1, 0.0) == 10


async def test_scores_without_a_deadline_are_counted_in_spans_of_their_own(world: World) -> None:
    now = int(time.time())
    for score in (-5.0, 7.0, 999.5, 3e11, 1e12, float("-inf"), float("inf")):
        await world.zadd(score, b"foreign %r" % score)
    await submit_with_deadlines(world, now + 50)
    snapshot = await world.owner().take_snapshot(0.01, 0.0)
    assert sum(span.count for span in snapshot.spans if span.low is None) == 7
    forecast = compute_forecast(snapshot, 0.01, 0.0)
    assert forecast.at_risk == 1
    assert forecast.earliest_deadline_s == pytest.approx(50, abs=30)
    assert compute_forecast(await world.owner().take_snapshot(1.0, 0.0), 1.0, 0.0).at_risk == 0


async def test_earliest_deadline_is_the_earliest_of_all_priority_levels(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, now + 5000, priority=0)
    await submit_with_deadlines(world, now + 3000, priority=2)
    await submit_with_deadlines(world, now - 40, priority=7)
    snapshot = await world.owner().take_snapshot()
    forecast = compute_forecast(snapshot, 1.0, 0.0)
    assert forecast.earliest_deadline_s == pytest.approx(now - 40 - snapshot.now, abs=0.01)
    assert forecast.at_risk == 1


async def test_age_is_that_of_the_oldest_first_request_of_any_size(world: World) -> None:
    now = int(time.time())
    pad = "x" * 300_000
    for priority, age in ((0, 100), (4, 700)):
        made = encode_member(f"r{priority}", {"p": pad}, now + 900, created=now - age)
        await world.zadd(compute_score(now + 900, priority), made)
    snapshot = await world.owner().take_snapshot()
    assert compute_forecast(snapshot, None, 0.0).oldest_pending_age_s == pytest.approx(
        snapshot.now - (now - 700), abs=0.01
    )


async def test_snapshot_includes_returned_requests_and_suspects_but_no_delayed_ones(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 500] * 5)
    owner = world.owner()
    for _ in range(2):
        await world.lose_leases(owner, *await claim(owner, 1))
    first, second = await claim(owner, 2)
    await owner.release([Release(first), Release(second, delay_s=100)])
    snapshot = await owner.take_snapshot()
    assert snapshot.pending_count == (await owner.count_requests()).pending == 4
    assert sum(count_by_deadline(snapshot).values()) == 4


async def test_first_returned_request_has_age_and_deadline(world: World) -> None:
    now = int(time.time())
    await world.zadd(now + 500, encode_member("r", {"p": 1}, now + 500, created=now - 60))
    owner = world.owner()
    await owner.release([Release(lease) for lease in await claim(owner)])
    snapshot = await owner.take_snapshot()
    forecast = compute_forecast(snapshot, None, 0.0)
    assert forecast.oldest_pending_age_s == pytest.approx(snapshot.now - now + 60, abs=0.01)
    assert forecast.earliest_deadline_s == pytest.approx(now + 500 - snapshot.now, abs=0.01)


async def test_settled_count_includes_results_and_dead_letters_but_no_releases(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 500] * 6)
    one, other = world.owner("owner-1"), world.owner("owner-2")
    first, second, third = await claim(one, 3)
    await one.settle([answer(first)])
    await one.move_to_dead_letters([DeadLetter(answer(second), "never mind")])
    await one.release([Release(third)])
    await other.settle([answer(lease) for lease in await claim(other, 2)])
    await one.settle([answer(first)])  # the lease has ended
    snapshot = await one.take_snapshot()
    assert (snapshot.settled_count, snapshot.leased_count) == (4, 0)


async def test_replicas_are_owners_that_are_alive_or_hold_leases(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 500] * 5)
    one, other = world.owner("owner-1"), world.owner("owner-2")
    mute = world.owner("owner-3", timeout_s=0.0)
    await claim(one, 2)
    await other.sweep()
    await claim(mute, 1)
    snapshot = await one.take_snapshot()
    found = {replica.owner: (replica.leases, replica.silent_s) for replica in snapshot.replicas}
    assert {owner: leases for owner, (leases, _) in found.items()} == {
        "owner-1": 2,
        "owner-2": 0,
        "owner-3": 1,
    }
    assert snapshot.owner_count == 3
    assert found["owner-3"][1] is None
    silent_s = [found[owner][1] for owner in ("owner-1", "owner-2")]
    assert all(each is not None and 0 <= each < OWNER_TIMEOUT_S for each in silent_s)


async def test_silent_replica_is_listed_while_it_holds_leases(world: World) -> None:
    now = int(time.time())
    await submit_with_deadlines(world, *[now + 500] * 5)
    one, dead = world.owner("owner-1"), world.owner("owner-2")
    await dead.sweep()
    await claim(dead, 1)
    await world.silence_owners("owner-2")
    (replica,) = (await one.take_snapshot()).replicas
    assert (replica.owner, replica.leases) == ("owner-2", 1)
    assert replica.silent_s is not None
    assert replica.silent_s >= OWNER_TIMEOUT_S


async def test_at_most_fifty_replicas_are_listed(world: World) -> None:
    queues = [world.owner(f"owner-{number}") for number in range(60)]
    for door in queues:
        await door.sweep()
    snapshot = await queues[0].take_snapshot()
    assert (len(snapshot.replicas), snapshot.owner_count) == (50, 60)


SMOOTH, BURSTS, LOGNORMAL, ONE, CRITICAL = "smooth", "bursts", "lognormal", "one", "critical"


def slacks(kind: str, count: int, draw: random.Random) -> list[int]:
    """Generate the seconds until each of `count` deadlines."""
    if kind == SMOOTH:
        return [draw.randrange(-60, 7200) for _ in range(count)]
    if kind == BURSTS:
        at = [draw.randrange(5, 50_000) for _ in range(draw.randrange(1, 12))]
        return [draw.choice(at) + draw.randrange(3) for _ in range(count)]
    if kind == LOGNORMAL:
        return [round(draw.lognormvariate(6, 2)) for _ in range(count)]
    if kind == ONE:
        return [3600] * count
    return [round(number + draw.gauss(0, 30)) for number in range(count)]  # each deadline is on the edge


@pytest.mark.parametrize("kind", [SMOOTH, BURSTS, LOGNORMAL, ONE, CRITICAL])
async def test_number_at_risk_is_within_three_percent_of_an_exact_count(world: World, kind: str) -> None:
    """Checked at every rate from far too low to enough. The error is relative to the queue if more than a
    twentieth of it is at risk, otherwise to the number at risk. If every deadline is on the edge, a tenth of
    the queue is allowed."""
    count, worst = 3000, 0.0
    draw = random.Random(kind)
    line_of = sorted(slacks(kind, count, draw))
    at = int(time.time())
    for number, slack in enumerate(line_of):
        await world.zadd(at + slack, b"%d" % number)
    owner = world.owner()
    for rate in (0.05, 0.2, 0.5, 0.8, 1.0, 1.3, 4.0):
        for service_s in (0.0, 20.0):
            snapshot = await owner.take_snapshot(rate, service_s)
            found = count_at_risk(snapshot.spans, snapshot.now, rate, service_s)
            exact = count_late_one_by_one([at + slack - snapshot.now for slack in line_of], rate, service_s)
            edge = (kind, rate) == (CRITICAL, 1.0)
            off = abs(found - exact) / (count if edge else max(exact, 0.05 * count))
            worst = max(worst, off)
            assert off <= (0.1 if edge else 0.03), f"{rate}/s, {service_s} s: {found} instead of {exact}"
    print(f"\n{kind}: {worst:.2%} at the worst")
