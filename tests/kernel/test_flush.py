"""Completions are reported to the queue, and parsed requests that return soon are kept."""

from __future__ import annotations

import asyncio

from dispatcher.kernel.parsed_requests import ParsedRequest, ParsedRequestCache
from dispatcher.requests.request import Request, encode_member, parse_member
from tests.kernel.call_recorder import CallRecorder
from tests.kernel.scene import Scene, lease, run_in_scene


def test_requests_that_free_no_other_are_settled_without_a_claim() -> None:
    async def check(scene: Scene) -> None:
        calls = CallRecorder(scene)
        await scene.submit("x", "y")
        await asyncio.sleep(1)
        assert sorted(scene.gateway.sent) == ["x", "y"]
        assert calls.leases_per_settle == []
        assert calls.settle_count > 0

    run_in_scene(check)


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
