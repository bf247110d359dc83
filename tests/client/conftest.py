"""An empty server for each test, a queue on it, and somebody who answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dispatcher.client.files import FilePaths
from tests.client.answering import NAMES, Answering
from tests.queue.made import queues
from tests.queue.servers import ENGINES, Server, server


@pytest.fixture(scope="session", params=ENGINES)
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running Redis, then a running Valkey."""
    with server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def any_redis(any_engine: Server) -> Server:
    """The same, empty."""
    with any_engine.client() as blocking:
        blocking.flushall()
    return any_engine


@pytest.fixture(scope="session")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server("redis", tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def one_redis(_redis: Server) -> Server:
    """An empty Redis, for what no engine does in its own way."""
    with _redis.client() as blocking:
        blocking.flushall()
    return _redis


@pytest.fixture
async def answering(one_redis: Server) -> AsyncIterator[Answering]:
    """Who answers on that Redis."""
    async with queues(one_redis.url, "a", names=NAMES) as (queue,):
        yield Answering(queue)


@pytest.fixture
def paths(tmp_path: Path) -> FilePaths:
    """Where a run of a batch file reads and writes."""
    return FilePaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
