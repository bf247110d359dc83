"""Requests of one sequence go in order, one at a time, and each is answered, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from dispatcher.core.requests.found_request import RequestLocation
from dispatcher.core.requests.request import Request, parse_member
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    SequenceCounters,
    TurnEnd,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.core.sequences.turns import OnError, SequenceSnapshot, SequenceStatus, Turn
from dispatcher.ports import (
    DeadLetter,
    Lease,
    Overload,
    Queue,
    Release,
    SettleAndClaimResult,
    Settlement,
    SettleStatus,
    UnleasedRequest,
)
from tests.conformance.turns import (
    LATER,
    NOBODY,
    TERMS,
    done,
    fail,
    goes,
    lined_up,
    name_of,
    seen,
    serve_unserved,
    take,
    turn_of,
)
from tests.conformance.worlds import NOW, World, answer, claim, full_claim, member, permit
from tests.support import wait_until


async def put(world: World, name: str, *turns: Any, of: str = "s", deadline: int = LATER) -> None:
    """Requests r-<n> in the order of their scores; a turn is an index, None, or fields of `data.sequence`."""
    for at, turn in enumerate(turns):
        fields = turn if isinstance(turn, dict) else {"index": turn}
        data = member(f"{name}-{at}", deadline=deadline, sequence={"id": of, **fields})
        await world.zadd(deadline + at * 1e-3, data)


async def answered(world: World) -> list[str]:
    return [msgspec.json.decode(result)["id"] for result in await world.results()]


# Order.


async def test_requests_go_by_their_index_in_whatever_order_they_come(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 2, 0, 3, 1)
    order = []
    for _ in range(4):
        lease = await goes(queue)
        order.append(name_of(lease))
        assert (await full_claim(queue)).leases == [], "nothing else of it goes meanwhile"
        await done(queue, lease)
    assert order == ["r-1", "r-3", "r-0", "r-2"]
    assert (await queue.count_requests()).pending == 0


async def test_without_an_index_they_go_in_the_order_of_the_line(world: World) -> None:
    queue = world.owner()
    await put(world, "r", None, None, None)
    await put(world, "later", None, deadline=LATER + 5)
    await put(world, "other", None, of="t")
    left, said = await take(queue)
    assert set(left) == {"r-0", "other-0"}, "sequences go side by side"
    assert sum(isinstance(one, TurnWaits) for one in said.values()) == 3
    order = []
    lease = left["r-0"]
    for _ in range(4):
        order.append(name_of(lease))
        await done(queue, lease)
        if len(order) < 4:
            lease = await goes(queue)
    assert order == ["r-0", "r-1", "r-2", "later-0"]


async def test_the_next_may_be_claimed_in_the_step_that_ends_the_one_before(world: World) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await put(world, "r", 0, 1)
    lease = await goes(first)
    assert (await full_claim(second)).leases == []
    await done(first, lease)
    (next_one,) = await claim(second)
    assert name_of(next_one) == "r-1"
    assert isinstance((await lined_up(second, [next_one]))[0], TurnGranted)


async def test_what_waits_was_not_delivered_and_counts_nothing(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    told = await full_claim(queue)
    assert told.lease_counts.live_units == 3
    lined = await queue.claim_turns([(lease, turn_of(lease)) for lease in told.leases], TERMS)
    assert lined.lease_counts.live_units == 1
    assert (await queue.count_requests()).pending == 2
    assert (await full_claim(queue)).claimable_count == 0, "no claim can have them"
    assert [
        one.location for one in (await world.desk.list_requests(RequestLocation.SEQUENCED, 9)).requests
    ] == [RequestLocation.SEQUENCED] * 2
    await done(queue, told.leases[0])
    lease = await goes(queue)
    assert lease.deliveries == 1


async def test_others_go_while_a_sequence_waits(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    await goes(queue)
    await world.zadd(LATER + 100, member("single"))
    (lease,) = await claim(queue)
    assert name_of(lease) == "single"
    assert await world.desk.peek_next(9) == []


# Handing over.


async def handed(
    queue: Queue, leases: Sequence[Lease], limit: int = 1000, nonce: str = "", apart: int = 0, **left: Any
) -> SettleAndClaimResult:
    """These end, by an owner that takes what comes next."""
    ends = [
        answer(one, msgspec.json.encode({"id": name_of(one)})).copy_with(
            turn_end=TurnEnd(turn_of(one), **left)
        )
        for one in leases
    ]
    told = await queue.settle_and_claim_next(
        ends, nonce or f"handing-{leases[0].token}", permit(limit).copy_with(unleased_units=apart)
    )
    assert told.statuses == [SettleStatus.DONE] * len(leases)
    return told


async def test_who_ends_one_is_handed_the_next(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    lease = await goes(queue)
    for number in (1, 2):
        told = await handed(queue, [lease], sticky_token="server-3", conversation=b"so far")
        assert told.claim_result is not None
        (lease,) = told.claim_result.leases
        assert name_of(lease) == f"r-{number}"
        assert (
            lease.deliveries,
            told.claim_result.lease_counts.live_units,
            told.claim_result.claimable_count,
        ) == (1, 1, 0)
        assert told.granted_turns == [TurnGranted(number, "server-3", b"so far", False)]
        assert await lined_up(queue, [lease]) == told.granted_turns, "it is asked for no more, but may be"
        assert (await full_claim(queue)).leases == []
    told = await handed(queue, [lease])
    assert told.claim_result is not None
    assert (list(told.claim_result.leases), told.claim_result.lease_counts.live_units) == ([], 0)
    assert await answered(world) == ["r-0", "r-1", "r-2"]


@pytest.mark.parametrize("how", ["limit", "apart", "paused", "refused", "better", "suspect", "nothing"])
async def test_nothing_is_handed_over_that_a_claim_would_not_have_leased(world: World, how: str) -> None:
    queue, other = world.owner("owner-1"), world.owner("owner-2")
    await put(world, "r", 0, 1)
    if how == "suspect":
        await put(world, "died", 0, of="t", deadline=LATER - 9)
        for _ in range(2):
            (died,) = await claim(other, 1)
            await world.lose(queue, died)
    held = await claim(queue, 100, suspects=0)
    await lined_up(queue, held)
    (lease,) = [one for one in held if name_of(one) == "r-0"]
    if how == "better":
        await world.zadd(LATER - 5, member("single"))
    if how == "paused":
        await world.desk.pause("me", "why")
    if how == "refused":
        now = asyncio.get_running_loop().time()
        await other.share_state(permit(), Overload(now, now + 100, False, 1))
    limit, apart = 0 if how == "limit" else 1000, 1000 if how == "apart" else 0
    told = await handed(queue, [lease], limit, apart=apart)
    assert told.claim_result is not None
    assert [name_of(one) for one in told.claim_result.leases] == (["r-1"] if how == "nothing" else [])
    assert (await queue.count_requests()).leased == (how == "nothing")
    if how != "nothing":
        assert told.claim_result.claimable_count == (2 if how == "better" else 1)
        if how == "paused":
            await world.desk.resume()
        names = ["r-1"] if how == "refused" else [name_of(one) for one in await claim(queue)]
        assert names == {"better": ["single", "r-1"], "suspect": ["died-0", "r-1"]}.get(how, ["r-1"])


async def test_the_best_are_handed_over_where_there_is_no_room_for_all(world: World) -> None:
    queue, other = world.owner("owner-1"), world.owner("owner-2")
    for at, name in enumerate("cab"):
        await put(world, name, 0, 1, of=name, deadline=LATER + 10 * (name == "a") + at)
    held, _ = await take(queue)
    await world.zadd(LATER, member("single"))
    assert [name_of(one) for one in await claim(other)] == ["single"]
    told = await handed(queue, [held["c-0"], held["a-0"], held["b-0"]], limit=3)
    assert told.claim_result is not None
    assert [name_of(one) for one in told.claim_result.leases] == ["c-1", "b-1"], "one unit is another owner's"
    assert told.claim_result.claimable_count == 1
    (last,) = await claim(queue)
    assert name_of(last) == "a-1"


async def test_what_was_handed_over_is_told_again_by_a_claim(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1)
    told = await handed(queue, [await goes(queue)], nonce="its reply is lost")
    assert told.claim_result is not None
    again = await queue.claim(5, "its reply is lost", permit(1000))
    assert again.leases == told.claim_result.leases
    assert again.lease_counts.live_units == 1
    assert await lined_up(queue, again.leases) == told.granted_turns


async def test_a_burial_between_them_is_waited_for_as_any_end(world: World) -> None:
    """What an end bars goes to nobody: a sequence that is over hands nothing over."""
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "abort"}, 1)
    told = await handed(queue, [await goes(queue)], has_failed=True, cause="it broke")
    assert told.claim_result is not None
    assert list(told.claim_result.leases) == []
    assert await serve_unserved(queue) == {"r-1": "SEQUENCE_ABORTED"}


# Who goes stays the one.


async def is_back(queue: Queue) -> bool:
    return (await queue.sweep()).due_count > 0


@pytest.mark.parametrize("how", ["release", "delay", "death", "no answer"])
async def test_who_goes_stays_the_one_until_it_has_ended(world: World, how: str) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await put(world, "r", 0, 1, 2)
    lease = await goes(first)
    await done(first, lease, sticky_token="server-3", conversation=b"so far")
    lease = await goes(first)
    if how == "release":
        await first.release([Release(lease, is_failed_attempt=True)])
    elif how == "delay":
        await first.release([Release(lease, delay_s=0.01, is_failed_attempt=True)])
        await wait_until(lambda: is_back(second), what="it is due")
    else:
        await world.lose(second, lease)
    (again,) = await claim(second)
    assert name_of(again) == "r-1"
    (said,) = await lined_up(second, [again])
    assert said == TurnGranted(1, "server-3", b"so far", False)
    if how == "no answer":
        late = answer(lease)
        assert await first.settle([late]) == [SettleStatus.LOST]
        assert (await full_claim(first)).leases == []
    await done(second, again)
    assert name_of(await goes(second)) == "r-2"


async def test_the_same_call_again_says_the_same(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 0)
    leases = await claim(queue)
    once = await lined_up(queue, leases)
    assert [type(one) for one in once] == [TurnGranted, TurnWaits, TurnRejected]
    assert await lined_up(queue, leases) == once
    assert (await seen(world)).waiting_count == 1


async def test_a_lease_that_was_taken_away_lines_up_nothing(world: World) -> None:
    first, second = world.owner("owner-1"), world.owner("owner-2")
    await put(world, "r", 0)
    leases = await claim(first)
    await world.lose(second, *leases)
    assert await lined_up(first, leases) == [TurnWaits()]
    assert await world.desk.get_sequence("s") is None
    assert name_of(await goes(second)) == "r-0"


async def test_what_the_next_is_built_on_is_kept_until_it_is_told_otherwise(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2, 3)
    said = []
    for left in (
        {"sticky_token": "a", "conversation": b"\x00\xff" * 300},
        {},
        {"sticky_token": "", "conversation": b""},
        {},
    ):
        leases = await claim(queue)
        verdict = next(one for one in await lined_up(queue, leases) if isinstance(one, TurnGranted))
        said.append((verdict.sticky_token, verdict.conversation, verdict.is_first))
        (lease,) = [one for one in leases if turn_of(one).index == verdict.index]
        await done(queue, lease, **left)
    carried = b"\x00\xff" * 300
    assert said == [("", b"", True), ("a", carried, False), ("a", carried, False), ("", b"", False)]


# Gaps and doubles.


async def test_a_missing_index_is_waited_for_and_then_passed_over(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 2)
    await done(queue, await goes(queue))
    assert (await full_claim(queue)).leases == []
    assert (await seen(world)).gap_since is not None
    await world.age_sequences(490)
    assert (await queue.sweep()).turn_count == 0
    await world.age_sequences(11)
    assert (await queue.sweep()).turn_count == 1
    lease = await goes(queue)
    assert turn_of(lease).index == 2
    await put(world, "late", 1)
    _, said = await take(queue)
    assert said == {"late-0": TurnRejected(ErrorCode.SEQUENCE_INDEX, "index 1: 3 is next")}


async def test_a_gap_that_is_filled_in_time_is_none(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 1, 2)
    left, _ = await take(queue)
    assert left == {}, "indexes begin with 0"
    await put(world, "first", 0)
    for expected in (0, 1, 2):
        lease = await goes(queue)
        assert turn_of(lease).index == expected
        await done(queue, lease)


async def test_an_index_that_was_there_is_refused(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1)
    running = await goes(queue)
    await put(world, "twin", 0, 1)
    left, said = await take(queue)
    assert {name: one.code for name, one in said.items() if isinstance(one, TurnRejected)} == dict.fromkeys(
        ("twin-0", "twin-1"), ErrorCode.SEQUENCE_INDEX
    )
    await queue.settle([answer(lease) for lease in left.values()])
    await done(queue, running)
    assert turn_of(await goes(queue)).index == 1, "those that were refused are no part of it"


@pytest.mark.parametrize("failed", [False, True])
async def test_one_that_ends_before_it_was_lined_up_is_not_waited_for(world: World, failed: bool) -> None:
    queue = world.owner()
    await put(world, "r", 0, 2)
    running = await goes(queue)
    await put(world, "late", 1, deadline=NOW - 100)
    (late,) = await expired(queue, 9)
    end = TurnEnd(Turn("s", 1), has_failed=failed, cause="late-0: too late")
    assert (
        await queue.settle_unleased([(late, Settlement(NOBODY, b'{"id":"late-0"}', "", turn_end=end))]) == 1
    )
    await done(queue, running)
    if failed:
        (barred,) = await queue.find_remaining_requests(9)
        assert (barred.error_code, barred.message) == (ErrorCode.SEQUENCE_ABORTED, "late-0: too late")
    else:
        assert turn_of(await goes(queue)).index == 2


async def expired(queue: Queue, most: int) -> Sequence[UnleasedRequest]:
    """All that may be past their deadline; both walks take turns."""
    found = {}
    for _ in range(4):
        for one in await queue.find_overdue(most):
            found[one.member] = one
    return list(found.values())


async def test_what_passes_its_deadline_in_line_lets_the_next_go(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0)
    await put(world, "gone", 1, deadline=NOW - 100)
    await put(world, "then", 2)
    leases = {name_of(lease): lease for lease in await claim(queue)}
    await lined_up(queue, [leases[name] for name in ("r-0", "gone-0", "then-0")])
    (late,) = await expired(queue, 10)
    end = TurnEnd(turn_of(leases["gone-0"]), has_failed=False)
    assert (
        await queue.settle_unleased([(late, Settlement(NOBODY, b'{"id":"gone-0"}', "", turn_end=end))]) == 1
    )
    assert (
        await queue.settle_unleased([(late, Settlement(NOBODY, b'{"id":"gone-0"}', "", turn_end=end))]) == 0
    )
    await done(queue, leases["r-0"])
    assert name_of(await goes(queue)) == "then-0"


# Lives.


async def test_a_sequence_ends_with_its_last_and_begins_anew(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, {"index": 1, "last": True}, 5)
    await done(queue, await goes(queue), sticky_token="a")
    await done(queue, await goes(queue))
    left, said = await take(queue)
    assert said == {"r-2": TurnGranted(5, "", b"", True)}, "what waits behind it begins the next life"
    await done(queue, left["r-2"])
    assert (await seen(world)).expected_index == 6
    await put(world, "end", {"index": 6, "last": True})
    await done(queue, await goes(queue))
    assert await world.desk.get_sequence("s") is None


async def test_what_comes_after_the_end_may_be_refused(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, refuse_after_end=True)
    await put(world, "r", {"index": 0, "last": True}, 1, 2)
    await done(queue, await goes(queue, terms))
    assert await serve_unserved(queue) == {"r-1": "SEQUENCE_ENDED", "r-2": "SEQUENCE_ENDED"}
    await put(world, "late", None)
    left, said = await take(queue, terms)
    assert said == {"late-0": TurnRejected(ErrorCode.SEQUENCE_ENDED, "its last request has ended")}
    await queue.settle([answer(left["late-0"])])
    await world.age_sequences(999)
    await queue.sweep()
    assert (await seen(world)).status is SequenceStatus.ENDED
    await world.age_sequences(2)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is None
    await put(world, "new", 0)
    assert name_of(await goes(queue, terms)) == "new-0"


async def test_a_reset_begins_anew_behind_all_that_came_before(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, {"index": 0, "reset": True}, 1, {"reset": True}, None)
    order, fresh = [], []
    for _ in range(6):
        leases = await claim(queue)
        verdicts = await lined_up(queue, leases)
        (at,) = [number for number, one in enumerate(verdicts) if isinstance(one, TurnGranted)]
        verdict = verdicts[at]
        assert isinstance(verdict, TurnGranted)
        order.append(name_of(leases[at]))
        fresh.append(verdict.is_first)
        assert (verdict.sticky_token == "") == verdict.is_first, "nothing is carried over"
        await done(queue, leases[at], sticky_token="x")
    assert order == [f"r-{at}" for at in range(6)]
    assert fresh == [True, False] * 3


async def test_a_gap_before_a_reset_is_not_waited_for(world: World) -> None:
    """Whatever comes now is of the life that begins with it."""
    queue = world.owner()
    await put(world, "r", 0, 7, {"index": 3, "reset": True})
    order = []
    for _ in range(3):
        lease = await goes(queue)
        order.append(turn_of(lease).index)
        await done(queue, lease)
    assert order == [0, 7, 3]


async def test_a_sequence_ends_by_idle_to_the_second(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0)
    await done(queue, await goes(queue), sticky_token="a")
    await queue.sweep()
    await world.age_sequences(990)
    await queue.sweep()
    assert (await seen(world)).has_token
    await world.age_sequences(11)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is None


async def test_what_runs_or_waits_keeps_a_sequence_from_being_idle(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0)
    lease = await goes(queue)
    await world.age_sequences(3000)
    await queue.sweep()
    assert (await seen(world)).next_entry == lease.entry_id
    await done(queue, lease)
    assert (await seen(world)).status is SequenceStatus.OPEN


async def test_a_sequence_ends_by_age_with_what_runs(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    lease = await goes(queue)
    await world.age_sequences(4990)
    await done(queue, lease, sticky_token="a")
    lease = await goes(queue)
    (said,) = await lined_up(queue, [lease])
    assert isinstance(said, TurnGranted)
    assert said.sticky_token == "a"
    await world.age_sequences(20)
    await queue.sweep()
    assert (await seen(world)).next_entry == lease.entry_id
    await done(queue, lease, sticky_token="b")
    _, said_of = await take(queue)
    assert said_of == {"r-2": TurnGranted(2, "", b"", True)}, "a new life"


async def test_an_idle_life_ends_by_age(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_idle_s=100_000)
    await put(world, "r", 0)
    await done(queue, await goes(queue, terms))
    await world.age_sequences(4990)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is not None
    await world.age_sequences(11)
    await queue.sweep()
    assert await world.desk.get_sequence("s") is None


# Limits.


async def test_no_more_wait_than_may(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=2)
    await put(world, "r", 0, 1, 2, 3, 4)
    left, said = await take(queue, terms)
    full = TurnRejected(ErrorCode.SEQUENCE_FULL, "2 requests of its sequence wait already")
    assert [said[f"r-{at}"] for at in range(1, 5)] == [TurnWaits(), TurnWaits(), full, full]
    await queue.settle([answer(left["r-3"]), answer(left["r-4"])])
    await done(queue, left["r-0"])
    await put(world, "again", 3)
    left, said = await take(queue, terms)
    assert said == {"r-1": TurnGranted(1, "", b"", False), "again-0": TurnWaits()}


async def test_the_one_that_is_waited_for_is_never_too_many(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=1)
    await put(world, "r", 1, 0)
    _, said = await take(queue, terms)
    assert said == {"r-0": TurnWaits(), "r-1": TurnGranted(0, "", b"", True)}


async def test_no_more_sequences_are_alive_than_may_be(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_active=2)
    for at, name in enumerate("abcd"):
        await put(world, name, 0, {"index": 1, "last": True}, of=name, deadline=LATER - at)
    left, _ = await take(queue, terms)
    assert {name_of(lease) for lease in left.values()} == {"c-0", "d-0"}, "the earliest deadlines"
    assert (await seen(world, "a")).status is SequenceStatus.PARKED
    for name in "dc":
        await done(queue, left[f"{name}-0"])
    left, _ = await take(queue, terms)
    assert set(left) == {"c-1", "d-1"}
    await done(queue, left["d-1"])
    left_now, _ = await take(queue, terms)
    assert set(left_now) == {"b-0"}, "the best of those that wait"
    await put(world, "e", 0, of="e")
    assert (await take(queue, terms))[0] == {}
    await put(world, "f", 0, of="f")
    left_now, _ = await take(queue, replace(terms, max_active=None))
    assert set(left_now) == {"f-0"}
    left_now, _ = await take(queue, terms)
    assert set(left_now) == {"a-0", "e-0"}, "more may be, by the last word: those that waited have begun"


async def test_an_idle_sequence_makes_room_for_one_that_waits(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_active=1)
    await put(world, "a", 0, of="a")
    await done(queue, await goes(queue, terms))
    await put(world, "b", 0, of="b")
    assert (await take(queue, terms))[0] == {}
    await world.age_sequences(1001)
    assert (await queue.sweep()).turn_count == 1
    assert name_of(await goes(queue, terms)) == "b-0"


# When one fails.


async def test_a_failure_ends_the_later_ones_with_its_cause(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    await fail(queue, await goes(queue))
    assert (await full_claim(queue)).leases == []
    (first, _) = await queue.find_remaining_requests(9)
    assert (first.error_code, first.message) == (ErrorCode.SEQUENCE_ABORTED, "r-0: it broke")
    assert await serve_unserved(queue) == {"r-1": "SEQUENCE_ABORTED", "r-2": "SEQUENCE_ABORTED"}
    await put(world, "late", 3)
    left, said = await take(queue)
    assert said == {"late-0": TurnRejected(ErrorCode.SEQUENCE_ABORTED, "r-0: it broke")}
    await queue.settle([answer(left["late-0"], b'{"id":"late-0"}')])
    await put(world, "new", {"index": 0, "reset": True})
    assert name_of(await goes(queue)) == "new-0", "a reset begins anew"
    assert sorted(await answered(world)) == ["late-0", "r-0", "r-1", "r-2"]


async def test_a_burial_ends_a_turn_as_well(world: World) -> None:
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "continue"}, 1)
    lease = await goes(queue)
    end = TurnEnd(turn_of(lease), has_failed=True, cause="why")
    await queue.move_to_dead_letters([DeadLetter(answer(lease).copy_with(turn_end=end), "why")])
    assert name_of(await goes(queue)) == "r-1"
    (dead,) = await world.desk.list_dead(9)
    await world.desk.requeue_dead([dead.entry_id], LATER)
    _, said = await take(queue)
    assert [type(one) for one in said.values()] == [TurnWaits], "it has lost its index, and comes behind"


async def test_held_until_an_operator_has_decided(world: World) -> None:
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "hold"}, 1, 2)
    await fail(queue, await goes(queue))
    found = await seen(world)
    assert (found.status, found.cause) == (SequenceStatus.HELD, "r-0: it broke")
    assert [index for index, _ in found.waiting_requests] == [1, 2]
    await world.age_sequences(9000)
    await queue.sweep()
    assert (await full_claim(queue)).leases == []
    assert [one.id for one in await pages(world, SequenceStatus.HELD)] == ["s"]
    assert await world.desk.release_sequence("s")
    assert not await world.desk.release_sequence("s")
    lease = await goes(queue)
    assert name_of(lease) == "r-1"
    assert await world.desk.abort_sequence("s", "no use")
    assert not await world.desk.abort_sequence("s", "no use")
    assert await serve_unserved(queue) == {"r-2": "SEQUENCE_ABORTED"}
    await done(queue, lease)
    assert (await seen(world)).status is SequenceStatus.ABORTED


async def pages(world: World, status: SequenceStatus | None = None) -> list[SequenceSnapshot]:
    found: list[SequenceSnapshot] = []
    after = ""
    while True:
        page = await world.desk.list_sequences(1, after, status)
        found += page.sequences
        if not page.after:
            return found
        after = page.after


async def test_all_sequences_are_shown_once(world: World) -> None:
    queue = world.owner()
    for at in range(20):
        await put(world, f"r{at}", 0, 1, of=f"chat-{at}")
    await take(queue)
    found = await pages(world)
    assert sorted({one.id for one in found}) == sorted(f"chat-{at}" for at in range(20))
    assert {(one.status, one.waiting_count, one.expected_index) for one in found} == {
        (SequenceStatus.OPEN, 1, 1)
    }
    assert await pages(world, SequenceStatus.HELD) == []


async def test_a_whole_sequence_is_cancelled(world: World) -> None:
    queue = world.owner()
    data = member("run", deadline=LATER, token="its token", sequence={"id": "s", "index": 0})
    await world.zadd(1, data)
    await put(world, "r", 1, {"reset": True}, None)
    lease = await goes(queue)
    assert await world.desk.cancel_sequence("s")
    assert await queue.check_cancelled([("run", "its token")]) == [True]
    assert await serve_unserved(queue) == dict.fromkeys(("r-0", "r-1", "r-2"), "CANCELLED")
    later = member("after", deadline=LATER, created=NOW + 3000, sequence={"id": "s", "index": 5})
    await world.zadd(2, later)
    assert (await take(queue))[0] == {}, "what runs has not ended yet"
    await done(queue, lease)
    assert name_of(await goes(queue)) == "after", "and begins anew"
    assert not await world.desk.cancel_sequence("nobody")


async def test_a_sequence_of_which_nothing_runs_is_forgotten_when_it_is_cancelled(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 1, 2)
    await take(queue)
    assert await world.desk.cancel_sequence("s")
    assert await world.desk.get_sequence("s") is None
    assert set(await serve_unserved(queue)) == {"r-0", "r-1"}
    assert (await queue.count_requests()).pending == 0


async def test_what_is_over_is_forgotten_so_that_its_id_begins_anew(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1)
    first = await goes(queue)
    assert await world.desk.forget_sequence("s") is False, "one runs, and one waits"
    assert await world.desk.abort_sequence("s", "no use")
    assert await world.desk.forget_sequence("s") is False, "what runs has not ended"
    await put(world, "too late", 2)
    assert isinstance((await take(queue))[1]["too late-0"], TurnRejected)
    await done(queue, first)
    assert await world.desk.forget_sequence("s") is True
    assert await world.desk.get_sequence("s") is None
    assert await world.desk.forget_sequence("s") is None
    await put(world, "anew", 0, 1)
    lease = await goes(queue)
    assert name_of(lease) == "anew-0"
    assert await serve_unserved(queue) == {"r-1": "SEQUENCE_ABORTED"}, (
        "the life before is answered all the same"
    )
    assert (await seen(world)).waiting_count == 1, "and takes nothing of the new one with it"
    await done(queue, lease)
    assert name_of(await goes(queue)) == "anew-1"


async def test_what_has_not_run_is_not_forgotten_while_it_waits(world: World) -> None:
    """Held, in a gap, or parked."""
    queue = world.owner()
    terms = replace(TERMS, max_active=2)
    await put(world, "r", {"index": 0, "on_error": "hold"}, 1)
    await put(world, "gap", 1, of="gap", deadline=LATER + 1)
    await put(world, "parked", 0, of="parked", deadline=LATER + 2)
    left, _ = await take(queue, terms)
    await fail(queue, left["r-0"])
    for name, status in (("s", "held"), ("gap", "open"), ("parked", "parked")):
        assert (await seen(world, name)).status == status
        assert await world.desk.forget_sequence(name) is False


async def test_one_that_is_forgotten_makes_room_for_one_that_waits_to_begin(world: World) -> None:
    queue = world.owner()
    terms = replace(TERMS, max_active=1)
    await put(world, "a", 0, of="a")
    lease = await goes(queue, terms)
    await put(world, "b", 0, of="b")
    await take(queue, terms)
    assert (await full_claim(queue)).leases == []
    await done(queue, lease)
    assert await world.desk.forget_sequence("a") is True
    assert name_of(await goes(queue, terms)) == "b-0"


async def test_what_happened_to_sequences_is_counted(world: World) -> None:
    queue = world.owner()

    async def news() -> SequenceCounters:
        return (await queue.count_requests()).sequence_counters

    assert await news() == SequenceCounters()
    await put(world, "r", {"index": 0, "on_error": "hold"}, {"index": 2, "on_error": "abort"}, of="é")
    await fail(queue, await goes(queue))
    assert await news() == SequenceCounters(held=1, last_held="é")
    assert await world.desk.release_sequence("é")
    await queue.sweep()
    assert await news() == SequenceCounters(held=1, released=1, last_held="é"), "the gap is waited for yet"
    await world.age_sequences(TERMS.gap_s + 1)
    await queue.sweep()
    await fail(queue, await goes(queue))
    told = SequenceCounters(held=1, released=1, aborted=1, gaps=1, last_held="é", last_aborted="é")
    assert await news() == told
    for name in ("idle", "aged", "cancelled"):
        await put(world, name, 0, of=name)
    left, _ = await take(queue)
    assert await world.desk.cancel_sequence("cancelled")
    await done(queue, left["idle-0"])
    await world.age_sequences(TERMS.max_idle_s + 1)
    await queue.sweep()
    assert await news() == replace(told, cancelled=1, idle=1)
    await world.age_sequences(TERMS.max_age_s + 1)
    await done(queue, left["aged-0"])
    assert await news() == replace(told, cancelled=1, idle=1, aged=1)


async def late(queue: Queue, name: str, **left: Any) -> None:
    """The deadline of that one passes in its line, though it may be far in truth."""
    for one in await expired(queue, 10):
        request = parse_member(one.member)
        assert isinstance(request, Request)
        if request.id == name:
            assert request.sequence is not None
            end = TurnEnd(request.sequence, **left)
            result = b'{"id":"%s"}' % name.encode()
            assert await queue.settle_unleased([(one, Settlement(NOBODY, result, "", turn_end=end))]) == 1
            return
    raise AssertionError(f"{name} is not found")


async def test_while_it_is_held_no_gap_is_waited_for(world: World) -> None:
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "hold"}, 2)
    await put(world, "old", 3, deadline=NOW - 100)
    leases = sorted(await claim(queue), key=lambda lease: turn_of(lease).index or 0)
    await lined_up(queue, leases)
    await fail(queue, leases[0])
    await late(queue, "old-0")
    found = await seen(world)
    assert (found.gap_since, found.waiting_count) == (None, 1)
    await world.desk.release_sequence("s")
    assert (await seen(world)).gap_since is not None
    await world.age_sequences(501)
    await queue.sweep()
    await done(queue, await goes(queue))
    assert (await seen(world)).expected_index == 4


async def test_a_reset_goes_on_where_the_life_before_it_is_given_up(world: World) -> None:
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "hold"}, 1, {"reset": True})
    await fail(queue, await goes(queue))
    assert await world.desk.abort_sequence("s", "no use")
    assert (await seen(world)).status is SequenceStatus.OPEN
    assert name_of(await goes(queue)) == "r-2"
    assert await serve_unserved(queue) == {"r-1": "SEQUENCE_ABORTED"}


async def test_what_an_operator_gave_up_leaves_nothing_to_the_life_behind_it(world: World) -> None:
    queue = world.owner()
    await put(world, "r", {"index": 0, "on_error": "continue"}, {"reset": True}, {"index": 1})
    lease = await goes(queue)
    assert await world.desk.abort_sequence("s", "no use")
    await done(queue, lease, has_failed=True, cause="it broke", sticky_token="old", conversation=b"old")
    left, said = await take(queue)
    assert said == {"r-1": TurnGranted(0, "", b"", True)}
    await done(queue, left["r-1"])
    assert name_of(await goes(queue)) == "r-2"


async def test_those_that_passed_in_line_are_among_those_that_may_wait(world: World) -> None:
    queue, terms = world.owner(), replace(TERMS, max_waiting=2)
    await put(world, "r", 0)
    await put(world, "old", 2, deadline=NOW - 100)
    await put(world, "then", 3)
    leases = sorted(await claim(queue), key=lambda lease: turn_of(lease).index or 0)
    await lined_up(queue, leases, terms)
    await late(queue, "old-0")
    await put(world, "more", 4)
    _, said = await take(queue, terms)
    assert isinstance(said["more-0"], TurnRejected)
    assert said["more-0"].code is ErrorCode.SEQUENCE_FULL


async def test_a_last_one_that_passed_in_line_ends_its_life_all_the_same(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0)
    await put(world, "old", {"index": 1, "last": True}, deadline=NOW - 100)
    await put(world, "then", 2)
    leases = sorted(await claim(queue), key=lambda lease: turn_of(lease).index or 0)
    await lined_up(queue, leases)
    await late(queue, "old-0")
    await done(queue, leases[0], sticky_token="a")
    _, said = await take(queue)
    assert said == {"then-0": TurnGranted(2, "", b"", True)}, "a new life"


@pytest.mark.parametrize("failed", [False, True])
async def test_a_gap_before_what_has_passed_ends_in_its_time(world: World, failed: bool) -> None:
    """Though nobody waits for it: what has passed behind it takes effect then, and no sooner."""
    queue = world.owner()
    await put(world, "r", 0)
    await put(world, "old", {"index": 2, "last": not failed}, deadline=NOW - 100)
    leases = sorted(await claim(queue), key=lambda lease: turn_of(lease).index or 0)
    await lined_up(queue, leases)
    await late(queue, "old-0", has_failed=failed, cause="it broke")
    await done(queue, leases[0], sticky_token="a")
    for more_s in (0, 31, 459):  # the second: when its head would have been looked at
        await world.age_sequences(more_s)
        await queue.sweep()
        found = await seen(world)
        assert (found.status, found.waiting_count, found.has_token) == (SequenceStatus.OPEN, 0, True)
        assert found.gap_since is not None
    await world.age_sequences(11)
    await queue.sweep()
    assert (await queue.count_requests()).sequence_counters.gaps == 1
    if failed:
        found = await seen(world)
        assert (found.status, found.cause, found.expected_index) == (SequenceStatus.ABORTED, "it broke", 3)
    else:
        assert await world.desk.get_sequence("s") is None


@pytest.mark.parametrize("order", ["first", "second"])
async def test_what_time_ends_at_once_ends_alike_in_whatever_order(world: World, order: str) -> None:
    """One of two that are over makes room: what has not begun, and is over itself, does not begin by it."""
    queue, terms = world.owner(), replace(TERMS, max_active=1)
    await put(world, "r", 0, of="first")
    running = await goes(queue, terms)
    await put(world, "old", 0, of="second", deadline=NOW - 100)
    assert await take(queue, terms) == ({}, {"old-0": TurnWaits()})
    if order == "first":
        await done(queue, running)
    await late(queue, "old-0", has_failed=True, cause="it broke")
    if order == "second":
        await done(queue, running)
    assert (await seen(world, "second")).status is SequenceStatus.PARKED
    await world.age_sequences(1001)
    await queue.sweep()
    assert [await world.desk.get_sequence(name) for name in ("first", "second")] == [None, None]
    news = (await queue.count_requests()).sequence_counters
    assert (news.idle, news.aborted) == (2, 0)


# What could get stuck.


async def test_a_head_that_an_older_version_ended_does_not_hold_the_others_up(world: World) -> None:
    """It settles what it knows nothing more of."""
    queue = world.owner()
    await put(world, "r", 0, 1)
    lease = await goes(queue)
    await world.end_silently(lease)
    assert (await full_claim(queue)).leases == []
    await world.age_sequences(31)
    assert (await queue.sweep()).turn_count == 1
    assert name_of(await goes(queue)) == "r-1"


async def test_a_settlement_that_tells_nothing_of_the_sequence_lets_the_next_go(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1)
    await queue.settle([answer(await goes(queue))])
    assert name_of(await goes(queue)) == "r-1"


async def test_many_that_are_late_at_once_are_each_answered(world: World) -> None:
    queue = world.owner()
    await put(world, "r", *range(6), deadline=NOW - 50)
    running = await goes(queue)
    await queue.release([Release(running)])
    late = await expired(queue, 100)
    assert len(late) == 6
    items = [(one, Settlement(NOBODY, one.member, "")) for one in late]
    assert await queue.settle_unleased(items) == 6
    assert len(await world.results()) == 6
    assert (await queue.count_requests()).pending == 0
    assert (await seen(world)).waiting_count == 0


async def test_times_follow_a_clock_that_steps_back(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 2)
    await done(queue, await goes(queue))
    await queue.sweep()
    await world.step_back(100_000)
    await queue.sweep()
    turns = 0
    for _ in range(2):  # what was said to be of later is of when it is looked at
        await world.age_sequences(600)
        turns += (await queue.sweep()).turn_count
    assert turns == 1


@pytest.fixture
async def owners(world: World) -> list[Queue]:
    return [world.owner(f"owner-{number}") for number in range(3)]


@pytest.mark.parametrize("seed", range(6))
async def test_every_history_ends_with_each_request_answered_once_and_in_order(
    world: World, owners: list[Queue], seed: int
) -> None:
    """Three owners that die, answer late, repeat calls, let requests fail, and give them back."""
    history = History(world, owners, seed)
    await history.live()
    await history.work_off()
    assert sorted(await answered(world)) == sorted(history.submitted)
    history.check_order()
    assert (await owners[0].count_requests()).pending == 0


class History:
    """What happens to a few sequences."""

    def __init__(self, world: World, owners: list[Queue], seed: int) -> None:
        self.world, self.owners = world, owners
        self.dice = random.Random(seed)
        self.submitted: list[str] = []
        self.held: list[tuple[Queue, Lease]] = []
        self.going: dict[str, str] = {}
        self.sent: dict[str, list[int]] = {}
        self.last: dict[str, int] = {}

    async def live(self) -> None:
        for _ in range(120):
            await self.dice.choice((self.submit, self.work, self.work, self.work, self.die, self.late))()

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

    async def work(self) -> None:
        queue = self.dice.choice(self.owners)
        leases = await claim(queue, self.dice.randint(1, 4))
        verdicts = await lined_up(queue, leases)
        if self.dice.random() < 0.3:
            verdicts = await lined_up(queue, leases)
        for lease, verdict in zip(leases, verdicts, strict=True):
            if isinstance(verdict, TurnGranted):
                turn = turn_of(lease)
                assert self.going.setdefault(turn.id, name_of(lease)) == name_of(lease), "one at a time"
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
        result = b'{"id":"%s"}' % name_of(lease).encode()
        end = TurnEnd(turn_of(lease), has_failed=failed, cause="why")
        settlement = answer(lease, result).copy_with(turn_end=end)
        if self.dice.random() < 0.5:
            told = await queue.settle_and_claim_next([settlement], f"handing-{lease.token}", permit())
            (said,) = told.statuses
        else:
            told = SettleAndClaimResult(await queue.settle([settlement]), None)
            (said,) = told.statuses
        if said is SettleStatus.DONE:
            assert self.going.pop(turn_of(lease).id) == name_of(lease)
        for next_one, verdict in zip(
            told.claim_result.leases if told.claim_result else (), told.granted_turns, strict=True
        ):
            turn = turn_of(next_one)
            assert self.going.setdefault(turn.id, name_of(next_one)) == name_of(next_one), "one at a time"
            self.sent.setdefault(turn.id, []).append(verdict.index)
            self.held.append((queue, next_one))
        assert await queue.settle([settlement]) == [SettleStatus.LOST]

    async def die(self) -> None:
        """An owner's leases run out, and are taken back; it may not know."""
        sweeper = self.dice.choice(self.owners)
        if self.held and self.dice.random() < 0.5:
            queue, lease = self.dice.choice(self.held)
            if lease.entry_id in (await queue.renew([lease])).lost_entry_ids:
                return
            await self.world.lose(sweeper, lease)
            if self.dice.random() < 0.5:
                self.held.remove((queue, lease))

    async def late(self) -> None:
        if self.held:
            await self.finish(*self.dice.choice(self.held))

    async def work_off(self) -> None:
        for _ in range(100):
            await self.work()
            if not (await self.owners[0].count_requests()).pending and not self.held:
                break

    def check_order(self) -> None:
        for sent in self.sent.values():
            steps = [after - before for before, after in pairwise(sent)]
            assert set(steps) <= {0, 1}, "each turn once, or again where it was not answered"


async def test_a_reset_takes_what_is_claimed_behind_it_and_nothing_that_was_claimed_before(
    world: World,
) -> None:
    """docs/reference/queue-contract.md: a request that does not wait is not lost, nor runs beside another."""
    queue = world.owner()
    await put(world, "old", 0)
    first = await goes(queue)
    await put(world, "early", 2)  # of the life to come, claimed before its reset
    assert isinstance((await take(queue))[1]["early-0"], TurnWaits)
    await put(world, "reset", {"reset": True})
    await put(world, "late", 1, deadline=LATER + 1)  # of the life before, claimed behind the reset
    assert set(map(type, (await take(queue))[1].values())) == {TurnWaits}
    order = []
    lease = first
    while True:
        await done(queue, lease)
        left, _ = await take(queue)
        if not left:
            break
        ((name, lease),) = left.items()
        order.append(name)
    assert order == ["early-0", "reset-0", "late-0"], "no gap is waited for before a reset"
    await put(world, "taken", 1)
    _, said = await take(queue)
    assert said["taken-0"] == TurnRejected(ErrorCode.SEQUENCE_INDEX, "index 1: 2 is next")


async def test_what_waits_keeps_the_word_on_errors_that_it_came_under(world: World) -> None:
    queue = world.owner()
    await put(world, "r", 0, 1, 2)
    lease = await goes(queue, replace(TERMS, on_error=OnError.CONTINUE))
    await queue.claim_turns([], replace(TERMS, on_error=OnError.ABORT))
    await fail(queue, lease)
    assert name_of(await goes(queue, replace(TERMS, on_error=OnError.ABORT))) == "r-1"


async def test_terms_that_are_told_without_a_request_hold_for_what_waits(world: World) -> None:
    queue = world.owner()
    few = replace(TERMS, max_active=1)
    await put(world, "a", 0, of="a")
    await done(queue, await goes(queue, few))
    await put(world, "b", 0, of="b")
    await take(queue, few)
    assert (await queue.claim_turns([], TERMS)).decisions == []
    await queue.sweep()
    assert name_of(await goes(queue)) == "b-0"
