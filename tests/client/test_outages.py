"""Redis is away, slow, or refuses: what a client waits for and raises, and that it submits nothing twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.client import BatchClient, QueueUnreachableError
from tests.client.answering import NAMES, POOL, Answering
from tests.queue.made import queues
from tests.queue.relay import relay
from tests.queue.servers import Server, server
from tests.support import free_port, wait_until


@pytest.fixture
def lasting(tmp_path: Path) -> Iterator[Server]:
    """A server that forgets nothing when it is killed."""
    with server("redis", tmp_path, "--appendonly", "yes", "--appendfsync", "no") as running:
        yield running


async def test_who_waits_while_redis_is_gone_has_the_answer_when_it_is_back(lasting: Server) -> None:
    async with (
        queues(lasting.url, "a", names=NAMES) as (queue,),
        BatchClient(lasting.url, pool=POOL) as client,
    ):
        answering = Answering(queue)
        before = await client.enqueue_many([{"n": n} for n in range(50)])
        waiting = [asyncio.create_task(client.result(handle)) for handle in before]
        await wait_until(lambda: all(handle.waiters for handle in before))
        lasting.kill()
        meanwhile = [asyncio.create_task(client.submit({"n": n}, id=f"r-{n}")) for n in range(50, 100)]
        await wait_until(lambda: client.connection_error is not None, what="the client to notice")
        assert not any(task.done() for task in (*waiting, *meanwhile))
        await asyncio.to_thread(lasting.start)
        async with answering.always():
            results = await asyncio.gather(*waiting, *meanwhile)
        assert [result.json() for result in results] == [{"n": n} for n in range(100)]
        assert len(answering.served) == len(set(answering.served)) == 100
        assert client.connection_error is None


async def test_a_queue_that_no_dispatcher_works_on_is_told_once(
    one_redis: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A slip in the pool's name makes such a queue, and whoever submits to it would wait in silence."""
    async with (
        BatchClient(one_redis.url, pool="slipped") as client,
        queues(one_redis.url, "a", names=client._backend.names) as (queue,),
    ):
        for _ in range(2):
            await client._mailbox._check_for_dispatcher()
        (told,) = [each.message for each in caplog.records]
        assert told.startswith("no dispatcher works on batch:{slipped}:requests: is the pool's name right")
        assert "--observe" in told, "who only observes is not seen, and sends nothing"
        await queue.sweep()
        await client._mailbox._check_for_dispatcher()
        assert len(caplog.records) == 1


async def test_a_submission_whose_reply_is_lost_is_made_once(one_redis: Server) -> None:
    """The dispatcher has taken and answered it before the client asks again, long after the usual minute."""
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        relay(one_redis) as way,
        BatchClient(way.url, pool=POOL) as client,
    ):
        answering = Answering(queue)
        async with answering.always():
            await client.submit({}, id="warm")
        await wait_until(lambda: not client._mailbox._wake_event.is_set(), what="its connection to be free")
        way.mute = 1
        handle = asyncio.create_task(client.enqueue({"n": 1}, id="once"))
        await wait_until(lambda: answering.once(), what="the request to be in line")
        with one_redis.client() as raw:
            replies = [key for key in raw.scan_iter("*:reply:*") if b":a:" not in key]
            assert max(raw.ttl(key) for key in replies) > 3600, "it may be asked again until the deadline"
        await wait_until(lambda: client.connection_error is not None, what="the client to give up that call")
        way.mute = None
        assert (await client.result(await handle, timeout=20)).json() == {"n": 1}
        assert answering.served == ["warm", "once"]
        assert await answering.once() == 0, "nothing is in line a second time"


async def test_results_whose_way_to_the_client_was_cut_come_again(one_redis: Server) -> None:
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        relay(one_redis) as way,
        BatchClient(way.url, pool=POOL) as client,
    ):
        handles = await client.enqueue_many([{"n": n, "text": "x" * 500} for n in range(100)])
        waiting = [asyncio.create_task(client.result(handle)) for handle in handles]
        way.mute = 5_000
        await Answering(queue).once()
        with one_redis.client() as raw:
            kept = client.box.kept_key
            await wait_until(lambda: raw.hlen(kept) > 100, what="the results to be taken")
            assert not any(task.done() for task in waiting)
            way.mute = None
            results = await asyncio.gather(*waiting)
            assert [result.json()["n"] for result in results] == list(range(100))
            await wait_until(lambda: raw.hlen(kept) == 2, what="them to be given back")


async def test_a_client_that_never_reached_its_queue_says_so_soon() -> None:
    async with BatchClient(f"redis://127.0.0.1:{free_port()}", retry_for=0.5) as client:
        began = time.monotonic()
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.submit({})
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("user", ["nobody:wrong@", ":wrong@"])
async def test_what_does_not_pass_by_itself_is_raised_at_once(one_redis: Server, user: str) -> None:
    url = one_redis.url.replace("redis://", f"redis://{user}")
    with one_redis.client() as raw:
        raw.config_set("requirepass", "right")
    try:
        async with BatchClient(url) as client:
            with pytest.raises(QueueUnreachableError, match="does not accept this user and password"):
                await client.submit({})
    finally:
        with one_redis.client(password="right") as raw:
            raw.config_set("requirepass", "")


async def test_a_submission_waits_for_redis_until_its_deadline(lasting: Server) -> None:
    async with BatchClient(lasting.url, pool=POOL) as client:
        handle = await client.enqueue({}, deadline=1)
        lasting.kill()
        began = time.monotonic()
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.enqueue({}, deadline=1.5)
        assert time.monotonic() - began < 8
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.result(handle, timeout=0.5)


async def test_who_awaits_a_client_that_is_closed_is_told(one_redis: Server) -> None:
    client = BatchClient(one_redis.url, pool=POOL)
    handle = await client.enqueue({})
    waiting = asyncio.create_task(client.result(handle))
    await wait_until(lambda: handle.waiters)
    await client.aclose()
    await client.aclose()
    with pytest.raises(QueueUnreachableError, match="was closed"):
        await waiting
    with pytest.raises(QueueUnreachableError, match="was closed"):
        await client.enqueue({})


async def test_records_of_calls_do_not_pile_up(one_redis: Server) -> None:
    """They live until the deadline, so the next call removes them."""
    async with BatchClient(one_redis.url, pool=POOL) as client:
        for n in range(30):
            await client.enqueue({"n": n})
        with one_redis.client() as raw:
            assert len(list(raw.scan_iter(f"{NAMES.queue_prefix}:reply:*"))) == 1


async def test_submission_to_a_full_queue_says_so_and_is_made_when_fewer_wait(one_redis: Server) -> None:
    with one_redis.client() as raw:
        raw.flushall()
        raw.hset(NAMES.control_key, f"max_pending:{NAMES.queue}", 1)
        raw.zadd(NAMES.queue, {"another's": 1})
        async with BatchClient(one_redis.url, pool=POOL, retry_for=0) as client:
            with pytest.raises(QueueUnreachableError, match=r"1 requests wait, and queue\.max_pending is 1"):
                await client.enqueue({"n": 1})
        async with BatchClient(one_redis.url, pool=POOL) as client:
            waiting = asyncio.create_task(client.enqueue({"n": 2}))
            await wait_until(lambda: client.connection_error is not None, what="the client to notice")
            assert raw.zcard(NAMES.queue) == 1
            raw.delete(NAMES.queue)
            await waiting
            assert raw.zcard(NAMES.queue) == 1
