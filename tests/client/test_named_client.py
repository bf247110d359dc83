"""Named clients: their results wait for the next client of the name, and one client at a time reads them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys

import pytest

from dispatcher.client import BatchClient, Item, NameInUseError, NoResultError, QueueUnreachableError
from dispatcher.queue.redis.producer import ResultBox
from tests.client.fake_dispatcher import POOL, FakeDispatcher
from tests.queue.servers import Server
from tests.support import wait_until

NIGHTLY = ResultBox("batch-results:{nightly}")
KILLED_CONSUMER = """
import asyncio, json, os, signal, sys
from dispatcher.client import BatchClient, Item

async def main():
    client = BatchClient(sys.argv[1], pool="qwen", name="nightly")
    handles = await client.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(50)])
    had = [(await client.result(handle)).id for handle in handles[:10]]
    while not all(handle.done for handle in handles):
        await asyncio.sleep(0.01)
    print(json.dumps(had), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
"""A program that is killed with forty results that it has taken from the list and not yet returned to its
caller."""


async def test_killed_consumer_loses_no_result(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED_CONSUMER, one_redis.url, stdout=asyncio.subprocess.PIPE
    )
    async with fake_dispatcher.answer_continuously():
        output, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    received = json.loads(output)
    assert len(received) == 10
    with one_redis.client() as raw:
        assert raw.llen(NIGHTLY.result_list) == 0, "the client has taken all results"
        assert 0 < raw.ttl(NIGHTLY.owner_key) <= 15
        raw.delete(NIGHTLY.owner_key)  # as its expiry does
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client:
        for n in range(10, 50):
            result = await client.result(f"r-{n}")
            assert result.json() == {"n": n}
            with pytest.raises(NoResultError):
                await client.result(f"r-{n}", timeout=0)
    with one_redis.client() as raw:
        not_acknowledged = {name for name in raw.hkeys(NIGHTLY.kept_key) if name.isdigit()}
        assert len(not_acknowledged) <= 10, "at most the results that the killed client had not acknowledged"


async def test_second_client_of_a_name_raises_and_takes_no_results(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    async with (
        BatchClient(one_redis.url, pool=POOL, name="nightly") as first,
        BatchClient(one_redis.url, pool=POOL, name="nightly") as second,
    ):
        second._mailbox.in_use_after_s = 0.5
        first_handles = await first.enqueue_many([{"n": n} for n in range(20)])
        waiting = [asyncio.create_task(first.result(handle)) for handle in first_handles]
        await wait_until(lambda: first.is_reading)
        second_handle = await second.enqueue({"n": "second"}, id="theirs")
        with pytest.raises(NameInUseError, match=r"batch-results:\{nightly\} is read by .*process \d+"):
            await second.result(second_handle)
        await fake_dispatcher.answer_once()
        assert [(await each).json()["n"] for each in waiting] == list(range(20))
        assert (await first.result("theirs", timeout=5)).json() == {"n": "second"}, (
            "the owner of the name gets all results"
        )


async def test_name_is_free_after_its_client_has_closed(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    for n in range(3):
        async with (
            BatchClient(one_redis.url, pool=POOL, name="nightly") as client,
            fake_dispatcher.answer_continuously(),
        ):
            assert (await client.submit({"n": n})).json() == {"n": n}


async def test_one_client_submits_and_another_of_the_same_name_reads(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    """A client that only submits does not own the name, and may end before the requests are answered."""
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as reader:
        async with BatchClient(one_redis.url, pool=POOL, name="nightly") as submitter:
            await submitter.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(3)])
        waiting = [asyncio.create_task(reader.result(f"r-{n}")) for n in range(3)]
        await wait_until(lambda: reader.is_reading)
        await fake_dispatcher.answer_once()
        assert [(await each).json() for each in waiting] == [{"n": n} for n in range(3)]


async def test_unknown_id_raises_soon(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client:
        with pytest.raises(
            NoResultError, match="never is not in line, and no result of it is kept for nightly"
        ):
            await client.result("never")


async def test_results_by_id_need_a_named_client(one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        with pytest.raises(ValueError, match="by their handles alone"):
            await client.result("r-1")
    with pytest.raises(ValueError, match="1 to 64 letters"):
        BatchClient(one_redis.url, name="a:kept")


async def test_lost_record_of_kept_results_is_started_again(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    """The record expired or was lost in a failover. Later results are not mistaken for earlier ones."""
    async with (
        BatchClient(one_redis.url, pool=POOL, name="nightly") as client,
        fake_dispatcher.answer_continuously(),
    ):
        for n in range(3):
            assert (await client.submit({"n": n})).json() == {"n": n}
            with one_redis.client() as raw:
                raw.delete(NIGHTLY.kept_key)
        assert (await client.submit({"n": 3})).json() == {"n": 3}


@pytest.mark.parametrize("key", [NIGHTLY.owner_key, NIGHTLY.kept_key])
async def test_key_of_another_type_raises_instead_of_waiting(
    fake_dispatcher: FakeDispatcher, one_redis: Server, key: str
) -> None:
    """Earlier versions accepted a result list of this name, which made the key a list."""
    with one_redis.client() as raw:
        raw.lpush(key, "result")
        async with (
            fake_dispatcher.answer_continuously(),
            BatchClient(one_redis.url, pool=POOL, name="nightly") as client,
        ):
            handle = await client.enqueue({"n": 1}, id="r-1")
            with pytest.raises(QueueUnreachableError, match=rf"{re.escape(key)} holds a list, not a "):
                await client.result(handle)
            raw.delete(key)
            assert (await client.result(handle)).json() == {"n": 1}
