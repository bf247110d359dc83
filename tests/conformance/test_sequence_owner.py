"""Only the producer that began a sequence can use it, and a cancel ends all requests that were submitted
before it, whether they were claimed or not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.features.sequences.decisions import (
    SequenceCounters,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import SequenceStatus
from dispatcher.queue.contract import Queue, SettleStatus
from dispatcher.wire_format import ErrorCode
from tests.conformance.sequence_steps import (
    LATER,
    TERMS,
    answer_remaining_requests,
    claim_and_take_turns,
    claim_next_turn,
    finish_request,
    get_request_id,
    get_snapshot,
    get_turn,
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


def make_request_of(
    name: str, *, secret: str = "", results: str = "", created: int | None = None, of: str = "s", **turn: Any
) -> bytes:
    """Return a request of a sequence by a producer with this secret and this result list."""
    reply = {"id": of, **({"secret": secret} if secret else {}), **turn}
    data = {"id": name, "deadline": LATER, "payload": {}, "sequence": reply}
    data |= {} if created is None else {"created": created}
    internal = {"result_queue_name": results} if results else {}
    return json.dumps({"internal": internal, "request_kind": "redis", "data": data}).encode()


async def submit_request_of(world: World, *members: bytes) -> None:
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
async def test_request_for_the_sequence_of_another_producer_is_rejected_without_details(
    world: World, mine: dict[str, Any], theirs: dict[str, Any], turn: dict[str, Any]
) -> None:
    queue = world.owner()
    await submit_request_of(world, make_request_of("mine-0", index=0, **mine))
    await finish_request(queue, await claim_next_turn(queue), **LEFT)
    before = await get_snapshot(world)
    await submit_request_of(world, make_request_of("theirs", carry="messages", **turn, **theirs))
    left, decisions = await claim_and_take_turns(queue)
    assert decisions == {"theirs": DENIED}
    assert await get_snapshot(world) == before
    await submit_request_of(world, make_request_of("mine-1", index=1, **mine))
    found = (await claim_and_take_turns(queue))[1]["mine-1"]
    assert found == TurnGranted(1, "server-1", CARRY, is_first=False), (
        "as if no other producer had sent requests"
    )
    assert list(left) == ["theirs"], "it keeps its lease, because it is to be answered"


async def test_other_producers_learn_nothing_of_an_ended_sequence_and_do_not_extend_it(world: World) -> None:
    queue = world.owner()
    await submit_request_of(world, make_request_of("mine-0", secret=SECRET, on_error="abort"))
    await finish_request(queue, await claim_next_turn(queue), has_failed=True, cause="in confidence")
    await world.age_sequences(TERMS.max_idle_s - 1)
    for name, reset in (("theirs", False), ("reset", True)):
        await submit_request_of(world, make_request_of(name, secret=OTHER, reset=reset))
        assert (await claim_and_take_turns(queue))[1] == {name: DENIED}
    await world.age_sequences(2)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None


async def test_unleased_end_of_another_producers_request_does_not_change_the_sequence(world: World) -> None:
    """Otherwise the request could abort the sequence, or mark its index as passed."""
    queue = world.owner()
    await submit_request_of(world, make_request_of("mine-0", index=0, secret=SECRET))
    await finish_request(queue, await claim_next_turn(queue), **LEFT)
    before = await get_snapshot(world)
    await submit_request_of(world, make_request_of("theirs", index=1, on_error="abort", secret=OTHER))
    (lease,) = await claim(queue)
    end = TurnEnd(get_turn(lease), has_failed=True, cause="cancelled")
    assert await queue.settle([answer(lease).copy_with(extra=end)]) == [SettleStatus.DONE]
    assert await get_snapshot(world) == before


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
async def test_producer_with_the_secret_or_the_result_list_continues_the_sequence(
    world: World, first: dict[str, Any], second: dict[str, Any]
) -> None:
    queue = world.owner()
    await submit_request_of(world, make_request_of("r-0", index=0, **first))
    await finish_request(queue, await claim_next_turn(queue), **LEFT)
    await submit_request_of(world, make_request_of("r-1", index=1, **second))
    assert (await claim_and_take_turns(queue))[1] == {
        "r-1": TurnGranted(1, "server-1", CARRY, is_first=False)
    }


async def test_first_producer_owns_an_id_until_the_sequence_is_forgotten(
    world: World,
) -> None:
    queue = world.owner()
    await submit_request_of(world, make_request_of("squatter", secret=OTHER))
    await finish_request(queue, await claim_next_turn(queue), **LEFT)
    await submit_request_of(world, make_request_of("mine", secret=SECRET))
    assert (await claim_and_take_turns(queue))[1] == {"mine": DENIED}
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    await submit_request_of(world, make_request_of("mine again", secret=SECRET))
    assert (await claim_and_take_turns(queue))[1] == {"mine again": TurnGranted(0, "", b"", is_first=True)}
    await submit_request_of(world, make_request_of("squatter again", secret=OTHER))
    assert (await claim_and_take_turns(queue))[1] == {"squatter again": DENIED}


async def test_owner_stays_the_owner_after_resets_and_the_end_of_a_run(world: World) -> None:
    queue = world.owner()
    await submit_request_of(
        world,
        make_request_of("r-0", index=0, last=True, secret=SECRET),
        make_request_of("r-1", index=1, secret=SECRET),
    )
    first = await claim_next_turn(queue)
    await submit_request_of(world, make_request_of("reset", reset=True, secret=SECRET))
    await claim_and_take_turns(queue)
    await finish_request(queue, first)
    await finish_request(queue, await claim_next_turn(queue))
    assert get_request_id(await claim_next_turn(queue)) == "reset"
    await submit_request_of(world, make_request_of("theirs", secret=OTHER))
    assert (await claim_and_take_turns(queue))[1] == {"theirs": DENIED}


# A cancel ends claimed and unclaimed requests.


async def claim_before_cancel(queue: Queue, how_many: int) -> dict[str, Any]:
    return (await claim_and_take_turns(queue, max_count=how_many))[0] if how_many else {}


@pytest.mark.parametrize("claimed", [0, 1, 4], ids=["none claimed", "one claimed", "all claimed"])
async def test_cancel_covers_earlier_requests_and_later_ones_run(world: World, claimed: int) -> None:
    queue = world.owner()
    await submit_request_of(world, *(make_request_of(f"r-{n}", index=n, created=NOW - 60) for n in range(4)))
    running = await claim_before_cancel(queue, claimed)
    await submit_request_of(world, make_request_of("later", index=0, created=NOW + 300_000))
    assert await open_sequences(world.queue_admin).cancel_sequence("s") is bool(claimed)
    ended = dict.fromkeys(running, "CANCELLED")  # by its token
    for lease in running.values():
        await finish_request(queue, lease, has_failed=True, cause="CANCELLED: cancelled")
    ended |= await answer_remaining_requests(queue)
    left, decisions = await claim_and_take_turns(queue)
    ended |= {name: one.code for name, one in decisions.items() if isinstance(one, TurnRejected)}
    assert ended == {f"r-{n}": "CANCELLED" for n in range(4)}
    assert decisions["later"] == TurnGranted(0, "", b"", is_first=True)
    assert (await get_snapshot(world)).status is SequenceStatus.OPEN
    await finish_request(queue, left["later"])


async def test_request_that_ends_unleased_after_a_cancel_does_not_change_the_sequence(world: World) -> None:
    """The client cancels each request by its own token as well, so that it may end in this way."""
    queue = world.owner()
    await submit_request_of(world, make_request_of("other", of="other"))
    await claim_next_turn(queue)
    await submit_request_of(world, *(make_request_of(f"r-{n}", index=n, created=NOW - 60) for n in range(4)))
    await open_sequences(world.queue_admin).cancel_sequence("s")
    for lease in await claim(queue):
        end = TurnEnd(get_turn(lease), has_failed=True, cause="CANCELLED: cancelled")
        await queue.settle([answer(lease).copy_with(extra=end)])
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
    await submit_request_of(world, make_request_of("later", index=0, created=NOW + 300_000))
    assert (await claim_and_take_turns(queue))[1] == {"later": TurnGranted(0, "", b"", is_first=True)}


async def test_cancel_with_a_time_applies_until_then_and_an_earlier_one_revokes_nothing(
    world: World,
) -> None:
    queue = world.owner()
    await open_sequences(world.queue_admin).cancel_sequence("s", NOW - 100.5)
    await open_sequences(world.queue_admin).cancel_sequence("s", NOW - 200)
    await submit_request_of(
        world, make_request_of("before", created=NOW - 101), make_request_of("after", created=NOW - 100)
    )
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"before": CANCELLED, "after": TurnGranted(0, "", b"", is_first=True)}


async def test_undated_request_is_cancelled_until_the_sequence_is_forgotten(
    world: World,
) -> None:
    queue = world.owner()
    await open_sequences(world.queue_admin).cancel_sequence("s")
    await submit_request_of(world, make_request_of("undated"), make_request_of("before", created=NOW - 60))
    assert (await claim_and_take_turns(queue))[1] == {"undated": UNDATED, "before": CANCELLED}
    assert await open_sequences(world.queue_admin).forget_sequence("s") is True
    await submit_request_of(
        world, make_request_of("before again", created=NOW - 60), make_request_of("undated again")
    )
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"before again": CANCELLED, "undated again": TurnGranted(0, "", b"", is_first=True)}
    await open_sequences(world.queue_admin).cancel_sequence("s")
    await submit_request_of(world, make_request_of("third"))
    assert (await claim_and_take_turns(queue))[1] == {"third": UNDATED}, "another cancel applies again"


async def test_other_producers_do_not_learn_of_a_cancel(world: World) -> None:
    queue = world.owner()
    await submit_request_of(world, make_request_of("runs", secret=SECRET, created=NOW - 60))
    await claim_next_turn(queue)
    await open_sequences(world.queue_admin).cancel_sequence("s")
    await submit_request_of(world, make_request_of("theirs", secret=OTHER, created=NOW - 60))
    assert (await claim_and_take_turns(queue))[1] == {"theirs": DENIED}


async def test_cancel_before_the_first_claim_ends_a_sequence_if_later_requests_are_rejected(
    world: World,
) -> None:
    queue, terms = world.owner(), replace(TERMS, refuse_after_end=True)
    await submit_request_of(world, make_request_of("other", of="other"))
    await claim_and_take_turns(queue, terms)
    await submit_request_of(world, make_request_of("before", created=NOW - 60))
    assert not await open_sequences(world.queue_admin).cancel_sequence("s")
    await submit_request_of(world, make_request_of("later", created=NOW + 300_000))
    _, decisions = await claim_and_take_turns(queue, terms)
    ended = TurnRejected(ErrorCode.SEQUENCE_ENDED, "the sequence was cancelled")
    assert decisions == {"before": CANCELLED, "later": ended}


@pytest.mark.parametrize("others", [False, True], ids=["the first sequence of all", "with others"])
async def test_sequence_can_be_aborted_before_its_first_claim(world: World, others: bool) -> None:
    queue = world.owner()
    if others:
        await submit_request_of(world, make_request_of("other", of="other"))
        await claim_and_take_turns(queue)
    await submit_request_of(world, make_request_of("r-0", index=0), make_request_of("r-1", index=1))
    assert await open_sequences(world.queue_admin).abort_sequence("s", "wrong model")
    assert not await open_sequences(world.queue_admin).abort_sequence("s", "wrong model")
    await queue.sweep()
    found = await get_snapshot(world)
    assert (found.status, found.cause) == (SequenceStatus.ABORTED, "wrong model")
    aborted = TurnRejected(ErrorCode.SEQUENCE_ABORTED, "wrong model")
    assert (await claim_and_take_turns(queue))[1] == {"r-0": aborted, "r-1": aborted}
    assert (await queue.count_requests()).of(SequenceCounters).aborted == 1
    assert await open_sequences(world.queue_admin).forget_sequence("s")
    await submit_request_of(world, make_request_of("anew", index=0))
    assert isinstance((await claim_and_take_turns(queue))[1]["anew"], TurnGranted)


async def test_sequence_aborted_before_its_first_claim_can_be_forgotten(world: World) -> None:
    queue = world.owner()
    assert await open_sequences(world.queue_admin).abort_sequence("s", "wrong model")
    await submit_request_of(world, make_request_of("other", of="other"), make_request_of("waits", of="other"))
    assert isinstance((await claim_and_take_turns(queue))[1]["waits"], TurnWaits)
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
