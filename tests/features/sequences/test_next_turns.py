"""The next request of a sequence is leased by the call that completes the previous one."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.requests.request import Request, encode_member, parse_member
from tests.features.scene import Scene, run_in_scene
from tests.features.sequences.sequence_scene import SequenceGateway, build_turns, submit_turns
from tests.kernel.call_recorder import CallRecorder
from tests.kernel.scene import find_part, lease, read_results


async def raise_if_called(*_: object) -> None:
    raise AssertionError("turns were checked")


def test_next_turns_need_no_claim_and_no_turn_check() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        calls = CallRecorder(scene)
        await submit_turns(scene, build_turns("a", 8))
        await asyncio.sleep(0.05)
        claimed_before = calls.claimed_count
        scene.queue.claim_turns = raise_if_called  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.7)
        assert len(gateway.sent) == 8
        assert calls.leases_per_settle == [1] * 7
        assert calls.claimed_count == claimed_before
        await asyncio.sleep(1)
        assert gateway.sent == [f"a-{n}" for n in range(8)]
        assert find_part(scene.dispatcher, TurnChecker).turn_counts["granted"] == 8

    run_in_scene(check, gateway)


def test_request_parsed_for_the_turn_check_is_not_parsed_again() -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        await submit_turns(scene, build_turns("a", 8))
        await asyncio.sleep(0.05)
        cache = scene.dispatcher.context.parsed_requests
        members = [scene.store.queue.entries[entry_id].member for entry_id in range(2, 9)]
        assert cache.size_bytes == sum(map(len, members)) > 0
        requests: list[Request] = []
        for entry_id, member in enumerate(members, 2):
            leased = lease(entry_id, member=member)
            parsed = cache.take_request(leased, 10**6)
            assert parsed is not None
            assert parsed.request == parse_member(member)
            requests.append(parsed.request)
            cache.store_request(leased, parsed.request)
        await asyncio.sleep(2)
        for sent, request in zip(gateway.requests[1:], requests, strict=True):
            assert sent.payload is request.payload
        assert cache.size_bytes == 0

    run_in_scene(check, gateway)


@pytest.mark.parametrize("lost_count", [1, 2, 5])
def test_lost_reply_loses_no_turn_and_sends_no_request_twice(lost_count: int) -> None:
    gateway = SequenceGateway()

    async def check(scene: Scene) -> None:
        calls = CallRecorder(scene)
        calls.replies_to_lose = lost_count
        await submit_turns(scene, [*build_turns("a", 6), *build_turns("b", 6)])
        await asyncio.sleep(20)
        assert gateway.list_sent_of("a") == [f"a-{n}" for n in range(6)]
        assert gateway.list_sent_of("b") == [f"b-{n}" for n in range(6)]
        assert gateway.max_running_per_sequence == 1
        assert len(await read_results(scene)) == 12
        counts = await scene.queue.count_requests()
        assert (counts.pending, counts.leased) == (0, 0)

    run_in_scene(check, gateway)


def test_request_with_a_lower_score_is_sent_before_the_next_turn() -> None:
    gateway = SequenceGateway()
    gateway.answer_after_s = 0.5

    async def check(scene: Scene) -> None:
        # As many sequences as the limit allows requests.
        await submit_turns(scene, [turn for name in "abcdefghi" for turn in build_turns(name, 2)])
        await asyncio.sleep(0.2)
        calls = CallRecorder(scene)
        assert len(gateway.sent) == 9
        first = encode_member("first", b"{}", int(scene.queue.unix_now()) + 10**6)
        scene.store.add_member(first, 1e9)
        await asyncio.sleep(0.4)
        assert "first" in gateway.sent[9:18]
        assert sum(calls.leases_per_settle) == 0, "the other request comes before all next turns"
        await asyncio.sleep(2)
        assert len(gateway.sent) == 19

    run_in_scene(check, gateway)
