"""Processes to be killed, and a network to be cut."""

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

from dispatcher.ports import Submission
from tests.chaos.worker import NAMES, answer_to
from tests.warm import Warm, warm


@dataclass
class Owner:
    """One worker process, started again whenever it was killed."""

    name: str
    url: str
    lease_s: float
    slots: int = 4
    work_s: tuple[float, float] = (0.01, 0.06)
    process: Warm | None = None
    working: asyncio.Event = field(default_factory=asyncio.Event)
    lost: int = 0
    _reader: asyncio.Task[None] | None = None
    _ended: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    async def start(self) -> None:
        self.working.clear()
        numbers = (self.lease_s, self.slots, *self.work_s)
        self.process = self._ended.enter_context(
            warm("tests.chaos.worker", self.url, self.name, *map(str, numbers), stdout=subprocess.PIPE)
        )
        output = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), self.process.stdout
        )
        self._reader = asyncio.create_task(self._handle_buffered_requests(output))

    async def _handle_buffered_requests(self, output: asyncio.StreamReader) -> None:
        async for line in output:
            if line == b"working\n":
                self.working.set()
            elif line == b"lost\n":
                self.lost += 1

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self.process is None or self._reader is None:
            return
        self.process.send_signal(how)
        await asyncio.to_thread(self.process.wait)
        await self._reader
        self._ended.close()


@contextlib.asynccontextmanager
async def owners(*started: Owner) -> AsyncIterator[tuple[Owner, ...]]:
    """Run them for the length of the block; whatever runs at its end is killed."""
    try:
        for owner in started:
            await owner.start()
        yield started
    finally:
        for owner in started:
            await owner.kill()


class Network:
    """A way to a server that can be stalled: nothing passes, nothing is refused, then all goes on."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self._streams: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[int]:
        """The port it listens on."""
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
        """For the length of the block nothing passes; what was sent in it arrives afterwards."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


def requests(first: int, count: int) -> list[Submission]:
    """Requests with ids of their own, due in an hour."""
    made = []
    for number in range(first, first + count):
        data = {"id": f"r-{number}", "deadline": 4_000_000_000, "payload": {"n": number}}
        made.append(
            Submission(json.dumps({"request_kind": "redis", "data": data}).encode(), 4_000_000_000 + number)
        )
    return made


async def results_in(client: redis.asyncio.Redis) -> list[bytes]:
    found: Any = await client.lrange(NAMES.result_list, 0, -1)
    return list(found)


def assert_each_answered_once(results: list[bytes], count: int) -> None:
    """Every request has its result, an answer, its own, and one only."""
    found = [json.loads(result) for result in results]
    assert sorted(one["id"] for one in found) == sorted(f"r-{number}" for number in range(count))
    wrong = [one for one in found if one.get("status_code") != 200 or one["payload"] != answer_to(one["id"])]
    assert wrong == []
