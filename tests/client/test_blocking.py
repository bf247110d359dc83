"""The twin for programs without an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from dispatcher.client import BatchClient, Item, NoResultError, QueueUnreachableError
from dispatcher.client.blocking import AsyncClient, BlockingBatchClient
from tests.client.answering import POOL, Answering
from tests.queue.servers import Server
from tests.support import wait_until

WAITS = """
import sys
from dispatcher.client import BatchClient

with BatchClient.sync(sys.argv[1], pool="qwen") as client:
    print("waiting", flush=True)
    try:
        client.submit({}, id="r-1")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


async def test_the_verbs_block_and_do_the_same(answering: Answering, one_redis: Server) -> None:
    def script() -> dict[str, Any]:
        with BatchClient.sync(one_redis.url, pool=POOL) as client:
            handle = client.enqueue({"n": 1}, id="r-1")
            told = {
                "submit": client.submit({"n": 0}, deadline="10m").json(),
                "result": client.result(handle).id,
                "many": [client.result(each).json() for each in client.enqueue_many([Item({}), {"n": 2}])],
                "map": [result.json() for result in client.map([{"n": 3}, {"n": 4}])],
                "stream": [
                    result.json() for result in client.stream(({"n": n} for n in range(5)), ordered=True)
                ],
                "cancel": client.cancel(handle),
            }
            for result in client.stream({"n": n} for n in range(100)):
                told["left early"] = result.ok
                break
            return told

    async with answering.always():
        told = await asyncio.to_thread(script)
    assert told == {
        "submit": {"n": 0},
        "result": "r-1",
        "many": [{}, {"n": 2}],
        "map": [{"n": 3}, {"n": 4}],
        "stream": [{"n": n} for n in range(5)],
        "cancel": False,
        "left early": True,
    }


async def test_many_threads_share_one_and_each_has_its_own_answers(
    answering: Answering, one_redis: Server
) -> None:
    def work(number: int) -> list[dict[str, int]]:
        return [client.submit({"thread": number, "n": n}).json() for n in range(25)]

    def script() -> list[list[dict[str, int]]]:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(work, range(8)))

    client = BatchClient.sync(one_redis.url, pool=POOL)
    try:
        async with answering.always():
            found = await asyncio.to_thread(script)
    finally:
        await asyncio.to_thread(client.close)
    assert found == [[{"thread": number, "n": n} for n in range(25)] for number in range(8)]


async def test_ctrl_c_ends_the_wait_and_cancels_what_nobody_awaits(
    answering: Answering, one_redis: Server
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WAITS,
        one_redis.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def in_line() -> bool:
        return bool((await answering.queue.count_requests()).pending)

    await wait_until(in_line)
    process.send_signal(signal.SIGINT)
    told, complaint = await asyncio.wait_for(process.communicate(), 10)
    assert told.split() == [b"waiting", b"interrupted"]
    assert (process.returncode, complaint) == (0, b"")
    with one_redis.client() as raw:
        assert len(list(raw.scan_iter("*:cancel:r-1:*"))) == 1


class SlowToEnd:
    """A client whose stream yields once, interrupts the program while it awaits the next result, and needs
    many rounds of the loop to end."""

    def __init__(self) -> None:
        self.record_completion = False
        self.interrupts = 1

    async def stream(self, items: object, **options: object) -> AsyncGenerator[int, None]:
        try:
            yield 1
            self.interrupt()
            await asyncio.Event().wait()
        finally:
            for _ in range(50):
                await asyncio.sleep(0)
            if self.interrupts:
                self.interrupt()
                for _ in range(50):
                    await asyncio.sleep(0.001)
            self.record_completion = True

    def interrupt(self) -> None:
        self.interrupts -= 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def aclose(self) -> None:
        assert self.record_completion, "what it runs has ended before it is closed"


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_comes_out_of_a_stream_that_takes_time_to_end(interrupts: int) -> None:
    slow = SlowToEnd()
    slow.interrupts = interrupts
    got: list[object] = []
    with BlockingBatchClient(lambda: cast(AsyncClient, slow)) as client, pytest.raises(KeyboardInterrupt):
        got.extend(client.stream([]))
    assert slow.record_completion


STREAMS = """
import sys
from dispatcher.client import BatchClient

with BatchClient.sync(sys.argv[1], pool="qwen") as client:
    for result in client.stream(({"n": n} for n in range(20000)), max_pending=2000):
        pass
"""


async def test_ctrl_c_ends_a_program_that_streams(answering: Answering, one_redis: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAMS, one_redis.url, stderr=asyncio.subprocess.PIPE
    )

    async def is_full() -> bool:
        return (await answering.queue.count_requests()).pending == 2000

    await wait_until(is_full)
    process.send_signal(signal.SIGINT)
    _, complaint = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == -signal.SIGINT, "130 in a shell"
    assert complaint.endswith(b"KeyboardInterrupt\n")
    assert b"RuntimeError" not in complaint


async def test_a_client_that_is_closed_or_was_forked_says_so(one_redis: Server) -> None:
    client = BatchClient.sync(one_redis.url, pool=POOL)
    with pytest.raises(NoResultError):
        await asyncio.to_thread(client.submit, {}, timeout=0.05)
    client._pid = os.getpid() + 1
    with pytest.raises(QueueUnreachableError, match="forked"):
        client.submit({})
    client._pid = os.getpid()
    await asyncio.to_thread(client.close)
    with pytest.raises(QueueUnreachableError, match="was closed"):
        client.submit({})
    with pytest.raises(ValueError, match=r"queue\.url"):
        BatchClient.sync("http://nowhere")
