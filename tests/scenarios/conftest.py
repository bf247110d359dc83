"""A stage for each scenario: an empty queue server, and room for worlds and dispatchers beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.queue.servers import Server, server
from tests.scenarios.cluster import Cluster, cluster_in
from tests.scenarios.processes import Stage

APPENDS = ("--appendonly", "yes", "--appendfsync", "no")
"""A killed server leaves every acknowledged write. With `everysec` some wait in it while the disk syncs."""


def default_engine() -> str:
    """Redis; the Valkey of the wheel where that is not installed, unless CI promises that it is."""
    return "redis" if shutil.which("redis-server") or os.environ.get("CI") == "true" else "valkey"


@pytest.fixture(scope="session")
def queue_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server for all scenarios that do it no harm; `indirect` parameter: the engine."""
    engine = getattr(request, "param", None) or default_engine()
    with server(engine, tmp_path_factory.mktemp(engine)) as running:
        yield running


@pytest.fixture
def stage(queue_server: Server, tmp_path: Path) -> Iterator[Stage]:
    """An empty queue and a stage around it. No dispatcher may show a defect of its own in its log."""
    with _stage_around(queue_server, tmp_path) as made:
        yield made


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    """The same around a server of its own, which a test may freeze or kill: it has an append-only file."""
    with (
        server(default_engine(), tmp_path / "queue", *APPENDS) as running,
        _stage_around(running, tmp_path) as made,
    ):
        yield made


@contextmanager
def _stage_around(running: Server, folder: Path) -> Iterator[Stage]:
    with running.client() as client:
        client.flushall()
    with ExitStack() as stack:
        made = Stage(folder, running, stack)
        yield made
        complaints = made.complaints()
    assert not complaints, "\n".join(complaints)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_in(tmp_path) as made:
        yield made
