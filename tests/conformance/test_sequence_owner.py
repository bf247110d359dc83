"""Only the producer that began a sequence can use it, and a cancel ends all requests that were submitted
before it, whether they were claimed or not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import TurnEnd, TurnGranted, TurnRejected, TurnWaits
from dispatcher.core.sequences.turns import SequenceStatus
from dispatcher.ports import Queue, SettleStatus
from tests.conformance.turns import (
    LATER,
    TERMS,
    done,
    goes,
    name_of,
    seen,
    serve_unserved,
    take,
    turn_of,
)
from tests.conformance.worlds import NOW, RESULTS, World, answer, claim

SECRET, OTHER = "a secret of 128 bits", "another secret, guessed"
DENIED = TurnRejected(ErrorCode.SEQUENCE_DENIED, "its sequence belongs to another producer")
CANCELLED = TurnRejected(ErrorCode.CANCELLED, "the sequence was cancelled")
UNDATED = replace(
    CANCELLED,
    why=f"{CANCELLED.why}, and the request has no data.created that proves that it came later",
)
CARRY = b'[{"role":"user","content":"in confidence"}]'
LEFT: dict[str, Any] = {"sticky_token": "server-1", "conversation": CARRY}
"""State that a turn leaves to the next one."""


def asked(
    name: str, *, secret: str = "", results: str = "", created: int | None = None, of: str = "s", **turn: Any
) -> bytes:
    """Return a request of a sequence by a producer with this secret and this result list."""
    told = {"id": of, **({"secret": secret} if secret else {}), **turn}
    data = {"id": name, "deadline": LATER, "payload": {}, "sequence": told}
    data |= {} if created is None else {"created": created}
    internal = {"result_queue_name": results} if results else {}
    return json.dumps({"internal": internal, "request_kind": "redis", "data": data}).encode()


async def put(world: World, *members: bytes) -> None:
    for at, each in enumerate(members):
        await world.zadd(LATER + at * 1e-3, each)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"secret": SECRET}, {"secret": OTHER}),
        ({"secret": SECRET}, {}),
        ({"secret": SECRET, "results": "batch-results:alice:1"}, {"results": "batch-results:alice:1"}),
        ({"results": "batch-results:alice:1"}, {"results": "batch-results:bob:1"}),
        ({"results": "batch-results:alice:1"}, {"secret": "batch-results:alice:1"}),
        ({"results": "batch-results:alice:1"}, {}),
        ({}, {"secret": RESULTS}),
    ],
    ids=["secret", "no secret", "list known", "list", "list as secret", "default list", "default as secret"],
)
@pytest.mark.parametrize(
    "turn",
    [{"index": 1}, {}, {"index": 0}, {"index": 7}, {"reset": True}, {"last": True, "on_error": "hold"}],
    ids=["next", "behind", "passed", "ahead", "reset", "last"],
)
async def test_a_sequence_of_another_producer_is_refused_without_a_word_of_it(
    world: World, mine: dict[str, Any], theirs: dict[str, Any], turn: dict[str, Any]
) -> None:
    queue = world.owner()
    await put(world, asked("mine-0", index=0, **mine))
    await done(queue, await goes(queue), **LEFT)
    before = await seen(world)
    await put(world, asked("theirs", carry="messages", **turn, **theirs))
    left, said = await take(queue)
    assert said == {"theirs": DENIED}
    assert await seen(world) == before
    await put(world, asked("mine-1", index=1, **mine))
    found = (await take(queue))[1]["mine-1"]
    assert found == TurnGranted(1, "server-1", CARRY, is_first=False), "as if nobody else had come"
    assert list(left) == ["theirs"], "it keeps its lease, to be answered"


async def test_others_learn_nothing_of_a_sequence_that_is_over_and_do_not_keep_it_alive(world: World) -> None:
    queue = world.owner()
    await put(world, asked("mine-0", secret=SECRET, on_error="abort"))
    await done(queue, await goes(queue), has_failed=True, cause="in confidence")
    await world.age_sequences(TERMS.max_idle_s - 1)
    for name, reset in (("theirs", False), ("reset", True)):
        await put(world, asked(name, secret=OTHER, reset=reset))
        assert (await take(queue))[1] == {name: DENIED}
    await world.age_sequences(2)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is None


async def test_a_request_of_another_producer_that_ends_before_its_turn_leaves_no_trace(world: World) -> None:
    """Otherwise it could abort the sequence, or mark its index as passed."""
    queue = world.owner()
    await put(world, asked("mine-0", index=0, secret=SECRET))
    await done(queue, await goes(queue), **LEFT)
    before = await seen(world)
    await put(world, asked("theirs", index=1, on_error="abort", secret=OTHER))
    (lease,) = await claim(queue)
    end = TurnEnd(turn_of(lease), has_failed=True, cause="cancelled")
    assert await queue.settle([answer(lease).copy_with(turn_end=end)]) == [SettleStatus.DONE]
    assert await seen(world) == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"secret": SECRET, "results": "batch-results:a"}, {"secret": SECRET, "results": "batch-results:b"}),
        ({"results": "batch-results:a"}, {"results": "batch-results:a"}),
        ({}, {"results": RESULTS}),
        ({"results": RESULTS}, {}),
    ],
    ids=["two lists and a secret", "one list", "default list named", "default list not named"],
)
async def test_whoever_has_the_secret_or_the_list_goes_on(
    world: World, first: dict[str, Any], second: dict[str, Any]
) -> None:
    queue = world.owner()
    await put(world, asked("r-0", index=0, **first))
    await done(queue, await goes(queue), **LEFT)
    await put(world, asked("r-1", index=1, **second))
    assert (await take(queue))[1] == {"r-1": TurnGranted(1, "server-1", CARRY, is_first=False)}


async def test_who_takes_an_id_first_keeps_others_out_until_it_is_forgotten_and_leaves_them_nothing(
    world: World,
) -> None:
    queue = world.owner()
    await put(world, asked("squatter", secret=OTHER))
    await done(queue, await goes(queue), **LEFT)
    await put(world, asked("mine", secret=SECRET))
    assert (await take(queue))[1] == {"mine": DENIED}
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    await put(world, asked("mine again", secret=SECRET))
    assert (await take(queue))[1] == {"mine again": TurnGranted(0, "", b"", is_first=True)}
    await put(world, asked("squatter again", secret=OTHER))
    assert (await take(queue))[1] == {"squatter again": DENIED}


async def test_the_owner_stays_the_owner_over_resets_and_the_end_of_a_life(world: World) -> None:
    queue = world.owner()
    await put(world, asked("r-0", index=0, last=True, secret=SECRET), asked("r-1", index=1, secret=SECRET))
    first = await goes(queue)
    await put(world, asked("reset", reset=True, secret=SECRET))
    await take(queue)
    await done(queue, first)
    await done(queue, await goes(queue))
    assert name_of(await goes(queue)) == "reset"
    await put(world, asked("theirs", secret=OTHER))
    assert (await take(queue))[1] == {"theirs": DENIED}


# A cancel ends requests whether they were claimed or not.


async def claimed_before(queue: Queue, how_many: int) -> dict[str, Any]:
    return (await take(queue, most=how_many))[0] if how_many else {}


@pytest.mark.parametrize("claimed", [0, 1, 4], ids=["none claimed", "one claimed", "all claimed"])
async def test_what_was_submitted_before_a_cancel_is_cancelled_and_what_comes_later_runs(
    world: World, claimed: int
) -> None:
    queue = world.owner()
    await put(world, *(asked(f"r-{n}", index=n, created=NOW - 60) for n in range(4)))
    running = await claimed_before(queue, claimed)
    await put(world, asked("later", index=0, created=NOW + 3000))
    assert await world.desk.cancel_sequence("s") is bool(claimed)
    ended = dict.fromkeys(running, "CANCELLED")  # by its token
    for lease in running.values():
        await done(queue, lease, has_failed=True, cause="CANCELLED: cancelled")
    ended |= await serve_unserved(queue)
    left, said = await take(queue)
    ended |= {name: one.code for name, one in said.items() if isinstance(one, TurnRejected)}
    assert ended == {f"r-{n}": "CANCELLED" for n in range(4)}
    assert said["later"] == TurnGranted(0, "", b"", is_first=True)
    assert (await seen(world)).status is SequenceStatus.OPEN
    await done(queue, left["later"])


async def test_a_request_that_ends_after_a_cancel_and_before_its_turn_leaves_no_trace(world: World) -> None:
    """The client cancels each request by its own token as well, so that it may end in this way."""
    queue = world.owner()
    await put(world, asked("other", of="other"))
    await goes(queue)
    await put(world, *(asked(f"r-{n}", index=n, created=NOW - 60) for n in range(4)))
    await world.desk.cancel_sequence("s")
    for lease in await claim(queue):
        end = TurnEnd(turn_of(lease), has_failed=True, cause="CANCELLED: cancelled")
        await queue.settle([answer(lease).copy_with(turn_end=end)])
    assert await world.desk.get_sequence("s") is None
    await put(world, asked("later", index=0, created=NOW + 3000))
    assert (await take(queue))[1] == {"later": TurnGranted(0, "", b"", is_first=True)}


async def test_a_cancel_of_a_given_moment_counts_from_then_and_an_earlier_one_takes_nothing_back(
    world: World,
) -> None:
    queue = world.owner()
    await world.desk.cancel_sequence("s", NOW - 100.5)
    await world.desk.cancel_sequence("s", NOW - 200)
    await put(world, asked("before", created=NOW - 101), asked("after", created=NOW - 100))
    _, said = await take(queue)
    assert said == {"before": CANCELLED, "after": TurnGranted(0, "", b"", is_first=True)}


async def test_one_that_does_not_say_when_it_was_submitted_is_cancelled_until_the_sequence_is_forgotten(
    world: World,
) -> None:
    queue = world.owner()
    await world.desk.cancel_sequence("s")
    await put(world, asked("undated"), asked("before", created=NOW - 60))
    assert (await take(queue))[1] == {"undated": UNDATED, "before": CANCELLED}
    assert await world.desk.forget_sequence("s") is True
    await put(world, asked("before again", created=NOW - 60), asked("undated again"))
    _, said = await take(queue)
    assert said == {"before again": CANCELLED, "undated again": TurnGranted(0, "", b"", is_first=True)}
    await world.desk.cancel_sequence("s")
    await put(world, asked("third"))
    assert (await take(queue))[1] == {"third": UNDATED}, "a further cancel counts anew"


async def test_other_producers_are_not_told_of_a_cancel(world: World) -> None:
    queue = world.owner()
    await put(world, asked("runs", secret=SECRET, created=NOW - 60))
    await goes(queue)
    await world.desk.cancel_sequence("s")
    await put(world, asked("theirs", secret=OTHER, created=NOW - 60))
    assert (await take(queue))[1] == {"theirs": DENIED}


async def test_a_cancel_before_the_first_claim_ends_a_sequence_where_what_comes_after_the_end_is_refused(
    world: World,
) -> None:
    queue, terms = world.owner(), replace(TERMS, refuse_after_end=True)
    await put(world, asked("other", of="other"))
    await take(queue, terms)
    await put(world, asked("before", created=NOW - 60))
    assert not await world.desk.cancel_sequence("s")
    await put(world, asked("later", created=NOW + 3000))
    _, said = await take(queue, terms)
    ended = TurnRejected(ErrorCode.SEQUENCE_ENDED, "the sequence was cancelled")
    assert said == {"before": CANCELLED, "later": ended}


@pytest.mark.parametrize("others", [False, True], ids=["the first sequence of all", "with others"])
async def test_an_abort_before_the_first_claim_is_one_all_the_same(world: World, others: bool) -> None:
    queue = world.owner()
    if others:
        await put(world, asked("other", of="other"))
        await take(queue)
    await put(world, asked("r-0", index=0), asked("r-1", index=1))
    assert await world.desk.abort_sequence("s", "wrong model")
    assert not await world.desk.abort_sequence("s", "wrong model")
    await queue.sweep()
    found = await seen(world)
    assert (found.status, found.cause) == (SequenceStatus.ABORTED, "wrong model")
    aborted = TurnRejected(ErrorCode.SEQUENCE_ABORTED, "wrong model")
    assert (await take(queue))[1] == {"r-0": aborted, "r-1": aborted}
    assert (await queue.count_requests()).sequence_counters.aborted == 1
    assert await world.desk.forget_sequence("s")
    await put(world, asked("anew", index=0))
    assert isinstance((await take(queue))[1]["anew"], TurnGranted)


async def test_an_abort_before_the_first_claim_is_forgotten_like_any_other(world: World) -> None:
    queue = world.owner()
    assert await world.desk.abort_sequence("s", "wrong model")
    await put(world, asked("other", of="other"), asked("waits", of="other"))
    assert isinstance((await take(queue))[1]["waits"], TurnWaits)
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is None
