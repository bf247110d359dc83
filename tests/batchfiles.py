"""Batch files for tests: good lines, every kind of bad one with what must be said of it, and runs of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispatcher.client.files import FileOptions, FilePaths, FileProgress, run_file
from tests.client.answering import NAMES
from tests.queue.servers import Server

CHAT = "/v1/chat/completions"


def line(custom_id: str, *, system: str = "", **body: Any) -> bytes:
    """A chat request as OpenAI's documents have it."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": f"question {custom_id}"})
    whole = {"model": "m", "messages": messages} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": whole}).encode()


def bent(**fields: Any) -> bytes:
    """A good line with these fields instead; None leaves one out."""
    whole = json.loads(line("bent")) | fields
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


_GOOD = line("x")
BAD: dict[str, tuple[bytes, str]] = {
    "text": (b"hello", "no JSON"),
    "cut off": (_GOOD[:-7], "no JSON"),
    "comma at the end": (_GOOD[:-1] + b",}", "no JSON: trailing comma"),
    "single quotes": (_GOOD.replace(b'"', b"'"), "no JSON"),
    "two requests": (_GOOD + b" " + _GOOD, "no JSON: trailing characters"),
    "NaN": (_GOOD.replace(b'"m"', b"NaN"), "no JSON"),
    "list": (b"[" + _GOOD + b"]", "must be a JSON object, not a list"),
    "number": (b"17", "must be a JSON object, not a number"),
    "string": (json.dumps(_GOOD.decode()).encode(), "must be a JSON object, not a string"),
    "null": (b"null", "must be a JSON object, not null"),
    "Latin-1": (_GOOD.replace(b"question", b"caf\xe9"), "not UTF-8 at byte"),
    "UTF-16": (_GOOD.decode().encode("utf-16").replace(b"\n", b" "), "UTF-16"),
    "NUL bytes": (b"\0\0\0\0", "holds NUL bytes"),
    "byte order mark": (b"\xef\xbb\xbf" + _GOOD, "begins with a byte order mark"),
    "lone surrogate": (_GOOD.replace(b'"x"', b'"\\ud800"'), "lone surrogate"),
    "too deep": (_GOOD.replace(b'"m"', b"[" * 5000 + b"]" * 5000), "nested too deeply"),
    "no custom_id": (bent(custom_id=None), "custom_id: is missing"),
    "custom_id a number": (bent(custom_id=17), "custom_id: must be a string, not a number"),
    "custom_id empty": (bent(custom_id=""), "custom_id: is empty"),
    "custom_id too long": (bent(custom_id="x" * 1025), "custom_id: longer than 1024 characters"),
    "custom_id twice": (_GOOD.replace(b"{", b'{"custom_id": "y", ', 1), "custom_id: given twice"),
    "no method": (bent(method=None), "method: is missing"),
    "GET": (bent(method="GET"), "method: must be POST, not 'GET'"),
    "method a list": (bent(method=["POST"]), "method: must be a string, not a list"),
    "no url": (bent(url=None), "url: is missing"),
    "whole url": (bent(url="https://api.openai.com" + CHAT), "give the path alone"),
    "url with a query": (bent(url=CHAT + "?a=1"), "is no plain path"),
    "url with dots": (bent(url="/v1/../metrics"), "is no plain path"),
    "url not allowed": (bent(url="/metrics"), "is not allowed; allowed are /v1/*"),
    "no body": (bent(body=None), "body: is missing"),
    "Anthropic's": (b'{"custom_id": "x", "params": {"model": "m"}}', "params is what Anthropic"),
    "body a string": (bent(body='{"model": "m"}'), "encoded twice"),
    "body a list": (bent(body=[1]), "body: must be a JSON object, not a list"),
    "stream": (line("x", stream=True), "body.stream: true cannot be had in a batch"),
    "stream a string": (line("x", stream="yes"), "body.stream: must be false, not a string"),
    "model a number": (line("x", model=7), "body.model: must be the name of a model, not a number"),
    "model empty": (line("x", model=""), "body.model: must be the name of a model, not an empty string"),
}
"""Kind → a line, and words of what is wrong with it."""


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    return path


def requests(count: int) -> list[bytes]:
    return [line(f"c-{n}", system=f"You are {n % 3}.") for n in range(count)]


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    assert not text or text.endswith(b"\n")
    return [json.loads(each) for each in text.splitlines()]


def ids(path: Path) -> list[str]:
    return [each["custom_id"] for each in read(path)]


def output(paths: FilePaths) -> Path:
    assert isinstance(paths.output, Path)
    return paths.output


def errors(paths: FilePaths) -> Path:
    assert paths.errors_path is not None
    return paths.errors_path


def source(paths: FilePaths) -> Path:
    assert isinstance(paths.source, Path)
    return paths.source


async def run(server: Server, paths: FilePaths, **options: Any) -> FileProgress:
    return await run_file(server.url, NAMES, paths, FileOptions(**options))


def left(server: Server) -> set[bytes]:
    """Keys that nobody needs any more."""
    with server.client() as client:
        return {key for key in client.scan_iter() if b"file-" in key}


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    ends = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)


async def broken_off(server: Server, paths: FilePaths, **options: Any) -> None:
    """A run that ends as by Ctrl-C while it has lines in the queue."""
    task = asyncio.create_task(run(server, paths, **options))
    await until(lambda: bool(left(server)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
