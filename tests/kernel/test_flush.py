"""Completions are reported to the queue, and parsed requests that return soon are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.completions import Completion
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks, LeasePart, join_hooks
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.parsed_requests import ParsedRequest, ParsedRequestCache
from dispatcher.lab.memory_queue.entries import Entry
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.queue.contract import Settlement
from dispatcher.requests.request import Request, encode_member, parse_member
from tests.kernel.call_recorder import CallRecorder
from tests.kernel.scene import AnsweringGateway, Scene, find_part, lease, read_results, run_in_scene
from tests.memory_queue import MemoryStore

LIMIT = 9
"""Limit in a pool of ten, less the reserve."""


class FreeingState(QueueState):
    """State of a queue in which the end of a request can free all that wait."""

    def end_entry(self, entry: Entry, settlement: Settlement, now: float) -> Sequence[Entry]:
        if settlement.extra is None:
            return ()
        for waiting in self.pending.values():
            waiting.units = 1  # as if it had been leased before, which frees no more than there is room for
        return [*self.pending.values()]

    def get_extra(self, entry: Entry) -> str:
        return "freed"


class FreeingStore(MemoryStore):
    queue_type = FreeingState


class FreeingPart(LeasePart):
    """Part of a feature whose requests free others when they end."""

    def __init__(self) -> None:
        self.leases: set[str] = set()
        self.extras: list[object] = []
        """Facts that came with the leases, in the order of the leases."""

    def look_up(self, requests: list[ClaimedRequest]) -> None: ...

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        self.leases |= {claimed.entry.lease.token for claimed in requests}
        self.extras += [claimed.extra for claimed in requests]
        return requests

    def forget_lease(self, token: str) -> None:
        self.leases.remove(token)

    def end(self, entry: InFlightLease, completion: Completion, result: AttemptResult) -> Completion:
        assert isinstance(completion, Settlement)
        return completion.copy_with(extra="ended")


def build_freeing_hooks(context: KernelContext) -> Hooks:
    part = FreeingPart()
    return Hooks(stages=(part,), lease_parts=(part,))


class FreeingScene(Scene):
    store_type = FreeingStore
    build_hooks = staticmethod(build_freeing_hooks)


class SlowGateway(AnsweringGateway):
    answer_after_s = 0.1


REQUESTS = [f"r-{number:02}" for number in range(20)]


def test_requests_that_free_no_other_are_settled_without_a_claim() -> None:
    async def check(scene: Scene) -> None:
        calls = CallRecorder(scene)
        await scene.submit("x", "y")
        await asyncio.sleep(1)
        assert sorted(scene.gateway.sent) == ["x", "y"]
        assert calls.leases_per_settle == []
        assert calls.settle_count > 0

    run_in_scene(check)


def test_freed_requests_are_claimed_by_the_call_that_settles_others() -> None:
    async def check(scene: FreeingScene) -> None:
        calls = CallRecorder(scene)
        await scene.submit(*REQUESTS)
        await asyncio.sleep(1)
        assert (calls.claimed_count, calls.settle_count) == (LIMIT, 0)
        assert calls.leases_per_settle == [LIMIT, len(REQUESTS) - 2 * LIMIT, 0]
        assert scene.gateway.sent == REQUESTS
        extras = find_part(scene.dispatcher, FreeingPart).extras
        assert extras == [None] * LIMIT + ["freed"] * (len(REQUESTS) - LIMIT)

    FreeingScene.run(check, SlowGateway())


@pytest.mark.parametrize("lost_count", [1, 2, 5])
def test_lost_reply_loses_no_freed_request_and_sends_none_twice(lost_count: int) -> None:
    async def check(scene: FreeingScene) -> None:
        CallRecorder(scene).replies_to_lose = lost_count
        await scene.submit(*REQUESTS)
        await asyncio.sleep(20)
        assert sorted(scene.gateway.sent) == REQUESTS
        assert len(await read_results(scene)) == len(REQUESTS)
        counts = await scene.store.count_requests()
        assert (counts.pending, counts.leased) == (0, 0)

    FreeingScene.run(check, SlowGateway())


def test_freed_requests_are_not_claimed_while_the_gate_is_closed() -> None:
    async def check(scene: FreeingScene) -> None:
        calls = CallRecorder(scene)
        await scene.submit(*REQUESTS)
        await asyncio.sleep(0.05)
        await scene.store.pause("me", "why")
        await asyncio.sleep(3)
        assert scene.gateway.sent == REQUESTS[:LIMIT]
        assert sum(calls.leases_per_settle) == 0
        assert (await scene.store.count_requests()).leased == 0
        await scene.store.resume()
        await asyncio.sleep(3)
        assert scene.gateway.sent == REQUESTS

    FreeingScene.run(check, SlowGateway())


def test_freed_requests_are_claimed_alone_if_a_feature_has_room_for_fewer() -> None:
    class RoomForSix:
        problem = ""

        def plan_claim(self, max_count: int) -> int:
            return min(max_count, 6)

    class Narrow(FreeingScene):
        @staticmethod
        def build_hooks(context: KernelContext) -> Hooks:
            return join_hooks([build_freeing_hooks(context), Hooks(rooms=(RoomForSix(),))])

    async def check(scene: Narrow) -> None:
        calls = CallRecorder(scene)
        await scene.submit(*REQUESTS)
        await asyncio.sleep(1)
        assert scene.gateway.sent == REQUESTS
        # The nine requests that the first flushes settle free as many, which are claimed by six.
        assert all(count <= 6 for count in calls.leases_per_settle)

    Narrow.run(check, SlowGateway())


def test_cached_request_is_returned_once_and_only_for_the_same_member() -> None:
    cache, member = ParsedRequestCache(), encode_member("r-1", b'{"a":1}', 10**9)
    request = parse_member(member)
    assert isinstance(request, Request)
    cache.store_request(lease(1, member=member), request)
    cache.store_request(lease(1, member=member), request)
    assert cache.size_bytes == len(member)
    assert cache.take_request(lease(2, member=member), 7) is None
    assert cache.take_request(lease(1, member=member), 7) == ParsedRequest(member, request)
    assert cache.take_request(lease(1, member=member), 7) is None
    cache.store_request(lease(1, member=member), request)
    assert cache.take_request(lease(1, member=member), 6) is None, "the maximum size is lower by now"
    cache.store_request(lease(1, member=member), request)
    assert cache.take_request(lease(1, member=member[:9]), 7) is None
    cache.store_request(lease(1), request)
    assert cache.size_bytes == 0


def test_cache_without_room_drops_the_oldest_request() -> None:
    member = encode_member("r-1", b"{}", 10**9)
    request = parse_member(member)
    assert isinstance(request, Request)
    cache = ParsedRequestCache(max_bytes=3 * len(member))
    for entry_id in (1, 2, 3, 1, 4):
        cache.store_request(lease(entry_id, member=member), request)
        assert cache.size_bytes <= 3 * len(member)
    assert [
        cache.take_request(lease(entry_id, member=member), 2) is not None for entry_id in (1, 2, 3, 4)
    ] == [
        True,
        False,
        True,
        True,
    ]
    assert cache.size_bytes == 0
