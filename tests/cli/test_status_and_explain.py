"""`status` and `explain` show every part that answers, and say why the others do not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dispatcher.cli import render
from dispatcher.cli.overview import Overview
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.telemetry.status import (
    BudgetStatus,
    FeatureSection,
    GateStatus,
    ProcessStatus,
    SignalsStatus,
    Status,
)
from tests.fork_server import run_cli
from tests.queue.servers import ENGINES, Server, server
from tests.support import free_port

Output = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("explaining")) as running:
        yield running


def build_status_document(
    queue: str = "batch:{qwen}:requests",
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    return Status(
        ProcessStatus("1", "3", "qwen", queue, "one", False, 0.0),
        GateStatus("queue-unreachable", False, "Nothing is sent: no queue.", problems=problems),
        BudgetStatus(0.05),
        SignalsStatus("epp", 1.0),
    ).to_dict()


@asynccontextmanager
async def serve_dispatcher(shown: dict[str, Any], not_ready: list[str] | None = None) -> AsyncIterator[int]:
    """Serve the admin port of a dispatcher. It is ready after it has returned all of `not_ready`."""

    async def status(_: web.Request) -> web.Response:
        return web.json_response(shown)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=503, text=not_ready.pop(0)) if not_ready else web.Response()

    app = web.Application()
    app.router.add_get("/status", status)
    app.router.add_get("/readyz", readyz)
    async with TestServer(app) as there:
        assert there.port
        yield there.port


async def run_verb(*arguments: str | Path, timeout_s: float = 60.0) -> Output:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER")}
    return await asyncio.to_thread(run_cli, *arguments, env=bare, timeout_s=timeout_s)


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(queue: int, admin: int, more: str = "") -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(
            f"pool: {{name: qwen}}\nqueue: {{url: 'redis://127.0.0.1:{queue}'}}\nadmin: {{port: {admin}}}\n"
            f"gateway: {{url: 'http://gw'}}\n{more}"
        )
        return path

    return write


async def test_dispatcher_is_shown_if_redis_is_down(write_config: Callable[..., Path]) -> None:
    async with serve_dispatcher(build_status_document()) as port:
        config = write_config(free_port(), port)
        output = await run_verb("explain", "--config", config)
        assert output.returncode == 1
        assert "Nothing is sent: no queue." in output.stdout
        assert "pending" not in output.stdout, "unknown values are not shown as 0"
        assert "requests wait" not in output.stdout
        assert "cannot be reached" in output.stderr
        assert len(output.stderr.splitlines()) == 1
        shown = json.loads((await run_verb("status", "--json", "--config", config)).stdout)
    assert (shown["pending"], shown["dispatcher"]["reason"]) == (None, "queue-unreachable")
    assert "cannot be reached" in shown["queue_problem"]


async def test_valid_parts_of_an_invalid_configuration_are_used(
    write_config: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with serve_dispatcher(build_status_document()) as port:
        config = write_config(queue, port, "budget: {reserv: 0.1}\n")
        output = await run_verb("status", "--config", config)
        assert output.returncode == 0
        assert "batch:{qwen}:requests: pending 0" in output.stdout
        assert "Nothing is sent: no queue." in output.stdout
        assert "line 5: budget.reserv: unknown key" in output.stderr
        done = await run_verb("resume", "--config", config)
        assert (done.returncode, "budget.reserv" in done.stderr) == (0, True)


async def test_dispatcher_is_shown_if_the_configuration_cannot_be_read(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gateway: {url: [\n")
    async with serve_dispatcher(build_status_document()) as port:
        output = await run_verb("status", "--config", config, "--admin-url", f"127.0.0.1:{port}")
    assert output.returncode == 1
    assert "Nothing is sent: no queue." in output.stdout
    assert "is not valid YAML" in output.stderr
    done = await run_verb("pause", "--config", config)
    assert (done.returncode, "--queue-url" in done.stderr) == (2, True)


async def test_refused_reload_and_dispatcher_of_another_queue_are_shown(
    write_config: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with serve_dispatcher(
        build_status_document("batch:{other}:requests", ["The changed configuration is refused"])
    ) as port:
        config = write_config(queue, port)
        explained, listed = [await run_verb(name, "--config", config) for name in ("explain", "status")]
    assert "works on another queue, batch:{other}:requests:" in explained.stdout
    assert explained.stdout.startswith("0 requests wait"), "the facts about the requested queue come first"
    assert "The changed configuration is refused" in listed.stdout.splitlines()


@pytest.mark.parametrize(
    ("dead", "output"),
    [(0, "0 are dead."), (1, "1 is dead (`batch-dispatcher list --state dead` says why).")],
)
def test_explanation_of_dead_requests_names_the_verb_that_says_why(dead: int, output: str) -> None:
    overview = Overview("q", QueueCounts(pending=0, leased=0, delayed=5, dead=dead))
    assert render.format_explanation(overview).endswith(f"5 wait for a retry, {output}")


class OtherSection(FeatureSection):
    def format_lines(self) -> list[str]:
        return ["A line about it."]

    def explain(self) -> list[str]:
        return ["A sentence about it."]


def test_lines_and_sentences_of_features_are_shown() -> None:
    status = Status(features=[OtherSection()])
    assert "A line about it." in render.format_details(status)
    assert "A sentence about it." in render.format_explanation(Overview(dispatcher=status))


async def test_problems_of_the_dispatcher_are_shown_by_status_and_explain(
    write_config: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    problem = "Labels and drains of models in the queue cannot be read and are ignored: a list"
    async with serve_dispatcher(build_status_document(problems=[problem])) as port:
        config = write_config(queue, port)
        explained, listed = [await run_verb(name, "--config", config) for name in ("explain", "status")]
    assert problem in listed.stdout.splitlines()
    assert f"{problem}." in explained.stdout


async def test_missing_dispatcher_is_reported_with_its_address_and_a_hint(
    write_config: Callable[..., Path], queue_server: Server
) -> None:
    queue, port = int(queue_server.url.rsplit(":", 1)[1].split("/")[0]), free_port()
    output = await run_verb("status", "--config", write_config(queue, port))
    assert output.returncode == 0
    expected = f"No dispatcher answers: nothing listens on admin.port {port} of this machine; start one with"
    assert expected in output.stdout
    as_json = json.loads((await run_verb("status", "--json", "--config", write_config(queue, port))).stdout)
    assert as_json["dispatcher_problem_kind"] == "not-listening"


async def test_wait_prints_nothing_until_a_dispatcher_is_ready(write_config: Callable[..., Path]) -> None:
    async with serve_dispatcher(build_status_document(), ["starting", "starting"]) as port:
        output = await run_verb("status", "--wait", "30s", "--config", write_config(free_port(), port))
    assert (output.returncode, output.stdout, output.stderr) == (0, "", "")


async def test_wait_reports_at_the_timeout_why_no_dispatcher_is_ready(
    write_config: Callable[..., Path],
) -> None:
    began = time.monotonic()
    output = await run_verb("status", "--wait", "300ms", "--config", write_config(free_port(), free_port()))
    assert (output.returncode, output.stdout) == (1, "")
    assert "not ready after 0.3 s: nothing listens on admin.port" in output.stderr
    assert time.monotonic() - began < 30
    async with serve_dispatcher(build_status_document(), ["queue: not asked yet"] * 100) as port:
        output = await run_verb("status", "--wait", "0.3", "--config", write_config(free_port(), port))
        assert "not ready after 0.3 s: queue: not asked yet" in output.stderr
    async with serve_dispatcher(build_status_document("other")) as port:
        output = await run_verb("status", "--wait", "0.3", "--config", write_config(free_port(), port))
        assert "works on another queue, other" in output.stderr
    assert (await run_verb("status", "--wait", "soon", "--config", write_config(1, 1))).returncode == 2


@pytest.mark.parametrize("url", ["https://h", "http://", "http://h/path", "http://u:p@h"])
async def test_invalid_admin_url_is_wrong_usage(write_config: Callable[..., Path], url: str) -> None:
    output = await run_verb("status", "--admin-url", url, "--config", write_config(1, 1))
    assert (output.returncode, "--admin-url: give http://host:port" in output.stderr) == (2, True)
