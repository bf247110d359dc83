"""Requests that wait for their model: each promise of the port, in memory, Redis and Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.core.requests.found_request import FoundRequest, RequestLocation
from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.core.sequences.decisions import SequenceTerms, TurnEnd, TurnGranted
from dispatcher.core.sequences.turns import OnError, Turn
from dispatcher.ports import Lease, Queue, Release, ReturnedRequests, SettleStatus
from dispatcher.queue.constants import MAX_RETURNED_PER_CALL
from tests.conformance.worlds import NOW, QUEUE, World, answer, claim, full_claim, member, waits

WHY = "its model is not served"


async def put_off(
    world: World, *models: str, queue: Queue | None = None, scores: Sequence[float] = ()
) -> list[Lease]:
    """One request for each of these, claimed and given back to wait for its model."""
    queue = queue or world.owner()
    at = scores or [NOW + 1000.0 + number for number in range(len(models))]
    for number, score in enumerate(at):
        await world.zadd(score, member(f"r-{number}-{score}", token=f"t-{number}"))
    leases = list(await claim(queue, len(models)))
    assert [lease.score for lease in leases] == sorted(at)
    by_score = dict(zip(at, models, strict=True))
    releases = [
        Release(lease, is_undelivered=True, last_attempt=WHY, missing_model=by_score[lease.score])
        for lease in leases
    ]
    assert await queue.release(releases) == [SettleStatus.DONE] * len(models)
    return leases


async def awaiting(world: World) -> list[FoundRequest]:
    return list((await world.desk.list_requests(RequestLocation.WAITING_FOR_MODEL, 100)).requests)


async def test_no_claim_takes_what_waits_for_its_model_until_it_is_recalled(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "qwen")
    claimed = await full_claim(queue)
    assert (claimed.leases, claimed.claimable_count, claimed.lease_counts.live_units) == ([], 0, 0)
    assert await world.desk.peek_next(9) == []
    assert await queue.return_waiting_for_models(["qwen"]) == ReturnedRequests(1, 0)
    (again,) = await claim(queue)
    assert (again.entry_id, again.deliveries, again.last_attempt) == (lease.entry_id, 1, WHY)
    assert again.lane is None
    assert await queue.settle([answer(again)]) == [SettleStatus.DONE]


async def test_what_waits_for_its_model_is_no_work_to_wake_for(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a")
    await waits(queue, 0.3)  # for a wake-up of before
    assert await waits(queue, 0.6)
    await queue.return_waiting_for_models(["a"])
    async with asyncio.timeout(10):
        await queue.wait_for_work()


async def test_what_waits_is_counted_by_model_and_seen_with_its_model(world: World) -> None:
    queue = world.owner()
    assert (await queue.count_waiting_by_model(), await world.desk.count_waiting_by_model()) == ({}, {})
    await put_off(world, "a", "b", "a")
    assert (
        await queue.count_waiting_by_model() == await world.desk.count_waiting_by_model() == {"a": 2, "b": 1}
    )
    assert [(one.missing_model, one.reason) for one in await awaiting(world)] == [
        ("a", WHY),
        ("b", WHY),
        ("a", WHY),
    ]
    counts = await queue.count_requests()
    assert (counts.pending, counts.waiting_for_model, counts.leased) == (3, 3, 0)
    first, second, third = await awaiting(world)
    assert [await world.desk.count_ahead(one) for one in (first, second, third)] == [0, 1, 2]
    await queue.return_waiting_for_models(["a"])
    assert await queue.count_waiting_by_model() == {"b": 1}
    assert (await queue.count_requests()).waiting_for_model == 1
    assert [one.missing_model for one in await awaiting(world)] == ["b"]
    (returned, _) = (await world.desk.list_requests(RequestLocation.RETURNED, 9)).requests
    assert returned.missing_model == ""


async def test_what_comes_back_is_claimed_at_its_old_place(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", "b", scores=[NOW + 20.0, NOW + 10.0])
    for at in (NOW + 5, NOW + 15, NOW + 25):
        await world.zadd(at, member(f"other-{at}"))
    assert [lease.score - NOW for lease in await claim(queue, 1)] == [5]
    await queue.return_waiting_for_models(["a", "b"])
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


async def test_a_page_of_a_recall_holds_the_best_of_all_its_models(world: World) -> None:
    queue = world.owner()
    most = MAX_RETURNED_PER_CALL
    await put_off(
        world, *(("a", "b")[number % 2] for number in range(most + 50)), scores=range(NOW, NOW + most + 50)
    )
    assert await queue.return_waiting_for_models(["b", "a", "b", "nobody's"]) == ReturnedRequests(most, 50)
    assert [lease.score - NOW for lease in await claim(queue, 999)] == list(range(most))
    assert await queue.return_waiting_for_models(["a"]) == ReturnedRequests(25, 0)
    assert await queue.return_waiting_for_models(["a", "b"]) == ReturnedRequests(25, 0)
    assert await queue.return_waiting_for_models(["a", "b"]) == ReturnedRequests(0, 0)
    assert await queue.return_waiting_for_models([]) == ReturnedRequests(0, 0)


async def test_whatever_the_score_is_the_best_comes_back_first(world: World) -> None:
    """Of the first page nothing but the worst score is missing."""
    queue = world.owner()
    filler = [2e12 + number for number in range(MAX_RETURNED_PER_CALL - len(SCORES) + 1)]
    scores = [*SCORES[::-1], *filler]
    await put_off(world, *["m"] * len(scores), scores=scores)
    assert await queue.return_waiting_for_models(["m"]) == ReturnedRequests(MAX_RETURNED_PER_CALL, 1)
    assert [one.score for one in await awaiting(world)] == [float("inf")]


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


async def test_no_name_reaches_what_waits_for_another(world: World) -> None:
    queue = world.owner()
    await put_off(world, *NAMES)
    assert await queue.count_waiting_by_model() == dict.fromkeys(NAMES, 1)
    for at, name in enumerate(NAMES):
        assert await queue.return_waiting_for_models([name]) == ReturnedRequests(1, 0)
        assert name not in await queue.count_waiting_by_model()
        assert len(await awaiting(world)) == len(NAMES) - at - 1


@pytest.mark.parametrize("name", ["y" * 300, "ü" * 200, "a\ud800b"])
async def test_a_name_that_no_queue_takes_is_cut_and_found_again(world: World, name: str) -> None:
    queue = world.owner()
    await put_off(world, name)
    (told,) = await queue.count_waiting_by_model()
    assert len(told.encode()) <= MAX_MODEL_NAME_BYTES
    assert await queue.return_waiting_for_models([told]) == ReturnedRequests(1, 0)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, missing_model=name)])
    assert await queue.return_waiting_for_models([name]) == ReturnedRequests(1, 0)


async def test_several_may_recall_at_once_and_each_request_comes_back_once(world: World) -> None:
    owners = [world.owner(f"owner-{number}") for number in range(3)]
    leases = await put_off(world, *["a"] * 30)
    told = [await owner.return_waiting_for_models(["a"]) for owner in owners]
    assert [each.returned_count for each in told] == [30, 0, 0]
    claimed = [lease.entry_id for owner in owners for lease in await claim(owner, 10)]
    assert sorted(claimed) == sorted(lease.entry_id for lease in leases)


async def test_its_deadline_ends_what_waits_and_says_why(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", "a", scores=[NOW - 5.0, NOW + 1000.0])
    (late,) = await queue.find_overdue(9)
    assert late.last_attempt == WHY
    assert await queue.settle_unleased([(late, answer(_nobodys(), b"too late"))]) == 1
    assert await world.results() == [b"too late"]
    assert await queue.count_waiting_by_model() == {"a": 1}
    assert await queue.settle_unleased([(late, answer(_nobodys(), b"again"))]) == 0
    assert await queue.return_waiting_for_models(["a"]) == ReturnedRequests(1, 0)
    assert await queue.count_waiting_by_model() == {}


async def test_what_was_found_late_and_came_back_meanwhile_is_not_ended(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", scores=[NOW - 5.0])
    (late,) = await queue.find_overdue(9)
    await queue.return_waiting_for_models(["a"])
    assert await queue.settle_unleased([(late, answer(_nobodys(), b"too late"))]) == 0
    assert len(await claim(queue)) == 1


def _nobodys() -> Lease:
    return Lease(0, "", b"", 0, 0, 0, 0, 0)


async def test_what_is_cancelled_comes_back_to_be_answered(world: World) -> None:
    queue = world.owner()
    leases = await put_off(world, "a", "a", "b")
    ids = [f"r-{number}-{lease.score}" for number, lease in enumerate(leases)]
    assert (await queue.sweep()).cancelled_count == 0
    assert await world.desk.cancel_request(ids[1], "t-1", is_token_known=True)
    await world.set_key(f"{QUEUE}:cancel:{ids[2]}:t-2", "another's")
    assert (await queue.sweep()).cancelled_count == 1
    assert await queue.count_waiting_by_model() == {"a": 1, "b": 1}
    (back,) = await claim(queue)
    assert back.entry_id == leases[1].entry_id
    assert await queue.check_cancelled([(ids[1], "t-1")]) == [True]
    assert (await queue.sweep()).cancelled_count == 0


async def test_who_holds_no_member_any_more_says_what_cancels_it(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 1000 + number, member(f"r-{number}", token="t"))
    told, untold = (lease.copy_with(member=b"") for lease in await claim(queue))
    named = Release(told, missing_model="a", request_id="r-0", request_token="t")
    await queue.release([named, Release(untold, missing_model="a")])
    for number in range(2):
        assert await world.desk.cancel_request(f"r-{number}", "t", is_token_known=True)
    assert (await queue.sweep()).cancelled_count == 1
    assert [one.entry_id for one in await claim(queue)] == [told.entry_id]
    assert await queue.return_waiting_for_models(["a"]) == ReturnedRequests(1, 0)


async def test_llm_ds_marker_cancels_it_too(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "a")
    await world.set_key(f"request-cancel:r-0-{lease.score}", "t-0")
    assert (await queue.sweep()).cancelled_count == 1
    assert [one.entry_id for one in await claim(queue)] == [lease.entry_id]


async def test_the_sweep_looks_at_all_that_wait_in_some_rounds(world: World) -> None:
    queue = world.owner()
    leases: list[Lease] = []
    for at in (0.0, 1000.0):
        models = [f"m-{number % 7}" for number in range(600)]
        leases += await put_off(world, *models, scores=[NOW + at + number for number in range(600)])
    assert (await queue.sweep()).cancelled_count == 0
    doomed = [0, 500, 1199]
    for number in doomed:
        request_id = f"r-{number % 600}-{leases[number].score}"
        assert await world.desk.cancel_request(request_id, f"t-{number % 600}", is_token_known=True)
    assert sum([(await queue.sweep()).cancelled_count for _ in range(6)]) == 3
    assert [one.entry_id for one in await claim(queue)] == [leases[number].entry_id for number in doomed]
    while (await queue.return_waiting_for_models([f"m-{number}" for number in range(7)])).remaining_count:
        pass
    for _ in range(2):
        await queue.sweep()
    assert await queue.count_waiting_by_model() == {}


async def test_a_suspect_that_waits_for_its_model_is_one_again_when_that_comes(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 1000, member("r-1"))
    for _ in range(2):
        (lease,) = await claim(queue)
        await world.lose(queue, lease)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, is_undelivered=True, missing_model="a")])
    (one,) = await awaiting(world)
    assert (one.missing_model, one.deaths) == ("a", 2)
    await queue.return_waiting_for_models(["a"])
    assert await claim(queue, suspects=0) == []
    (suspect,) = (await world.desk.list_requests(RequestLocation.SUSPECT, 9)).requests
    assert suspect.entry == lease.entry_id


async def test_the_head_of_a_sequence_keeps_its_turn_while_it_waits(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms()
    for number in range(2):
        await world.zadd(NOW + 1000 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await queue.claim_turns(turns, terms)
    head, second = (lease for lease, _ in turns)
    await queue.release([Release(head, is_undelivered=True, missing_model="a")])
    await queue.sweep()
    assert await claim(queue) == []
    seen = await world.desk.get_sequence("s")
    assert seen is not None
    assert (seen.next_entry, seen.waiting_count) == (head.entry_id, 1)
    await queue.return_waiting_for_models(["a"])
    (again,) = await claim(queue)
    (said,) = (await queue.claim_turns([(again, Turn("s"))], terms)).decisions
    assert (again.entry_id, said) == (head.entry_id, TurnGranted(0, "", b"", True))
    await queue.settle([answer(again)])
    assert [one.entry_id for one in await claim(queue)] == [second.entry_id]


async def test_the_deadline_of_a_head_that_waits_lets_the_next_one_go(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms(on_error=OnError.CONTINUE)
    for score in (NOW - 5, NOW + 1000):
        await world.zadd(score, member(f"r-{score}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await queue.claim_turns(turns, terms)
    await queue.release([Release(turns[0][0], is_undelivered=True, missing_model="a")])
    (late,) = await queue.find_overdue(9)
    ended = answer(_nobodys(), b"late", turn_end=TurnEnd(Turn("s"), has_failed=True))
    assert await queue.settle_unleased([(late, ended)]) == 1
    assert [one.entry_id for one in await claim(queue)] == [turns[1][0].entry_id]
    assert await queue.count_waiting_by_model() == {}


async def test_a_release_of_a_lease_that_has_ended_puts_nothing_into_the_lane(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "a")
    assert await queue.release([Release(lease, missing_model="b")]) == [SettleStatus.LOST]
    assert await queue.count_waiting_by_model() == {"a": 1}
    await queue.return_waiting_for_models(["a"])
    (again,) = await claim(queue)
    assert await queue.release([Release(again, delay_s=100.0, missing_model="b")] * 2) == [
        SettleStatus.DONE,
        SettleStatus.LOST,
    ]
    assert await queue.count_waiting_by_model() == {"b": 1}
    assert (await queue.count_requests()).delayed == 0


async def test_a_copy_asks_for_its_model_anew(world: World) -> None:
    await put_off(world, "a")
    far = world.take_snapshot("batch:{qwen}:other")
    assert await far.desk.restore_requests("there", await awaiting(world)) == 1
    assert await far.desk.count_waiting_by_model() == {}
    (copied,) = (await far.desk.list_requests(RequestLocation.RETURNED, 9)).requests
    assert (copied.reason, copied.deliveries) == (WHY, 0)
    assert await world.desk.count_waiting_by_model() == {"a": 1}, "and nothing of the other line has changed"


async def test_more_models_than_one_look_tells_of_are_told_of_in_turns(world: World) -> None:
    queue = world.owner()
    models = [f"m-{number:04}" for number in range(1200)]
    for at in range(0, 1200, 100):
        await put_off(world, *models[at : at + 100], queue=queue, scores=range(NOW + at, NOW + at + 100))
    told: set[str] = set()
    for _ in range(100):
        some = await queue.count_waiting_by_model()
        assert len(some) == 1000
        assert set(some.values()) == {1}
        told |= set(some)
    assert told == set(models)
