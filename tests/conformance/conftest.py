"""Fixture with the queues on which every conformance test runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conformance.worlds import MemoryWorld, RedisWorld, World
from tests.queue.servers import ENGINE_PARAMS, Server, server


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Yield a server of each engine for the whole session. Each is started on first use."""
    with contextlib.ExitStack() as stack:

        class Started(dict[str, Server]):
            def __missing__(self, engine: str) -> Server:
                running = stack.enter_context(server(engine, tmp_path_factory.mktemp(engine)))
                return self.setdefault(engine, running)

        yield Started()


@pytest.fixture(params=["memory", *ENGINE_PARAMS])
async def world(request: pytest.FixtureRequest, _servers: dict[str, Server]) -> AsyncIterator[World]:
    """An empty queue of each kind."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    running = _servers[request.param]
    with running.client() as client:
        client.flushall()
    found = RedisWorld(running)
    yield found
    await found.close()
