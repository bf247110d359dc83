"""`batch-dispatcher models record`: write a warm-up file from requests in the queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, find_queue, run_with_admin
from dispatcher.cli.find_requests import iterate_pages
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines
from dispatcher.features.models.warmup import MAX_LINES, WarmupSample, encode_line
from dispatcher.requests.found_request import RequestLocation
from dispatcher.requests.model_names import parse_model
from dispatcher.requests.request import Request, parse_member

if TYPE_CHECKING:
    from dispatcher.features.models.version_template import VersionTemplate
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.settings.model import Settings

MAX_SEARCHED = 100_000
"""Largest number of requests that are read. More requests do not make a better warm-up."""
RECORD_EXAMPLES = [
    "batch-dispatcher models record --model qwen",
    "batch-dispatcher models record --model qwen --path /v1/embeddings --output -",
]
_STDOUT = Path("-")


def record(
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Name of the model in requests.")],
    max_requests: Annotated[
        int,
        typer.Option("--most", "-n", metavar="N", min=1, max=MAX_LINES, help="Most requests in the file."),
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
        raise exit_error("--json and --output - both go to standard output: give one of them", 2)
    # lexists: a dangling link is not overwritten, either.
    if not to_stdout and os.path.lexists(output):
        raise exit_error(f"{output} exists and is not overwritten: name another with --output")
    target = find_queue(where)
    sample, paths = WarmupSample(max_requests), frozenset(path or ())
    request_filter = _make_request_filter(model, target.settings, paths, include_dead=dead)
    searched = run_with_admin(target, lambda desk: _sample_requests(desk, request_filter, sample))
    requests = sample.list_requests()
    if not requests:
        path_note = f" to {', '.join(sorted(paths))}" if paths else ""
        raise exit_error(
            f"{target.names.queue}: none of {searched:,} requests is for {model}{path_note}; nothing is "
            "written"
        )
    text = b"".join(map(encode_line, requests))
    if to_stdout:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    else:
        _write_new_file(output, text)
    call_count = sum(warm_up_request.repeat for warm_up_request in requests)
    if json_output:
        counts = {"written": str(output), "model": model, "requests": len(requests), "calls": call_count}
        print_json({**counts, "bytes": len(text), "of_model": sample.offered_count, "searched": searched})
        return
    destination = "" if to_stdout else f"{output}: "
    sources = f"of {sample.offered_count:,} for {model} among {searched:,}"
    summary = f"{destination}written {len(requests):,} requests, {call_count:,} calls, {sources}"
    if to_stdout:
        print_error(summary, fg=None)
    else:
        print_lines(summary, "Its bodies are the data of users; only you can read the file.")


@dataclass(frozen=True, slots=True)
class _RequestFilter:
    """Filter for the requests that may be in the sample."""

    model: str
    template: VersionTemplate | None
    """Template of the versions if the model is a family. Bodies may name a version instead of the model."""
    default_path: str
    """Path of requests that do not name one."""
    paths: Collection[str]
    """Paths to use. Empty: all paths."""
    include_dead: bool

    def matches_model(self, name: str) -> bool:
        if name == self.model:
            return True
        return self.template is not None and self.template.extract_version(name) is not None


async def _sample_requests(
    admin: RedisQueueAdmin, request_filter: _RequestFilter, sample: WarmupSample
) -> int:
    """Add the matching requests of the queue to the sample. Return the number of requests that were read."""
    searched = 0
    seen_entries: set[int] = set()
    async for page in iterate_pages(lambda after: admin.search_requests((), after, full_members=True)):
        for found_request in page.requests:
            if found_request.entry in seen_entries or (
                found_request.location is RequestLocation.DEAD and not request_filter.include_dead
            ):
                continue
            # A walk may return a request twice. Entry 0 means that it was never claimed.
            seen_entries |= {found_request.entry} - {0}
            searched += 1
            parsed = parse_member(found_request.member)
            # Requests that cannot be read are counted as read, but not used.
            if not isinstance(parsed, Request) or not request_filter.matches_model(
                parse_model(parsed.payload)
            ):
                continue
            url = parsed.endpoint or request_filter.default_path
            if not request_filter.paths or url in request_filter.paths:
                sample.add_request(url, parsed.payload)
        if searched >= MAX_SEARCHED:
            break
    return searched


def _make_request_filter(
    model: str, settings: Settings | None, paths: Collection[str], *, include_dead: bool
) -> _RequestFilter:
    """Return the filter. `settings`: `None` if only the queue is known, without a configuration."""
    if settings is None:
        return _RequestFilter(model, None, "", paths, include_dead)
    from dispatcher.features.models.settings import get_models  # slow to import, and known by now

    template = next((each.version_template for each in get_models(settings) if each.name == model), None)
    return _RequestFilter(model, template, settings.gateway.path, paths, include_dead)


def _write_new_file(output: Path, text: bytes) -> None:
    """Write a new file that only its owner can read. A file that cannot be written completely is removed."""
    try:
        # O_EXCL: the file may have appeared since the check. The mode is set when the file is created, so
        # that nobody else can open it before.
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise exit_error(f"{output}: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError as error:
        output.unlink(missing_ok=True)
        raise exit_error(f"{output}: {error.strerror or error}") from error
