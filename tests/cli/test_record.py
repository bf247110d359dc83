"""`models record`: a warm-up file out of a queue, which keeps all that it had."""

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

from dispatcher.cli import app, record
from dispatcher.core.models.warmup import WarmupRequest, WarmupRules, parse_warmup
from dispatcher.core.requests.request import encode_member
from dispatcher.ports import DeadLetter, Settlement, Submission
from dispatcher.queue.keys import QueueNames
from tests.queue.made import OwnerAndDesk, claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{default}:requests", "batch:{default}:results")
LATER = int(time.time()) + 3600
EMBEDDINGS = "/v1/embeddings"


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("record")) as running:
        yield running


@pytest.fixture
async def queue(queue_server: Server) -> AsyncIterator[OwnerAndDesk]:
    with queue_server.client() as client:
        client.flushall()
    async with queues(queue_server.url, "owner", names=NAMES) as (made,):
        yield made


async def put(queue: OwnerAndDesk, *requests: tuple[str, Any]) -> None:
    """Path and body of each."""
    members = [
        encode_member(
            f"r-{at}", body if isinstance(body, bytes) else json.dumps(body).encode(), LATER, endpoint=url
        )
        for at, (url, body) in enumerate(requests)
    ]
    await queue.submit([Submission(member, LATER + at) for at, member in enumerate(members)])


async def recorded(queue_server: Server, file: Path, *arguments: str, **environ: str) -> Result:
    asked = ["models", "record", "--model", "qwen", "--output", str(file), "--queue-url", queue_server.url]
    return await asyncio.to_thread(CliRunner().invoke, app, [*asked, *arguments], env=environ)


def read(file: Path | bytes) -> dict[tuple[str, str], int]:
    """Path and prompt of each request that a dispatcher would read, with how often."""
    text = file if isinstance(file, bytes) else file.read_bytes()
    found = parse_warmup(text, WarmupRules("/the/gateways"))
    requests = [each for each in found if isinstance(each, WarmupRequest)]
    assert len(requests) == len(found), found
    return {(each.url, json.loads(each.body)["prompt"]): each.repeat for each in requests}


def body(prompt: str, model: str = "qwen") -> dict[str, str]:
    return {"model": model, "prompt": prompt}


async def test_what_lies_in_the_queue_becomes_a_file_for_its_owner_alone(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path
) -> None:
    await put(
        queue,
        ("", body("a")),
        ("", {**body("a"), "model": "other"}),
        (EMBEDDINGS, body("b")),
        (EMBEDDINGS, b'{"model": "qwen", "prompt": "b"}'),
        ("", b'{"prompt": "nameless"}'),
        ("", {**body("streamed"), "stream": True}),
    )
    before = await queue.count_requests()
    file = tmp_path / "warm.jsonl"
    done = await recorded(queue_server, file)
    assert done.exit_code == 0, done.output
    assert read(file) == {("/the/gateways", "a"): 1, (EMBEDDINGS, "b"): 2}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "written 2 requests, 3 calls, of 3 for qwen among 6" in done.stdout
    assert await queue.count_requests() == before


async def test_the_dead_are_taken_where_that_is_said_and_each_request_once(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path
) -> None:
    await put(queue, ("", body("dead")), ("", body("running")), ("", body("waits")))
    dead, _ = (await claim(queue, 2)).leases
    await queue.move_to_dead_letters([DeadLetter(Settlement(dead, b"", ""), "out of memory")])
    await recorded(queue_server, tmp_path / "a")
    assert {prompt: count for (_, prompt), count in read(tmp_path / "a").items()} == {
        "running": 1,
        "waits": 1,
    }
    await recorded(queue_server, tmp_path / "b", "--dead")
    assert {prompt for _, prompt in read(tmp_path / "b")} == {"running", "waits", "dead"}


async def test_a_family_has_its_versions_and_the_path_of_its_gateway(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path
) -> None:
    await put(
        queue,
        ("", body("a")),
        ("", body("b", "qwen-v2")),
        ("", body("c", "qwen-v2-lora")),
        ("", body("d", "q")),
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        "gateway: {url: http://gw, path: /v1/chat/completions}\n"
        "models: [{name: qwen, match: '(?i)QWEN-v(?P<version>[0-9]+)'}]\n"
    )
    done = await recorded(queue_server, tmp_path / "a", "--config", str(config))
    assert done.exit_code == 0, done.output
    assert set(read(tmp_path / "a")) == {("/v1/chat/completions", "a"), ("/v1/chat/completions", "b")}


async def test_only_these_paths_and_so_many(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path
) -> None:
    await put(queue, ("", body("no")), *((EMBEDDINGS, body(f"{number}")) for number in range(20)))
    done = await recorded(queue_server, tmp_path / "a", "--path", EMBEDDINGS, "-n", "5", "--json")
    told = json.loads(done.stdout)
    assert len(read(tmp_path / "a")) == told["requests"] == told["calls"] == 5
    assert (told["of_model"], told["searched"], told["model"]) == (20, 21, "qwen")
    assert told["bytes"] == (tmp_path / "a").stat().st_size
    none = await recorded(queue_server, tmp_path / "b", "--path", "/v1/rerank")
    assert none.exit_code == 1
    assert f"{NAMES.queue}: none of 21 requests is for qwen to /v1/rerank; nothing is written" in none.stderr
    assert not (tmp_path / "b").exists()


async def test_an_empty_queue_says_so(queue_server: Server, queue: OwnerAndDesk, tmp_path: Path) -> None:
    done = await recorded(queue_server, tmp_path / "a")
    assert done.exit_code == 1
    assert "none of 0 requests is for qwen; nothing is written" in done.stderr


async def test_on_standard_output_there_are_lines_and_nothing_else(
    queue_server: Server, queue: OwnerAndDesk
) -> None:
    await put(queue, ("", body("größe")))
    done = await recorded(queue_server, Path("-"))
    assert done.exit_code == 0, done.output
    assert read(done.stdout_bytes) == {("/the/gateways", "größe"): 1}
    assert "written 1 requests, 1 calls" in done.stderr


async def test_no_file_is_overwritten_and_none_is_left_half(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path
) -> None:
    await put(queue, ("", body("a")))
    file = tmp_path / "there"
    file.write_text("mine")
    done = await recorded(queue_server, file)
    assert (done.exit_code, file.read_text()) == (1, "mine")
    assert "exists and is not overwritten" in done.stderr
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert (await recorded(queue_server, link)).exit_code == 1
    assert not (tmp_path / "elsewhere").exists()
    nowhere = await recorded(queue_server, tmp_path / "none" / "a")
    assert nowhere.exit_code == 1
    assert "No such file or directory" in nowhere.stderr


async def test_a_long_queue_is_read_as_far_as_that_helps(
    queue_server: Server, queue: OwnerAndDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_SEARCHED", 50)
    await put(queue, *(("", body(f"{number}")) for number in range(400)))
    done = await recorded(queue_server, tmp_path / "a", "--json")
    assert 50 <= json.loads(done.stdout)["searched"] < 400


async def test_long_bodies_are_whole(queue_server: Server, queue: OwnerAndDesk, tmp_path: Path) -> None:
    await put(queue, ("", body("x" * 3_000_000)), ("", body("y")))
    await recorded(queue_server, tmp_path / "a")
    assert sorted(len(prompt) for _, prompt in read(tmp_path / "a")) == [1, 3_000_000]
