"""Requests that wait for their model: each promise of the port, in memory, Redis and Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.core.requests.found_request import FoundRequest, Whereabouts
from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.core.sequences.decisions import Goes, SequenceTerms, TurnEnd
from dispatcher.core.sequences.turns import OnError, Turn
from dispatcher.ports import Lease, Queue, Recalled, Release, Settled
from dispatcher.queue.constants import RECALL_MOST
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
        Release(lease, undelivered=True, last_try=WHY, awaits=by_score[lease.score]) for lease in leases
    ]
    assert await queue.release(releases) == [Settled.DONE] * len(models)
    return leases


async def awaiting(world: World) -> list[FoundRequest]:
    return list((await world.desk.lying(Whereabouts.AWAITING, 100)).found)


async def test_no_claim_takes_what_waits_for_its_model_until_it_is_recalled(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "qwen")
    claimed = await full_claim(queue)
    assert (claimed.leases, claimed.waiting, claimed.count.live) == ([], 0, 0)
    assert await world.desk.peek(9) == []
    assert await queue.recall(["qwen"]) == Recalled(1, 0)
    (again,) = await claim(queue)
    assert (again.entry, again.deliveries, again.last_try) == (lease.entry, 1, WHY)
    assert again.lane is None
    assert await queue.settle([answer(again)]) == [Settled.DONE]


async def test_what_waits_for_its_model_is_no_work_to_wake_for(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a")
    await waits(queue, 0.3)  # for a wake-up of before
    assert await waits(queue, 0.6)
    await queue.recall(["a"])
    async with asyncio.timeout(10):
        await queue.wait_for_work()


async def test_what_waits_is_counted_by_model_and_seen_with_its_model(world: World) -> None:
    queue = world.owner()
    assert (await queue.awaited(), await world.desk.awaited()) == ({}, {})
    await put_off(world, "a", "b", "a")
    assert await queue.awaited() == await world.desk.awaited() == {"a": 2, "b": 1}
    assert [(one.awaits, one.reason) for one in await awaiting(world)] == [("a", WHY), ("b", WHY), ("a", WHY)]
    counts = await queue.counts()
    assert (counts.pending, counts.awaiting, counts.leased) == (3, 3, 0)
    first, second, third = await awaiting(world)
    assert [await world.desk.ahead(one) for one in (first, second, third)] == [0, 1, 2]
    await queue.recall(["a"])
    assert await queue.awaited() == {"b": 1}
    assert (await queue.counts()).awaiting == 1
    assert [one.awaits for one in await awaiting(world)] == ["b"]
    (returned, _) = (await world.desk.lying(Whereabouts.RETURNED, 9)).found
    assert returned.awaits == ""


async def test_what_comes_back_is_claimed_at_its_old_place(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", "b", scores=[NOW + 20.0, NOW + 10.0])
    for at in (NOW + 5, NOW + 15, NOW + 25):
        await world.zadd(at, member(f"other-{at}"))
    assert [lease.score - NOW for lease in await claim(queue, 1)] == [5]
    await queue.recall(["a", "b"])
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
    most = RECALL_MOST
    await put_off(
        world, *(("a", "b")[number % 2] for number in range(most + 50)), scores=range(NOW, NOW + most + 50)
    )
    assert await queue.recall(["b", "a", "b", "nobody's"]) == Recalled(most, 50)
    assert [lease.score - NOW for lease in await claim(queue, 999)] == list(range(most))
    assert await queue.recall(["a"]) == Recalled(25, 0)
    assert await queue.recall(["a", "b"]) == Recalled(25, 0)
    assert await queue.recall(["a", "b"]) == Recalled(0, 0)
    assert await queue.recall([]) == Recalled(0, 0)


async def test_whatever_the_score_is_the_best_comes_back_first(world: World) -> None:
    """Of the first page nothing but the worst score is missing."""
    queue = world.owner()
    filler = [2e12 + number for number in range(RECALL_MOST - len(SCORES) + 1)]
    scores = [*SCORES[::-1], *filler]
    await put_off(world, *["m"] * len(scores), scores=scores)
    assert await queue.recall(["m"]) == Recalled(RECALL_MOST, 1)
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
    "x" * MODEL_BYTES,
]


async def test_no_name_reaches_what_waits_for_another(world: World) -> None:
    queue = world.owner()
    await put_off(world, *NAMES)
    assert await queue.awaited() == dict.fromkeys(NAMES, 1)
    for at, name in enumerate(NAMES):
        assert await queue.recall([name]) == Recalled(1, 0)
        assert name not in await queue.awaited()
        assert len(await awaiting(world)) == len(NAMES) - at - 1


@pytest.mark.parametrize("name", ["y" * 300, "ü" * 200, "a\ud800b"])
async def test_a_name_that_no_queue_takes_is_cut_and_found_again(world: World, name: str) -> None:
    queue = world.owner()
    await put_off(world, name)
    (told,) = await queue.awaited()
    assert len(told.encode()) <= MODEL_BYTES
    assert await queue.recall([told]) == Recalled(1, 0)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, awaits=name)])
    assert await queue.recall([name]) == Recalled(1, 0)


async def test_several_may_recall_at_once_and_each_request_comes_back_once(world: World) -> None:
    owners = [world.owner(f"owner-{number}") for number in range(3)]
    leases = await put_off(world, *["a"] * 30)
    told = [await owner.recall(["a"]) for owner in owners]
    assert [each.moved for each in told] == [30, 0, 0]
    claimed = [lease.entry for owner in owners for lease in await claim(owner, 10)]
    assert sorted(claimed) == sorted(lease.entry for lease in leases)


async def test_its_deadline_ends_what_waits_and_says_why(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", "a", scores=[NOW - 5.0, NOW + 1000.0])
    (late,) = await queue.expired(9)
    assert late.last_try == WHY
    assert await queue.expire([(late, answer(_nobodys(), b"too late"))]) == 1
    assert await world.results() == [b"too late"]
    assert await queue.awaited() == {"a": 1}
    assert await queue.expire([(late, answer(_nobodys(), b"again"))]) == 0
    assert await queue.recall(["a"]) == Recalled(1, 0)
    assert await queue.awaited() == {}


async def test_what_was_found_late_and_came_back_meanwhile_is_not_ended(world: World) -> None:
    queue = world.owner()
    await put_off(world, "a", scores=[NOW - 5.0])
    (late,) = await queue.expired(9)
    await queue.recall(["a"])
    assert await queue.expire([(late, answer(_nobodys(), b"too late"))]) == 0
    assert len(await claim(queue)) == 1


def _nobodys() -> Lease:
    return Lease(0, "", b"", 0, 0, 0, 0, 0)


async def test_what_is_cancelled_comes_back_to_be_answered(world: World) -> None:
    queue = world.owner()
    leases = await put_off(world, "a", "a", "b")
    ids = [f"r-{number}-{lease.score}" for number, lease in enumerate(leases)]
    assert (await queue.sweep()).revoked == 0
    assert await world.desk.cancel(ids[1], "t-1", found=True)
    await world.set_key(f"{QUEUE}:cancel:{ids[2]}:t-2", "another's")
    assert (await queue.sweep()).revoked == 1
    assert await queue.awaited() == {"a": 1, "b": 1}
    (back,) = await claim(queue)
    assert back.entry == leases[1].entry
    assert await queue.cancelled([(ids[1], "t-1")]) == [True]
    assert (await queue.sweep()).revoked == 0


async def test_who_holds_no_member_any_more_says_what_cancels_it(world: World) -> None:
    queue = world.owner()
    for number in range(2):
        await world.zadd(NOW + 1000 + number, member(f"r-{number}", token="t"))
    told, untold = (lease.but(member=b"") for lease in await claim(queue))
    named = Release(told, awaits="a", request_id="r-0", request_token="t")
    await queue.release([named, Release(untold, awaits="a")])
    for number in range(2):
        assert await world.desk.cancel(f"r-{number}", "t", found=True)
    assert (await queue.sweep()).revoked == 1
    assert [one.entry for one in await claim(queue)] == [told.entry]
    assert await queue.recall(["a"]) == Recalled(1, 0)


async def test_llm_ds_marker_cancels_it_too(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "a")
    await world.set_key(f"request-cancel:r-0-{lease.score}", "t-0")
    assert (await queue.sweep()).revoked == 1
    assert [one.entry for one in await claim(queue)] == [lease.entry]


async def test_the_sweep_looks_at_all_that_wait_in_some_rounds(world: World) -> None:
    queue = world.owner()
    leases: list[Lease] = []
    for at in (0.0, 1000.0):
        models = [f"m-{number % 7}" for number in range(600)]
        leases += await put_off(world, *models, scores=[NOW + at + number for number in range(600)])
    assert (await queue.sweep()).revoked == 0
    doomed = [0, 500, 1199]
    for number in doomed:
        request_id = f"r-{number % 600}-{leases[number].score}"
        assert await world.desk.cancel(request_id, f"t-{number % 600}", found=True)
    assert sum([(await queue.sweep()).revoked for _ in range(6)]) == 3
    assert [one.entry for one in await claim(queue)] == [leases[number].entry for number in doomed]
    while (await queue.recall([f"m-{number}" for number in range(7)])).left:
        pass
    for _ in range(2):
        await queue.sweep()
    assert await queue.awaited() == {}


async def test_a_suspect_that_waits_for_its_model_is_one_again_when_that_comes(world: World) -> None:
    queue = world.owner()
    await world.zadd(NOW + 1000, member("r-1"))
    for _ in range(2):
        (lease,) = await claim(queue)
        await world.lose(queue, lease)
    (lease,) = await claim(queue)
    await queue.release([Release(lease, undelivered=True, awaits="a")])
    (one,) = await awaiting(world)
    assert (one.awaits, one.deaths) == ("a", 2)
    await queue.recall(["a"])
    assert await claim(queue, suspects=0) == []
    (suspect,) = (await world.desk.lying(Whereabouts.SUSPECT, 9)).found
    assert suspect.entry == lease.entry


async def test_the_head_of_a_sequence_keeps_its_turn_while_it_waits(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms()
    for number in range(2):
        await world.zadd(NOW + 1000 + number, member(f"r-{number}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await queue.line_up(turns, terms)
    head, second = (lease for lease, _ in turns)
    await queue.release([Release(head, undelivered=True, awaits="a")])
    await queue.sweep()
    assert await claim(queue) == []
    seen = await world.desk.sequence("s")
    assert seen is not None
    assert (seen.head, seen.waiting) == (head.entry, 1)
    await queue.recall(["a"])
    (again,) = await claim(queue)
    (said,) = (await queue.line_up([(again, Turn("s"))], terms)).verdicts
    assert (again.entry, said) == (head.entry, Goes(0, "", b"", True))
    await queue.settle([answer(again)])
    assert [one.entry for one in await claim(queue)] == [second.entry]


async def test_the_deadline_of_a_head_that_waits_lets_the_next_one_go(world: World) -> None:
    queue, terms = world.owner(), SequenceTerms(on_error=OnError.CONTINUE)
    for score in (NOW - 5, NOW + 1000):
        await world.zadd(score, member(f"r-{score}"))
    turns = [(lease, Turn("s")) for lease in await claim(queue)]
    await queue.line_up(turns, terms)
    await queue.release([Release(turns[0][0], undelivered=True, awaits="a")])
    (late,) = await queue.expired(9)
    ended = answer(_nobodys(), b"late", turn=TurnEnd(Turn("s"), failed=True))
    assert await queue.expire([(late, ended)]) == 1
    assert [one.entry for one in await claim(queue)] == [turns[1][0].entry]
    assert await queue.awaited() == {}


async def test_a_release_of_a_lease_that_has_ended_puts_nothing_into_the_lane(world: World) -> None:
    queue = world.owner()
    (lease,) = await put_off(world, "a")
    assert await queue.release([Release(lease, awaits="b")]) == [Settled.LOST]
    assert await queue.awaited() == {"a": 1}
    await queue.recall(["a"])
    (again,) = await claim(queue)
    assert await queue.release([Release(again, delay_s=100.0, awaits="b")] * 2) == [
        Settled.DONE,
        Settled.LOST,
    ]
    assert await queue.awaited() == {"b": 1}
    assert (await queue.counts()).delayed == 0


async def test_a_copy_asks_for_its_model_anew(world: World) -> None:
    await put_off(world, "a")
    far = world.line("batch:{qwen}:other")
    assert await far.desk.restore("there", await awaiting(world)) == 1
    assert await far.desk.awaited() == {}
    (copied,) = (await far.desk.lying(Whereabouts.RETURNED, 9)).found
    assert (copied.reason, copied.deliveries) == (WHY, 0)
    assert await world.desk.awaited() == {"a": 1}, "and nothing of the other line has changed"


async def test_more_models_than_one_look_tells_of_are_told_of_in_turns(world: World) -> None:
    queue = world.owner()
    models = [f"m-{number:04}" for number in range(1200)]
    for at in range(0, 1200, 100):
        await put_off(world, *models[at : at + 100], queue=queue, scores=range(NOW + at, NOW + at + 100))
    told: set[str] = set()
    for _ in range(100):
        some = await queue.awaited()
        assert len(some) == 1000
        assert set(some.values()) == {1}
        told |= set(some)
    assert told == set(models)
