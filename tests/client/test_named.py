"""Clients with a name: their results wait for the next one of that name, and one at a time reads them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys

import pytest

from dispatcher.client import BatchClient, Item, NameInUseError, NoResultError, QueueUnreachableError
from dispatcher.queue.redis.producer import ResultBox
from tests.client.answering import POOL, Answering
from tests.queue.servers import Server
from tests.support import wait_until

NIGHTLY = ResultBox("batch-results:{nightly}")
DIES = """
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
"""A consumer that dies with forty results that it has taken from the list, and handed to nobody."""


async def test_a_consumer_that_is_killed_loses_no_result(answering: Answering, one_redis: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIES, one_redis.url, stdout=asyncio.subprocess.PIPE
    )
    async with answering.always():
        told, _ = await process.communicate()
    assert process.returncode == -signal.SIGKILL
    had = json.loads(told)
    assert len(had) == 10
    with one_redis.client() as raw:
        assert raw.llen(NIGHTLY.result_list) == 0, "all were taken"
        assert 0 < raw.ttl(NIGHTLY.owner_key) <= 15
        raw.delete(NIGHTLY.owner_key)  # as those seconds do
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client:
        for n in range(10, 50):
            result = await client.result(f"r-{n}")
            assert result.json() == {"n": n}
            with pytest.raises(NoResultError):
                await client.result(f"r-{n}", timeout=0)
    with one_redis.client() as raw:
        left = {name for name in raw.hkeys(NIGHTLY.kept_key) if name.isdigit()}
        assert len(left) <= 10, "those at most that the dead one had, and may not have told"


async def test_a_second_process_of_a_name_is_told_and_takes_nothing(
    answering: Answering, one_redis: Server
) -> None:
    async with (
        BatchClient(one_redis.url, pool=POOL, name="nightly") as first,
        BatchClient(one_redis.url, pool=POOL, name="nightly") as second,
    ):
        second._mailbox.in_use_after_s = 0.5
        mine = await first.enqueue_many([{"n": n} for n in range(20)])
        waiting = [asyncio.create_task(first.result(handle)) for handle in mine]
        await wait_until(lambda: first.is_reading)
        theirs = await second.enqueue({"n": "second"}, id="theirs")
        with pytest.raises(NameInUseError, match=r"batch-results:\{nightly\} is read by .*process \d+"):
            await second.result(theirs)
        await answering.once()
        assert [(await each).json()["n"] for each in waiting] == list(range(20))
        assert (await first.result("theirs", timeout=5)).json() == {"n": "second"}, "who has the name has all"


async def test_the_name_is_free_when_its_client_closes(answering: Answering, one_redis: Server) -> None:
    for n in range(3):
        async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client, answering.always():
            assert (await client.submit({"n": n})).json() == {"n": n}


async def test_one_program_submits_and_another_one_of_the_name_reads(
    answering: Answering, one_redis: Server
) -> None:
    """Who only submits does not hold the name, and may end before anything is answered."""
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as reader:
        async with BatchClient(one_redis.url, pool=POOL, name="nightly") as submitter:
            await submitter.enqueue_many([Item({"n": n}, id=f"r-{n}") for n in range(3)])
        waiting = [asyncio.create_task(reader.result(f"r-{n}")) for n in range(3)]
        await wait_until(lambda: reader.is_reading)
        await answering.once()
        assert [(await each).json() for each in waiting] == [{"n": n} for n in range(3)]


async def test_an_id_that_nobody_submitted_is_told_soon(answering: Answering, one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client:
        with pytest.raises(
            NoResultError, match="never is not in line, and no result of it is kept for nightly"
        ):
            await client.result("never")


async def test_results_by_id_are_for_clients_with_a_name(one_redis: Server) -> None:
    async with BatchClient(one_redis.url, pool=POOL) as client:
        with pytest.raises(ValueError, match="by their handles alone"):
            await client.result("r-1")
    with pytest.raises(ValueError, match="1 to 64 letters"):
        BatchClient(one_redis.url, name="a:kept")


async def test_a_keep_that_redis_lost_is_begun_anew(answering: Answering, one_redis: Server) -> None:
    """Its lifetime ended, or a failover forgot it: what comes then is not mistaken for what was seen."""
    async with BatchClient(one_redis.url, pool=POOL, name="nightly") as client, answering.always():
        for n in range(3):
            assert (await client.submit({"n": n})).json() == {"n": n}
            with one_redis.client() as raw:
                raw.delete(NIGHTLY.kept_key)
        assert (await client.submit({"n": 3})).json() == {"n": 3}


@pytest.mark.parametrize("key", [NIGHTLY.owner_key, NIGHTLY.kept_key])
async def test_another_programs_key_in_its_place_is_said_and_waited_for_by_nobody(
    answering: Answering, one_redis: Server, key: str
) -> None:
    """Before such names were refused, a result that was sent to the name made a list of the key."""
    with one_redis.client() as raw:
        raw.lpush(key, "result")
        async with (
            answering.always(),
            BatchClient(one_redis.url, pool=POOL, name="nightly") as client,
        ):
            handle = await client.enqueue({"n": 1}, id="r-1")
            with pytest.raises(QueueUnreachableError, match=rf"{re.escape(key)} holds a list, not a "):
                await client.result(handle)
            raw.delete(key)
            assert (await client.result(handle)).json() == {"n": 1}
