"""Requests of one sequence run in order, one at a time, and each is answered, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from dispatcher.features.sequences.decisions import (
    OverrideCounts,
    SequenceCounters,
    SequenceCounts,
    SequenceOverride,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import LANE, OnError, SequenceSnapshot, SequenceStatus, Turn
from dispatcher.queue.contract import (
    DeadLetter,
    EndAndClaimResult,
    Lease,
    Overload,
    Queue,
    Release,
    Settlement,
    SettleStatus,
)
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
    get_granted_turns,
    get_request_id,
    get_snapshot,
    get_turn,
    submit_turns,
)
from tests.conformance.worlds import NOW, World, answer, claim, claim_fully, member, permit, sequences
from tests.support import wait_until


async def read_codes(world: World) -> list[str]:
    return [msgspec.json.decode(result)["id"] for result in await world.pop_results()]


# Order.


async def test_requests_run_by_index_in_whatever_order_they_arrive(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 2, 0, 3, 1)
    order = []
    for _ in range(4):
        lease = await claim_next_turn(queue)
        order.append(get_request_id(lease))
        assert (await claim_fully(queue)).leases == [], "no other request of it runs meanwhile"
        await finish_request(queue, lease)
    assert order == ["r-1", "r-3", "r-0", "r-2"]
    assert (await queue.count_requests()).pending == 0


async def test_requests_without_an_index_run_in_the_order_of_the_queue(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", None, None, None)
    await submit_turns(world, "later", None, deadline=LATER + 5)
    await submit_turns(world, "other", None, of="t")
    left, decisions = await claim_and_take_turns(queue)
    assert set(left) == {"r-0", "other-0"}, "sequences run side by side"
    assert sum(isinstance(one, TurnWaits) for one in decisions.values()) == 3
    order = []
    lease = left["r-0"]
    for _ in range(4):
        order.append(get_request_id(lease))
        await finish_request(queue, lease)
        if len(order) < 4:
            lease = await claim_next_turn(queue)
    assert order == ["r-0", "r-1", "r-2", "later-0"]


async def test_next_request_is_claimable_in_the_step_that_ends_the_previous_one(world: World) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await submit_turns(world, "r", 0, 1)
    lease = await claim_next_turn(first)
    assert (await claim_fully(second)).leases == []
    await finish_request(first, lease)
    (next_one,) = await claim(second)
    assert get_request_id(next_one) == "r-1"
    assert isinstance((await claim_turns_of(second, [next_one]))[0], TurnGranted)


@pytest.mark.server
async def test_waiting_request_counts_no_delivery_and_no_lease(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    reply = await claim_fully(queue)
    assert reply.lease_counts.live_units == 3
    lined = await sequences(queue).claim_turns([(lease, get_turn(lease)) for lease in reply.leases], TERMS)
    assert lined.lease_counts.live_units == 1
    assert (await queue.count_requests()).pending == 2
    assert (await claim_fully(queue)).claimable_count == 0, "no claim returns them"
    assert [one.location for one in (await world.queue_admin.list_requests(LANE, 9)).requests] == [LANE] * 2
    await finish_request(queue, reply.leases[0])
    lease = await claim_next_turn(queue)
    assert lease.deliveries == 1


@pytest.mark.server
async def test_other_requests_run_while_a_sequence_waits(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    await claim_next_turn(queue)
    await world.zadd(LATER + 100, member("single"))
    (lease,) = await claim(queue)
    assert get_request_id(lease) == "single"
    assert await world.queue_admin.peek_next(9) == []


# Next requests in the same step.


async def settle_and_get_next(
    queue: Queue, leases: Sequence[Lease], limit: int = 1000, nonce: str = "", apart: int = 0, **left: Any
) -> EndAndClaimResult:
    """Settle these leases, and return the requests that are granted next."""
    ends = [
        answer(one, msgspec.json.encode({"id": get_request_id(one)})).copy_with(
            extra=TurnEnd(get_turn(one), **left)
        )
        for one in leases
    ]
    reply = await queue.settle_and_claim_next(
        ends, nonce or f"handing-{leases[0].token}", permit(limit).copy_with(unleased_units=apart)
    )
    assert reply.statuses == [SettleStatus.DONE] * len(leases)
    return reply


async def test_owner_that_settles_a_request_is_granted_the_next_one(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    lease = await claim_next_turn(queue)
    for number in (1, 2):
        reply = await settle_and_get_next(queue, [lease], sticky_token="server-3", conversation=b"so far")
        assert reply.claim_result is not None
        (lease,) = reply.claim_result.leases
        assert get_request_id(lease) == f"r-{number}"
        assert (
            lease.deliveries,
            reply.claim_result.lease_counts.live_units,
            reply.claim_result.claimable_count,
        ) == (1, 1, 0)
        assert get_granted_turns(reply) == [TurnGranted(number, "server-3", b"so far", False)]
        assert await claim_turns_of(queue, [lease]) == get_granted_turns(reply), (
            "it is asked for no more, but may be"
        )
        assert (await claim_fully(queue)).leases == []
    reply = await settle_and_get_next(queue, [lease])
    assert reply.claim_result is not None
    assert (list(reply.claim_result.leases), reply.claim_result.lease_counts.live_units) == ([], 0)
    assert await read_codes(world) == ["r-0", "r-1", "r-2"]


@pytest.mark.parametrize("how", ["limit", "apart", "paused", "refused", "better", "suspect", "nothing"])
async def test_settlement_grants_nothing_that_a_claim_would_not_lease(world: World, how: str) -> None:
    queue, other = world.owner("owner-1"), world.owner("owner-2")
    await submit_turns(world, "r", 0, 1)
    if how == "suspect":
        await submit_turns(world, "died", 0, of="t", deadline=LATER - 9)
        for _ in range(2):
            (died,) = await claim(other, 1)
            await world.lose_leases(queue, died)
    held = await claim(queue, 100, suspects=0)
    await claim_turns_of(queue, held)
    (lease,) = [one for one in held if get_request_id(one) == "r-0"]
    if how == "better":
        await world.zadd(LATER - 5, member("single"))
    if how == "paused":
        await world.queue_admin.pause("me", "why")
    if how == "refused":
        now = asyncio.get_running_loop().time()
        await other.share_state(permit(), Overload(now, now + 100, False, 1))
    limit, apart = 0 if how == "limit" else 1000, 1000 if how == "apart" else 0
    reply = await settle_and_get_next(queue, [lease], limit, apart=apart)
    assert reply.claim_result is not None
    assert [get_request_id(one) for one in reply.claim_result.leases] == (["r-1"] if how == "nothing" else [])
    assert (await queue.count_requests()).leased == (how == "nothing")
    if how != "nothing":
        assert reply.claim_result.claimable_count == (2 if how == "better" else 1)
        if how == "paused":
            await world.queue_admin.resume()
        names = ["r-1"] if how == "refused" else [get_request_id(one) for one in await claim(queue)]
        assert names == {"better": ["single", "r-1"], "suspect": ["died-0", "r-1"]}.get(how, ["r-1"])


async def test_best_requests_are_granted_if_there_is_no_room_for_all(world: World) -> None:
    queue, other = world.owner("owner-1"), world.owner("owner-2")
    for at, name in enumerate("cab"):
        await submit_turns(world, name, 0, 1, of=name, deadline=LATER + 10 * (name == "a") + at)
    held, _ = await claim_and_take_turns(queue)
    await world.zadd(LATER, member("single"))
    assert [get_request_id(one) for one in await claim(other)] == ["single"]
    reply = await settle_and_get_next(queue, [held["c-0"], held["a-0"], held["b-0"]], limit=3)
    assert reply.claim_result is not None
    assert [get_request_id(one) for one in reply.claim_result.leases] == ["c-1", "b-1"], (
        "one unit is another owner's"
    )
    assert reply.claim_result.claimable_count == 1
    (last,) = await claim(queue)
    assert get_request_id(last) == "a-1"


async def test_claim_with_the_same_nonce_returns_the_granted_requests_again(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1)
    reply = await settle_and_get_next(queue, [await claim_next_turn(queue)], nonce="its reply is lost")
    assert reply.claim_result is not None
    again = await queue.claim(5, "its reply is lost", permit(1000))
    assert again.leases == reply.claim_result.leases
    assert again.lease_counts.live_units == 1
    assert await claim_turns_of(queue, again.leases) == get_granted_turns(reply)


async def test_dead_letter_ends_a_turn_like_any_other_end(world: World) -> None:
    """No request is granted if the end closes the run: a sequence that has ended grants nothing."""
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "abort"}, 1)
    reply = await settle_and_get_next(
        queue, [await claim_next_turn(queue)], has_failed=True, cause="it broke"
    )
    assert reply.claim_result is not None
    assert list(reply.claim_result.leases) == []
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ABORTED"}


# The running request keeps its turn.


async def is_waiting_again(queue: Queue) -> bool:
    return (await queue.sweep()).due_count > 0


@pytest.mark.parametrize("how", ["release", "delay", "death", "no answer"])
async def test_running_request_keeps_its_turn_until_it_has_ended(world: World, how: str) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await submit_turns(world, "r", 0, 1, 2)
    lease = await claim_next_turn(first)
    await finish_request(first, lease, sticky_token="server-3", conversation=b"so far")
    lease = await claim_next_turn(first)
    if how == "release":
        await first.release([Release(lease, is_failed_attempt=True)])
    elif how == "delay":
        await first.release([Release(lease, delay_s=0.01, is_failed_attempt=True)])
        await wait_until(lambda: is_waiting_again(second), what="it is due")
    else:
        await world.lose_leases(second, lease)
    (again,) = await claim(second)
    assert get_request_id(again) == "r-1"
    (decisions,) = await claim_turns_of(second, [again])
    assert decisions == TurnGranted(1, "server-3", b"so far", False)
    if how == "no answer":
        late = answer(lease)
        assert await first.settle([late]) == [SettleStatus.LOST]
        assert (await claim_fully(first)).leases == []
    await finish_request(second, again)
    assert get_request_id(await claim_next_turn(second)) == "r-2"


async def test_repeated_call_returns_the_same_decisions(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 0)
    leases = await claim(queue)
    once = await claim_turns_of(queue, leases)
    assert [type(one) for one in once] == [TurnGranted, TurnWaits, TurnRejected]
    assert await claim_turns_of(queue, leases) == once
    assert (await get_snapshot(world)).waiting_count == 1


async def test_reclaimed_lease_claims_no_turn(world: World) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await submit_turns(world, "r", 0)
    leases = await claim(first)
    await world.lose_leases(second, *leases)
    assert await claim_turns_of(first, leases) == [TurnWaits()]
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
    assert get_request_id(await claim_next_turn(second)) == "r-0"


async def test_conversation_is_kept_until_it_is_replaced(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2, 3)
    decisions = []
    for left in (
        {"sticky_token": "a", "conversation": b"\x00\xff" * 300},
        {},
        {"sticky_token": "", "conversation": b""},
        {},
    ):
        leases = await claim(queue)
        verdict = next(one for one in await claim_turns_of(queue, leases) if isinstance(one, TurnGranted))
        decisions.append((verdict.sticky_token, verdict.conversation, verdict.is_first))
        (lease,) = [one for one in leases if get_turn(one).index == verdict.index]
        await finish_request(queue, lease, **left)
    carried = b"\x00\xff" * 300
    assert decisions == [("", b"", True), ("a", carried, False), ("a", carried, False), ("", b"", False)]


# Gaps and repeated indexes.


async def test_missing_index_is_waited_for_and_then_skipped(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 2)
    await finish_request(queue, await claim_next_turn(queue))
    assert (await claim_fully(queue)).leases == []
    assert (await get_snapshot(world)).gap_since is not None
    await world.age_sequences(490)
    assert (await queue.sweep()).freed_count == 0
    await world.age_sequences(11)
    assert (await queue.sweep()).freed_count == 1
    lease = await claim_next_turn(queue)
    assert get_turn(lease).index == 2
    await submit_turns(world, "late", 1)
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"late-0": TurnRejected(ErrorCode.SEQUENCE_INDEX, "index 1: 3 is next")}


async def test_gap_that_is_filled_in_time_is_not_counted(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 1, 2)
    left, _ = await claim_and_take_turns(queue)
    assert left == {}, "indexes begin with 0"
    await submit_turns(world, "first", 0)
    for expected in (0, 1, 2):
        lease = await claim_next_turn(queue)
        assert get_turn(lease).index == expected
        await finish_request(queue, lease)


async def test_repeated_index_is_rejected(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1)
    running = await claim_next_turn(queue)
    await submit_turns(world, "twin", 0, 1)
    left, decisions = await claim_and_take_turns(queue)
    assert {
        name: one.code for name, one in decisions.items() if isinstance(one, TurnRejected)
    } == dict.fromkeys(("twin-0", "twin-1"), ErrorCode.SEQUENCE_INDEX)
    await queue.settle([answer(lease) for lease in left.values()])
    await finish_request(queue, running)
    assert get_turn(await claim_next_turn(queue)).index == 1, "rejected requests do not belong to it"


@pytest.mark.parametrize("failed", [False, True])
async def test_request_that_ends_before_its_turn_is_not_waited_for(world: World, failed: bool) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 2)
    running = await claim_next_turn(queue)
    await submit_turns(world, "late", 1, deadline=NOW - 100)
    (late,) = await find_all_overdue(queue, 9)
    end = TurnEnd(Turn("s", 1), has_failed=failed, cause="late-0: too late")
    assert await queue.settle_unleased([(late, Settlement(NO_LEASE, b'{"id":"late-0"}', "", extra=end))]) == 1
    await finish_request(queue, running)
    if failed:
        (barred,) = await sequences(queue).find_remaining_requests(9)
        assert (barred.error_code, barred.message) == (ErrorCode.SEQUENCE_ABORTED, "late-0: too late")
    else:
        assert get_turn(await claim_next_turn(queue)).index == 2


async def test_waiting_request_past_its_deadline_lets_the_next_one_run(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await submit_turns(world, "gone", 1, deadline=NOW - 100)
    await submit_turns(world, "then", 2)
    leases = {get_request_id(lease): lease for lease in await claim(queue)}
    await claim_turns_of(queue, [leases[name] for name in ("r-0", "gone-0", "then-0")])
    (late,) = await find_all_overdue(queue, 10)
    end = TurnEnd(get_turn(leases["gone-0"]), has_failed=False)
    assert await queue.settle_unleased([(late, Settlement(NO_LEASE, b'{"id":"gone-0"}', "", extra=end))]) == 1
    assert await queue.settle_unleased([(late, Settlement(NO_LEASE, b'{"id":"gone-0"}', "", extra=end))]) == 0
    await finish_request(queue, leases["r-0"])
    assert get_request_id(await claim_next_turn(queue)) == "then-0"


# Runs.


async def test_sequence_ends_with_its_last_request_and_can_begin_again(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, {"index": 1, "last": True}, 5)
    await finish_request(queue, await claim_next_turn(queue), sticky_token="a")
    await finish_request(queue, await claim_next_turn(queue))
    left, decisions = await claim_and_take_turns(queue)
    assert decisions == {"r-2": TurnGranted(5, "", b"", True)}, (
        "requests that wait after it begin the next run"
    )
    await finish_request(queue, left["r-2"])
    assert (await get_snapshot(world)).expected_index == 6
    await submit_turns(world, "end", {"index": 6, "last": True})
    await finish_request(queue, await claim_next_turn(queue))
    assert await open_sequences(world.queue_admin).get_sequence("s") is None


async def test_request_after_the_end_is_rejected_if_configured(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, refuse_after_end=True)
    await submit_turns(world, "r", {"index": 0, "last": True}, 1, 2)
    await finish_request(queue, await claim_next_turn(queue, terms))
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ENDED", "r-2": "SEQUENCE_ENDED"}
    await submit_turns(world, "late", None)
    left, decisions = await claim_and_take_turns(queue, terms)
    assert decisions == {"late-0": TurnRejected(ErrorCode.SEQUENCE_ENDED, "its last request has ended")}
    await queue.settle([answer(left["late-0"])])
    await world.age_sequences(999)
    await queue.sweep()
    assert (await get_snapshot(world)).status is SequenceStatus.ENDED
    await world.age_sequences(2)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
    await submit_turns(world, "new", 0)
    assert get_request_id(await claim_next_turn(queue, terms)) == "new-0"


async def test_reset_begins_a_run_after_all_earlier_requests(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, {"index": 0, "reset": True}, 1, {"reset": True}, None)
    order, fresh = [], []
    for _ in range(6):
        leases = await claim(queue)
        verdicts = await claim_turns_of(queue, leases)
        (at,) = [number for number, one in enumerate(verdicts) if isinstance(one, TurnGranted)]
        verdict = verdicts[at]
        assert isinstance(verdict, TurnGranted)
        order.append(get_request_id(leases[at]))
        fresh.append(verdict.is_first)
        assert (verdict.sticky_token == "") == verdict.is_first, "no conversation is kept"
        await finish_request(queue, leases[at], sticky_token="x")
    assert order == [f"r-{at}" for at in range(6)]
    assert fresh == [True, False] * 3


async def test_gap_before_a_reset_is_skipped_at_once(world: World) -> None:
    """Later requests belong to the run that begins with the reset."""
    queue = world.owner()
    await submit_turns(world, "r", 0, 7, {"index": 3, "reset": True})
    order = []
    for _ in range(3):
        lease = await claim_next_turn(queue)
        order.append(get_turn(lease).index)
        await finish_request(queue, lease)
    assert order == [0, 7, 3]


async def test_idle_sequence_ends_after_exactly_max_idle_s(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await finish_request(queue, await claim_next_turn(queue), sticky_token="a")
    await queue.sweep()
    await world.age_sequences(990)
    await queue.sweep()
    assert (await get_snapshot(world)).has_token
    await world.age_sequences(11)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None


async def test_sequence_with_a_running_or_waiting_request_is_not_idle(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    lease = await claim_next_turn(queue)
    await world.age_sequences(3000)
    await queue.sweep()
    assert (await get_snapshot(world)).next_entry == lease.entry_id
    await finish_request(queue, lease)
    assert (await get_snapshot(world)).status is SequenceStatus.OPEN


async def test_sequence_that_waits_in_a_gap_is_not_idle_but_ages(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, gap_s=100_000)
    await submit_turns(world, "r", 0, 2)
    await finish_request(queue, await claim_next_turn(queue, terms))
    for aged_s, decisions in ((4990, {}), (20, {"r-1": TurnGranted(2, "", b"", True)})):
        await world.age_sequences(aged_s)
        await queue.sweep()
        assert (await claim_and_take_turns(queue, terms))[1] == decisions


async def test_old_sequence_ends_with_its_running_request(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    lease = await claim_next_turn(queue)
    await world.age_sequences(4990)
    await finish_request(queue, lease, sticky_token="a")
    lease = await claim_next_turn(queue)
    (decisions,) = await claim_turns_of(queue, [lease])
    assert isinstance(decisions, TurnGranted)
    assert decisions.sticky_token == "a"
    await world.age_sequences(20)
    await queue.sweep()
    assert (await get_snapshot(world)).next_entry == lease.entry_id
    await finish_request(queue, lease, sticky_token="b")
    _, said_of = await claim_and_take_turns(queue)
    assert said_of == {"r-2": TurnGranted(2, "", b"", True)}, "a new run"


async def test_run_without_requests_ends_by_age(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_idle_s=100_000)
    await submit_turns(world, "r", 0)
    await finish_request(queue, await claim_next_turn(queue, terms))
    await world.age_sequences(4990)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is not None
    await world.age_sequences(11)
    await queue.sweep()
    assert await open_sequences(world.queue_admin).get_sequence("s") is None


# Limits.


async def test_number_of_waiting_requests_is_limited(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=2)
    await submit_turns(world, "r", 0, 1, 2, 3, 4)
    left, decisions = await claim_and_take_turns(queue, terms)
    full = TurnRejected(ErrorCode.SEQUENCE_FULL, "2 requests of its sequence wait already")
    assert [decisions[f"r-{at}"] for at in range(1, 5)] == [TurnWaits(), TurnWaits(), full, full]
    await queue.settle([answer(left["r-3"]), answer(left["r-4"])])
    await finish_request(queue, left["r-0"])
    await submit_turns(world, "again", 3)
    left, decisions = await claim_and_take_turns(queue, terms)
    assert decisions == {"r-1": TurnGranted(1, "", b"", False), "again-0": TurnWaits()}


async def test_expected_request_is_accepted_beyond_the_limit(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=1)
    await submit_turns(world, "r", 1, 0)
    _, decisions = await claim_and_take_turns(queue, terms)
    assert decisions == {"r-0": TurnWaits(), "r-1": TurnGranted(0, "", b"", True)}


async def test_number_of_active_sequences_is_limited(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_active=2)
    for at, name in enumerate("abcd"):
        await submit_turns(world, name, 0, {"index": 1, "last": True}, of=name, deadline=LATER - at)
    left, _ = await claim_and_take_turns(queue, terms)
    assert {get_request_id(lease) for lease in left.values()} == {"c-0", "d-0"}, "the earliest deadlines"
    assert (await get_snapshot(world, "a")).status is SequenceStatus.PARKED
    for name in "dc":
        await finish_request(queue, left[f"{name}-0"])
    left, _ = await claim_and_take_turns(queue, terms)
    assert set(left) == {"c-1", "d-1"}
    await finish_request(queue, left["d-1"])
    left_now, _ = await claim_and_take_turns(queue, terms)
    assert set(left_now) == {"b-0"}, "the best of the waiting requests"
    await submit_turns(world, "e", 0, of="e")
    assert (await claim_and_take_turns(queue, terms))[0] == {}
    await submit_turns(world, "f", 0, of="f")
    left_now, _ = await claim_and_take_turns(queue, replace(terms, max_active=None))
    assert set(left_now) == {"f-0"}
    left_now, _ = await claim_and_take_turns(queue, terms)
    assert set(left_now) == {"a-0", "e-0"}, "the newest terms allow more, so parked sequences have begun"


async def test_idle_sequence_makes_room_for_a_parked_one(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_active=1)
    await submit_turns(world, "a", 0, of="a")
    await finish_request(queue, await claim_next_turn(queue, terms))
    await submit_turns(world, "b", 0, of="b")
    assert (await claim_and_take_turns(queue, terms))[0] == {}
    await world.age_sequences(1001)
    assert (await queue.sweep()).freed_count == 1
    assert get_request_id(await claim_next_turn(queue, terms)) == "b-0"


# Overrides for models.


LIMITED = replace(TERMS, overrides=(SequenceOverride("big-*", max_active=1),))


async def test_full_override_does_not_delay_sequences_of_other_models(world: World) -> None:
    queue = world.owner()
    for at, (name, model) in enumerate({"a": "big-1", "b": "big-2", "c": "small", "d": ""}.items()):
        await submit_turns(world, name, 0, of=name, deadline=LATER + at, model=model)
    left, decisions = await claim_and_take_turns(queue, LIMITED)
    assert set(left) == {"a-0", "c-0", "d-0"}
    assert decisions["b-0"] == TurnWaits()
    snapshot = await get_snapshot(world, "b")
    assert (snapshot.status, snapshot.override) == (SequenceStatus.PARKED, "big-*")
    await finish_request(queue, left["c-0"])
    assert await claim(queue) == [], "the end of another model makes no room"


async def test_parked_sequences_begin_by_score_among_those_whose_override_has_room(world: World) -> None:
    queue, terms = world.owner(), replace(LIMITED, max_active=2)
    last = {"index": 0, "last": True}
    for at, (name, model) in enumerate(
        {"a": "big-1", "b": "small", "c": "big-2", "d": "big-1", "e": "small", "f": "other"}.items()
    ):
        await submit_turns(world, name, last, of=name, deadline=LATER + at, model=model)
    left, _ = await claim_and_take_turns(queue, terms)
    assert set(left) == {"a-0", "b-0"}
    counts = (await queue.count_requests()).of(SequenceCounts)
    assert (counts.active, counts.parked, counts.overrides) == (2, 4, (OverrideCounts("big-*", 1, 2),))
    await finish_request(queue, left["b-0"])
    left_now, _ = await claim_and_take_turns(queue, terms)
    assert set(left_now) == {"e-0"}, "the two with better scores are of the model that is full"
    await finish_request(queue, left["a-0"])
    left_now, _ = await claim_and_take_turns(queue, terms)
    assert set(left_now) == {"c-0"}
    await finish_request(queue, left_now["c-0"])
    left_now, _ = await claim_and_take_turns(queue, terms)
    assert set(left_now) == {"d-0"}, "it is before f"


async def test_general_limit_is_the_bound_of_all_overrides(world: World) -> None:
    queue = world.owner()
    terms = replace(TERMS, max_active=1, overrides=(SequenceOverride("big", max_active=5),))
    for name in "ab":
        await submit_turns(world, name, 0, of=name, model="big")
    left, _ = await claim_and_take_turns(queue, terms)
    assert len(left) == 1


@pytest.mark.server
async def test_idle_time_of_an_override_applies_to_its_sequences_only(world: World) -> None:
    queue = world.owner()
    terms = replace(
        TERMS,
        overrides=(SequenceOverride("quick", max_idle_s=100), SequenceOverride("slow", max_idle_s=2000)),
    )
    for name in ("quick", "slow", "other"):
        await submit_turns(world, name, 0, of=name, model=name)
    left, _ = await claim_and_take_turns(queue, terms)
    for lease in left.values():
        await finish_request(queue, lease)
    for age_s, expected in ((101, {"slow", "other"}), (900, {"slow"}), (1000, set())):
        await world.age_sequences(age_s)
        await queue.sweep()
        page = await open_sequences(world.queue_admin).list_sequences(10)
        assert {one.id for one in page.sequences} == expected


async def test_reset_with_another_model_waits_for_room_of_its_override(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "busy", {"index": 0}, of="busy", model="big-1")
    busy = await claim_next_turn(queue, LIMITED)
    await submit_turns(world, "old", 0, of="s", model="small")
    await finish_request(queue, await claim_next_turn(queue, LIMITED))
    await submit_turns(world, "new", {"reset": True}, of="s", model="big-2")
    left, decisions = await claim_and_take_turns(queue, LIMITED)
    assert (left, decisions) == ({}, {"new-0": TurnWaits()})
    assert (await get_snapshot(world)).status is SequenceStatus.PARKED
    await submit_turns(world, "end", {"last": True}, of="busy", model="big-1")
    await finish_request(queue, busy)
    await finish_request(queue, await claim_next_turn(queue, LIMITED))
    assert get_request_id(await claim_next_turn(queue, LIMITED)) == "new-0"


async def test_sequences_of_a_removed_override_follow_the_general_settings(world: World) -> None:
    queue = world.owner()
    for name in "ab":
        await submit_turns(world, name, 0, of=name, model="big")
    left, _ = await claim_and_take_turns(queue, replace(TERMS, overrides=(SequenceOverride("big", None, 1),)))
    assert len(left) == 1
    await sequences(queue).claim_turns([], TERMS)
    await queue.sweep()
    assert len(await claim(queue)) == 1


async def test_parked_sequences_of_negative_and_infinite_scores_keep_their_order(world: World) -> None:
    queue, terms = world.owner(), replace(LIMITED, max_active=1)
    last = {"index": 0, "last": True}
    await submit_turns(world, "first", last, of="first", deadline=LATER)
    running = await claim_next_turn(queue, terms)
    scores = [float("-inf"), -2.5, -1.0, 0.0, 0.5, 1e300, float("inf")]
    for at, score in enumerate(reversed(scores)):
        name = f"n{len(scores) - 1 - at}"
        data = member(name, deadline=LATER, sequence={"id": name, **last}, payload={"model": "big-1"})
        await world.zadd(score, data)
    assert (await claim_and_take_turns(queue, terms))[0] == {}
    order = []
    for _ in scores:
        await finish_request(queue, running)
        running = await claim_next_turn(queue, terms)
        order.append(get_request_id(running))
    assert order == [f"n{at}" for at in range(len(scores))]


async def test_cancelled_parked_sequence_leaves_its_place_to_the_next(world: World) -> None:
    queue = world.owner()
    for at, name in enumerate("abc"):
        await submit_turns(
            world, name, {"index": 0, "last": True}, of=name, deadline=LATER + at, model="big-1"
        )
    left, _ = await claim_and_take_turns(queue, LIMITED)
    await open_sequences(world.queue_admin).cancel_sequence("b")
    await finish_request(queue, left["a-0"])
    assert get_request_id(await claim_next_turn(queue, LIMITED)) == "c-0"
    assert (await queue.count_requests()).of(SequenceCounts).overrides == (OverrideCounts("big-*", 1, 0),)


# Failures.


async def test_failure_ends_later_requests_with_its_cause(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    await fail_request(queue, await claim_next_turn(queue))
    assert (await claim_fully(queue)).leases == []
    (first, _) = await sequences(queue).find_remaining_requests(9)
    assert (first.error_code, first.message) == (ErrorCode.SEQUENCE_ABORTED, "r-0: it broke")
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ABORTED", "r-2": "SEQUENCE_ABORTED"}
    await submit_turns(world, "late", 3)
    left, decisions = await claim_and_take_turns(queue)
    assert decisions == {"late-0": TurnRejected(ErrorCode.SEQUENCE_ABORTED, "r-0: it broke")}
    await queue.settle([answer(left["late-0"], b'{"id":"late-0"}')])
    await submit_turns(world, "new", {"index": 0, "reset": True})
    assert get_request_id(await claim_next_turn(queue)) == "new-0", "a reset begins anew"
    assert sorted(await read_codes(world)) == ["late-0", "r-0", "r-1", "r-2"]


@pytest.mark.server
async def test_dead_letter_ends_a_turn(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "continue"}, 1)
    lease = await claim_next_turn(queue)
    end = TurnEnd(get_turn(lease), has_failed=True, cause="why")
    await queue.move_to_dead_letters([DeadLetter(answer(lease).copy_with(extra=end), "why")])
    assert get_request_id(await claim_next_turn(queue)) == "r-1"
    (dead,) = await world.queue_admin.list_dead(9)
    await world.queue_admin.requeue_dead([dead.entry_id], LATER)
    _, decisions = await claim_and_take_turns(queue)
    assert [type(one) for one in decisions.values()] == [TurnWaits], "it has lost its index, and comes last"


@pytest.mark.server
async def test_sequence_is_held_until_an_operator_decides(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "hold"}, 1, 2)
    await fail_request(queue, await claim_next_turn(queue))
    found = await get_snapshot(world)
    assert (found.status, found.cause) == (SequenceStatus.HELD, "r-0: it broke")
    assert [index for index, _ in found.waiting_requests] == [1, 2]
    await world.age_sequences(9000)
    await queue.sweep()
    assert (await claim_fully(queue)).leases == []
    assert [one.id for one in await pages(world, SequenceStatus.HELD)] == ["s"]
    assert await open_sequences(world.queue_admin).release_sequence("s")
    assert not await open_sequences(world.queue_admin).release_sequence("s")
    lease = await claim_next_turn(queue)
    assert get_request_id(lease) == "r-1"
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    assert not await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    assert await answer_remaining_requests(queue) == {"r-2": "SEQUENCE_ABORTED"}
    await finish_request(queue, lease)
    assert (await get_snapshot(world)).status is SequenceStatus.ABORTED


async def pages(world: World, status: SequenceStatus | None = None) -> list[SequenceSnapshot]:
    found: list[SequenceSnapshot] = []
    after = ""
    while True:
        page = await open_sequences(world.queue_admin).list_sequences(1, after, status)
        found += page.sequences
        if not page.after:
            return found
        after = page.after


@pytest.mark.server
async def test_listing_shows_each_sequence_once(world: World) -> None:
    queue = world.owner()
    for at in range(20):
        await submit_turns(world, f"r{at}", 0, 1, of=f"chat-{at}")
    await claim_and_take_turns(queue)
    found = await pages(world)
    assert sorted({one.id for one in found}) == sorted(f"chat-{at}" for at in range(20))
    assert {(one.status, one.waiting_count, one.expected_index) for one in found} == {
        (SequenceStatus.OPEN, 1, 1)
    }
    assert await pages(world, SequenceStatus.HELD) == []


async def test_cancel_ends_all_requests_of_a_sequence(world: World) -> None:
    queue = world.owner()
    data = member("run", deadline=LATER, token="its token", sequence={"id": "s", "index": 0})
    await world.zadd(1, data)
    await submit_turns(world, "r", 1, {"reset": True}, None)
    lease = await claim_next_turn(queue)
    assert await open_sequences(world.queue_admin).cancel_sequence("s")
    assert await queue.check_cancelled([("run", "its token")]) == [True]
    assert await answer_remaining_requests(queue) == dict.fromkeys(("r-0", "r-1", "r-2"), "CANCELLED")
    later = member("after", deadline=LATER, created=NOW + 300_000, sequence={"id": "s", "index": 5})
    await world.zadd(2, later)
    assert (await claim_and_take_turns(queue))[0] == {}, "the running request has not ended yet"
    await finish_request(queue, lease)
    assert get_request_id(await claim_next_turn(queue)) == "after", "and begins anew"
    assert not await open_sequences(world.queue_admin).cancel_sequence("nobody")


async def test_sequence_without_a_running_request_is_forgotten_when_it_is_cancelled(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 1, 2)
    await claim_and_take_turns(queue)
    assert await open_sequences(world.queue_admin).cancel_sequence("s")
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
    assert set(await answer_remaining_requests(queue)) == {"r-0", "r-1"}
    assert (await queue.count_requests()).pending == 0


async def test_ended_sequence_can_be_forgotten_so_that_its_id_begins_again(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1)
    first = await claim_next_turn(queue)
    assert await open_sequences(world.queue_admin).forget_sequence("s") is False, "one runs, and one waits"
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    assert await open_sequences(world.queue_admin).forget_sequence("s") is False, (
        "the running request has not ended"
    )
    await submit_turns(world, "too late", 2)
    assert isinstance((await claim_and_take_turns(queue))[1]["too late-0"], TurnRejected)
    await finish_request(queue, first)
    assert await open_sequences(world.queue_admin).forget_sequence("s") is True
    assert await open_sequences(world.queue_admin).get_sequence("s") is None
    assert await open_sequences(world.queue_admin).forget_sequence("s") is None
    await submit_turns(world, "anew", 0, 1)
    lease = await claim_next_turn(queue)
    assert get_request_id(lease) == "anew-0"
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ABORTED"}, (
        "the requests of the previous run are answered"
    )
    assert (await get_snapshot(world)).waiting_count == 1, "and the new run keeps its state"
    await finish_request(queue, lease)
    assert get_request_id(await claim_next_turn(queue)) == "anew-1"


async def test_sequence_with_a_waiting_request_is_not_forgotten(world: World) -> None:
    """The sequence is held, waits for a gap, or is parked."""
    queue = world.owner()
    terms = replace(TERMS, max_active=2)
    await submit_turns(world, "r", {"index": 0, "on_error": "hold"}, 1)
    await submit_turns(world, "gap", 1, of="gap", deadline=LATER + 1)
    await submit_turns(world, "parked", 0, of="parked", deadline=LATER + 2)
    left, _ = await claim_and_take_turns(queue, terms)
    await fail_request(queue, left["r-0"])
    for name, status in (("s", "held"), ("gap", "open"), ("parked", "parked")):
        assert (await get_snapshot(world, name)).status == status
        assert await open_sequences(world.queue_admin).forget_sequence(name) is False


async def test_forgotten_sequence_makes_room_for_a_parked_one(world: World) -> None:
    queue = world.owner()
    terms = replace(TERMS, max_active=1)
    await submit_turns(world, "a", 0, of="a")
    lease = await claim_next_turn(queue, terms)
    await submit_turns(world, "b", 0, of="b")
    await claim_and_take_turns(queue, terms)
    assert (await claim_fully(queue)).leases == []
    await finish_request(queue, lease)
    assert await open_sequences(world.queue_admin).forget_sequence("a") is True
    assert get_request_id(await claim_next_turn(queue, terms)) == "b-0"


async def test_events_of_sequences_are_counted(world: World) -> None:
    queue = world.owner()

    async def counters() -> SequenceCounters:
        return (await queue.count_requests()).of(SequenceCounters)

    assert await counters() == SequenceCounters()
    await submit_turns(
        world, "r", {"index": 0, "on_error": "hold"}, {"index": 2, "on_error": "abort"}, of="é"
    )
    await fail_request(queue, await claim_next_turn(queue))
    assert await counters() == SequenceCounters(held=1, last_held="é")
    assert await open_sequences(world.queue_admin).release_sequence("é")
    await queue.sweep()
    assert await counters() == SequenceCounters(held=1, released=1, last_held="é"), (
        "the gap is still waited for"
    )
    await world.age_sequences(TERMS.gap_s + 1)
    await queue.sweep()
    await fail_request(queue, await claim_next_turn(queue))
    reply = SequenceCounters(held=1, released=1, aborted=1, gaps=1, last_held="é", last_aborted="é")
    assert await counters() == reply
    for name in ("idle", "aged", "cancelled"):
        await submit_turns(world, name, 0, of=name)
    left, _ = await claim_and_take_turns(queue)
    assert await open_sequences(world.queue_admin).cancel_sequence("cancelled")
    await finish_request(queue, left["idle-0"])
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    assert await counters() == replace(reply, cancelled=1, idle=1)
    await world.age_sequences(TERMS.max_age_s + 1)
    await finish_request(queue, left["aged-0"])
    assert await counters() == replace(reply, cancelled=1, idle=1, aged=1)


async def test_held_sequence_does_not_wait_for_a_gap(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "hold"}, 2)
    await submit_turns(world, "old", 3, deadline=NOW - 100)
    leases = sorted(await claim(queue), key=lambda lease: get_turn(lease).index or 0)
    await claim_turns_of(queue, leases)
    await fail_request(queue, leases[0])
    await expire_waiting_request(queue, "old-0")
    found = await get_snapshot(world)
    assert (found.gap_since, found.waiting_count) == (None, 1)
    await open_sequences(world.queue_admin).release_sequence("s")
    assert (await get_snapshot(world)).gap_since is not None
    await world.age_sequences(501)
    await queue.sweep()
    await finish_request(queue, await claim_next_turn(queue))
    assert (await get_snapshot(world)).expected_index == 4


async def test_reset_continues_after_the_run_before_it_was_aborted(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "hold"}, 1, {"reset": True})
    await fail_request(queue, await claim_next_turn(queue))
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    assert (await get_snapshot(world)).status is SequenceStatus.OPEN
    assert get_request_id(await claim_next_turn(queue)) == "r-2"
    assert await answer_remaining_requests(queue) == {"r-1": "SEQUENCE_ABORTED"}


async def test_aborted_run_leaves_no_conversation_to_the_next_run(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", {"index": 0, "on_error": "continue"}, {"reset": True}, {"index": 1})
    lease = await claim_next_turn(queue)
    assert await open_sequences(world.queue_admin).abort_sequence("s", "no use")
    await finish_request(
        queue, lease, has_failed=True, cause="it broke", sticky_token="old", conversation=b"old"
    )
    left, decisions = await claim_and_take_turns(queue)
    assert decisions == {"r-1": TurnGranted(0, "", b"", True)}
    await finish_request(queue, left["r-1"])
    assert get_request_id(await claim_next_turn(queue)) == "r-2"


async def test_passed_indexes_count_as_waiting_requests(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=2)
    await submit_turns(world, "r", 0)
    await submit_turns(world, "old", 2, deadline=NOW - 100)
    await submit_turns(world, "then", 3)
    leases = sorted(await claim(queue), key=lambda lease: get_turn(lease).index or 0)
    await claim_turns_of(queue, leases, terms)
    await expire_waiting_request(queue, "old-0")
    await submit_turns(world, "more", 4)
    _, decisions = await claim_and_take_turns(queue, terms)
    assert isinstance(decisions["more-0"], TurnRejected)
    assert decisions["more-0"].code is ErrorCode.SEQUENCE_FULL


async def test_last_request_that_ended_while_waiting_ends_its_run(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await submit_turns(world, "old", {"index": 1, "last": True}, deadline=NOW - 100)
    await submit_turns(world, "then", 2)
    leases = sorted(await claim(queue), key=lambda lease: get_turn(lease).index or 0)
    await claim_turns_of(queue, leases)
    await expire_waiting_request(queue, "old-0")
    await finish_request(queue, leases[0], sticky_token="a")
    _, decisions = await claim_and_take_turns(queue)
    assert decisions == {"then-0": TurnGranted(2, "", b"", True)}, "a new run"


@pytest.mark.parametrize("failed", [False, True])
async def test_gap_before_a_passed_index_ends_in_its_time(world: World, failed: bool) -> None:
    """No request waits for the gap, but an index that passed after it takes effect at that time, and no
    sooner."""
    queue = world.owner()
    await submit_turns(world, "r", 0)
    await submit_turns(world, "old", {"index": 2, "last": not failed}, deadline=NOW - 100)
    leases = sorted(await claim(queue), key=lambda lease: get_turn(lease).index or 0)
    await claim_turns_of(queue, leases)
    await expire_waiting_request(queue, "old-0", has_failed=failed, cause="it broke")
    await finish_request(queue, leases[0], sticky_token="a")
    for more_s in (0, 31, 459):  # the second time is when its next request would have been checked
        await world.age_sequences(more_s)
        await queue.sweep()
        found = await get_snapshot(world)
        assert (found.status, found.waiting_count, found.has_token) == (SequenceStatus.OPEN, 0, True)
        assert found.gap_since is not None
    await world.age_sequences(11)
    await queue.sweep()
    assert (await queue.count_requests()).of(SequenceCounters).gaps == 1
    if failed:
        found = await get_snapshot(world)
        assert (found.status, found.cause, found.expected_index) == (SequenceStatus.ABORTED, "it broke", 3)
    else:
        assert await open_sequences(world.queue_admin).get_sequence("s") is None


@pytest.mark.parametrize("order", ["first", "second"])
async def test_sequences_due_at_the_same_time_end_alike_in_any_order(world: World, order: str) -> None:
    """One of two ended sequences makes room. A parked sequence that has ended as well does not begin."""
    queue, terms = world.owner(), replace(TERMS, max_active=1)
    await submit_turns(world, "r", 0, of="first")
    running = await claim_next_turn(queue, terms)
    await submit_turns(world, "old", 0, of="second", deadline=NOW - 100)
    assert await claim_and_take_turns(queue, terms) == ({}, {"old-0": TurnWaits()})
    if order == "first":
        await finish_request(queue, running)
    await expire_waiting_request(queue, "old-0", has_failed=True, cause="it broke")
    if order == "second":
        await finish_request(queue, running)
    assert (await get_snapshot(world, "second")).status is SequenceStatus.PARKED
    await world.age_sequences(1001)
    await queue.sweep()
    assert [await open_sequences(world.queue_admin).get_sequence(name) for name in ("first", "second")] == [
        None,
        None,
    ]
    counters = (await queue.count_requests()).of(SequenceCounters)
    assert (counters.idle, counters.aborted) == (2, 0)


# Rare cases that must not block a sequence.


async def test_settlement_without_a_turn_end_lets_the_next_request_run(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1)
    await queue.settle([answer(await claim_next_turn(queue))])
    assert get_request_id(await claim_next_turn(queue)) == "r-1"


async def test_many_overdue_requests_are_each_answered(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", *range(6), deadline=NOW - 50)
    running = await claim_next_turn(queue)
    await queue.release([Release(running)])
    late = await find_all_overdue(queue, 100)
    assert len(late) == 6
    items = [(one, Settlement(NO_LEASE, one.member, "")) for one in late]
    assert await queue.settle_unleased(items) == 6
    assert len(await world.pop_results()) == 6
    assert (await queue.count_requests()).pending == 0
    assert (await get_snapshot(world)).waiting_count == 0


async def test_times_of_sequences_follow_a_clock_that_steps_back(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 2)
    await finish_request(queue, await claim_next_turn(queue))
    await queue.sweep()
    await world.step_clock_back(100_000)
    await queue.sweep()
    turns = 0
    for _ in range(2):  # a time in the future counts as the time of the check
        await world.age_sequences(600)
        turns += (await queue.sweep()).freed_count
    assert turns == 1


@pytest.fixture
async def owners(world: World) -> list[Queue]:
    return [world.owner(f"owner-{number}") for number in range(3)]


@pytest.mark.parametrize("seed", range(6))
async def test_random_history_answers_each_request_once_and_in_order(
    world: World, owners: list[Queue], seed: int
) -> None:
    """Three owners die, answer late, repeat calls, let requests fail, and release them."""
    history = SequenceHistory(world, owners, seed)
    await history.get_live_owner()
    await history.work_until_done()
    assert sorted(await read_codes(world)) == sorted(history.submitted)
    history.check_order()
    assert (await owners[0].count_requests()).pending == 0


class SequenceHistory:
    """Random history of a few sequences."""

    def __init__(self, world: World, owners: list[Queue], seed: int) -> None:
        self.world, self.owners = world, owners
        self.dice = random.Random(seed)
        self.submitted: list[str] = []
        self.held: list[tuple[Queue, Lease]] = []
        self.going: dict[str, str] = {}
        self.sent: dict[str, list[int]] = {}
        self.last: dict[str, int] = {}

    async def get_live_owner(self) -> None:
        for _ in range(120):
            await self.dice.choice(
                (
                    self.submit,
                    self.work_once,
                    self.work_once,
                    self.work_once,
                    self.die,
                    self.expire_waiting_request,
                )
            )()

    async def submit(self) -> None:
        name = self.dice.choice("abc")
        first = self.last.get(name, 0)
        indexes = list(range(first, first + self.dice.randint(1, 4)))
        self.last[name] = first + len(indexes)
        self.dice.shuffle(indexes)
        for index in indexes:
            request = f"{name}-{index}"
            self.submitted.append(request)
            turn = {"id": name, "index": index, "on_error": "continue"}
            await self.world.zadd(LATER + self.dice.random(), member(request, sequence=turn))

    async def work_once(self) -> None:
        queue = self.dice.choice(self.owners)
        leases = await claim(queue, self.dice.randint(1, 4))
        verdicts = await claim_turns_of(queue, leases)
        if self.dice.random() < 0.3:
            verdicts = await claim_turns_of(queue, leases)
        for lease, verdict in zip(leases, verdicts, strict=True):
            if isinstance(verdict, TurnGranted):
                turn = get_turn(lease)
                assert self.going.setdefault(turn.id, get_request_id(lease)) == get_request_id(lease), (
                    "one at a time"
                )
                self.sent.setdefault(turn.id, []).append(verdict.index)
                self.held.append((queue, lease))
            else:
                assert isinstance(verdict, TurnWaits)
        for queue, lease in [one for one in self.held if self.dice.random() < 0.7]:
            await self.finish(queue, lease)

    async def finish(self, queue: Queue, lease: Lease) -> None:
        self.held.remove((queue, lease))
        if self.dice.random() < 0.2:
            await queue.release([Release(lease, is_failed_attempt=True)])
            return
        failed = self.dice.random() < 0.2
        result = b'{"id":"%s"}' % get_request_id(lease).encode()
        end = TurnEnd(get_turn(lease), has_failed=failed, cause="why")
        settlement = answer(lease, result).copy_with(extra=end)
        if self.dice.random() < 0.5:
            reply = await queue.settle_and_claim_next([settlement], f"handing-{lease.token}", permit())
            (decisions,) = reply.statuses
        else:
            reply = EndAndClaimResult(await queue.settle([settlement]), None)
            (decisions,) = reply.statuses
        if decisions is SettleStatus.DONE:
            assert self.going.pop(get_turn(lease).id) == get_request_id(lease)
        for next_one, verdict in zip(
            reply.claim_result.leases if reply.claim_result else (), get_granted_turns(reply), strict=True
        ):
            turn = get_turn(next_one)
            assert self.going.setdefault(turn.id, get_request_id(next_one)) == get_request_id(next_one), (
                "one at a time"
            )
            self.sent.setdefault(turn.id, []).append(verdict.index)
            self.held.append((queue, next_one))
        assert await queue.settle([settlement]) == [SettleStatus.LOST]

    async def die(self) -> None:
        """Expire and reclaim the leases of an owner, which may not know it."""
        sweeper = self.dice.choice(self.owners)
        if self.held and self.dice.random() < 0.5:
            queue, lease = self.dice.choice(self.held)
            if lease.entry_id in (await queue.renew([lease])).lost_entry_ids:
                return
            await self.world.lose_leases(sweeper, lease)
            if self.dice.random() < 0.5:
                self.held.remove((queue, lease))

    async def expire_waiting_request(self) -> None:
        if self.held:
            await self.finish(*self.dice.choice(self.held))

    async def work_until_done(self) -> None:
        for _ in range(100):
            await self.work_once()
            if not (await self.owners[0].count_requests()).pending and not self.held:
                break

    def check_order(self) -> None:
        for sent in self.sent.values():
            steps = [after - before for before, after in pairwise(sent)]
            assert set(steps) <= {0, 1}, "each turn once, or again if it was not answered"


async def test_reset_covers_requests_claimed_after_it_and_none_claimed_before(
    world: World,
) -> None:
    """docs/reference/queue-contract.md: a request that does not wait is not lost, and never runs beside
    another one."""
    queue = world.owner()
    await submit_turns(world, "old", 0)
    first = await claim_next_turn(queue)
    await submit_turns(world, "early", 2)  # belongs to the next run, and is claimed before its reset
    assert isinstance((await claim_and_take_turns(queue))[1]["early-0"], TurnWaits)
    await submit_turns(world, "reset", {"reset": True})
    await submit_turns(
        world, "late", 1, deadline=LATER + 1
    )  # belongs to the previous run, and is claimed after the reset
    assert set(map(type, (await claim_and_take_turns(queue))[1].values())) == {TurnWaits}
    order = []
    lease = first
    while True:
        await finish_request(queue, lease)
        left, _ = await claim_and_take_turns(queue)
        if not left:
            break
        ((name, lease),) = left.items()
        order.append(name)
    assert order == ["early-0", "reset-0", "late-0"], "no gap is waited for before a reset"
    await submit_turns(world, "taken", 1)
    _, decisions = await claim_and_take_turns(queue)
    assert decisions["taken-0"] == TurnRejected(ErrorCode.SEQUENCE_INDEX, "index 1: 2 is next")


async def test_waiting_request_keeps_the_on_error_rule_of_its_arrival(world: World) -> None:
    queue = world.owner()
    await submit_turns(world, "r", 0, 1, 2)
    lease = await claim_next_turn(queue, replace(TERMS, on_error=OnError.CONTINUE))
    await sequences(queue).claim_turns([], replace(TERMS, on_error=OnError.ABORT))
    await fail_request(queue, lease)
    assert get_request_id(await claim_next_turn(queue, replace(TERMS, on_error=OnError.ABORT))) == "r-1"


async def test_terms_sent_without_a_request_apply_to_waiting_requests(world: World) -> None:
    queue = world.owner()
    few = replace(TERMS, max_active=1)
    await submit_turns(world, "a", 0, of="a")
    await finish_request(queue, await claim_next_turn(queue, few))
    await submit_turns(world, "b", 0, of="b")
    await claim_and_take_turns(queue, few)
    assert (await sequences(queue).claim_turns([], TERMS)).decisions == []
    await queue.sweep()
    assert get_request_id(await claim_next_turn(queue)) == "b-0"
