"""Steps of named streams: each is atomic, repeatable, and bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis
from redis.crc import key_slot

from dispatcher.features.named_streams import redis_streams as streams
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.submission import CallRefusedError, QueueFullError
from tests.queue.factories import NAMES, OwnerAndAdmin, queues, submission
from tests.queue.servers import Server

PENDING, CONSUMED = streams.get_stream_keys(NAMES, "s")


@pytest.fixture
async def queue(any_redis: Server) -> AsyncIterator[OwnerAndAdmin]:
    async with queues(any_redis.url, "a") as (one,):
        yield one


@pytest.fixture
def admin(any_redis: Server) -> redis.Redis:
    return any_redis.client()


async def test_repeated_stream_submission_submits_nothing_after_a_claim(
    queue: OwnerAndAdmin, admin: redis.Redis
) -> None:
    asked = [(submission(f"r-{n}", token=f"t-{n}"), "digest") for n in range(3)]
    assert await streams.submit_to_stream(queue.backend, "s", asked) == 3
    assert admin.zpopmin(NAMES.queue)
    assert await streams.submit_to_stream(queue.backend, "s", asked) == 0
    assert await streams.consume_result(queue.backend, "s", "me", "r-1", 7) == ""
    assert await streams.submit_to_stream(queue.backend, "s", asked) == 0
    assert admin.zcard(NAMES.queue) == 2


async def test_stream_with_too_many_ids_is_rejected_as_a_whole(
    queue: OwnerAndAdmin, admin: redis.Redis
) -> None:
    asked = [(submission(f"r-{n}", token=f"t-{n}"), "digest") for n in range(4)]
    assert await streams.submit_to_stream(queue.backend, "s", asked[:2], max_ids=3) == 2
    await streams.consume_result(queue.backend, "s", "me", "r-0", 0)
    with pytest.raises(CallRefusedError, match="the stream would have 4 ids, and may have 3"):
        await streams.submit_to_stream(queue.backend, "s", asked, max_ids=3)
    assert (admin.zcard(NAMES.queue), admin.hlen(PENDING), admin.hlen(CONSUMED)) == (2, 1, 1)


async def test_full_queue_rejects_a_stream_submission_as_a_whole(
    queue: OwnerAndAdmin, admin: redis.Redis
) -> None:
    admin.hset(NAMES.control_key, f"max_pending:{NAMES.queue}", 1)
    asked = [(submission(f"r-{n}", token=f"t-{n}"), "digest") for n in range(2)]
    with pytest.raises(QueueFullError):
        await streams.submit_to_stream(queue.backend, "s", asked)
    assert admin.keys("*stream*") == []


async def test_consumed_result_is_removed_and_recorded_once(queue: OwnerAndAdmin, admin: redis.Redis) -> None:
    await streams.submit_to_stream(queue.backend, "s", [(submission("r-1", token="t"), "digest")])
    keep = streams.get_stream_box(queue.backend.names, "s").kept_key
    admin.hset(keep, mapping={"first": 7, "last": 8, "7": "result", "8": "another's"})
    for _ in range(2):
        assert await streams.consume_result(queue.backend, "s", "me", "r-1", 7) == ""
        assert admin.hgetall(keep) == {b"first": b"7", b"last": b"8", b"8": b"another's"}
        assert admin.hgetall(CONSUMED) == {b"r-1": b"digest"}
        assert not admin.exists(PENDING)


@pytest.mark.parametrize("queue_name", ["batch:{qwen}:requests", "requests", "a:{b}c:d"])
@pytest.mark.parametrize("name", ["nightly", "dead", "reply", "kept", "a.b-c_d", "x" * 64])
def test_keys_of_a_stream_belong_to_the_queue_and_share_its_slot(queue_name: str, name: str) -> None:
    """Its result list is allowed, whatever the name of the stream is, and its record is not."""
    names = QueueNames(queue_name, f"{queue_name}-results")
    results, notes = streams.get_stream_box(names, name).result_list, streams.get_stream_keys(names, name)
    assert {key_slot(key.encode()) for key in (results, *notes)} == {key_slot(queue_name.encode())}
    assert names.find_list_problem(results) is None
    assert all(names.is_queue_key(key) for key in notes)
    other = QueueNames("batch:{other}:requests", "batch:{other}:results", ("*",))
    assert all(other.find_list_problem(key) == "may be a key of a queue" for key in notes)


def test_streams_with_one_name_in_two_queues_are_independent() -> None:
    first, second = QueueNames("a:{t}", "results"), QueueNames("b:{t}", "results")
    assert streams.get_stream_box(first, "s") != streams.get_stream_box(second, "s")
    assert not set(streams.get_stream_keys(first, "s")) & set(streams.get_stream_keys(second, "s"))
