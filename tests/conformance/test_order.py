"""Order of the queue: lowest score first, equal scores by the bytes of the member, whatever happened to a
request."""

from __future__ import annotations

import math
import random
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.client.item import Item, TokenGenerator, build_submission
from dispatcher.queue.contract import Release
from dispatcher.requests.score import compute_score, decode_deadline
from dispatcher.requests.submission import Submission
from tests.conformance.worlds import MemoryWorld, World, claim


async def claim_member_ids(world: World, max_count: int = 100) -> list[bytes]:
    return [lease.member for lease in await claim(world.owner(), max_count)]


async def test_lowest_score_is_claimed_first(world: World) -> None:
    scores = [5, -3, 1764044000.5, 0, 3 * 10**11, -math.inf, math.inf, 1e-9, 2**53, 2**53 - 1, 1764044000.25]
    for score in scores:
        await world.zadd(score, repr(float(score)).encode())
    assert await claim_member_ids(world) == [repr(float(score)).encode() for score in sorted(scores)]


@pytest.mark.server
async def test_equal_scores_are_ordered_by_the_bytes_of_the_member(world: World) -> None:
    members = [b"b", b"a", b"aa", b"", b"\x00", b"\xff", b"\x7f", b"\xc3\xa9", b"Z", b"a\x00", b"a\x00b"]
    for each in members:
        await world.zadd(7, each)
    assert [each for _, each in await world.queue_admin.peek_next(100)] == sorted(members)
    assert await claim_member_ids(world) == sorted(members)


async def test_claim_returns_no_more_than_requested(world: World) -> None:
    for number in range(10):
        await world.zadd(number, b"%d" % number)
    assert await claim_member_ids(world, 0) == []
    assert await claim_member_ids(world, 3) == [b"0", b"1", b"2"]
    assert await claim_member_ids(world, 100) == [b"%d" % number for number in range(3, 10)]


@pytest.mark.server
async def test_released_requests_keep_their_place(world: World) -> None:
    owner = world.owner()
    for letter in b"acegi":
        await world.zadd(letter // 4, bytes([letter]))
    leases = await claim(owner)
    await owner.release([Release(lease) for lease in reversed(leases)])
    for letter in b"bdfhj":
        await world.zadd(letter // 4, bytes([letter]))
    by_score_then_bytes = sorted((letter // 4, bytes([letter])) for letter in b"abcdefghij")
    assert await world.queue_admin.peek_next(100) == by_score_then_bytes
    assert [(lease.score, lease.member) for lease in await claim(owner)] == by_score_then_bytes


async def test_reclaimed_requests_keep_their_place(world: World) -> None:
    owner = world.owner()
    for number in (1, 3, 5):
        await world.zadd(number, b"%d" % number)
    await world.lose_leases(owner, *await claim(owner))
    for number in (2, 4):
        await world.zadd(number, b"%d" % number)
    assert await claim_member_ids(world) == [b"1", b"2", b"3", b"4", b"5"]


async def test_identical_member_that_was_claimed_before_is_claimed_first(world: World) -> None:
    owner = world.owner()
    await world.zadd(1, b"same")
    [first] = await claim(owner)
    await world.zadd(1, b"same")
    await owner.release([Release(first)])
    assert [lease.deliveries for lease in await claim(owner)] == [2, 1]


async def test_producer_can_change_the_score_of_a_pending_member(world: World) -> None:
    await world.zadd(1, b"a")
    await world.zadd(2, b"b")
    await world.zadd(3, b"a")
    assert [(lease.score, lease.member) for lease in await claim(world.owner())] == [(2, b"b"), (3, b"a")]


@pytest.mark.server
async def test_peek_shows_the_next_requests_and_claims_nothing(world: World) -> None:
    for number in range(5):
        await world.zadd(number, b"%d" % number)
    assert await world.queue_admin.peek_next(2) == [(0.0, b"0"), (1.0, b"1")]
    assert (await world.queue_admin.count_requests()).pending == 5


_SCORED = st.tuples(st.integers(0, 3), st.binary(max_size=3))


@settings(max_examples=100)
@given(
    first=st.lists(_SCORED, max_size=12), second=st.lists(_SCORED, max_size=12), max_count=st.integers(0, 12)
)
async def test_mixtures_of_new_and_returned_requests_are_claimed_in_order(
    first: list[tuple[int, bytes]], second: list[tuple[int, bytes]], max_count: int
) -> None:
    """Only in memory, because the model-based test compares Redis with it."""
    world = MemoryWorld()
    owner = world.owner()
    for score, each in first:
        await world.zadd(score, each)
    returned = await claim(owner, max_count)
    await owner.release([Release(lease) for lease in returned])
    for score, each in second:
        await world.zadd(score, each)
    taken = [(lease.score, lease.member) for lease in await claim(owner)]
    assert taken == sorted(taken)


def submissions(count: int, deadline: int, priorities: list[int | None], clock_ns: int) -> list[Submission]:
    """Return submissions of our client that were all made in one nanosecond."""
    tokens = TokenGenerator(lambda: clock_ns)
    moment = datetime.fromtimestamp(deadline, UTC)
    return [
        build_submission(
            Item(
                {"n": number},
                id=f"r-{number}",
                deadline=moment,
                priority=priorities[number % len(priorities)],
            ),
            tokens.make_token(),
            queue="q",
            results="",
        )
        for number in range(count)
    ]


async def test_requests_of_our_client_with_equal_deadlines_are_claimed_in_order_of_submission(
    world: World,
) -> None:
    """In one call, with and without priorities, and again after they were released in any order."""
    deadline = int(time.time()) + 3600
    made = submissions(40, deadline, [9, None, 0, 9], time.time_ns())
    assert len({each.score for each in made}) == 2, "priority 0 has none"
    await world.queue_admin.submit(random.Random(1).sample(made, len(made)))
    expected = [each.member for each in sorted(made, key=lambda each: each.score)]
    owner = world.owner()
    leases = await claim(owner)
    assert [lease.member for lease in leases] == expected
    await owner.release([Release(lease) for lease in random.Random(2).sample(leases[5:30], 25)])
    later = submissions(3, deadline, [None], time.time_ns())
    await world.queue_admin.submit(later)
    returned = [lease.member for lease in leases[5:30]]
    ahead = [member for member in returned if member in expected[:20]]
    behind = [member for member in returned if member not in ahead]
    assert await claim_member_ids(world) == [*ahead, *(each.member for each in later), *behind]


@given(st.lists(st.integers(0, 2**63), max_size=20))
def test_tokens_sort_by_creation_despite_clock_steps(times: list[int]) -> None:
    clock = iter(times)
    tokens = TokenGenerator(lambda: next(clock))
    made = [tokens.make_token() for _ in times]
    assert made == sorted(made)
    assert len({token[-32:] for token in made}) == len(made), "128 random bits"
    assert {len(token) for token in made} <= {48}


@given(st.integers(1, 10**11 - 1), st.floats(0, 1, exclude_max=True), st.integers(0, 9))
def test_fraction_of_a_score_does_not_change_its_deadline(
    deadline: int, fraction: float, priority: int
) -> None:
    """A producer may order its equal deadlines by a fraction, as far as the precision of a double allows."""
    room = math.ulp(float(10 * 10**11))
    score = compute_score(deadline, priority) + min(fraction, 1 - room)
    assert decode_deadline(score) == deadline
