"""What comes next of a sequence comes with the reply to the end of the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.requests.request import Request, encode_member, parse_member
from dispatcher.dispatch.sequences.turns import ParsedRequestCache
from dispatcher.ports import Permit, QueueUnavailableError, SettleAndClaimResult, Settlement, SettleStatus
from tests.dispatch.scene import Scene, lease, perform
from tests.dispatch.turns import Servers, results, submit, turns


class Calls:
    """Which calls the loop makes, and which of their replies are lost."""

    def __init__(self, scene: Scene) -> None:
        self.queue = scene.queue
        self.handed: list[int] = []
        self.settled = self.claimed = self.turn_claims = 0
        self.lose = 0
        self._settle_and_claim_next, self._settle = self.queue.settle_and_claim_next, self.queue.settle
        self._claim, self._claim_turns = self.queue.claim, self.queue.claim_turns
        for name in ("settle_and_claim_next", "settle", "claim", "claim_turns"):
            setattr(self.queue, name, getattr(self, name))

    async def settle_and_claim_next(
        self, ends: Sequence[Settlement], nonce: str, permit: Permit
    ) -> SettleAndClaimResult:
        told = await self._settle_and_claim_next(ends, nonce, permit)
        if self.lose:
            self.lose -= 1
            raise QueueUnavailableError("Redis did not answer in time")
        assert told.claim_result is not None
        self.handed.append(len(told.claim_result.leases))
        return told

    async def settle(self, ends: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        self.settled += 1
        return await self._settle(ends)

    async def claim(self, *args: Any, **how: Any) -> Any:
        claimed = await self._claim(*args, **how)
        self.claimed += len(claimed.leases)
        return claimed

    async def claim_turns(self, *args: Any) -> Any:
        self.turn_claims += 1
        return await self._claim_turns(*args)


def test_turns_are_neither_claimed_nor_asked_for_again() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        calls = Calls(scene)
        await submit(scene, turns("a", 8))
        await asyncio.sleep(0.05)
        claimed, turn_claims = calls.claimed, calls.turn_claims
        await asyncio.sleep(0.7)
        assert len(gateway.sent) == 8
        assert calls.handed == [1] * 7
        assert (calls.claimed, calls.turn_claims) == (claimed, turn_claims)
        await asyncio.sleep(1)
        assert gateway.sent == [f"a-{n}" for n in range(8)]
        assert scene.dispatcher.turn_checker.turn_counts["granted"] == 8

    perform(scene_of, gateway)


def test_what_was_read_to_be_lined_up_is_not_read_again() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 8))
        await asyncio.sleep(0.05)
        read = scene.dispatcher.turn_checker.parsed_requests
        kept = [scene.store.queue.entries[entry].member for entry in range(2, 9)]
        assert read.size_bytes == sum(map(len, kept)) > 0
        known: list[Request] = []
        for entry, member in enumerate(kept, 2):
            held = lease(entry, member=member)
            request = read.take_request(held, 10**6)
            assert request is not None
            assert request == parse_member(member)
            known.append(request)
            read.store_request(held, request)
        await asyncio.sleep(2)
        for sent, request in zip(gateway.requests[1:], known, strict=True):
            assert sent.payload is request.payload
        assert read.size_bytes == 0

    perform(scene_of, gateway)


def test_ends_of_requests_of_no_sequence_are_settled_as_ever() -> None:
    async def scene_of(scene: Scene) -> None:
        calls = Calls(scene)
        await submit(scene, [("x", None), ("y", None)])
        await asyncio.sleep(1)
        assert sorted(scene.gateway.sent) == ["x", "y"]
        assert calls.handed == []
        assert calls.settled > 0

    perform(scene_of)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_reply_that_is_lost_costs_no_turn_and_sends_nothing_twice(lost: int) -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        calls = Calls(scene)
        calls.lose = lost
        await submit(scene, [*turns("a", 6), *turns("b", 6)])
        await asyncio.sleep(20)
        assert gateway.of("a") == [f"a-{n}" for n in range(6)]
        assert gateway.of("b") == [f"b-{n}" for n in range(6)]
        assert gateway.most_at_once == 1
        assert len(await results(scene)) == 12
        counts = await scene.queue.count_requests()
        assert (counts.pending, counts.leased) == (0, 0)

    perform(scene_of, gateway)


def test_what_is_better_goes_before_the_next_turn() -> None:
    gateway = Servers()
    gateway.takes_s = 0.5

    async def scene_of(scene: Scene) -> None:
        await submit(scene, [turn for name in "abcdefghi" for turn in turns(name, 2)])  # the limit is nine
        await asyncio.sleep(0.2)
        calls = Calls(scene)
        assert len(gateway.sent) == 9
        first = encode_member("first", b"{}", int(scene.queue.unix_now()) + 10**6)
        scene.store.add_member(first, 1e9)
        await asyncio.sleep(0.4)
        assert "first" in gateway.sent[9:18]
        assert sum(calls.handed) == 0, "another one was to go before all of them"
        await asyncio.sleep(2)
        assert len(gateway.sent) == 19

    perform(scene_of, gateway)


def test_nothing_is_taken_over_while_the_gate_is_closed() -> None:
    """An operator has paused the pool: what runs ends, and the next ones wait."""
    gateway = Servers(lambda _: Delivered(200, b"{}"))

    async def scene_of(scene: Scene) -> None:
        await submit(scene, turns("a", 3))
        await asyncio.sleep(0.05)
        await scene.store.pause("me", "why")
        await asyncio.sleep(3)
        assert gateway.sent == ["a-0"]
        assert (await scene.queue.count_requests()).leased == 0
        await scene.store.resume()
        await asyncio.sleep(3)
        assert gateway.sent == ["a-0", "a-1", "a-2"]

    perform(scene_of, gateway)


def test_what_was_read_is_known_of_that_very_member_and_once() -> None:
    read, member = ParsedRequestCache(), encode_member("r-1", b'{"a":1}', 10**9)
    known = parse_member(member)
    assert isinstance(known, Request)
    read.store_request(lease(1, member=member), known)
    read.store_request(lease(1, member=member), known)
    assert read.size_bytes == len(member)
    assert read.take_request(lease(2, member=member), 7) is None
    assert read.take_request(lease(1, member=member), 7) is known
    assert read.take_request(lease(1, member=member), 7) is None
    read.store_request(lease(1, member=member), known)
    assert read.take_request(lease(1, member=member), 6) is None, "by now it is longer than any may be"
    read.store_request(lease(1, member=member), known)
    assert read.take_request(lease(1, member=member[:9]), 7) is None
    read.store_request(lease(1), known)
    assert read.size_bytes == 0


def test_what_was_read_longest_ago_goes_first_where_there_is_no_room() -> None:
    member = encode_member("r-1", b"{}", 10**9)
    known = parse_member(member)
    assert isinstance(known, Request)
    read = ParsedRequestCache(max_bytes=3 * len(member))
    for entry in (1, 2, 3, 1, 4):
        read.store_request(lease(entry, member=member), known)
        assert read.size_bytes <= 3 * len(member)
    assert [read.take_request(lease(entry, member=member), 2) is known for entry in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]
    assert read.size_bytes == 0
