"""Named streams: a restarted program continues where it stopped, and loses and repeats nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace

import pytest
import redis

from dispatcher.client import BatchClient, Item, NameInUseError, QueueUnreachableError, Result, StreamStatus
from dispatcher.features.named_streams import redis_streams as streams
from dispatcher.requests.result import encode_answer
from dispatcher.wire_format import ErrorCode
from tests.client.fake_dispatcher import NAMES, POOL, FakeDispatcher, fail_with
from tests.queue.servers import Server
from tests.support import wait_until

PENDING, CONSUMED = streams.get_stream_keys(NAMES, "nightly")
RESULT_BOX = streams.get_stream_box(NAMES, "nightly")
WEEK_S = 604_800
KILLED_CONSUMER = """
import asyncio, os, signal, sys
from dispatcher.client import BatchClient, Item

async def main():
    client = BatchClient(sys.argv[1], pool="qwen")
    items = (Item({"n": n}, id=f"r-{n}") for n in range(200))
    consumed = 0
    async for result in client.stream(items, name="nightly", max_pending=50):
        print(result.id, flush=True)
        consumed += 1
        if consumed == 70:
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A program that is killed while it handles a result."""


def make_items(count: int, first: int = 0) -> list[Item]:
    return [Item({"n": n}, id=f"r-{n}") for n in range(first, first + count)]


def make_ids(count: int, first: int = 0) -> list[str]:
    return [f"r-{n}" for n in range(first, first + count)]


async def consume(
    server: Server, stream_items: Iterable[Item], stop_after: int | None = None, **options: object
) -> list[Result]:
    """Run the stream with a new client and return its results. Stop after `stop_after` results if that is
    given."""
    received: list[Result] = []
    async with BatchClient(server.url, pool=POOL) as client:
        stream = client.stream(stream_items, name="nightly", **options)  # type: ignore[arg-type]
        async with aclosing(stream):
            async for result in stream:
                received.append(result)
                if len(received) == stop_after:
                    break
    return received


async def get_status(server: Server, **options: object) -> StreamStatus:
    async with BatchClient(server.url, pool=POOL) as client:
        return await client.stream_status("nightly", **options)  # type: ignore[arg-type]


@pytest.fixture
def raw(one_redis: Server) -> redis.Redis:
    return one_redis.client()


async def test_killed_consumer_loses_nothing_and_repeats_one_result(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_CONSUMER, one_redis.url, stdout=asyncio.subprocess.PIPE
    )
    async with fake_dispatcher.answer_continuously():
        output, _ = await process.communicate()
        assert process.returncode == -signal.SIGKILL
        received = output.decode().split()
        assert len(received) == 70
        raw.delete(RESULT_BOX.owner_key)  # as its expiry after 15 seconds does
        later_results = await consume(one_redis, make_items(200))
    repeated_ids = [result.id for result in later_results]
    assert received[-1] in repeated_ids, "the result that it was handling"
    assert Counter([*received[:-1], *repeated_ids]) == Counter(make_ids(200)), "each result is yielded once"
    assert all(result.json() == {"n": int(result.id[2:])} for result in later_results)
    assert Counter(fake_dispatcher.answered) == Counter(make_ids(200)), "each request was sent once"


async def test_interrupted_stream_continues(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    async with fake_dispatcher.answer_continuously():
        first = await consume(one_redis, make_items(100), stop_after=30, max_pending=10)
        second = await consume(one_redis, make_items(100))
    assert len(first) == 30
    assert Counter(each.id for each in [*first[:-1], *second]) == Counter(make_ids(100))
    assert Counter(fake_dispatcher.answered) == Counter(make_ids(100))


async def test_ordered_stream_continues_in_the_order_of_its_items(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with fake_dispatcher.answer_continuously():
        first = await consume(one_redis, make_items(100), stop_after=30, max_pending=10, ordered=True)
        second = await consume(one_redis, make_items(100), ordered=True)
    assert [each.id for each in first] == make_ids(30)
    assert [each.id for each in second] == make_ids(71, 29)


async def test_finished_stream_does_nothing_until_it_is_forgotten(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with fake_dispatcher.answer_continuously():
        assert len(await consume(one_redis, make_items(20))) == 20
        assert await consume(one_redis, make_items(20)) == []
        assert len(fake_dispatcher.answered) == 20
        async with BatchClient(one_redis.url, pool=POOL) as client:
            await client.forget_stream("nightly")
        assert len(await consume(one_redis, make_items(20))) == 20


async def test_pending_requests_are_finished_although_their_items_are_missing(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with fake_dispatcher.answer_continuously():
        await consume(one_redis, make_items(20), stop_after=1, max_pending=10)
        later_results = await consume(one_redis, make_items(3, first=50))
    assert Counter(each.id for each in later_results) == Counter([*make_ids(10), *make_ids(3, first=50)])


async def test_known_id_with_another_body_is_rejected(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with fake_dispatcher.answer_continuously():
        await consume(one_redis, make_items(5))
        for other in (Item({"n": "other"}, id="r-2"), Item({"n": 2}, id="r-2", path="/v1/embeddings")):
            with pytest.raises(ValueError, match="item r-2: stream nightly has a request of this id"):
                await consume(one_redis, [*make_items(2), other])
        with pytest.raises(ValueError, match="item r-9: stream nightly has a request of this id"):
            await consume(one_redis, [Item({"n": 9}, id="r-9"), Item({"n": 10}, id="r-9")])
        assert await consume(one_redis, [replace(each, deadline="2h") for each in make_items(5)]) == []
    assert Counter(fake_dispatcher.answered) == Counter(make_ids(5))


async def test_duplicate_item_is_submitted_once(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    async with fake_dispatcher.answer_continuously():
        received = await consume(one_redis, [*make_items(3), *make_items(3)], max_pending=2)
    assert sorted(each.id for each in received) == make_ids(3)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"n": 1}, "an item without an id"),
        (Item({"n": 1}, id="x" * 257), "at most 256 bytes"),
        (Item({"n": 1}, id="r-1", results="batch-results:mine"), "leave out results="),
    ],
)
async def test_item_that_cannot_be_resumed_is_rejected(one_redis: Server, item: Item, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        await consume(one_redis, [item])


async def test_invalid_item_is_an_error_in_each_run_and_not_recorded(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    invalid = Item(b"no json", id="wrong")
    async with fake_dispatcher.answer_continuously():
        for _ in range(2):
            (result,) = [each for each in await consume(one_redis, [*make_items(2), invalid]) if not each.ok]
            assert (result.id, result.code) == ("wrong", "INVALID_REQUEST")
    assert (await get_status(one_redis)).consumed == 2


async def test_failed_request_is_consumed_and_not_sent_again(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with fake_dispatcher.answer_continuously(fail_with(ErrorCode.DEADLINE_EXCEEDED)):
        (result,) = await consume(one_redis, make_items(1))
    assert result.code == "DEADLINE_EXCEEDED"
    async with fake_dispatcher.answer_continuously():
        assert await consume(one_redis, make_items(1)) == []


@pytest.mark.parametrize("key", [RESULT_BOX.result_list, RESULT_BOX.kept_key])
async def test_request_whose_result_was_lost_is_submitted_again(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis, key: str
) -> None:
    """A request that is in the queue, or has a result, is not submitted again."""
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(make_items(4), name="nightly")
        first = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 4)
        if key == RESULT_BOX.result_list:
            first.cancel()
            await asyncio.wait([first])
            await stream.aclose()
            await fake_dispatcher.answer_once()
        else:
            await fake_dispatcher.answer_once()
            await first
            await stream.aclose()
    assert raw.delete(key)
    async with fake_dispatcher.answer_continuously():
        repeated_ids = await consume(one_redis, make_items(4))
    assert Counter(each.id for each in repeated_ids) == Counter(make_ids(4))
    assert Counter(fake_dispatcher.answered) == Counter(make_ids(4) * 2)


async def test_second_process_of_a_stream_raises_and_submits_nothing(
    one_redis: Server, raw: redis.Redis
) -> None:
    async with (
        BatchClient(one_redis.url, pool=POOL) as first,
        BatchClient(one_redis.url, pool=POOL) as second,
    ):
        running = first.stream(make_items(2), name="nightly")
        waiting = asyncio.ensure_future(anext(running))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 2)
        other = second.stream(make_items(2, first=10), name="nightly")
        second_result = asyncio.ensure_future(anext(other))
        await wait_until(lambda: bool(second._load_streams()._open_streams))
        for stream in second._load_streams()._open_streams:
            stream._mailbox.in_use_after_s = 0.5
        with pytest.raises(NameInUseError, match=r"stream-nightly is read by .*process \d+"):
            await second_result
        assert raw.zcard(NAMES.queue) == 2
        waiting.cancel()
        await asyncio.wait([waiting])
        await running.aclose()


async def test_name_is_renewed_while_the_program_handles_the_last_result(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client, fake_dispatcher.answer_continuously():
        stream = client.stream(make_items(1), name="nightly")
        await anext(stream)
        assert raw.expire(RESULT_BOX.owner_key, 7)
        await wait_until(lambda: raw.ttl(RESULT_BOX.owner_key) > 7, what="the name to be renewed")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_program_that_lost_the_name_consumes_nothing(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    """The program was suspended for longer than the name is reserved, and another program took the name."""
    async with BatchClient(one_redis.url, pool=POOL) as client, fake_dispatcher.answer_continuously():
        stream = client.stream(make_items(3), name="nightly")
        await anext(stream)
        raw.set(RESULT_BOX.owner_key, "another", ex=15)
        with pytest.raises(NameInUseError, match="is read by another"):
            await anext(stream)
        await stream.aclose()
    assert (raw.hlen(PENDING), raw.hlen(CONSUMED), raw.get(RESULT_BOX.owner_key)) == (3, 0, b"another")


async def test_result_without_the_token_of_its_request_is_not_yielded(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    """Another program may know the result list of the stream and guess an id."""
    raw.lpush(
        RESULT_BOX.result_list, encode_answer("r-0", 200, b'"forged"', token="guessed"), b"no result at all"
    )
    async with fake_dispatcher.answer_continuously():
        (result,) = await consume(one_redis, make_items(1))
    assert result.json() == {"n": 0}


async def test_recorded_requests_can_be_listed(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    assert await get_status(one_redis) == StreamStatus(0, 0, 0, [], "")
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(make_items(10), name="nightly", max_pending=4)
        first = asyncio.ensure_future(anext(stream))
        async with fake_dispatcher.answer_continuously():
            await first
            await anext(stream)  # the first result is consumed, and a fifth item is submitted
            await wait_until(lambda: len(fake_dispatcher.answered) == 5)
        await stream.aclose()
    stream_status = await get_status(one_redis)
    assert (stream_status.unconsumed, stream_status.consumed, stream_status.kept, stream_status.after) == (
        4,
        1,
        4,
        "",
    )
    assert {each.state for each in stream_status.requests} == {"answered"}
    assert all(each.deadline for each in stream_status.requests)
    (consumed,) = (await get_status(one_redis, consumed=True)).requests
    assert (consumed.state, consumed.deadline) == ("consumed", None)
    assert {consumed.id, *(each.id for each in stream_status.requests)} == set(make_ids(5))


async def test_long_list_is_read_in_pages(one_redis: Server, raw: redis.Redis) -> None:
    raw.hset(CONSUMED, mapping={f"r-{n}": "0" * 16 for n in range(5000)})
    found, after = [], ""
    while True:
        page = await get_status(one_redis, consumed=True, after=after, limit=500)
        assert len(page.requests) < 1000
        found += [each.id for each in page.requests]
        if not (after := page.after):
            break
    assert set(found) == set(make_ids(5000))


async def test_forgetting_a_stream_cancels_its_pending_requests(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(make_items(3), name="nightly")
        first = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 3)
        first.cancel()
        await asyncio.wait([first])
        await stream.aclose()
        stream_status = await client.stream_status("nightly")
        assert [each.state for each in stream_status.requests] == ["pending"] * 3
        await client.forget_stream("nightly")
    assert len(raw.keys(NAMES.cancel_key("*", "*"))) == 3
    assert raw.keys("*stream*") == []


async def test_record_of_a_stream_expires_a_week_after_the_last_deadline(
    fake_dispatcher: FakeDispatcher, one_redis: Server, raw: redis.Redis
) -> None:
    async with fake_dispatcher.answer_continuously():
        await consume(
            one_redis, [Item({"n": 0}, id="r-0", deadline="2h"), *make_items(2, first=1)], stop_after=3
        )
    expiries_s = {raw.ttl(PENDING), raw.ttl(CONSUMED)}
    assert all(WEEK_S + 7000 < expiry_s <= WEEK_S + 7201 for expiry_s in expiries_s)
    assert max(expiries_s) - min(expiries_s) <= 1, (
        "if one hash expired before the other, requests would be sent again"
    )


@pytest.mark.parametrize("key", [PENDING, CONSUMED, RESULT_BOX.kept_key, RESULT_BOX.owner_key])
async def test_key_of_another_type_is_an_error(one_redis: Server, raw: redis.Redis, key: str) -> None:
    raw.lpush(key, "other")
    with pytest.raises(QueueUnreachableError, match="holds a list, not a "):
        await consume(one_redis, make_items(1))
    assert raw.zcard(NAMES.queue) == 0


async def test_hooks_that_would_lose_items_are_rejected(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with BatchClient(one_redis.url, pool=POOL, after=lambda item, result: None) as client:
        with pytest.raises(ValueError, match="with the hook after"):
            client.stream(make_items(1), name="nightly")

    def rename(item: Item) -> Item:
        return replace(item, id=f"other-{item.id}")

    async with BatchClient(one_redis.url, pool=POOL, before=rename) as client:
        with pytest.raises(ValueError, match="`before` changed its id"):
            await anext(client.stream(make_items(1), name="nightly"))


async def test_closing_the_client_ends_its_streams_and_keeps_pending_requests(
    one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(make_items(2), name="nightly")
        waiting = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 2)
    with pytest.raises(QueueUnreachableError, match="closed"):
        await waiting
    assert (raw.exists(RESULT_BOX.owner_key), raw.keys(NAMES.cancel_key("*", "*"))) == (0, [])
    with pytest.raises(QueueUnreachableError, match="closed"):
        await anext(client.stream(make_items(2), name="nightly"))


async def test_blocking_client_continues_a_stream(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    def run(stop_after: int) -> list[str]:
        received = []
        with BatchClient.sync(one_redis.url, pool=POOL) as client:
            stream = client.stream(make_items(20), name="nightly")
            for result in stream:
                received.append(result.id)
                if len(received) == stop_after:
                    break
            stream.close()  # type: ignore[attr-defined]
            stream_status = client.stream_status("nightly")
            assert stream_status.unconsumed + stream_status.consumed == 20
        return received

    async with fake_dispatcher.answer_continuously():
        first = await asyncio.to_thread(run, 5)
        second = await asyncio.to_thread(run, 100)
    assert Counter([*first[:-1], *second]) == Counter(make_ids(20))


async def test_invalid_names_are_rejected(one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        for name in ("a b", "a:kept", "x" * 65):
            with pytest.raises(ValueError, match="1 to 64 letters"):
                await client.stream_status(name)
            with pytest.raises(ValueError, match="1 to 64 letters"):
                await anext(client.stream(make_items(1), name=name))
