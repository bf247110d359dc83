"""Fixtures of scenarios with processes: an empty queue server, and a stage for worlds and dispatchers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.queue.servers import Server, server
from tests.scenarios.cluster import Cluster, start_cluster
from tests.scenarios.processes import Stage

APPEND_ONLY_OPTIONS = ("--appendonly", "yes", "--appendfsync", "no")
"""With these options a killed server keeps every acknowledged write.

With `everysec` some writes stay in its memory while the disk syncs.
"""


def default_engine() -> str:
    """Return Redis if it is installed or must be (CI=true), else Valkey from its wheel."""
    return "redis" if shutil.which("redis-server") or os.environ.get("CI") == "true" else "valkey"


@pytest.fixture(scope="session")
def queue_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Queue server shared by all scenarios that do not stop it. The engine may be an indirect parameter."""
    engine = getattr(request, "param", None) or default_engine()
    with server(engine, tmp_path_factory.mktemp(engine)) as queue_server:
        yield queue_server


@pytest.fixture
def stage(queue_server: Server, tmp_path: Path) -> Iterator[Stage]:
    """Stage with an empty queue. The test fails if the log of a dispatcher shows a defect."""
    with _make_stage(queue_server, tmp_path) as stage:
        yield stage


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    """Stage with its own queue server with an append-only file, which a test may freeze or kill."""
    with (
        server(default_engine(), tmp_path / "queue", *APPEND_ONLY_OPTIONS) as queue_server,
        _make_stage(queue_server, tmp_path) as stage,
    ):
        yield stage


@contextmanager
def _make_stage(queue_server: Server, folder: Path) -> Iterator[Stage]:
    with queue_server.client() as client:
        client.flushall()
    with ExitStack() as stack:
        stage = Stage(folder, queue_server, stack)
        yield stage
        defects = stage.find_defects()
    assert not defects, "\n".join(defects)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with start_cluster(tmp_path) as cluster:
        yield cluster
