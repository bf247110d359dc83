"""`queue copy` onto itself, and from a queue that shrinks during the copy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.cli.connection import QueueTarget
from dispatcher.cli.queue import copy_requests
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.found_request import LookupPage, RequestLocation
from dispatcher.requests.submission import Submission
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = int(time.time()) + 86_400


@pytest.fixture
def queue_server(tmp_path: Path) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path) as running:
        yield running


def test_queue_is_not_copied_onto_itself_through_another_url(queue_server: Server) -> None:
    same = queue_server.url.replace("127.0.0.1", "localhost")
    done = CliRunner().invoke(
        app, ["queue", "copy", "--from", queue_server.url, "--to", same, "--pool", "default", "--live"]
    )
    assert (done.exit_code, "are the same Redis" in done.stderr) == (2, True)
    with queue_server.client() as client:
        assert client.keys() == []


class ShrinkingQueue(RedisQueueAdmin):
    """A queue in which three requests expire after its first page was read."""

    async def list_requests(
        self, state: str, max_count: int, after: str = "", *, full_members: bool = False
    ) -> LookupPage:
        page = await super().list_requests(state, max_count, after, full_members=full_members)
        if state is RequestLocation.PENDING and not after:
            await self.backend.scripts.client.zpopmin(self.names.queue, 3)
        return page


async def test_requests_that_expire_during_a_copy_do_not_hide_others(
    queue_server: Server, tmp_path: Path
) -> None:
    with server(ENGINES[-1], tmp_path) as far:
        source = ShrinkingQueue(connect(queue_server.url), NAMES)
        for n in range(300):
            await source.submit([Submission(b"r-%d" % n, LATER + n)])
        await source.pause("ann", "moving")
        found = await copy_requests(source, QueueTarget(far.url, NAMES), live=False)
        await source.aclose()
        assert found is not None
        assert (found[0][RequestLocation.PENDING], found[1]) == (300, 300)
        with far.client() as client:
            assert client.zcard(NAMES.queue) == 300
