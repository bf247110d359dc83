"""`batch-dispatcher models record`: write a warm-up file from requests in the queue."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, ask, find
from dispatcher.cli.find_requests import each
from dispatcher.cli.terminal import answer, complain, fail, say
from dispatcher.core.models.names import model_of
from dispatcher.core.models.warmup import LINES_MOST, WarmupSample, line_of
from dispatcher.core.requests.found_request import Whereabouts
from dispatcher.core.requests.request import Request, parse

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk
    from dispatcher.settings import Settings

LOOKED_MOST = 100_000
"""Largest number of requests that are read. More requests do not make a better warm-up."""
EXAMPLE = [
    "batch-dispatcher models record --model qwen",
    "batch-dispatcher models record --model qwen --path /v1/embeddings --output -",
]
_STDOUT = Path("-")


def record(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Name of the model in requests.")],
    most: Annotated[
        int,
        typer.Option("--most", "-n", metavar="N", min=1, max=LINES_MOST, help="Most requests in the file."),
    ] = 100,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; `-`: standard output.")
    ] = Path("warmup.jsonl"),
    path: Annotated[
        list[str] | None,
        typer.Option("--path", metavar="PATH", help="Only requests to this path; may be repeated."),
    ] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Use dead requests, too.")] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Write a warm-up file (models[].warmup) from the requests for a model in the queue.

    The file has a sample of all sizes and paths. Equal requests are written once, with a repeat count of at
    most 10. The queue is not changed. Bodies are the data of users and are written as they are: only you can
    read the file; look through it before you give it to others. An existing file is never overwritten.

    Exit code 1: the queue has no such request, or the file cannot be written.
    """
    to_stdout = output == _STDOUT
    if to_stdout and json_output:
        raise fail("--json and --output - both go to standard output: give one of them", 2)
    # lexists: a dangling link is not overwritten, either.
    if not to_stdout and os.path.lexists(output):
        raise fail(f"{output} exists and is not overwritten: name another with --output")
    target = find(where)
    sample, paths = WarmupSample(most), frozenset(path or ())
    wanted = _wanted(model, target.settings, paths, dead=dead)
    looked_at = ask(target, lambda desk: _look(desk, wanted, sample))
    requests = sample.requests()
    if not requests:
        at = f" to {', '.join(sorted(paths))}" if paths else ""
        raise fail(
            f"{target.names.queue}: none of {looked_at:,} requests is for {model}{at}; nothing is written"
        )
    text = b"".join(map(line_of, requests))
    if to_stdout:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        _write(output, text)
    calls = sum(one.repeat for one in requests)
    if json_output:
        told = {"written": str(output), "model": model, "requests": len(requests), "calls": calls}
        answer({**told, "bytes": len(text), "of_model": sample.seen, "looked_at": looked_at})
        return
    to = "" if to_stdout else f"{output}: "
    of = f"of {sample.seen:,} for {model} among {looked_at:,}"
    summary = f"{to}written {len(requests):,} requests, {calls:,} calls, {of}"
    if to_stdout:
        complain(summary, fg=None)
    else:
        say(summary, "Its bodies are the data of users; only you can read the file.")


@dataclass(frozen=True, slots=True)
class _OfModel:
    """Filter for the requests that may be in the sample."""

    model: str
    versions: re.Pattern[str] | None
    """Pattern of the versions if the model is a family. Bodies may name a version instead of the model."""
    default: str
    """Path of requests that do not name one."""
    paths: Collection[str]
    """Paths to use. Empty: all paths."""
    dead: bool

    def named(self, name: str) -> bool:
        return name == self.model or (self.versions is not None and self.versions.fullmatch(name) is not None)


async def _look(desk: RedisDesk, wanted: _OfModel, sample: WarmupSample) -> int:
    """Add the matching requests of the queue to the sample. Return the number of requests that were read."""
    looked_at = 0
    met: set[int] = set()
    async for page in each(lambda after: desk.search((), after, whole=True)):
        for found in page.found:
            if found.entry in met or (found.state is Whereabouts.DEAD and not wanted.dead):
                continue
            # A walk may return a request twice. Entry 0 means that it was never claimed.
            met |= {found.entry} - {0}
            looked_at += 1
            read = parse(found.member)
            # Requests that cannot be read are counted as read, but not used.
            if not isinstance(read, Request) or not wanted.named(model_of(read.payload)):
                continue
            url = read.endpoint or wanted.default
            if not wanted.paths or url in wanted.paths:
                sample.add(url, read.payload)
        if looked_at >= LOOKED_MOST:
            break
    return looked_at


def _wanted(model: str, settings: Settings | None, paths: Collection[str], *, dead: bool) -> _OfModel:
    """Return the filter. `settings`: `None` if only the queue is known, without a configuration."""
    if settings is None:
        return _OfModel(model, None, "", paths, dead)
    versions = next((each.pattern for each in settings.models if each.name == model), None)
    return _OfModel(model, versions, settings.gateway.path, paths, dead)


def _write(output: Path, text: bytes) -> None:
    """Write a new file that only its owner can read. A file that cannot be written completely is removed."""
    try:
        # O_EXCL: the file may have appeared since the check. The mode is set when the file is created, so
        # that nobody else can open it before.
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise fail(f"{output}: {error.strerror or error}") from error
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text)
    except OSError as error:
        output.unlink(missing_ok=True)
        raise fail(f"{output}: {error.strerror or error}") from error
