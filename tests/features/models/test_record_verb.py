"""`models record` writes a warm-up file from a queue and leaves the queue unchanged."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dispatcher.cli import app
from dispatcher.features.models.cli import record
from dispatcher.features.models.warmup import WarmupRequest, WarmupRules, parse_warmup
from dispatcher.queue.contract import DeadLetter, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = int(time.time()) + 86_400
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("record")) as running:
        yield running


@pytest.fixture
async def queue(queue_server: Server) -> AsyncIterator[OwnerAndAdmin]:
    with queue_server.client() as client:
        client.flushall()
    async with queues(queue_server.url, "owner", names=NAMES) as (made,):
        yield made


async def submit_requests(queue: OwnerAndAdmin, *requests: tuple[str, Any]) -> None:
    """Submit requests, each given as path and body."""
    members = [
        encode_member(
            f"r-{at}",
            make_body if isinstance(make_body, bytes) else json.dumps(make_body).encode(),
            LATER,
            endpoint=url,
        )
        for at, (url, make_body) in enumerate(requests)
    ]
    await queue.submit([Submission(member, LATER + at) for at, member in enumerate(members)])


async def record_queue(queue_server: Server, file: Path, *arguments: str, **environ: str) -> Result:
    asked = ["models", "record", "--model", "qwen", "--output", str(file), "--queue-url", queue_server.url]
    return await asyncio.to_thread(CliRunner().invoke, app, [*asked, *arguments], env=environ)


def read_recording(file: Path | bytes) -> dict[tuple[str, str], int]:
    """Return path, prompt and repetitions of each request as a dispatcher reads the file."""
    text = file if isinstance(file, bytes) else file.read_bytes()
    found = parse_warmup(text, WarmupRules("/the/gateways"))
    requests = [each for each in found if isinstance(each, WarmupRequest)]
    assert len(requests) == len(found), found
    return {(each.url, json.loads(each.body)["prompt"]): each.repeat for each in requests}


def make_body(prompt: str, model: str = "qwen") -> dict[str, str]:
    return {"model": model, "prompt": prompt}


async def test_requests_of_the_queue_are_recorded_to_a_private_file(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(
        queue,
        ("", make_body("a")),
        ("", {**make_body("a"), "model": "other"}),
        (EMBEDDINGS, make_body("b")),
        (EMBEDDINGS, b'{"model": "qwen", "prompt": "b"}'),
        ("", b'{"prompt": "nameless"}'),
        ("", {**make_body("streamed"), "stream": True}),
    )
    before = await queue.count_requests()
    file = tmp_path / "warm.jsonl"
    done = await record_queue(queue_server, file)
    assert done.exit_code == 0, done.output
    assert read_recording(file) == {("/the/gateways", "a"): 1, (EMBEDDINGS, "b"): 2}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "written 2 requests, 3 calls, of 3 for qwen among 6" in done.stdout
    assert await queue.count_requests() == before


async def test_dead_requests_are_recorded_on_demand_and_each_request_once(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(
        queue, ("", make_body("dead")), ("", make_body("running")), ("", make_body("waits"))
    )
    dead, _ = (await claim(queue, 2)).leases
    await queue.move_to_dead_letters([DeadLetter(Settlement(dead, b"", ""), "out of memory")])
    await record_queue(queue_server, tmp_path / "a")
    assert {prompt: count for (_, prompt), count in read_recording(tmp_path / "a").items()} == {
        "running": 1,
        "waits": 1,
    }
    await record_queue(queue_server, tmp_path / "b", "--dead")
    assert {prompt for _, prompt in read_recording(tmp_path / "b")} == {"running", "waits", "dead"}


async def test_recording_of_a_family_contains_its_versions_and_the_path_of_the_gateway(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(
        queue,
        ("", make_body("a")),
        ("", make_body("b", "qwen-v2")),
        ("", make_body("c", "qwen-v2@lora")),
        ("", make_body("d", "q")),
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        "gateway: {url: http://gw, path: /v1/chat/completions}\n"
        "models: [{name: qwen, match: 'qwen-v{version}'}]\n"
    )
    done = await record_queue(queue_server, tmp_path / "a", "--config", str(config))
    assert done.exit_code == 0, done.output
    assert set(read_recording(tmp_path / "a")) == {
        ("/v1/chat/completions", "a"),
        ("/v1/chat/completions", "b"),
    }


async def test_recording_is_limited_to_paths_and_a_number(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(
        queue, ("", make_body("no")), *((EMBEDDINGS, make_body(f"{number}")) for number in range(20))
    )
    done = await record_queue(queue_server, tmp_path / "a", "--path", EMBEDDINGS, "-n", "5", "--json")
    output = json.loads(done.stdout)
    assert len(read_recording(tmp_path / "a")) == output["requests"] == output["calls"] == 5
    assert (output["of_model"], output["searched"], output["model"]) == (20, 21, "qwen")
    assert output["bytes"] == (tmp_path / "a").stat().st_size
    none = await record_queue(queue_server, tmp_path / "b", "--path", "/v1/rerank")
    assert none.exit_code == 1
    assert f"{NAMES.queue}: none of 21 requests is for qwen to /v1/rerank; nothing is written" in none.stderr
    assert not (tmp_path / "b").exists()


async def test_recording_an_empty_queue_is_reported(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    done = await record_queue(queue_server, tmp_path / "a")
    assert done.exit_code == 1
    assert "none of 0 requests is for qwen; nothing is written" in done.stderr


async def test_standard_output_contains_only_recorded_lines(
    queue_server: Server, queue: OwnerAndAdmin
) -> None:
    await submit_requests(queue, ("", make_body("größe")))
    done = await record_queue(queue_server, Path("-"))
    assert done.exit_code == 0, done.output
    assert read_recording(done.stdout_bytes) == {("/the/gateways", "größe"): 1}
    assert "written 1 requests, 1 calls" in done.stderr


async def test_file_is_neither_overwritten_nor_left_incomplete(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(queue, ("", make_body("a")))
    file = tmp_path / "there"
    file.write_text("mine")
    done = await record_queue(queue_server, file)
    assert (done.exit_code, file.read_text()) == (1, "mine")
    assert "exists and is not overwritten" in done.stderr
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert (await record_queue(queue_server, link)).exit_code == 1
    assert not (tmp_path / "elsewhere").exists()
    nowhere = await record_queue(queue_server, tmp_path / "none" / "a")
    assert nowhere.exit_code == 1
    assert "No such file or directory" in nowhere.stderr


async def test_long_queue_is_read_only_as_far_as_needed(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_SEARCHED", 50)
    await submit_requests(queue, *(("", make_body(f"{number}")) for number in range(400)))
    done = await record_queue(queue_server, tmp_path / "a", "--json")
    assert 50 <= json.loads(done.stdout)["searched"] < 400


async def test_long_bodies_are_recorded_completely(
    queue_server: Server, queue: OwnerAndAdmin, tmp_path: Path
) -> None:
    await submit_requests(queue, ("", make_body("x" * 3_000_000)), ("", make_body("y")))
    await record_queue(queue_server, tmp_path / "a")
    assert sorted(len(prompt) for _, prompt in read_recording(tmp_path / "a")) == [1, 3_000_000]
