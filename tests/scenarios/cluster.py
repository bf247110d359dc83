"""A Kubernetes API server for scenarios of processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.signals.apiserver import ApiServer, populate


class Cluster:
    """An API server on a thread, for tests that wait for processes."""

    def __init__(self, server: ApiServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._loop = loop

    def do(self, act: Callable[[ApiServer], object]) -> None:
        """Done in the server's own loop when this returns."""

        async def once() -> None:
            act(self.server)

        asyncio.run_coroutine_threadsafe(once(), self._loop).result(10)


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """A pool of three ready pods."""
    ready, done = threading.Event(), asyncio.Event()
    made: list[Cluster] = []

    async def serve() -> None:
        async with ApiServer().serve(folder) as server:
            made.append(Cluster(server, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        made[0].do(lambda server: populate(server, 3))
        yield made[0]
    finally:
        made[0].do(lambda _: done.set())
        thread.join(10)
