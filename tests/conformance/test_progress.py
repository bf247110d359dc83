"""Progress of requests that are sent in slices: each promise of the port, in memory and on a real server."""

from __future__ import annotations

import math

import pytest

from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnGranted,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.queue.contract import MAX_PROGRESS_BYTES, DeadLetter, Lease, Queue, Release, SettleStatus
from dispatcher.requests.found_request import RequestLocation
from dispatcher.requests.lanes import Lane
from tests.conformance.worlds import NOW, World, answer, claim, claim_fully, member, models, permit, sequences

PRIORITY = 10**11
TERMS = SequenceTerms()
UNLEASED = Lease(0, "", b"", 0, 0, 0, 0, 0)
DONE = [SettleStatus.DONE]


async def start_request(
    world: World, queue: Queue, score: float = NOW + 100_000, progress: bytes = b"part 1", name: str = "r-1"
) -> Lease:
    """Submit a request, claim it, and release it with progress. Return the lease that has ended."""
    await world.zadd(score, member(name))
    (lease,) = await claim(queue, started=0)
    assert await queue.release([Release(lease, progress=progress)]) == DONE
    return lease


async def list_started(world: World) -> list[int]:
    page = await world.queue_admin.list_requests(RequestLocation.STARTED, 100)
    return [found.entry for found in page.requests]


async def test_next_lease_has_the_progress_of_the_last_release(world: World) -> None:
    queue = world.owner()
    lease = await start_request(world, queue)
    assert lease.progress == b""
    (second,) = await claim(queue)
    assert (second.entry_id, second.member, second.progress) == (lease.entry_id, lease.member, b"part 1")
    assert (second.lane, second.score, second.deliveries) == (Lane.STARTED, lease.score, 2)
    await queue.release([Release(second, progress=b"\0\xffpart 2" * 1000)])
    (third,) = await claim(world.owner("owner-2"))
    assert third.progress == b"\0\xffpart 2" * 1000


async def test_release_without_progress_keeps_what_is_stored(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, is_failed_attempt=True)])
    (lease,) = await claim(queue)
    assert (lease.progress, lease.failed_attempts) == (b"part 1", 1)


@pytest.mark.server
async def test_release_with_empty_progress_deletes_it(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, progress=b"", is_failed_attempt=True)])
    assert await list_started(world) == []
    (lease,) = await claim(queue)
    assert (lease.progress, lease.lane, lease.failed_attempts) == (b"", None, 1)


async def test_too_long_progress_is_not_stored(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    long = Release(lease, progress=b"x" * (MAX_PROGRESS_BYTES + 1), is_failed_attempt=True)
    assert await queue.release([long]) == DONE
    (lease,) = await claim(queue)
    assert (lease.progress, lease.failed_attempts) == (b"part 1", 1)


async def test_attempts_count_for_each_slice(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member())
    for _ in range(2):
        (lease,) = await claim(queue)
        await queue.release([Release(lease, is_failed_attempt=True, is_refusal=True, last_attempt="reset")])
    (lease,) = await claim(queue)
    assert (lease.failed_attempts, lease.refusals) == (2, 2)
    await queue.release([Release(lease, progress=b"a")])
    (lease,) = await claim(queue)
    assert (lease.failed_attempts, lease.refusals, lease.last_attempt) == (0, 0, "reset")
    await queue.release([Release(lease, is_failed_attempt=True)])
    (lease,) = await claim(queue)
    await queue.release([Release(lease, progress=b"ab", is_failed_attempt=True, is_refusal=True)])
    (lease,) = await claim(queue)
    assert (lease.failed_attempts, lease.refusals) == (1, 1)


@pytest.mark.server
async def test_started_requests_go_before_all_others_of_their_priority(world: World) -> None:
    queue = world.owner()
    for priority, deadline in ((0, NOW + 300_000), (1, NOW + 300_000), (1, NOW + 200_000)):
        await start_request(
            world, queue, priority * PRIORITY + deadline, name=f"started-{priority}-{deadline}"
        )
    others = [0.0, 5.0, NOW + 1.0, 1.0 * PRIORITY, PRIORITY + NOW + 1.0, 2.0 * PRIORITY]
    for score in others:
        await world.zadd(score, member(f"other-{score}"))
    started = [NOW + 300_000.0, PRIORITY + NOW + 200_000.0, PRIORITY + NOW + 300_000.0]
    order = [started[0], *others[:3], *started[1:], *others[3:]]
    assert [score for score, _ in await world.queue_admin.peek_next(100)] == order
    ahead = {}
    for state in (RequestLocation.STARTED, RequestLocation.PENDING):
        for found in (await world.queue_admin.list_requests(state, 100)).requests:
            ahead[found.score] = await world.queue_admin.count_ahead(found)
    assert [ahead[score] for score in order] == list(range(len(order)))
    assert [lease.score for lease in await claim(queue)] == order


SCORES = [-math.inf, -1e300, -PRIORITY - 5.0, -5.0, -5e-324, 0.5, 1e12 + 1, 1e300, math.inf]


async def test_started_requests_are_ordered_by_any_score(world: World) -> None:
    queue = world.owner()
    for score in SCORES:
        await world.zadd(score, member(f"started-{score}"))
    await queue.release([Release(lease, progress=b"p") for lease in await claim(queue)])
    for score in SCORES:
        await world.zadd(score, member(f"other-{score}"))
    found = [(lease.score, lease.lane) for lease in await claim(queue)]
    assert found == [(score, lane) for score in SCORES for lane in (Lane.STARTED, None)]


async def test_claim_takes_no_more_started_requests_than_it_may(world: World) -> None:
    queue = world.owner()
    for number in range(3):
        await start_request(world, queue, NOW + number + 10.0, name=f"r-{number}")
    await world.zadd(NOW + 100_000, member("other"))
    none = await claim_fully(queue, started=0)
    assert ([lease.lane for lease in none.leases], none.claimable_count) == ([None], 0)
    some = await claim_fully(queue, started=2)
    assert ([lease.score - NOW for lease in some.leases], some.claimable_count) == ([10, 11], 0)
    rest = await claim_fully(queue, max_count=0)
    assert (rest.leases, rest.claimable_count) == ([], 1)


async def test_request_of_a_dead_owner_keeps_its_progress(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    await world.lose_leases(queue, lease)
    (lease,) = await claim(world.owner("owner-2"))
    assert (lease.progress, lease.lane, lease.deaths_as_suspect) == (b"part 1", Lane.STARTED, 0)


async def test_release_by_an_owner_that_lost_the_lease_changes_no_progress(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lost,) = await claim(queue)
    await world.lose_leases(queue, lost)
    (lease,) = await claim(world.owner("owner-2"))
    late = Release(lost, progress=b"late")
    assert await queue.release([late]) == [SettleStatus.LOST]
    assert await world.owner("owner-2").release([Release(lease, progress=b"new"), late]) == [
        SettleStatus.DONE,
        SettleStatus.LOST,
    ]
    assert [lease.progress for lease in await claim(queue)] == [b"new"]


@pytest.mark.server
async def test_suspect_keeps_its_progress_and_its_lane(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    for _ in range(2):
        (lease,) = await claim(queue)
        await world.lose_leases(queue, lease)
    assert await claim(queue, suspects=0) == []
    assert await list_started(world) == []
    (lease,) = await claim(queue, started=0)
    assert (lease.progress, lease.lane) == (b"part 1", Lane.SUSPECTS)
    await queue.release([Release(lease, progress=b"part 2")])
    (lease,) = await claim(queue, started=0)
    assert (lease.progress, lease.lane) == (b"part 2", Lane.SUSPECTS)


async def test_delayed_request_keeps_its_progress(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member())
    (lease,) = await claim(queue)
    await queue.release([Release(lease, delay_s=0.01, progress=b"part 1")])
    assert await claim(queue) == []
    while not (await queue.sweep()).due_count:
        pass
    (lease,) = await claim(queue)
    assert (lease.progress, lease.lane) == (b"part 1", Lane.STARTED)


@pytest.mark.server
async def test_request_that_waits_for_its_model_keeps_its_progress(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member())
    (lease,) = await claim(queue)
    await queue.release([Release(lease, extra=ModelWait("a"), progress=b"part 1")])
    assert (await claim(queue), await list_started(world)) == ([], [])
    await models(queue).return_waiting_for_models(["a"])
    (lease,) = await claim(queue)
    assert (lease.progress, lease.lane) == (b"part 1", Lane.STARTED)
    await queue.release([Release(lease, extra=ModelWait("a"))])
    await models(queue).return_waiting_for_models(["a"])
    (lease,) = await claim(queue)
    assert lease.progress == b"part 1"
    await queue.release([Release(lease, progress=b"")])
    (lease,) = await claim(queue)
    assert (lease.progress, lease.lane) == (b"", None)


async def test_units_of_a_started_request_are_remembered(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member())
    (lease,) = await claim(queue)
    await queue.set_lease_units([(lease, 3)], permit())
    await queue.release([Release(lease, progress=b"part 1")])
    (lease,) = await claim(queue)
    assert (lease.units, lease.progress) == (3, b"part 1")
    reply = await queue.set_lease_units([(lease, 5)], permit(4))
    assert list(reply.fits) == [False]
    (lease,) = await claim(queue)
    assert (lease.units, lease.progress, lease.lane) == (5, b"part 1", Lane.STARTED)


async def test_next_request_of_a_sequence_keeps_turn_and_progress(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 100_000 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await sequences(queue).claim_turns(turns, TERMS)
    await queue.release([Release(turns[0][0], progress=b"part 1")])
    (again,) = await claim(queue)
    assert (again.entry_id, again.progress) == (turns[0][0].entry_id, b"part 1")
    (decision,) = (await sequences(queue).claim_turns([(again, Turn("s"))], TERMS)).decisions
    assert decision == TurnGranted(0, "", b"", True)
    await queue.settle([answer(again, extra=TurnEnd(Turn("s")))])
    (second,) = await claim(queue)
    assert (second.entry_id, second.progress) == (turns[1][0].entry_id, b"")


@pytest.mark.server
async def test_request_with_progress_that_waits_for_its_turn_is_claimed_by_a_claim(world: World) -> None:
    """The step that ends the previous request does not lease it, because it is in a lane."""
    queue = world.owner()
    second = await start_request(world, queue, name="second")
    await world.zadd(NOW + 10, member("first"))
    first, again = sorted(await claim(queue), key=lambda lease: lease.entry_id == second.entry_id)
    decisions = (
        await sequences(queue).claim_turns([(first, Turn("s")), (again, Turn("s"))], TERMS)
    ).decisions
    assert isinstance(decisions[0], TurnGranted)
    assert (await claim(queue), await list_started(world)) == ([], [])
    end = answer(first, extra=TurnEnd(Turn("s")))
    ended = await queue.settle_and_claim_next([end], "nonce-next", permit())
    assert ended.claim_result is not None
    assert (list(ended.statuses), list(ended.claim_result.leases)) == (DONE, [])
    (lease,) = await claim(queue)
    assert (lease.entry_id, lease.progress, lease.lane) == (second.entry_id, b"part 1", Lane.STARTED)


async def test_started_request_goes_before_the_next_request_of_a_sequence(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 10 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await sequences(queue).claim_turns(turns, TERMS)
    started = await start_request(world, queue, NOW + 100_000)
    end = answer(turns[0][0], extra=TurnEnd(Turn("s")))
    ended = await queue.settle_and_claim_next([end], "nonce-next", permit())
    assert ended.claim_result is not None
    assert list(ended.claim_result.leases) == []
    assert [lease.entry_id for lease in await claim(queue)] == [started.entry_id, turns[1][0].entry_id]


@pytest.mark.server
async def test_overdue_requests_are_found_with_their_progress(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue, NOW - 5)
    (late,) = await queue.find_overdue(9)
    assert (late.member, late.progress) == (member(), b"part 1")
    assert await queue.settle_unleased([(late, answer(UNLEASED, b"late"))]) == 1
    assert await queue.settle_unleased([(late, answer(UNLEASED, b"late"))]) == 0
    assert await world.pop_results() == [b"late"]
    assert await list_started(world) == []


async def test_remaining_requests_of_a_sequence_are_found_with_their_progress(world: World) -> None:
    queue = world.owner()
    second = await start_request(world, queue, name="second")
    await world.zadd(NOW + 10, member("first"))
    first, again = sorted(await claim(queue), key=lambda lease: lease.entry_id == second.entry_id)
    turn = Turn("s", on_error=OnError.ABORT)
    await sequences(queue).claim_turns([(first, turn), (again, turn)], TERMS)
    await queue.settle([answer(first, extra=TurnEnd(turn, has_failed=True))])
    (remaining,) = await sequences(queue).find_remaining_requests(9)
    assert (remaining.request.member, remaining.request.progress) == (member("second"), b"part 1")
    assert await queue.settle_unleased([(remaining.request, answer(UNLEASED, b"aborted"))]) == 1
    assert await sequences(queue).find_remaining_requests(9) == []


@pytest.mark.server
async def test_dead_request_keeps_its_progress_when_it_is_accepted_again(world: World) -> None:
    queue = world.owner()
    lease = await start_request(world, queue, 3 * PRIORITY + NOW + 100_000)
    (again,) = await claim(queue)
    await queue.move_to_dead_letters([DeadLetter(answer(again), "why", is_failed_attempt=True)])
    assert await list_started(world) == []
    assert await world.queue_admin.requeue_dead([lease.entry_id], NOW + 200_000) == 1
    assert await world.queue_admin.requeue_dead([lease.entry_id], NOW + 200_000) == 0
    assert list(await world.queue_admin.list_dead(9)) == []
    (new,) = await claim(queue)
    assert new.entry_id > again.entry_id
    assert (new.score, new.progress, new.lane) == (3 * PRIORITY + NOW + 200_000, b"part 1", Lane.STARTED)
    assert (new.deliveries, new.failed_attempts) == (1, 0)
    assert await queue.settle([answer(new)]) == DONE


@pytest.mark.server
@pytest.mark.parametrize("end", ["settle", "purge", "expire", "requeue"])
async def test_progress_is_deleted_with_its_request(world: World, end: str) -> None:
    queue = world.owner()
    await start_request(world, queue, NOW - 5)
    (lease,) = await claim(queue)
    if end == "expire":
        await queue.release([Release(lease)])
        (late,) = await queue.find_overdue(9)
        await queue.settle_unleased([(late, answer(UNLEASED, b"late"))])
    elif end == "settle":
        await queue.settle([answer(lease)])
    else:
        await queue.move_to_dead_letters([DeadLetter(answer(lease), "why")])
    assert await world.count_progress() == (end in ("purge", "requeue"))
    if end == "purge":
        await world.queue_admin.purge_dead()
    elif end == "requeue":
        await world.queue_admin.requeue_dead([lease.entry_id], NOW + 200_000)
        await queue.settle([answer(lease) for lease in await claim(queue)])
    assert await world.count_progress() == 0
    counts = await queue.count_requests()
    assert (counts.pending, counts.leased, counts.dead) == (0, 0, 0)


async def test_repeated_claim_returns_the_same_progress(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    lanes = {Lane.STARTED: 5}
    first = await queue.claim(5, "the-nonce", permit(), max_per_lane=lanes)
    second = await queue.claim(5, "the-nonce", permit(), max_per_lane=lanes)
    assert [lease.progress for lease in first.leases] == [b"part 1"]
    assert list(second.leases) == list(first.leases)


@pytest.mark.server
async def test_claim_stops_before_a_megabyte_of_members_and_progress(world: World) -> None:
    queue = world.owner()
    for number in range(3):
        await start_request(world, queue, NOW + number, b"%d" % number * 400_000, name=f"r-{number}")
    assert [lease.progress[:1] for lease in await claim(queue)] == [b"0", b"1"]
    assert [lease.progress[:1] for lease in await claim(queue)] == [b"2"]


@pytest.mark.server
@pytest.mark.parametrize(
    ("payload_bytes", "progress_bytes"), [(10, 3 << 20), (700_000, 700_000), (2 << 20, 5)]
)
async def test_large_progress_is_claimed_alone_and_whole(
    world: World, payload_bytes: int, progress_bytes: int
) -> None:
    queue = world.owner()
    large = member("large", payload={"prompt": "x" * payload_bytes})
    await world.zadd(NOW + 1, large)
    (lease,) = await claim(queue)
    progress = b"y" * progress_bytes
    assert await queue.release([Release(lease, progress=progress)]) == DONE
    await world.zadd(NOW + 2, member("small"))
    (lease,) = await claim(queue)
    assert (lease.member, lease.progress, lease.lane) == (large, progress, Lane.STARTED)
    assert [lease.member for lease in await claim(queue)] == [member("small")]


async def test_large_progress_of_an_overdue_request_is_found_whole(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await start_request(world, queue, NOW - 10 + number, b"%d" % number * (3 << 20), name=f"r-{number}")
    found = {late.member: late.progress for _ in range(4) for late in await queue.find_overdue(9)}
    assert found == {member(f"r-{number}"): b"%d" % number * (3 << 20) for number in range(2)}


@pytest.mark.server
async def test_copied_request_starts_again_from_the_beginning(world: World) -> None:
    await start_request(world, world.owner())
    (found,) = (await world.queue_admin.list_requests(RequestLocation.STARTED, 9)).requests
    far = world.open_other_queue("batch:{qwen}:other")
    assert await far.queue_admin.restore_requests("there", [found]) == 1
    (copied,) = (await far.queue_admin.list_requests(RequestLocation.RETURNED, 9)).requests
    assert copied.member == found.member
    assert len(await list_started(world)) == 1, "the other queue is unchanged"


async def release_and_claim(
    queue: Queue, *releases: Release, limit: int = 100, nonce: str = "again"
) -> tuple[list[SettleStatus | None], list[Lease]]:
    """Release requests and claim them again in one step. Return the statuses and the leases."""
    reply = await queue.release_and_claim_again(releases, nonce, permit(limit))
    claimed = [] if reply.claim_result is None else reply.claim_result.leases
    return list(reply.statuses), list(claimed)


@pytest.mark.server
async def test_started_request_is_claimed_again_with_its_release(world: World) -> None:
    queue = world.owner()
    lease = await start_request(world, queue)
    (lease,) = await claim(queue)
    statuses, (again,) = await release_and_claim(queue, Release(lease, progress=b"part 2"))
    assert statuses == DONE
    assert (again.entry_id, again.member, again.score) == (lease.entry_id, lease.member, lease.score)
    assert (again.progress, again.lane, again.deliveries) == (b"part 2", Lane.STARTED, 3)
    assert again.token != lease.token
    assert (await claim(queue), await list_started(world)) == ([], [])
    assert await queue.release([Release(lease)]) == [SettleStatus.LOST]
    assert await queue.settle([answer(again)]) == DONE


async def test_first_slice_is_claimed_again_like_later_ones(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member())
    (lease,) = await claim(queue)
    _, (again,) = await release_and_claim(queue, Release(lease, progress=b"part 1"))
    assert (again.progress, again.failed_attempts) == (b"part 1", 0)


@pytest.mark.parametrize("lost_count", [1, 2])
async def test_claim_by_the_nonce_returns_the_requests_claimed_again(world: World, lost_count: int) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    _, (again,) = await release_and_claim(queue, Release(lease, progress=b"part 2"))
    for _ in range(lost_count):
        repeated = await queue.claim(5, "again", permit(), max_per_lane={Lane.STARTED: 5})
        assert list(repeated.leases) == [again]


@pytest.mark.parametrize("other", ["pending", "started", "suspect"])
async def test_request_before_a_started_one_keeps_it_from_being_claimed_again(
    world: World, other: str
) -> None:
    queue = world.owner()
    await start_request(world, queue, PRIORITY + NOW + 100_000)
    (lease,) = await claim(queue)
    if other == "started":
        await start_request(world, queue, NOW + 200_000, name="other")
    else:
        await world.zadd(NOW + 200_000, member("other"))
    if other == "suspect":
        for _ in range(2):
            (suspect,) = await claim(queue)
            await world.lose_leases(queue, suspect)
    reply = await queue.release_and_claim_again([Release(lease, progress=b"part 2")], "again", permit())
    assert reply.claim_result is not None
    assert (list(reply.statuses), list(reply.claim_result.leases)) == (DONE, [])
    assert reply.claim_result.claimable_count == (1 if other == "suspect" else 2)
    assert [each.score for each in await claim(queue)] == [NOW + 200_000, lease.score]


async def test_request_behind_a_started_one_does_not_keep_it_from_being_claimed_again(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue, NOW + 100_000)
    (lease,) = await claim(queue)
    await start_request(world, queue, NOW + 200_000, name="started, later deadline")
    await world.zadd(NOW - 1000, member("earlier deadline, not started"))
    reply = await queue.release_and_claim_again([Release(lease, progress=b"part 2")], "again", permit())
    assert reply.claim_result is not None
    assert [each.entry_id for each in reply.claim_result.leases] == [lease.entry_id]
    assert reply.claim_result.claimable_count == 2


async def test_started_requests_are_claimed_again_as_far_as_there_is_room(world: World) -> None:
    queue = world.owner()
    for number in (2, 0, 1):
        await start_request(world, queue, NOW + number, name=f"r-{9 - number}")
    leases = await claim(queue)
    releases = [Release(lease, progress=b"part 2") for lease in reversed(leases)]
    statuses, again = await release_and_claim(queue, *releases, limit=2)
    assert statuses == DONE * 3
    assert [lease.score - NOW for lease in again] == [0, 1]
    assert [lease.score - NOW for lease in await claim(queue)] == [2]


async def test_heavy_started_request_is_not_overtaken_by_a_lighter_one(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await start_request(world, queue, NOW + number, name=f"r-{number}")
    heavy, light = await claim(queue)
    await queue.set_lease_units([(heavy, 3)], permit())
    releases = [Release(lease, progress=b"part 2") for lease in (light, heavy)]
    assert await release_and_claim(queue, *releases, limit=2) == (DONE * 2, [])
    assert [lease.units for lease in await claim(queue)] == [3, 1]


@pytest.mark.parametrize("reason", ["paused", "limit 0", "delayed", "waits for its model", "no progress"])
async def test_request_is_not_claimed_again_if_a_claim_would_not_lease_it(world: World, reason: str) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lease,) = await claim(queue)
    release = Release(
        lease,
        progress=None if reason == "no progress" else b"part 2",
        delay_s=1000.0 if reason == "delayed" else 0.0,
        extra=ModelWait("a") if reason == "waits for its model" else None,
    )
    if reason == "paused":
        await world.queue_admin.pause("me", "why")
    limit = 0 if reason == "limit 0" else 100
    assert await release_and_claim(queue, release, limit=limit) == (DONE, [])
    if reason == "paused":
        await world.queue_admin.resume()
    if reason not in ("delayed", "waits for its model"):
        assert [each.entry_id for each in await claim(queue)] == [lease.entry_id]


async def test_only_live_leases_are_claimed_again(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    (lost,) = await claim(queue)
    await world.lose_leases(queue, lost)
    (lease,) = await claim(world.owner("owner-2"))
    late, new = Release(lost, progress=b"late"), Release(lease, progress=b"new")
    assert await release_and_claim(queue, late) == ([SettleStatus.LOST], [])
    statuses, (again,) = await release_and_claim(world.owner("owner-2"), new, new)
    assert (statuses, again.progress) == ([SettleStatus.DONE, SettleStatus.LOST], b"new")


async def test_late_release_beside_the_one_that_counts_leaves_the_progress_as_it_is(world: World) -> None:
    """Its owner has lost a lease of the request, and has claimed the request again since."""
    queue = world.owner()
    await start_request(world, queue)
    (lost,) = await claim(queue)
    await world.lose_leases(queue, lost)
    (lease,) = await claim(queue)
    releases = Release(lease, progress=b"new"), Release(lost, progress=b"late")
    statuses, (again,) = await release_and_claim(queue, *releases)
    assert (statuses, again.progress) == ([SettleStatus.DONE, SettleStatus.LOST], b"new")


async def test_request_whose_member_the_caller_has_not_kept_is_not_claimed_again(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await start_request(world, queue, NOW + number, name=f"r-{number}")
    first, second = await claim(queue)
    releases = [Release(first.copy_with(member=b""), progress=b"a"), Release(second, progress=b"b")]
    assert await release_and_claim(queue, *releases) == (DONE * 2, [])
    again = await claim(queue)
    assert [(lease.member, lease.progress) for lease in again] == [
        (member("r-0"), b"a"),
        (member("r-1"), b"b"),
    ]


async def test_suspect_is_not_claimed_again_with_its_release(world: World) -> None:
    queue = world.owner()
    await start_request(world, queue)
    for _ in range(2):
        (lease,) = await claim(queue)
        await world.lose_leases(queue, lease)
    (lease,) = await claim(queue)
    assert await release_and_claim(queue, Release(lease, progress=b"part 2")) == (DONE, [])
    (lease,) = await claim(queue, started=0)
    assert (lease.progress, lease.lane) == (b"part 2", Lane.SUSPECTS)


async def test_turn_stays_with_a_request_that_is_claimed_again(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 100_000 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await sequences(queue).claim_turns(turns, TERMS)
    _, (again,) = await release_and_claim(queue, Release(turns[0][0], progress=b"part 1"))
    (decision,) = (await sequences(queue).claim_turns([(again, Turn("s"))], TERMS)).decisions
    assert decision == TurnGranted(0, "", b"", True)
    await queue.settle([answer(again, extra=TurnEnd(Turn("s")))])
    assert [lease.entry_id for lease in await claim(queue)] == [turns[1][0].entry_id]


async def test_two_owners_take_slices_of_one_request_in_turn(world: World) -> None:
    owners = [world.owner(f"owner-{number}") for number in range(2)]
    await world.zadd(NOW + 100_000, member())
    progress = b""
    for number in range(6):
        (lease,) = await claim(owners[number % 2])
        assert lease.progress == progress
        assert await claim(owners[1 - number % 2]) == []
        progress += b"%d" % number
        assert await owners[number % 2].release([Release(lease, progress=progress)] * 2) == [
            SettleStatus.DONE,
            SettleStatus.LOST,
        ]
    (lease,) = await claim(owners[0])
    assert lease.progress == b"012345"
