"""Rules of sequences (features/sequences/README.md) in cases that are rare."""

from __future__ import annotations

from dataclasses import replace

from dispatcher.features.sequences.decisions import (
    SequenceCounters,
    SequenceOverride,
    SequenceTerms,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import SequenceStatus, Turn
from dispatcher.queue.contract import Lease, Queue, Settlement
from dispatcher.queue.lua_files import FEATURE_CONSTANTS
from dispatcher.wire_format import ErrorCode
from tests.conformance.sequence_steps import (
    LATER,
    NO_LEASE,
    TERMS,
    answer_remaining_requests,
    claim_and_take_turns,
    claim_next_turn,
    claim_turns_of,
    expire_waiting_request,
    fail_request,
    find_all_overdue,
    finish_request,
    get_request_id,
    get_snapshot,
    get_turn,
    submit_turns,
)
from tests.conformance.worlds import NOW, World, claim, claim_fully, sequences

HOLD = {"index": 0, "on_error": "hold"}
LIMITED = replace(TERMS, max_active=1)


async def claim_in_order(queue: Queue, terms: SequenceTerms = TERMS) -> list[Lease]:
    """Claim requests and ask for their turns, in the order of their indexes. Return all leases."""
    leases = sorted(await claim(queue), key=lambda lease: get_turn(lease).index or 0)
    await claim_turns_of(queue, leases, terms)
    return leases


# Limits.


async def test_one_request_may_run_if_none_may_wait(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=0, max_active=1)
    await submit_turns(world, "r", 1, 0, 1)
    await submit_turns(world, "other", 0, of="other", deadline=LATER + 1)
    _, decisions = await claim_and_take_turns(queue, terms)
    full = TurnRejected(ErrorCode.SEQUENCE_FULL, "0 requests of its sequence wait already")
    assert decisions == {"r-0": full, "r-1": TurnGranted(0, "", b"", True), "r-2": full, "other-0": full}
    assert await open_sequences(world.queue_admin).get_sequence("other") is None


async def test_number_of_waiting_resets_is_limited(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=10_000)
    max_runs = FEATURE_CONSTANTS["MAX_RUNS"]
    await submit_turns(world, "r", 0, *[{"reset": True}] * max_runs)
    _, decisions = await claim_and_take_turns(queue, terms, max_count=2 * max_runs)
    assert [type(decisions[f"r-{at}"]) for at in range(1, max_runs + 1)] == [
        *[TurnWaits] * (max_runs - 1),
        TurnRejected,
    ]


async def test_reset_counts_the_indexes_that_have_passed_as_waiting(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=1)
    await submit_turns(world, "r", 0)
    await submit_turns(world, "old", 2, deadline=NOW - 100)
    leases = await claim_in_order(queue, terms)
    await expire_waiting_request(queue, "old-0")
    await finish_request(queue, leases[0])
    await submit_turns(world, "reset", {"reset": True})
    _, decisions = await claim_and_take_turns(queue, terms)
    assert isinstance(decisions["reset-0"], TurnRejected)
    assert decisions["reset-0"].code is ErrorCode.SEQUENCE_FULL


async def test_parked_sequences_begin_in_limited_numbers_per_step(world: World) -> None:
    queue, at_once = world.owner(), FEATURE_CONSTANTS["MAX_UNPARKED_PER_STEP"]
    for number in range(at_once + 6):
        await submit_turns(world, f"r{number}", 0, of=f"s-{number}")
    left, _ = await claim_and_take_turns(queue, LIMITED, max_count=2 * at_once)
    assert len(left) == 1
    await sequences(queue).claim_turns([], TERMS)
    freed = [(await queue.sweep()).freed_count for _ in range(3)]
    assert freed == [at_once, 5, 0]


async def test_parked_sequence_begins_by_the_best_score_of_its_requests(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "first", {"index": 0, "last": True}, of="first", deadline=LATER - 9)
    running = await claim_next_turn(queue, LIMITED)
    await submit_turns(world, "b", 0, of="b", deadline=LATER + 5)
    await submit_turns(world, "c", 0, of="c", deadline=LATER + 4)
    assert (await claim_and_take_turns(queue, LIMITED))[0] == {}
    await submit_turns(world, "better", 1, of="b", deadline=LATER + 1)
    assert (await claim_and_take_turns(queue, LIMITED))[0] == {}
    await finish_request(queue, running)
    assert get_request_id(await claim_next_turn(queue, LIMITED)) == "b-0"


async def test_request_that_ended_before_its_turn_begins_no_sequence_without_room(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "first", 0, of="first")
    await claim_next_turn(queue, LIMITED)
    await submit_turns(world, "late", 0, of="t", deadline=NOW - 100)
    (late,) = await find_all_overdue(queue, 9)
    end = TurnEnd(Turn("t", 0), has_failed=True, cause="too late")
    assert await queue.settle_unleased([(late, Settlement(NO_LEASE, b'{"id":"late-0"}', "", extra=end))]) == 1
    assert await open_sequences(world.queue_admin).get_sequence("t") is None


# Indexes.


async def test_request_without_an_index_comes_after_all_that_wait(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 5)
    await finish_request(queue, (await claim_in_order(queue))[0])
    await claim_next_turn(queue)
    await submit_turns(world, "more", None)
    await claim_and_take_turns(queue)
    assert [index for index, _ in (await get_snapshot(world)).waiting_requests] == [5, 6]


async def test_request_that_failed_while_it_waited_is_counted_in_its_turn(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await submit_turns(world, "old", {"index": 1, "on_error": "continue"}, deadline=NOW - 100)
    leases = await claim_in_order(queue)
    await expire_waiting_request(queue, "old-0", has_failed=True, cause="too late")
    found = await get_snapshot(world)
    assert (found.ended_count, found.failed_count) == (0, 0)
    await finish_request(queue, leases[0])
    found = await get_snapshot(world)
    assert (found.ended_count, found.failed_count, found.expected_index) == (2, 1, 2)


# Held sequences.


async def test_held_sequence_does_not_end_by_age(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", HOLD, 1)
    await fail_request(queue, await claim_next_turn(queue))
    await world.age_sequences(TERMS.max_age_s + 1)
    await queue.sweep()
    found = await get_snapshot(world)
    assert (found.status, found.cause, found.ended_count) == (SequenceStatus.HELD, "r-0: it broke", 1)
    assert (await queue.count_requests()).of(SequenceCounters).aged == 0


async def test_last_request_that_ended_while_its_sequence_was_held_ends_the_run_after_the_release(
    world: World,
) -> None:
    queue = world.owner()
    await submit_turns(world, "r", HOLD, 2)
    await submit_turns(world, "old", {"index": 1, "last": True}, deadline=NOW - 100)
    leases = await claim_in_order(queue)
    await expire_waiting_request(queue, "old-0")
    await fail_request(queue, leases[0])
    assert (await get_snapshot(world)).expected_index == 1
    assert await open_sequences(world.queue_admin).release_sequence("s")
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"r-1": TurnGranted(2, "", b"", True)}, "a new run"


async def test_released_sequence_continues_after_an_index_that_passed_meanwhile(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", HOLD)
    await submit_turns(world, "old", 2, deadline=NOW - 100)
    leases = await claim_in_order(queue)
    await submit_turns(world, "reset", {"reset": True})
    await claim_and_take_turns(queue)
    await fail_request(queue, leases[0])
    await expire_waiting_request(queue, "old-0", has_failed=True, cause="too late")
    assert (await claim_fully(queue)).leases == []
    assert await open_sequences(world.queue_admin).release_sequence("s")
    assert get_request_id(await claim_next_turn(queue)) == "reset-0"


# Aborted and cancelled sequences.


async def test_aborted_sequence_is_remembered_as_long_as_requests_arrive(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await fail_request(queue, await claim_next_turn(queue))
    for number in range(3):
        await world.age_sequences(TERMS.max_idle_s - 100)
        await queue.sweep()
        await submit_turns(world, f"late{number}", 1)
        _, decisions = await claim_and_take_turns(queue)
        assert decisions == {f"late{number}-0": TurnRejected(ErrorCode.SEQUENCE_ABORTED, "r-0: it broke")}
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None


async def test_reset_of_an_aborted_sequence_waits_for_the_request_in_flight(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1)
    running = await claim_next_turn(queue)
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    await submit_turns(world, "reset", {"reset": True})
    assert await claim_and_take_turns(queue) == ({}, {"reset-0": TurnWaits()})
    (again,) = await claim_turns_of(queue, [running])
    assert isinstance(again, TurnGranted), "it may be retried"
    await fail_request(queue, running)
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"reset-0": TurnGranted(0, "", b"", True)}
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ABORTED"}


async def test_request_in_flight_ends_a_sequence_that_was_parked_by_a_reset_and_cancelled(
    world: World,
) -> None:
    queue = world.owner()
    terms = replace(TERMS, overrides=(SequenceOverride("big-*", max_active=1),))
    await submit_turns(world, "busy", 0, of="busy", model="big-1")
    await submit_turns(world, "r", 0, model="small")
    left, _ = await claim_and_take_turns(queue, terms)
    await submit_turns(world, "big", {"reset": True}, model="big-2")
    await claim_and_take_turns(queue, terms)
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    assert (await get_snapshot(world)).status is SequenceStatus.PARKED
    assert await open_sequences(world.queue_admin).cancel_sequence("s")
    await finish_request(queue, left["r-0"])
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
