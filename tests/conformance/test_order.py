"""The order: lowest score first, equal scores by the members' bytes, whatever happened to a request."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.ports import Release
from tests.conformance.worlds import MemoryWorld, World, claim


async def claimed_members(world: World, most: int = 100) -> list[bytes]:
    return [lease.member for lease in await claim(world.owner(), most)]


async def test_lowest_score_first(world: World) -> None:
    scores = [5, -3, 1764044000.5, 0, 3 * 10**11, -math.inf, math.inf, 1e-9, 2**53, 2**53 - 1, 1764044000.25]
    for score in scores:
        await world.zadd(score, repr(float(score)).encode())
    assert await claimed_members(world) == [repr(float(score)).encode() for score in sorted(scores)]


async def test_equal_scores_go_by_bytes(world: World) -> None:
    members = [b"b", b"a", b"aa", b"", b"\x00", b"\xff", b"\x7f", b"\xc3\xa9", b"Z", b"a\x00", b"a\x00b"]
    for each in members:
        await world.zadd(7, each)
    assert [each for _, each in await world.desk.peek(100)] == sorted(members)
    assert await claimed_members(world) == sorted(members)


async def test_claim_takes_no_more_than_asked(world: World) -> None:
    for number in range(10):
        await world.zadd(number, b"%d" % number)
    assert await claimed_members(world, 0) == []
    assert await claimed_members(world, 3) == [b"0", b"1", b"2"]
    assert await claimed_members(world, 100) == [b"%d" % number for number in range(3, 10)]


async def test_returned_requests_lie_where_they_lay(world: World) -> None:
    owner = world.owner()
    for letter in b"acegi":
        await world.zadd(letter // 4, bytes([letter]))
    leases = await claim(owner)
    await owner.release([Release(lease) for lease in reversed(leases)])
    for letter in b"bdfhj":
        await world.zadd(letter // 4, bytes([letter]))
    by_score_then_bytes = sorted((letter // 4, bytes([letter])) for letter in b"abcdefghij")
    assert await world.desk.peek(100) == by_score_then_bytes
    assert [(lease.score, lease.member) for lease in await claim(owner)] == by_score_then_bytes


async def test_lost_requests_lie_where_they_lay(world: World) -> None:
    owner = world.owner()
    for number in (1, 3, 5):
        await world.zadd(number, b"%d" % number)
    await world.lose(owner, *await claim(owner))
    for number in (2, 4):
        await world.zadd(number, b"%d" % number)
    assert await claimed_members(world) == [b"1", b"2", b"3", b"4", b"5"]


async def test_of_identical_members_the_one_claimed_before_goes_first(world: World) -> None:
    owner = world.owner()
    await world.zadd(1, b"same")
    [first] = await claim(owner)
    await world.zadd(1, b"same")
    await owner.release([Release(first)])
    assert [lease.deliveries for lease in await claim(owner)] == [2, 1]


async def test_score_of_a_pending_member_can_be_changed_by_its_producer(world: World) -> None:
    await world.zadd(1, b"a")
    await world.zadd(2, b"b")
    await world.zadd(3, b"a")
    assert [(lease.score, lease.member) for lease in await claim(world.owner())] == [(2, b"b"), (3, b"a")]


async def test_peek_shows_and_takes_nothing(world: World) -> None:
    for number in range(5):
        await world.zadd(number, b"%d" % number)
    assert await world.desk.peek(2) == [(0.0, b"0"), (1.0, b"1")]
    assert (await world.desk.counts()).pending == 5


_SCORED = st.tuples(st.integers(0, 3), st.binary(max_size=3))


@settings(max_examples=100)
@given(first=st.lists(_SCORED, max_size=12), second=st.lists(_SCORED, max_size=12), most=st.integers(0, 12))
async def test_any_mixture_of_new_and_returned_comes_out_sorted(
    first: list[tuple[int, bytes]], second: list[tuple[int, bytes]], most: int
) -> None:
    """In memory alone: the model-based test holds Redis against this twin."""
    world = MemoryWorld()
    owner = world.owner()
    for score, each in first:
        await world.zadd(score, each)
    returned = await claim(owner, most)
    await owner.release([Release(lease) for lease in returned])
    for score, each in second:
        await world.zadd(score, each)
    taken = [(lease.score, lease.member) for lease in await claim(owner)]
    assert taken == sorted(taken)
