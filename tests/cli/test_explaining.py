"""What explains never refuses: it shows what answers, and says of the rest why it does not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dispatcher.cli import render
from dispatcher.telemetry.status import (
    BatchingStatus,
    BudgetStatus,
    GateStatus,
    ProcessStatus,
    SignalsStatus,
    Status,
)
from tests.queue.servers import ENGINES, Server, server
from tests.support import free_port
from tests.warm import warm_run

Told = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("explaining")) as running:
        yield running


def gate(
    queue: str = "batch:{qwen}:requests",
    refused: str | None = None,
    merged: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    return Status(
        ProcessStatus("1", "3", "qwen", queue, "one", False, 0.0, config_problem=refused),
        GateStatus("queue-unreachable", False, "Nothing is sent: no queue.", 0, 0, 0, None, None),
        BudgetStatus(0.05),
        SignalsStatus("epp", 1.0),
        batching=BatchingStatus(merged),
    ).to_dict()


@asynccontextmanager
async def dispatcher(shown: dict[str, Any], not_ready: list[str] | None = None) -> AsyncIterator[int]:
    """What answers as a dispatcher's admin port does; ready once `not_ready` has been told."""

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


async def verb(*arguments: str | Path, timeout_s: float = 60.0) -> Told:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER")}
    return await asyncio.to_thread(warm_run, *arguments, env=bare, timeout_s=timeout_s)


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Path]:
    def write(queue: int, admin: int, more: str = "") -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(
            f"pool: {{name: qwen}}\nqueue: {{url: 'redis://127.0.0.1:{queue}'}}\nadmin: {{port: {admin}}}\n"
            f"gateway: {{url: 'http://gw'}}\n{more}"
        )
        return path

    return write


async def test_with_redis_down_the_dispatcher_is_shown(configured: Callable[..., Path]) -> None:
    async with dispatcher(gate()) as port:
        config = configured(free_port(), port)
        told = await verb("explain", "--config", config)
        assert told.returncode == 1
        assert "Nothing is sent: no queue." in told.stdout
        assert "pending" not in told.stdout, "what is not known is not shown as nothing"
        assert "requests wait" not in told.stdout
        assert "cannot be reached" in told.stderr
        assert len(told.stderr.splitlines()) == 1
        shown = json.loads((await verb("status", "--json", "--config", config)).stdout)
    assert (shown["pending"], shown["dispatcher"]["reason"]) == (None, "queue-unreachable")
    assert "cannot be reached" in shown["queue_problem"]


async def test_a_wrong_file_is_used_as_far_as_it_goes(
    configured: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with dispatcher(gate()) as port:
        config = configured(queue, port, "budget: {reserv: 0.1}\n")
        told = await verb("status", "--config", config)
        assert told.returncode == 0
        assert "batch:{qwen}:requests: pending 0" in told.stdout
        assert "queue-unreachable: " in told.stdout
        assert "line 5: budget.reserv: unknown key" in told.stderr
        done = await verb("resume", "--config", config)
        assert (done.returncode, "budget.reserv" in done.stderr) == (0, True)


async def test_with_a_file_that_cannot_be_read_the_dispatcher_is_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gateway: {url: [\n")
    async with dispatcher(gate()) as port:
        told = await verb("status", "--config", config, "--admin-url", f"127.0.0.1:{port}")
    assert told.returncode == 1
    assert "queue-unreachable: Nothing is sent" in told.stdout
    assert "is not valid YAML" in told.stderr
    done = await verb("pause", "--config", config)
    assert (done.returncode, "--queue-url" in done.stderr) == (2, True)


async def test_a_refused_reload_and_another_dispatchers_queue_are_told(
    configured: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    async with dispatcher(gate("batch:{other}:requests", "pool.name: needs a restart")) as port:
        config = configured(queue, port)
        explained, listed = [await verb(name, "--config", config) for name in ("explain", "status")]
    assert "works on another queue, batch:{other}:requests:" in explained.stdout
    assert explained.stdout.startswith("0 requests wait"), "first what was asked for"
    assert "is refused, the one before is in force: pool.name" in listed.stdout


@pytest.mark.parametrize(
    ("dead", "told"),
    [(0, "0 are dead."), (1, "1 is dead (`batch-dispatcher dead list` says why).")],
)
def test_where_some_are_dead_it_says_who_says_why(dead: int, told: str) -> None:
    counts = {"pending": 0, "leased": 0, "delayed": 5, "dead": dead, "paused": None}
    shown = {"queue": "q", "queue_problem": None, "dispatcher": None}
    shown |= {"dispatcher_problem": "it answers late", "dispatcher_problem_kind": "unreachable"}
    assert render.format_explanation(counts | shown).endswith(f"5 wait for a retry, {told}")


async def test_what_is_merged_of_each_model_or_why_not_is_told_in_a_line(
    configured: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    path = "/v1/embeddings"
    ended = "the answer to a merged call differs from the answers to single calls: item 0: cosine 0.4210"
    told: list[dict[str, Any]] = [
        {"path": path, "model": "bge-m3", "sentence": "up to 16 items a call", "off_reason": None},
        {
            "path": path,
            "model": "e5",
            "sentence": f"each request is sent alone: {ended}",
            "off_reason": ended,
        },
        {"path": "/v1/models/a:predict", "model": "", "sentence": "whether it pays", "off_reason": None},
        *({"path": path, "model": f"m-{n}", "sentence": "s", "off_reason": None} for n in range(20)),
    ]
    async with dispatcher(gate(merged=told)) as port:
        config = configured(queue, port)
        listed, whole = (
            await verb("status", "--config", config),
            await verb("status", "--json", "--config", config),
        )
    lines = listed.stdout.splitlines()
    assert "Batching of bge-m3 at /v1/embeddings: up to 16 items a call." in lines
    assert "Batching of /v1/models/a:predict: whether it pays." in lines
    assert f"Batching has ended for e5 at /v1/embeddings: {ended}" in lines
    assert "Batching of 14 more: see --json." in lines
    assert len([line for line in lines if line.startswith("Batching")]) == 10
    assert json.loads(whole.stdout)["dispatcher"]["batching"] == told


async def test_marks_of_models_that_cannot_be_read_are_told_in_a_sentence(
    configured: Callable[..., Path], queue_server: Server
) -> None:
    queue = int(queue_server.url.rsplit(":", 1)[1].split("/")[0])
    problem = "batch:{qwen}:models:labels holds a list, not a zset"
    async with dispatcher(gate() | {"model_registry_problem": problem}) as port:
        told = await verb("status", "--config", configured(queue, port))
    assert f"Marks of models in the queue count for nothing: {problem}" in told.stdout.splitlines()


async def test_with_no_dispatcher_it_says_where_it_asked_and_what_to_do(
    configured: Callable[..., Path], queue_server: Server
) -> None:
    queue, port = int(queue_server.url.rsplit(":", 1)[1].split("/")[0]), free_port()
    told = await verb("status", "--config", configured(queue, port))
    assert told.returncode == 0
    said = f"No dispatcher answers (nothing listens on admin.port {port} of this machine): start one with"
    assert said in told.stdout
    as_json = json.loads((await verb("status", "--json", "--config", configured(queue, port))).stdout)
    assert as_json["dispatcher_problem_kind"] == "not-listening"


async def test_wait_is_quiet_until_a_dispatcher_is_ready(configured: Callable[..., Path]) -> None:
    async with dispatcher(gate(), ["starting", "starting"]) as port:
        told = await verb("status", "--wait", "30s", "--config", configured(free_port(), port))
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


async def test_wait_says_in_the_end_what_was_missing(configured: Callable[..., Path]) -> None:
    began = time.monotonic()
    told = await verb("status", "--wait", "300ms", "--config", configured(free_port(), free_port()))
    assert (told.returncode, told.stdout) == (1, "")
    assert "not ready after 0.3 s: nothing listens on admin.port" in told.stderr
    assert time.monotonic() - began < 30
    async with dispatcher(gate(), ["queue: not asked yet"] * 100) as port:
        told = await verb("status", "--wait", "0.3", "--config", configured(free_port(), port))
        assert "not ready after 0.3 s: queue: not asked yet" in told.stderr
    async with dispatcher(gate("other")) as port:
        told = await verb("status", "--wait", "0.3", "--config", configured(free_port(), port))
        assert "works on another queue, other" in told.stderr
    assert (await verb("status", "--wait", "soon", "--config", configured(1, 1))).returncode == 2


@pytest.mark.parametrize("url", ["https://h", "http://", "http://h/path", "http://u:p@h"])
async def test_an_admin_url_that_is_none_is_wrong_usage(configured: Callable[..., Path], url: str) -> None:
    told = await verb("status", "--admin-url", url, "--config", configured(1, 1))
    assert (told.returncode, "--admin-url: give http://host:port" in told.stderr) == (2, True)
