"""Fixture with the queues on which every conformance test runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from dispatcher.queue.lua_files import ALL_FEATURES
from tests.conformance.worlds import MemoryWorld, RedisWorld, World
from tests.queue.servers import DAILY_ENGINE, ENGINE_PARAMS, Server, server

NO_FEATURES = "no-features"
PLAIN_MODULES = {
    "test_dead_and_overdue",
    "test_leases",
    "test_lookups",
    "test_order",
    "test_owners",
    "test_queue_contract",
    "test_shared_state",
    "test_snapshot",
    "test_two_queues",
    "test_units",
    "test_wake_ups",
}
"""Modules whose tests need no feature, except for those with the mark `features`."""


@pytest.fixture(scope="session")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Yield a server of each engine for the whole session. Each is started on first use."""
    with contextlib.ExitStack() as stack:

        class Started(dict[str, Server]):
            def __missing__(self, engine: str) -> Server:
                running = stack.enter_context(server(engine, tmp_path_factory.mktemp(engine)))
                return self.setdefault(engine, running)

        yield Started()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of plain requests also on the scripts without features, and all but those with the mark
    `server` also in memory."""
    if "world" in metafunc.fixturenames:
        is_plain = metafunc.module.__name__.rpartition(".")[2] in PLAIN_MODULES
        has_features = metafunc.definition.get_closest_marker("features") is not None
        plain = [NO_FEATURES] if is_plain and not has_features else []
        needs_server = metafunc.definition.get_closest_marker("server") is not None
        memory = [] if needs_server else ["memory"]
        metafunc.parametrize("world", [*memory, *ENGINE_PARAMS, *plain], indirect=True)


@pytest.fixture
async def world(request: pytest.FixtureRequest, _servers: dict[str, Server]) -> AsyncIterator[World]:
    """An empty queue of each kind."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    has_features = request.param != NO_FEATURES
    running = _servers[request.param if has_features else DAILY_ENGINE]
    with running.client() as client:
        client.flushall()
    found = RedisWorld(running, features=ALL_FEATURES if has_features else ())
    yield found
    await found.close()
