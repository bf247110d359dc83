"""Fixtures with one server of each engine for a test process. Each test gets it empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from tests.queue.servers import ENGINE_PARAMS, Server, server


@pytest.fixture(scope="session", params=ENGINE_PARAMS)
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a running server. By day there is one engine (`ENGINE_PARAMS`)."""
    with server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def client(any_server: Server) -> AsyncIterator[redis.asyncio.Redis]:
    """Yield a client of an empty server, with the settings that a queue needs."""
    with any_server.client() as blocking:
        blocking.flushall()
    found = redis.asyncio.Redis(port=any_server.port, protocol=2)
    yield found
    await found.aclose()
