"""Batch files for tests: valid lines, every kind of invalid line with its error message, and runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispatcher.features.batch_files.progress import FileProgress
from dispatcher.features.batch_files.run import run_file
from dispatcher.features.batch_files.run_options import FileOptions, FilePaths
from tests.client.fake_dispatcher import NAMES
from tests.queue.servers import Server

CHAT_PATH = "/v1/chat/completions"


def make_line(custom_id: str, *, system: str = "", **body: Any) -> bytes:
    """Return a line with a chat request in the format of the OpenAI documentation."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"question {custom_id}"})
    full_body = {"model": "m", "messages": messages} | body
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": CHAT_PATH, "body": full_body}
    ).encode()


def make_changed_line(**fields: Any) -> bytes:
    """Return a valid line with some fields replaced. A value of None removes the field."""
    fields_of_line = json.loads(make_line("changed")) | fields
    return json.dumps({name: value for name, value in fields_of_line.items() if value is not None}).encode()


_VALID_LINE = make_line("x")
INVALID_LINES: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "no JSON"),
    "cut off": (_VALID_LINE[:-7], "no JSON"),
    "comma at the end": (_VALID_LINE[:-1] + b",}", "no JSON: trailing comma"),
    "single quotes": (_VALID_LINE.replace(b'"', b"'"), "no JSON"),
    "two requests": (_VALID_LINE + b" " + _VALID_LINE, "no JSON: trailing characters"),
    "NaN": (_VALID_LINE.replace(b'"m"', b"NaN"), "no JSON"),
    "list": (b"[" + _VALID_LINE + b"]", "must be a JSON object, not a list"),
    "number": (b"17", "must be a JSON object, not a number"),
    "string": (json.dumps(_VALID_LINE.decode()).encode(), "must be a JSON object, not a string"),
    "null": (b"null", "must be a JSON object, not null"),
    "Latin-1": (_VALID_LINE.replace(b"question", b"caf\xe9"), "not UTF-8 at byte"),
    "UTF-16": (_VALID_LINE.decode().encode("utf-16").replace(b"\n", b" "), "UTF-16"),
    "NUL bytes": (b"\0\0\0\0", "holds NUL bytes"),
    "byte order mark": (b"\xef\xbb\xbf" + _VALID_LINE, "begins with a byte order mark"),
    "lone surrogate": (_VALID_LINE.replace(b'"x"', b'"\\ud800"'), "lone surrogate"),
    "too deep": (_VALID_LINE.replace(b'"m"', b"[" * 5000 + b"]" * 5000), "nested too deeply"),
    "no custom_id": (make_changed_line(custom_id=None), "custom_id: is missing"),
    "custom_id a number": (make_changed_line(custom_id=17), "custom_id: must be a string, not a number"),
    "custom_id empty": (make_changed_line(custom_id=""), "custom_id: is empty"),
    "custom_id too long": (make_changed_line(custom_id="x" * 1025), "custom_id: longer than 1024 characters"),
    "custom_id twice": (_VALID_LINE.replace(b"{", b'{"custom_id": "y", ', 1), "custom_id: given twice"),
    "no method": (make_changed_line(method=None), "method: is missing"),
    "GET": (make_changed_line(method="GET"), "method: must be POST, not 'GET'"),
    "method a list": (make_changed_line(method=["POST"]), "method: must be a string, not a list"),
    "no url": (make_changed_line(url=None), "url: is missing"),
    "whole url": (make_changed_line(url="https://api.openai.com" + CHAT_PATH), "give the path alone"),
    "url with a query": (make_changed_line(url=CHAT_PATH + "?a=1"), "is no plain path"),
    "url with dots": (make_changed_line(url="/v1/../metrics"), "is no plain path"),
    "url not allowed": (make_changed_line(url="/metrics"), "is not allowed; allowed are /v1/*"),
    "no body": (make_changed_line(body=None), "body: is missing"),
    "Anthropic's": (b'{"custom_id": "x", "params": {"model": "m"}}', "params is what Anthropic"),
    "body a string": (make_changed_line(body='{"model": "m"}'), "encoded twice"),
    "body a list": (make_changed_line(body=[1]), "body: must be a JSON object, not a list"),
    "stream": (make_line("x", stream=True), "body.stream: true cannot be had in a batch"),
    "stream a string": (make_line("x", stream="yes"), "body.stream: must be false, not a string"),
    "model a number": (make_line("x", model=7), "body.model: must be the name of a model, not a number"),
    "slicing a string": (make_changed_line(slicing="off"), "slicing: must be true or false, not a string"),
    "slicing null": (_VALID_LINE[:-1] + b', "slicing": null}', "slicing: must be true or false, not null"),
    "slicing twice": (
        _VALID_LINE[:-1] + b', "slicing": true, "slicing": false}',
        "slicing: given twice",
    ),
    "model empty": (make_line("x", model=""), "body.model: must be the name of a model, not an empty string"),
}
"""Kind of error → invalid line, and a part of its error message."""


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    return path


def make_lines(count: int) -> list[bytes]:
    return [make_line(f"c-{n}", system=f"You are {n % 3}.") for n in range(count)]


def read_records(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(each) for each in text.splitlines()]


def read_custom_ids(path: Path) -> list[str]:
    return [each["custom_id"] for each in read_records(path)]


def get_output_path(paths: FilePaths) -> Path:
    assert isinstance(paths.output, Path)
    return paths.output


def get_errors_path(paths: FilePaths) -> Path:
    assert paths.errors_path is not None
    return paths.errors_path


def get_source_path(paths: FilePaths) -> Path:
    assert isinstance(paths.source, Path)
    return paths.source


async def run_batch_file(server: Server, paths: FilePaths, **options: Any) -> FileProgress:
    return await run_file(server.url, NAMES, paths, FileOptions(**options))


def find_file_keys(server: Server) -> set[bytes]:
    """Return the keys of batch files that are in Redis."""
    with server.client() as client:
        return {key for key in client.scan_iter() if b"file-" in key}


async def wait_until_true(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def interrupt_run(server: Server, paths: FilePaths, **options: Any) -> None:
    """Run a batch file and cancel the run, as Ctrl-C does, while some of its lines are in the queue."""
    task = asyncio.create_task(run_batch_file(server, paths, **options))
    await wait_until_true(lambda: bool(find_file_keys(server)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
def paths(tmp_path: Path) -> FilePaths:
    """Return the files that a run of a batch file reads and writes."""
    return FilePaths(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
