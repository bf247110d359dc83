"""Requests that wait for their model: each promise of the port, in memory and on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.features.models.counts import ModelCounts
from dispatcher.features.models.queue.waiting import LANE, MAX_RETURNED_PER_CALL, ModelWait, ReturnedRequests
from dispatcher.features.sequences.decisions import (
    SequenceTerms,
    TurnGranted,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.queue.contract import Lease, Queue, Release, SettleStatus
from dispatcher.requests.found_request import FoundRequest, RequestLocation
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from tests.conformance.worlds import (
    NOW,
    QUEUE,
    World,
    answer,
    claim,
    claim_fully,
    member,
    model_admin,
    models,
    sequences,
    waits,
)

WHY = "its model is not served"


async def release_to_wait_for_models(
    world: World, *models: str, queue: Queue | None = None, scores: Sequence[float] = ()
) -> list[Lease]:
    """Submit one request for each model, claim them, and release them to wait for their models."""
    queue = queue or world.owner()
    at = scores or [NOW + 100_000.0 + number for number in range(len(models))]
    for number, score in enumerate(at):
        await world.zadd(score, member(f"r-{number}-{score}", token=f"t-{number}"))
    leases = list(await claim(queue, len(models)))
    assert [lease.score for lease in leases] == sorted(at)
    by_score = dict(zip(at, models, strict=True))
    releases = [
        Release(lease, is_undelivered=True, last_attempt=WHY, extra=ModelWait(by_score[lease.score]))
        for lease in leases
    ]
    assert await queue.release(releases) == [SettleStatus.DONE] * len(models)
    return leases


async def count_waiting(world: World) -> list[FoundRequest]:
    return list((await world.queue_admin.list_requests(LANE, 100)).requests)


@pytest.mark.server
async def test_request_that_waits_for_its_model_is_not_claimed_until_it_is_returned(world: World) -> None:
    queue = world.owner()
    (lease,) = await release_to_wait_for_models(world, "qwen")
    claimed = await claim_fully(queue)
    assert (claimed.leases, claimed.claimable_count, claimed.lease_counts.live_units) == ([], 0, 0)
    assert await world.queue_admin.peek_next(9) == []
    assert await models(queue).return_waiting_for_models(["qwen"]) == ReturnedRequests(1, 0)
    (again,) = await claim(queue)
    assert (again.entry_id, again.deliveries, again.last_attempt) == (lease.entry_id, 1, WHY)
    assert again.lane is None
    assert await queue.settle([answer(again)]) == [SettleStatus.DONE]


async def test_request_that_waits_for_its_model_wakes_no_owner(world: World) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, "a")
    await waits(queue, 0.3)  # of an earlier wake-up
    assert await waits(queue, 0.6)
    await models(queue).return_waiting_for_models(["a"])
    async with asyncio.timeout(10):
        await queue.wait_for_work()


@pytest.mark.server
async def test_waiting_requests_are_counted_and_listed_by_model(world: World) -> None:
    queue = world.owner()
    assert (
        await models(queue).count_waiting_by_model(),
        await model_admin(world.queue_admin).count_waiting_by_model(),
    ) == (
        {},
        {},
    )
    await release_to_wait_for_models(world, "a", "b", "a")
    assert (
        await models(queue).count_waiting_by_model()
        == await model_admin(world.queue_admin).count_waiting_by_model()
        == {"a": 2, "b": 1}
    )
    assert [(one.missing_model, one.reason) for one in await count_waiting(world)] == [
        ("a", WHY),
        ("b", WHY),
        ("a", WHY),
    ]
    counts = await queue.count_requests()
    assert (counts.pending, counts.of(ModelCounts).waiting, counts.leased) == (3, 3, 0)
    first, second, third = await count_waiting(world)
    assert [await world.queue_admin.count_ahead(one) for one in (first, second, third)] == [0, 1, 2]
    await models(queue).return_waiting_for_models(["a"])
    assert await models(queue).count_waiting_by_model() == {"b": 1}
    assert (await queue.count_requests()).of(ModelCounts).waiting == 1
    assert [one.missing_model for one in await count_waiting(world)] == ["b"]
    (returned, _) = (await world.queue_admin.list_requests(RequestLocation.RETURNED, 9)).requests
    assert returned.missing_model == ""


async def test_returned_request_is_claimed_at_its_old_place(world: World) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, "a", "b", scores=[NOW + 20.0, NOW + 10.0])
    for at in (NOW + 5, NOW + 15, NOW + 25):
        await world.zadd(at, member(f"other-{at}"))
    assert [lease.score - NOW for lease in await claim(queue, 1)] == [5]
    await models(queue).return_waiting_for_models(["a", "b"])
    assert [lease.score - NOW for lease in await claim(queue)] == [10, 15, 20, 25]


SCORES = [
    float("-inf"),
    -1e300,
    -5.0,
    -0.5,
    0.0,
    5e-324,
    0.5,
    1.0,
    4e9,
    4e9 + 0.25,
    1e12,
    1e300,
    float("inf"),
]


async def test_return_takes_the_best_requests_of_all_named_models_first(world: World) -> None:
    queue = world.owner()
    max_count = MAX_RETURNED_PER_CALL
    await release_to_wait_for_models(
        world,
        *(("a", "b")[number % 2] for number in range(max_count + 50)),
        scores=range(NOW, NOW + max_count + 50),
    )
    assert await models(queue).return_waiting_for_models(["b", "a", "b", "nobody's"]) == ReturnedRequests(
        max_count, 50
    )
    assert [lease.score - NOW for lease in await claim(queue, 999)] == list(range(max_count))
    assert await models(queue).return_waiting_for_models(["a"]) == ReturnedRequests(25, 0)
    assert await models(queue).return_waiting_for_models(["a", "b"]) == ReturnedRequests(25, 0)
    assert await models(queue).return_waiting_for_models(["a", "b"]) == ReturnedRequests(0, 0)
    assert await models(queue).return_waiting_for_models([]) == ReturnedRequests(0, 0)


@pytest.mark.server
async def test_lowest_score_returns_first_whatever_the_scores_are(world: World) -> None:
    """Only the worst score is missing from the first page."""
    queue = world.owner()
    filler = [2e12 + number for number in range(MAX_RETURNED_PER_CALL - len(SCORES) + 1)]
    scores = [*SCORES[::-1], *filler]
    await release_to_wait_for_models(world, *["m"] * len(scores), scores=scores)
    assert await models(queue).return_waiting_for_models(["m"]) == ReturnedRequests(MAX_RETURNED_PER_CALL, 1)
    assert [one.score for one in await count_waiting(world)] == [float("inf")]


NAMES = [
    "m",
    "m:",
    "m;",
    "mm",
    "m\0",
    "\0",
    "001m",
    "m:0000000000000000",
    "grün",
    "\U0001f600",
    " ",
    "x" * MAX_MODEL_NAME_BYTES,
]


@pytest.mark.server
async def test_model_name_does_not_match_requests_of_another_model(world: World) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, *NAMES)
    assert await models(queue).count_waiting_by_model() == dict.fromkeys(NAMES, 1)
    for at, name in enumerate(NAMES):
        assert await models(queue).return_waiting_for_models([name]) == ReturnedRequests(1, 0)
        assert name not in await models(queue).count_waiting_by_model()
        assert len(await count_waiting(world)) == len(NAMES) - at - 1


@pytest.mark.parametrize("name", ["y" * 300, "ü" * 200, "a\ud800b"])
async def test_overlong_model_name_is_shortened_and_found_again(world: World, name: str) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, name)
    (reply,) = await models(queue).count_waiting_by_model()
    assert len(reply.encode()) <= MAX_MODEL_NAME_BYTES
    assert await models(queue).return_waiting_for_models([reply]) == ReturnedRequests(1, 0)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, extra=ModelWait(name))])
    assert await models(queue).return_waiting_for_models([name]) == ReturnedRequests(1, 0)


async def test_concurrent_returns_return_each_request_once(world: World) -> None:
    owners = [world.owner(f"owner-{number}") for number in range(3)]
    leases = await release_to_wait_for_models(world, *["a"] * 30)
    reply = [await models(owner).return_waiting_for_models(["a"]) for owner in owners]
    assert [each.returned_count for each in reply] == [30, 0, 0]
    claimed = [lease.entry_id for owner in owners for lease in await claim(owner, 10)]
    assert sorted(claimed) == sorted(lease.entry_id for lease in leases)


async def test_waiting_request_past_its_deadline_ends_with_the_reason(world: World) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, "a", "a", scores=[NOW - 5.0, NOW + 100_000.0])
    (late,) = await queue.find_overdue(9)
    assert late.last_attempt == WHY
    assert await queue.settle_unleased([(late, answer(make_unleased_settlement(), b"too late"))]) == 1
    assert await world.pop_results() == [b"too late"]
    assert await models(queue).count_waiting_by_model() == {"a": 1}
    assert await queue.settle_unleased([(late, answer(make_unleased_settlement(), b"again"))]) == 0
    assert await models(queue).return_waiting_for_models(["a"]) == ReturnedRequests(1, 0)
    assert await models(queue).count_waiting_by_model() == {}


async def test_overdue_request_that_was_returned_meanwhile_is_not_ended(world: World) -> None:
    queue = world.owner()
    await release_to_wait_for_models(world, "a", scores=[NOW - 5.0])
    (late,) = await queue.find_overdue(9)
    await models(queue).return_waiting_for_models(["a"])
    assert await queue.settle_unleased([(late, answer(make_unleased_settlement(), b"too late"))]) == 0
    assert len(await claim(queue)) == 1


def make_unleased_settlement() -> Lease:
    return Lease(0, "", b"", 0, 0, 0, 0, 0)


async def test_cancelled_request_returns_to_the_queue_to_be_answered(world: World) -> None:
    queue = world.owner()
    leases = await release_to_wait_for_models(world, "a", "a", "b")
    ids = [f"r-{number}-{lease.score}" for number, lease in enumerate(leases)]
    assert (await queue.sweep()).freed_count == 0
    assert await world.queue_admin.cancel_request(ids[1], "t-1", is_token_known=True)
    await world.set_key(f"{QUEUE}:cancel:{ids[2]}:t-2", "another's")
    assert (await queue.sweep()).freed_count == 1
    assert await models(queue).count_waiting_by_model() == {"a": 1, "b": 1}
    (back,) = await claim(queue)
    assert back.entry_id == leases[1].entry_id
    assert await queue.check_cancelled([(ids[1], "t-1")]) == [True]
    assert (await queue.sweep()).freed_count == 0


async def test_release_of_a_cut_member_names_its_cancel_key(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 100_000 + number, member(f"r-{number}", token="t"))
    reply, untold = (lease.copy_with(member=b"") for lease in await claim(queue))
    named = Release(reply, extra=ModelWait("a"), request_id="r-0", request_token="t")
    await queue.release([named, Release(untold, extra=ModelWait("a"))])
    for number in range(2):
        assert await world.queue_admin.cancel_request(f"r-{number}", "t", is_token_known=True)
    assert (await queue.sweep()).freed_count == 1
    assert [one.entry_id for one in await claim(queue)] == [reply.entry_id]
    assert await models(queue).return_waiting_for_models(["a"]) == ReturnedRequests(1, 0)


@pytest.mark.server
async def test_cancel_marker_of_llm_d_returns_a_waiting_request(world: World) -> None:
    queue = world.owner()
    (lease,) = await release_to_wait_for_models(world, "a")
    await world.set_key(f"request-cancel:r-0-{lease.score}", "t-0")
    assert (await queue.sweep()).freed_count == 1
    assert [one.entry_id for one in await claim(queue)] == [lease.entry_id]


async def test_successive_sweeps_check_all_waiting_requests_for_cancellation(world: World) -> None:
    queue = world.owner()
    leases: list[Lease] = []
    for at in (0.0, 1000.0):
        names = [f"m-{number % 7}" for number in range(600)]
        leases += await release_to_wait_for_models(
            world, *names, scores=[NOW + at + number for number in range(600)]
        )
    assert (await queue.sweep()).freed_count == 0
    doomed = [0, 500, 1199]
    for number in doomed:
        request_id = f"r-{number % 600}-{leases[number].score}"
        assert await world.queue_admin.cancel_request(request_id, f"t-{number % 600}", is_token_known=True)
    assert sum([(await queue.sweep()).freed_count for _ in range(6)]) == 3
    assert [one.entry_id for one in await claim(queue)] == [leases[number].entry_id for number in doomed]
    while (
        await models(queue).return_waiting_for_models([f"m-{number}" for number in range(7)])
    ).remaining_count:
        pass
    for _ in range(2):
        await queue.sweep()
    assert await models(queue).count_waiting_by_model() == {}


@pytest.mark.server
async def test_suspect_is_a_suspect_again_after_waiting_for_its_model(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 100_000, member("r-1"))
    for _ in range(2):
        (lease,) = await claim(queue)
        await world.lose_leases(queue, lease)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, is_undelivered=True, extra=ModelWait("a"))])
    (one,) = await count_waiting(world)
    assert (one.missing_model, one.deaths) == ("a", 2)
    await models(queue).return_waiting_for_models(["a"])
    assert await claim(queue, suspects=0) == []
    (suspect,) = (await world.queue_admin.list_requests(RequestLocation.SUSPECT, 9)).requests
    assert suspect.entry == lease.entry_id


async def test_next_request_of_a_sequence_keeps_its_turn_while_it_waits_for_its_model(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms()
    for number in range(2):
        await world.zadd(NOW + 100_000 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await sequences(queue).claim_turns(turns, terms)
    head, second = (lease for lease, _ in turns)
    await queue.release([Release(head, is_undelivered=True, extra=ModelWait("a"))])
    await queue.sweep()
    assert await claim(queue) == []
    seen = await open_sequences(world.queue_admin).get_sequence("s")
    assert seen is not None
    assert (seen.next_entry, seen.waiting_count) == (head.entry_id, 1)
    await models(queue).return_waiting_for_models(["a"])
    (again,) = await claim(queue)
    (decisions,) = (await sequences(queue).claim_turns([(again, Turn("s"))], terms)).decisions
    assert (again.entry_id, decisions) == (head.entry_id, TurnGranted(0, "", b"", True))
    await queue.settle([answer(again)])
    assert [one.entry_id for one in await claim(queue)] == [second.entry_id]


async def test_deadline_of_a_waiting_sequence_request_lets_the_following_request_run(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms(on_error=OnError.CONTINUE)
    for score in (NOW - 5, NOW + 100_000):
        await world.zadd(score, member(f"r-{score}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await sequences(queue).claim_turns(turns, terms)
    await queue.release([Release(turns[0][0], is_undelivered=True, extra=ModelWait("a"))])
    (late,) = await queue.find_overdue(9)
    ended = answer(make_unleased_settlement(), b"late", extra=TurnEnd(Turn("s"), has_failed=True))
    assert await queue.settle_unleased([(late, ended)]) == 1
    assert [one.entry_id for one in await claim(queue)] == [turns[1][0].entry_id]
    assert await models(queue).count_waiting_by_model() == {}


async def test_release_of_an_ended_lease_adds_nothing_to_the_lane(world: World) -> None:
    queue = world.owner()
    (lease,) = await release_to_wait_for_models(world, "a")
    assert await queue.release([Release(lease, extra=ModelWait("b"))]) == [SettleStatus.LOST]
    assert await models(queue).count_waiting_by_model() == {"a": 1}
    await models(queue).return_waiting_for_models(["a"])
    (again,) = await claim(queue)
    assert await queue.release([Release(again, delay_s=100.0, extra=ModelWait("b"))] * 2) == [
        SettleStatus.DONE,
        SettleStatus.LOST,
    ]
    assert await models(queue).count_waiting_by_model() == {"b": 1}
    assert (await queue.count_requests()).delayed == 0


@pytest.mark.server
async def test_copied_request_looks_for_its_model_again(world: World) -> None:
    await release_to_wait_for_models(world, "a")
    far = world.open_other_queue("batch:{qwen}:other")
    assert await far.queue_admin.restore_requests("there", await count_waiting(world)) == 1
    assert await model_admin(far.queue_admin).count_waiting_by_model() == {}
    (copied,) = (await far.queue_admin.list_requests(RequestLocation.RETURNED, 9)).requests
    assert (copied.reason, copied.deliveries) == (WHY, 0)
    assert await model_admin(world.queue_admin).count_waiting_by_model() == {"a": 1}, (
        "the other queue is unchanged"
    )


@pytest.mark.server
async def test_counts_of_very_many_models_are_returned_in_turns(world: World) -> None:
    queue = world.owner()
    names = [f"m-{number:04}" for number in range(1200)]
    for at in range(0, 1200, 100):
        await release_to_wait_for_models(
            world, *names[at : at + 100], queue=queue, scores=range(NOW + at, NOW + at + 100)
        )
    reply: set[str] = set()
    for _ in range(100):
        some = await models(queue).count_waiting_by_model()
        assert len(some) == 1000
        assert set(some.values()) == {1}
        reply |= set(some)
    assert reply == set(names)
