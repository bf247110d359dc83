"""One server of each engine for a test process; every test gets it empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from tests.queue.servers import ENGINES, Server, server


@pytest.fixture(scope="session", params=ENGINES)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running Redis, then a running Valkey."""
    with server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def client(any_server: Server) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty server, with the settings a queue needs."""
    with any_server.client() as blocking:
        blocking.flushall()
    found = redis.asyncio.Redis(port=any_server.port, protocol=2)
    yield found
    await found.aclose()
