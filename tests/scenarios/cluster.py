"""Kubernetes API server for process scenarios."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.signals.apiserver import ApiServer, populate


class Cluster:
    """An API server in a thread, since process scenarios block."""

    def __init__(self, server: ApiServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self._loop = loop

    def run_on_server(self, action: Callable[[ApiServer], object]) -> None:
        """Call `action` with the server in its event loop, and return when it is done."""

        async def run_action() -> None:
            action(self.server)

        asyncio.run_coroutine_threadsafe(run_action(), self._loop).result(10)


@contextmanager
def start_cluster(folder: Path) -> Iterator[Cluster]:
    """Start an API server with a pool of three ready pods."""
    ready, stop_requested = threading.Event(), asyncio.Event()
    clusters: list[Cluster] = []

    async def serve() -> None:
        async with ApiServer().serve(folder) as server:
            clusters.append(Cluster(server, asyncio.get_running_loop()))
            ready.set()
            await stop_requested.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        clusters[0].run_on_server(lambda server: populate(server, 3))
        yield clusters[0]
    finally:
        clusters[0].run_on_server(lambda _: stop_requested.set())
        thread.join(10)
