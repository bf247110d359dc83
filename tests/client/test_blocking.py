"""The blocking client, for programs without an event loop."""

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
from tests.client.fake_dispatcher import POOL, FakeDispatcher
from tests.queue.servers import Server
from tests.support import wait_until

WAITING_PROGRAM = """
import sys
from dispatcher.client import BatchClient

with BatchClient.sync(sys.argv[1], pool="qwen") as client:
    print("waiting", flush=True)
    try:
        client.submit({}, id="r-1")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


async def test_blocking_calls_return_the_same_results(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    def run_calls() -> dict[str, Any]:
        with BatchClient.sync(one_redis.url, pool=POOL) as client:
            handle = client.enqueue({"n": 1}, id="r-1")
            results = {
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
                results["left early"] = result.ok
                break
            return results

    async with fake_dispatcher.answer_continuously():
        results = await asyncio.to_thread(run_calls)
    assert results == {
        "submit": {"n": 0},
        "result": "r-1",
        "many": [{}, {"n": 2}],
        "map": [{"n": 3}, {"n": 4}],
        "stream": [{"n": n} for n in range(5)],
        "cancel": False,
        "left early": True,
    }


async def test_threads_share_a_client_and_get_their_own_answers(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    def work(number: int) -> list[dict[str, int]]:
        return [client.submit({"thread": number, "n": n}).json() for n in range(25)]

    def run_calls() -> list[list[dict[str, int]]]:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(work, range(8)))

    client = BatchClient.sync(one_redis.url, pool=POOL)
    try:
        async with fake_dispatcher.answer_continuously():
            found = await asyncio.to_thread(run_calls)
    finally:
        await asyncio.to_thread(client.close)
    assert found == [[{"thread": number, "n": n} for n in range(25)] for number in range(8)]


async def test_ctrl_c_ends_the_wait_and_cancels_the_request(
    fake_dispatcher: FakeDispatcher, one_redis: Server
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WAITING_PROGRAM,
        one_redis.url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def is_queued() -> bool:
        return bool((await fake_dispatcher.queue.count_requests()).pending)

    await wait_until(is_queued)
    process.send_signal(signal.SIGINT)
    output, error_output = await asyncio.wait_for(process.communicate(), 10)
    assert output.split() == [b"waiting", b"interrupted"]
    assert (process.returncode, error_output) == (0, b"")
    with one_redis.client() as raw:
        assert len(list(raw.scan_iter("*:cancel:r-1:*"))) == 1


class SlowStreamClient:
    """A client whose stream yields once, interrupts the program while it waits for the next result, and
    needs many iterations of the event loop to end."""

    def __init__(self) -> None:
        self.has_ended = False
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
            self.has_ended = True

    def interrupt(self) -> None:
        self.interrupts -= 1
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def aclose(self) -> None:
        assert self.has_ended, "the stream ends before the client is closed"


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_is_raised_by_a_stream_that_takes_time_to_end(interrupts: int) -> None:
    slow = SlowStreamClient()
    slow.interrupts = interrupts
    results: list[object] = []
    with BlockingBatchClient(lambda: cast(AsyncClient, slow)) as client, pytest.raises(KeyboardInterrupt):
        results.extend(client.stream([]))
    assert slow.has_ended


STREAMING_PROGRAM = """
import sys
from dispatcher.client import BatchClient

with BatchClient.sync(sys.argv[1], pool="qwen") as client:
    for result in client.stream(({"n": n} for n in range(20000)), max_pending=2000):
        pass
"""


async def test_ctrl_c_ends_a_streaming_program(fake_dispatcher: FakeDispatcher, one_redis: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAMING_PROGRAM, one_redis.url, stderr=asyncio.subprocess.PIPE
    )

    async def is_full() -> bool:
        return (await fake_dispatcher.queue.count_requests()).pending == 2000

    await wait_until(is_full)
    process.send_signal(signal.SIGINT)
    _, error_output = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == -signal.SIGINT, "130 in a shell"
    assert error_output.endswith(b"KeyboardInterrupt\n")
    assert b"RuntimeError" not in error_output


async def test_closed_or_forked_client_raises(one_redis: Server) -> None:
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
