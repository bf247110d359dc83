"""Behaviour of the client while Redis is unreachable, slow or refuses: what it waits for and raises, and
that it submits nothing twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.client import BatchClient, QueueUnreachableError
from tests.client.fake_dispatcher import NAMES, POOL, FakeDispatcher
from tests.queue.factories import queues
from tests.queue.faulty_relay import relay
from tests.queue.servers import Server, server
from tests.support import free_port, wait_until


@pytest.fixture
def persistent_redis(tmp_path: Path) -> Iterator[Server]:
    """Run a server that loses nothing when it is killed."""
    with server("redis", tmp_path, "--appendonly", "yes", "--appendfsync", "no") as running:
        yield running


async def test_waiting_calls_get_their_results_after_redis_is_back(persistent_redis: Server) -> None:
    async with (
        queues(persistent_redis.url, "a", names=NAMES) as (queue,),
        BatchClient(persistent_redis.url, pool=POOL) as client,
    ):
        fake_dispatcher = FakeDispatcher(queue)
        before = await client.enqueue_many([{"n": n} for n in range(50)])
        waiting = [asyncio.create_task(client.result(handle)) for handle in before]
        await wait_until(lambda: all(handle.waiters for handle in before))
        persistent_redis.kill()
        submitted_during_outage = [
            asyncio.create_task(client.submit({"n": n}, id=f"r-{n}")) for n in range(50, 100)
        ]
        await wait_until(lambda: client.connection_error is not None, what="the client to notice")
        assert not any(task.done() for task in (*waiting, *submitted_during_outage))
        await asyncio.to_thread(persistent_redis.start)
        async with fake_dispatcher.answer_continuously():
            results = await asyncio.gather(*waiting, *submitted_during_outage)
        assert [result.json() for result in results] == [{"n": n} for n in range(100)]
        assert len(fake_dispatcher.answered) == len(set(fake_dispatcher.answered)) == 100
        assert client.connection_error is None


@pytest.mark.parametrize(
    "reply",
    [
        "CLUSTERDOWN The cluster is down",
        "CLUSTERDOWN Hash slot not served",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    ],
)
async def test_reply_of_a_server_that_is_being_replaced_is_waited_out(one_redis: Server, reply: str) -> None:
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        relay(one_redis) as relayed,
        BatchClient(relayed.url, pool=POOL) as client,
    ):
        fake_dispatcher = FakeDispatcher(queue)
        async with fake_dispatcher.answer_continuously():
            await client.submit({}, id="warm")
            relayed.says = f"-{reply}\r\n".encode()
            submission = asyncio.create_task(client.submit({}, id="r"))
            await wait_until(lambda: client.connection_error is not None, what="the client to notice")
            assert reply.partition(" ")[2] in str(client.connection_error)
            assert not submission.done()
            relayed.says = None
            assert (await submission).status == 200


async def test_queue_without_a_dispatcher_is_logged_once(
    one_redis: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A typo in the name of the pool leads to such a queue, and its producers would wait in silence."""
    async with (
        BatchClient(one_redis.url, pool="mistyped") as client,
        queues(one_redis.url, "a", names=client._backend.names) as (queue,),
    ):
        for _ in range(2):
            await client._mailbox._check_for_dispatcher()
        (message,) = [each.message for each in caplog.records]
        assert message.startswith(
            "no dispatcher works on batch:{mistyped}:requests: is the pool's name right"
        )
        assert "--observe" in message, "a dispatcher that only observes does not count"
        await queue.sweep()
        await client._mailbox._check_for_dispatcher()
        assert len(caplog.records) == 1


async def test_submission_with_a_lost_reply_is_made_once(one_redis: Server) -> None:
    """The dispatcher has answered the request before the client repeats the call, long after the usual
    minute."""
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        relay(one_redis) as relayed,
        BatchClient(relayed.url, pool=POOL) as client,
    ):
        fake_dispatcher = FakeDispatcher(queue)
        async with fake_dispatcher.answer_continuously():
            await client.submit({}, id="warm")
        await wait_until(
            lambda: not client._mailbox._wake_event.is_set(), what="the connection of the client to be free"
        )
        relayed.mute = 1
        handle = asyncio.create_task(client.enqueue({"n": 1}, id="once"))
        await wait_until(lambda: fake_dispatcher.answer_once(), what="the request to be in the queue")
        with one_redis.client() as raw:
            replies = [key for key in raw.scan_iter("*:reply:*") if b":a:" not in key]
            assert max(raw.ttl(key) for key in replies) > 3600, "the call may be repeated until the deadline"
        await wait_until(lambda: client.connection_error is not None, what="the client to give up that call")
        relayed.mute = None
        assert (await client.result(await handle, timeout=20)).json() == {"n": 1}
        assert fake_dispatcher.answered == ["warm", "once"]
        assert await fake_dispatcher.answer_once() == 0, "the queue has no second request"


async def test_results_that_did_not_reach_the_client_are_delivered_again(one_redis: Server) -> None:
    async with (
        queues(one_redis.url, "a", names=NAMES) as (queue,),
        relay(one_redis) as relayed,
        BatchClient(relayed.url, pool=POOL) as client,
    ):
        handles = await client.enqueue_many([{"n": n, "text": "x" * 500} for n in range(100)])
        waiting = [asyncio.create_task(client.result(handle)) for handle in handles]
        relayed.mute = 5_000
        await FakeDispatcher(queue).answer_once()
        with one_redis.client() as raw:
            kept_key = client.box.kept_key
            await wait_until(lambda: raw.hlen(kept_key) > 100, what="the results to be taken")
            assert not any(task.done() for task in waiting)
            relayed.mute = None
            results = await asyncio.gather(*waiting)
            assert [result.json()["n"] for result in results] == list(range(100))
            await wait_until(lambda: raw.hlen(kept_key) == 2, what="the results to be acknowledged")


async def test_client_that_never_reached_its_queue_raises_soon() -> None:
    async with BatchClient(f"redis://127.0.0.1:{free_port()}", retry_for=0.5) as client:
        started_at = time.monotonic()
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.submit({})
        assert time.monotonic() - started_at < 5


@pytest.mark.parametrize("user", ["nobody:wrong@", ":wrong@"])
async def test_authentication_error_is_raised_at_once(one_redis: Server, user: str) -> None:
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


async def test_submission_waits_for_redis_until_its_deadline(persistent_redis: Server) -> None:
    async with BatchClient(persistent_redis.url, pool=POOL) as client:
        handle = await client.enqueue({}, deadline=1)
        persistent_redis.kill()
        started_at = time.monotonic()
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.enqueue({}, deadline=1.5)
        assert time.monotonic() - started_at < 8
        with pytest.raises(QueueUnreachableError, match="cannot be reached"):
            await client.result(handle, timeout=0.5)


async def test_calls_of_a_closed_client_raise(one_redis: Server) -> None:
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


async def test_records_of_calls_are_removed_by_the_next_call(one_redis: Server) -> None:
    """A record expires only at its deadline, so the next call removes it."""
    async with BatchClient(one_redis.url, pool=POOL) as client:
        for n in range(30):
            await client.enqueue({"n": n})
        with one_redis.client() as raw:
            assert len(list(raw.scan_iter(f"{NAMES.queue_prefix}:reply:*"))) == 1


async def test_submission_to_a_full_queue_raises_or_waits_until_fewer_requests_wait(
    one_redis: Server,
) -> None:
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
