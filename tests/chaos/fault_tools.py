"""Worker processes that can be killed, and a network connection that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from dispatcher.requests.submission import Submission
from tests.chaos.worker import NAMES, make_answer
from tests.fork_server import ForkedProcess, forked_process


@dataclass
class WorkerProcess:
    """Worker process (tests/chaos/worker.py), which can be killed and restarted."""

    name: str
    url: str
    lease_s: float
    slots: int = 4
    work_s: tuple[float, float] = (0.01, 0.06)
    process: ForkedProcess | None = None
    working: asyncio.Event = field(default_factory=asyncio.Event)
    lost_count: int = 0
    _reader: asyncio.Task[None] | None = None
    _exit_stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def start(self) -> None:
        self.working.clear()
        numbers = (self.lease_s, self.slots, *self.work_s)
        self.process = self._exit_stack.enter_context(
            forked_process(
                "tests.chaos.worker", self.url, self.name, *map(str, numbers), stdout=subprocess.PIPE
            )
        )
        output = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self.process.stdout
        )
        self._reader = asyncio.create_task(self._read_output(output))

    async def _read_output(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            if line == b"working\n":
                self.working.set()
            elif line == b"lost\n":
                self.lost_count += 1

    async def kill(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is None or self._reader is None:
            return
        self.process.send_signal(signal_number)
        await asyncio.to_thread(self.process.wait)
        await self._reader
        self._exit_stack.close()


@contextlib.asynccontextmanager
async def run_workers(*workers: WorkerProcess) -> AsyncIterator[tuple[WorkerProcess, ...]]:
    """Run worker processes for the duration of the block, and kill them at its end."""
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        for worker in workers:
            await worker.kill()


class Network:
    """TCP proxy in front of a server that can be stalled: connections stay open, but no data passes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._streams: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def start_proxy(self) -> AsyncIterator[int]:
        """Start the proxy, and yield its port."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._streams:
                task.cancel()
            await asyncio.gather(*self._streams, return_exceptions=True)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Let no data pass for the duration of the block. Data sent meanwhile arrives afterwards."""
        self._is_open.clear()
        try:
            yield
        finally:
            self._is_open.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for source, destination in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._forward(source, destination))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _forward(self, source: asyncio.StreamReader, destination: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._is_open.wait()
                destination.write(data)
                await destination.drain()
        destination.close()


def make_requests(first: int, count: int) -> list[Submission]:
    """Return requests with consecutive ids and a deadline in the far future."""
    submissions = []
    for number in range(first, first + count):
        data = {"id": f"r-{number}", "deadline": 4_000_000_000, "payload": {"n": number}}
        submissions.append(
            Submission(json.dumps({"request_kind": "redis", "data": data}).encode(), 4_000_000_000 + number)
        )
    return submissions


async def read_results(client: redis.asyncio.Redis) -> list[bytes]:
    results: Any = await client.lrange(NAMES.result_list, 0, -1)
    return list(results)


def assert_each_answered_once(raw_results: list[bytes], count: int) -> None:
    """Assert that each request has exactly one result, with the answer to this request."""
    results = [json.loads(result) for result in raw_results]
    assert sorted(result["id"] for result in results) == sorted(f"r-{number}" for number in range(count))
    wrong = [
        result
        for result in results
        if result.get("status_code") != 200 or result["payload"] != make_answer(result["id"])
    ]
    assert wrong == []
