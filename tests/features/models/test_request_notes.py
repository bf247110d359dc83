"""A request that waits for its model, as `describe`, `list` and `result --wait` show it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from dispatcher.cli import app
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.queue.contract import Release
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = 4_000_000_000


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("waiting")) as running:
        yield running


async def run_verb(queue_server: Server, *arguments: str) -> Result:
    given = [*arguments, "--queue-url", queue_server.url]
    return await asyncio.to_thread(CliRunner().invoke, app, given)


async def test_request_that_waits_for_its_model_is_shown_with_the_model(queue_server: Server) -> None:
    member = encode_member("r-1", b'{"prompt": "hi"}', LATER, token="token-of-r-1")
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        await queue.submit([Submission(member, LATER, "r-1", "token-of-r-1", LATER)])
        (lease,) = (await claim(queue, 1)).leases
        why = "its model 'qwen' is drained by ann"
        await queue.release([Release(lease, is_undelivered=True, last_attempt=why, extra=ModelWait("qwen"))])
        (shown,) = json.loads((await run_verb(queue_server, "describe", "r-1", "--json")).stdout)["requests"]
        assert (shown["state"], shown["missing_model"], shown["last_attempt"]) == (
            "waiting-for-model",
            "qwen",
            why,
        )
        assert shown["why"].startswith(f"it waits, because {why}; the gate: "), (
            "the model is served but drained"
        )
        wait_output = await run_verb(queue_server, "result", "r-1", "--wait", "2100ms")
        assert wait_output.stderr.splitlines()[0] == f"waiting: {why}"
        listed = (await run_verb(queue_server, "list", "--state", "pending")).stdout
        assert "waiting-for-model" in listed
        assert "waits for its model 'qwen'" in listed
        assert "r-1" not in (await run_verb(queue_server, "list", "--next")).stdout, "it cannot be claimed"
        assert "cancelled" in (await run_verb(queue_server, "cancel", "r-1")).stdout
        assert (await queue.sweep()).freed_count == 1
        (shown,) = json.loads((await run_verb(queue_server, "describe", "r-1", "--json")).stdout)["requests"]
        assert (shown["state"], shown["missing_model"]) == ("returned", None)
