"""Streams with a name: a program that begins anew goes on where it was, and nothing is lost or sent twice."""

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
from dispatcher.core.requests.result import ErrorCode, encode_answer
from dispatcher.queue.redis.producer import ResultBox
from tests.client.answering import NAMES, POOL, Answering, refusal
from tests.queue.servers import Server
from tests.support import wait_until

PENDING, CONSUMED = NAMES.stream_keys("nightly")
BOX = ResultBox(NAMES.stream_result_list("nightly"))
WEEK_S = 604_800
DIES = """
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
"""A consumer that is killed while it works on a result."""


def items(count: int, first: int = 0) -> list[Item]:
    return [Item({"n": n}, id=f"r-{n}") for n in range(first, first + count)]


def ids(count: int, first: int = 0) -> list[str]:
    return [f"r-{n}" for n in range(first, first + count)]


async def consume(
    server: Server, given: Iterable[Item], most: int | None = None, **options: object
) -> list[Result]:
    """Run the stream with a client of its own and return its results; with `most` break off at that one."""
    had: list[Result] = []
    async with BatchClient(server.url, pool=POOL) as client:
        stream = client.stream(given, name="nightly", **options)  # type: ignore[arg-type]
        async with aclosing(stream):
            async for result in stream:
                had.append(result)
                if len(had) == most:
                    break
    return had


async def status(server: Server, **options: object) -> StreamStatus:
    async with BatchClient(server.url, pool=POOL) as client:
        return await client.stream_status("nightly", **options)  # type: ignore[arg-type]


@pytest.fixture
def raw(one_redis: Server) -> redis.Redis:
    return one_redis.client()


async def test_a_consumer_that_is_killed_loses_nothing_and_repeats_one_result(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES, one_redis.url, stdout=asyncio.subprocess.PIPE
    )
    async with answering.always():
        told, _ = await process.communicate()
        assert process.returncode == -signal.SIGKILL
        had = told.decode().split()
        assert len(had) == 70
        raw.delete(BOX.owner_key)  # as its 15 seconds do
        rest = await consume(one_redis, items(200))
    again = [result.id for result in rest]
    assert had[-1] in again, "the result that it was at"
    assert Counter([*had[:-1], *again]) == Counter(ids(200)), "each result once"
    assert all(result.json() == {"n": int(result.id[2:])} for result in rest)
    assert Counter(answering.served) == Counter(ids(200)), "each request was sent once"


async def test_a_stream_that_was_broken_off_goes_on(answering: Answering, one_redis: Server) -> None:
    async with answering.always():
        first = await consume(one_redis, items(100), most=30, max_pending=10)
        second = await consume(one_redis, items(100))
    assert len(first) == 30
    assert Counter(each.id for each in [*first[:-1], *second]) == Counter(ids(100))
    assert Counter(answering.served) == Counter(ids(100))


async def test_an_ordered_stream_goes_on_in_the_order_of_its_items(
    answering: Answering, one_redis: Server
) -> None:
    async with answering.always():
        first = await consume(one_redis, items(100), most=30, max_pending=10, ordered=True)
        second = await consume(one_redis, items(100), ordered=True)
    assert [each.id for each in first] == ids(30)
    assert [each.id for each in second] == ids(71, 29)


async def test_a_finished_stream_yields_and_submits_nothing_until_it_is_forgotten(
    answering: Answering, one_redis: Server
) -> None:
    async with answering.always():
        assert len(await consume(one_redis, items(20))) == 20
        assert await consume(one_redis, items(20)) == []
        assert len(answering.served) == 20
        async with BatchClient(one_redis.url, pool=POOL) as client:
            await client.forget_stream("nightly")
        assert len(await consume(one_redis, items(20))) == 20


async def test_pending_requests_and_kept_results_are_continued_though_their_items_are_gone(
    answering: Answering, one_redis: Server
) -> None:
    async with answering.always():
        await consume(one_redis, items(20), most=1, max_pending=10)
        rest = await consume(one_redis, items(3, first=50))
    assert Counter(each.id for each in rest) == Counter([*ids(10), *ids(3, first=50)])


async def test_another_body_under_a_known_id_is_refused(answering: Answering, one_redis: Server) -> None:
    async with answering.always():
        await consume(one_redis, items(5))
        for other in (Item({"n": "other"}, id="r-2"), Item({"n": 2}, id="r-2", path="/v1/embeddings")):
            with pytest.raises(ValueError, match="item r-2: stream nightly has a request of this id"):
                await consume(one_redis, [*items(2), other])
        with pytest.raises(ValueError, match="item r-9: stream nightly has a request of this id"):
            await consume(one_redis, [Item({"n": 9}, id="r-9"), Item({"n": 10}, id="r-9")])
        assert await consume(one_redis, [replace(each, deadline="2h") for each in items(5)]) == []
    assert Counter(answering.served) == Counter(ids(5))


async def test_an_item_that_stands_there_twice_is_one(answering: Answering, one_redis: Server) -> None:
    async with answering.always():
        had = await consume(one_redis, [*items(3), *items(3)], max_pending=2)
    assert sorted(each.id for each in had) == ids(3)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"n": 1}, "an item without an id"),
        (Item({"n": 1}, id="x" * 257), "at most 256 bytes"),
        (Item({"n": 1}, id="r-1", results="batch-results:mine"), "leave out results="),
    ],
)
async def test_an_item_that_could_not_be_known_again_is_refused(
    one_redis: Server, item: Item, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        await consume(one_redis, [item])


async def test_an_item_that_is_no_request_is_told_each_time_and_not_noted(
    answering: Answering, one_redis: Server
) -> None:
    wrong = Item(b"no json", id="wrong")
    async with answering.always():
        for _ in range(2):
            (result,) = [each for each in await consume(one_redis, [*items(2), wrong]) if not each.ok]
            assert (result.id, result.code) == ("wrong", "INVALID_REQUEST")
    assert (await status(one_redis)).consumed == 2


async def test_a_request_that_failed_is_consumed_and_not_sent_again(
    answering: Answering, one_redis: Server
) -> None:
    async with answering.always(refusal(ErrorCode.DEADLINE_EXCEEDED)):
        (result,) = await consume(one_redis, items(1))
    assert result.code == "DEADLINE_EXCEEDED"
    async with answering.always():
        assert await consume(one_redis, items(1)) == []


@pytest.mark.parametrize("key", [BOX.result_list, BOX.kept_key])
async def test_results_that_expired_or_were_lost_are_asked_for_again(
    answering: Answering, one_redis: Server, raw: redis.Redis, key: str
) -> None:
    """A request that is in the queue is never submitted again, and neither is one whose result is there."""
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(items(4), name="nightly")
        first = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 4)
        if key == BOX.result_list:
            first.cancel()
            await asyncio.wait([first])
            await stream.aclose()
            await answering.once()
        else:
            await answering.once()
            await first
            await stream.aclose()
    assert raw.delete(key)
    async with answering.always():
        again = await consume(one_redis, items(4))
    assert Counter(each.id for each in again) == Counter(ids(4))
    assert Counter(answering.served) == Counter(ids(4) * 2)


async def test_one_process_at_a_time_runs_a_stream_and_the_other_submits_nothing(
    one_redis: Server, raw: redis.Redis
) -> None:
    async with (
        BatchClient(one_redis.url, pool=POOL) as first,
        BatchClient(one_redis.url, pool=POOL) as second,
    ):
        running = first.stream(items(2), name="nightly")
        waiting = asyncio.ensure_future(anext(running))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 2)
        other = second.stream(items(2, first=10), name="nightly")
        asked = asyncio.ensure_future(anext(other))
        await wait_until(lambda: bool(second._streams._open_streams))
        for stream in second._streams._open_streams:
            stream._mailbox.in_use_after_s = 0.5
        with pytest.raises(NameInUseError, match=r"stream-nightly is read by .*process \d+"):
            await asked
        assert raw.zcard(NAMES.queue) == 2
        waiting.cancel()
        await asyncio.wait([waiting])
        await running.aclose()


async def test_the_name_is_kept_while_the_program_works_on_the_last_result(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client, answering.always():
        stream = client.stream(items(1), name="nightly")
        await anext(stream)
        assert raw.expire(BOX.owner_key, 7)
        await wait_until(lambda: raw.ttl(BOX.owner_key) > 7, what="the name to be renewed")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_program_that_lost_the_name_consumes_nothing(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    """The program stood still for longer than the name lasts, and another one took the name."""
    async with BatchClient(one_redis.url, pool=POOL) as client, answering.always():
        stream = client.stream(items(3), name="nightly")
        await anext(stream)
        raw.set(BOX.owner_key, "another", ex=15)
        with pytest.raises(NameInUseError, match="is read by another"):
            await anext(stream)
        await stream.aclose()
    assert (raw.hlen(PENDING), raw.hlen(CONSUMED), raw.get(BOX.owner_key)) == (3, 0, b"another")


async def test_a_result_without_the_token_of_its_request_is_not_yielded(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    """Whoever may write the queue can name the stream's list, and guess an id."""
    raw.lpush(BOX.result_list, encode_answer("r-0", 200, b'"forged"', token="guessed"), b"no result at all")
    async with answering.always():
        (result,) = await consume(one_redis, items(1))
    assert result.json() == {"n": 0}


async def test_what_is_noted_can_be_listed(answering: Answering, one_redis: Server) -> None:
    assert await status(one_redis) == StreamStatus(0, 0, 0, [], "")
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(items(10), name="nightly", max_pending=4)
        first = asyncio.ensure_future(anext(stream))
        async with answering.always():
            await first
            await anext(stream)  # the first one is consumed, and a fifth item is submitted
            await wait_until(lambda: len(answering.served) == 5)
        await stream.aclose()
    seen = await status(one_redis)
    assert (seen.unconsumed, seen.consumed, seen.kept, seen.after) == (4, 1, 4, "")
    assert {each.state for each in seen.requests} == {"answered"}
    assert all(each.deadline for each in seen.requests)
    (consumed,) = (await status(one_redis, consumed=True)).requests
    assert (consumed.state, consumed.deadline) == ("consumed", None)
    assert {consumed.id, *(each.id for each in seen.requests)} == set(ids(5))


async def test_a_long_list_comes_in_pages(one_redis: Server, raw: redis.Redis) -> None:
    raw.hset(CONSUMED, mapping={f"r-{n}": "0" * 16 for n in range(5000)})
    found, after = [], ""
    while True:
        page = await status(one_redis, consumed=True, after=after, limit=500)
        assert len(page.requests) < 1000
        found += [each.id for each in page.requests]
        if not (after := page.after):
            break
    assert set(found) == set(ids(5000))


async def test_pending_requests_are_listed_and_forgetting_cancels_them(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(items(3), name="nightly")
        first = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 3)
        first.cancel()
        await asyncio.wait([first])
        await stream.aclose()
        seen = await client.stream_status("nightly")
        assert [each.state for each in seen.requests] == ["pending"] * 3
        await client.forget_stream("nightly")
    assert len(raw.keys(NAMES.cancel_key("*", "*"))) == 3
    assert raw.keys("*stream*") == []


async def test_all_that_is_noted_expires_a_week_after_the_last_deadline(
    answering: Answering, one_redis: Server, raw: redis.Redis
) -> None:
    async with answering.always():
        await consume(one_redis, [Item({"n": 0}, id="r-0", deadline="2h"), *items(2, first=1)], most=3)
    lives = {raw.ttl(PENDING), raw.ttl(CONSUMED)}
    assert all(WEEK_S + 7000 < life <= WEEK_S + 7201 for life in lives)
    assert max(lives) - min(lives) <= 1, "a hash that outlived the other would have requests sent again"


@pytest.mark.parametrize("key", [PENDING, CONSUMED, BOX.kept_key, BOX.owner_key])
async def test_another_programs_key_in_its_place_is_said(
    one_redis: Server, raw: redis.Redis, key: str
) -> None:
    raw.lpush(key, "other")
    with pytest.raises(QueueUnreachableError, match="holds a list, not a "):
        await consume(one_redis, items(1))
    assert raw.zcard(NAMES.queue) == 0


async def test_hooks_that_would_lose_items_are_refused(answering: Answering, one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL, after=lambda item, result: None) as client:
        with pytest.raises(ValueError, match="with the hook after"):
            client.stream(items(1), name="nightly")

    def rename(item: Item) -> Item:
        return replace(item, id=f"other-{item.id}")

    async with BatchClient(one_redis.url, pool=POOL, before=rename) as client:
        with pytest.raises(ValueError, match="before changed its id"):
            await anext(client.stream(items(1), name="nightly"))


async def test_a_client_that_closes_ends_its_streams_and_leaves_what_is_pending(
    one_redis: Server, raw: redis.Redis
) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        stream = client.stream(items(2), name="nightly")
        waiting = asyncio.ensure_future(anext(stream))
        await wait_until(lambda: raw.zcard(NAMES.queue) == 2)
    with pytest.raises(QueueUnreachableError, match="closed"):
        await waiting
    assert (raw.exists(BOX.owner_key), raw.keys(NAMES.cancel_key("*", "*"))) == (0, [])
    with pytest.raises(QueueUnreachableError, match="closed"):
        await anext(client.stream(items(2), name="nightly"))


async def test_the_blocking_client_goes_on_too(answering: Answering, one_redis: Server) -> None:
    def run(most: int) -> list[str]:
        had = []
        with BatchClient.sync(one_redis.url, pool=POOL) as client:
            stream = client.stream(items(20), name="nightly")
            for result in stream:
                had.append(result.id)
                if len(had) == most:
                    break
            stream.close()  # type: ignore[attr-defined]
            seen = client.stream_status("nightly")
            assert seen.unconsumed + seen.consumed == 20
        return had

    async with answering.always():
        first = await asyncio.to_thread(run, 5)
        second = await asyncio.to_thread(run, 100)
    assert Counter([*first[:-1], *second]) == Counter(ids(20))


async def test_names_that_are_no_part_of_a_key_are_refused(one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        for name in ("a b", "a:kept", "x" * 65):
            with pytest.raises(ValueError, match="1 to 64 letters"):
                await client.stream_status(name)
            with pytest.raises(ValueError, match="1 to 64 letters"):
                await anext(client.stream(items(1), name=name))
