"""Fixtures of the tests of the client: an empty Redis for each test, a queue on it, and a fake dispatcher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.client.fake_dispatcher import NAMES, FakeDispatcher
from tests.queue.factories import queues
from tests.queue.servers import ENGINE_PARAMS, Server, server


@pytest.fixture(scope="session", params=ENGINE_PARAMS)
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server. By day there is one engine (`ENGINE_PARAMS`)."""
    with server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def any_redis(any_engine: Server) -> Server:
    """Return the running server after deleting all keys."""
    with any_engine.client() as blocking:
        blocking.flushall()
    return any_engine


@pytest.fixture(scope="session")
def redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server("redis", tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def one_redis(redis_of_session: Server) -> Server:
    """Return an empty Redis, for tests that do not depend on the engine."""
    with redis_of_session.client() as blocking:
        blocking.flushall()
    return redis_of_session


@pytest.fixture
async def fake_dispatcher(one_redis: Server) -> AsyncIterator[FakeDispatcher]:
    """Yield a fake dispatcher on that Redis."""
    async with queues(one_redis.url, "a", names=NAMES) as (queue,):
        yield FakeDispatcher(queue)
