"""`batch-dispatcher submit --file`: run a batch file in the format of OpenAI's API, from check to summary."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from dispatcher.cli.admin_client import address_of, running
from dispatcher.cli.connection import QueueTarget
from dispatcher.cli.file_progress import FileScreen
from dispatcher.cli.find_requests import sentence_of
from dispatcher.cli.terminal import complain, remark, say, warn

if TYPE_CHECKING:
    from dispatcher.client.files import FileOptions, FilePaths, FileProgress, FileStart

STREAM = Path("-")
GATE_EVERY_S = 3.0
INTERRUPTED = 130
SKIP = "--skip-bad runs the others, and these become errors"

File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="A batch file of OpenAI's format (JSONL), instead of one request; - reads standard input.",
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="With --file: file for answers (2xx); - is standard output.")
]
Errors = Annotated[
    Path | None, typer.Option(help="With --file: file for all errors. Default: OUTPUT.errors.jsonl")
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="With --file: turn bad lines into errors, instead of refusing the file."),
]
Ordered = Annotated[
    bool, typer.Option("--ordered", help="With --file: write answers in the order of the input.")
]
Group = Annotated[
    str,
    typer.Option(
        help="With --file: prefix sends lines with the same model and system prompt together; or none."
    ),
]
SequenceBy = Annotated[
    str,
    typer.Option(
        "--sequence-by",
        metavar="FIELD",
        help="With --file: lines with the same value of this field are a sequence: metadata.conversation.",
    ),
]
BodyTemplate = Annotated[
    Path | None,
    typer.Option(
        "--template", help="With --file: file with a request body; each line of the input is text for it."
    ),
]
TemplateField = Annotated[
    str, typer.Option("--field", help="With --template: field for the text, such as messages.0.content.")
]


def file_paths(source: Path, output: Path | None, errors: Path | None) -> FilePaths:
    """Return the files to read and write. Exits with 2 if the options do not name them."""
    from dispatcher.client.files import FilePaths

    if output is None:
        raise _wrong("--file: say by --output where the answers go (- is standard output)")
    if errors == STREAM:
        raise _wrong("--errors: name a file; without it errors go beside the output")
    read: Path | BinaryIO = sys.stdin.buffer if source == STREAM else source
    written: Path | BinaryIO = sys.stdout.buffer if output == STREAM else output
    return FilePaths(read, written, errors)


def file_options(
    target: QueueTarget,
    *,
    deadline: float,
    priority: int | None,
    headers: Mapping[str, str],
    metadata: Mapping[str, str],
    labels: Mapping[str, str],
    endpoint: str,
    template: Path | None,
    field: str,
    group: str,
    sequence_by: str,
    ordered: bool,
    skip_bad: bool,
) -> FileOptions:
    """Return the options of a run, from command line and configuration.

    Exits with 2 if they are contradictory.
    """
    from dispatcher.client.files import FileOptions
    from dispatcher.client.files.lines import LineRules

    if group not in ("prefix", "none"):
        raise _wrong(f"--group {group}: give prefix or none")
    if (template is None) != (not field):
        raise _wrong("give --template and --field together")
    if sequence_by and (template is not None or not all(sequence_by.split("."))):
        raise _wrong(f"--sequence-by {sequence_by}: a path such as metadata.conversation, without --template")
    if endpoint and template is None:
        raise _wrong("--endpoint: each line of a batch file has its own url")
    settings, rules = target.settings, LineRules()
    if settings is not None:
        paths = (*settings.gateway.allowed_paths, settings.gateway.path)
        rules = LineRules(paths, settings.queue.max_payload_bytes)
    try:
        body = None if template is None else template.read_bytes()
    except OSError as error:
        raise _wrong(f"--template {template}: {error.strerror or error}") from error
    if body is not None and (doubt := doubted(body, endpoint or (settings.gateway.path if settings else ""))):
        warn(f"--template {template}: {doubt}")
    return FileOptions(
        skip_bad=skip_bad,
        ordered=ordered,
        group="prefix" if group == "prefix" else "none",
        sequence_by=sequence_by,
        deadline=deadline,
        priority=priority,
        headers=headers,
        metadata=metadata,
        labels=labels,
        rules=rules,
        template=body,
        field=field,
        path=endpoint,
    )


def doubted(body: bytes, path: str) -> str:
    """Return why a body does not fit its path. Empty if there is no objection."""
    if not path.endswith("/completions") or path.endswith("/chat/completions"):
        return ""
    try:
        fields = json.loads(body)
    except ValueError:  # the code that parses the body reports it
        return ""
    if not isinstance(fields, dict) or "messages" not in fields or "prompt" in fields:
        return ""
    return f"has `messages`, and {path} takes a `prompt`: is --endpoint /v1/chat/completions meant?"


def submit_file(target: QueueTarget, paths: FilePaths, options: FileOptions, *, as_json: bool) -> None:
    """Run a batch file to its end. Exits with 1 if some lines failed, and with 2 if the input is invalid."""
    from dispatcher.client import QueueAwayError
    from dispatcher.client.files import BadInputError, InputError, JournalError, SinkError, TemplateError

    name = paths.source.name if isinstance(paths.source, Path) else "standard input"
    screen = FileScreen(name)
    try:
        with screen:
            progress = asyncio.run(_run(target, paths, options, screen))
    except KeyboardInterrupt:
        _say_how_to_go_on(paths, screen.last)
        raise typer.Exit(INTERRUPTED) from None
    except BadInputError as error:
        for line in error.faulty:
            complain(f"{name}:{line.n}: {line.message}", fg=None)
        more = ", and more that were not looked at" if error.more else ""
        is_text = options.template is None and all(line.code == "invalid_json_line" for line in error.faulty)
        how = "lines of plain text need --template and --field" if is_text else SKIP
        complain(f"{name}: {error}{more}; {how}")
        raise typer.Exit(2) from error
    except (InputError, TemplateError, ValueError) as error:
        raise _wrong(str(error)) from error
    except BrokenPipeError:  # the reader of standard output has ended, such as `head`
        raise typer.Exit(1) from None
    except (JournalError, SinkError, QueueAwayError) as error:
        complain(str(error))
        raise typer.Exit(1) from error
    _say_summary(paths, screen.start, progress, as_json=as_json)
    raise typer.Exit(1 if progress.failed else 0)


async def _run(
    target: QueueTarget, paths: FilePaths, options: FileOptions, screen: FileScreen
) -> FileProgress:
    from dispatcher.client.files import run_file

    # A task beside the run: asking the dispatcher must not delay the file.
    gate = asyncio.create_task(_watch_gate(target, screen))
    try:
        return await run_file(
            target.url, target.names, paths, options, on_start=screen.begun, on_progress=screen.show
        )
    finally:
        gate.cancel()
        with suppress(asyncio.CancelledError):
            await gate


async def _watch_gate(target: QueueTarget, screen: FileScreen) -> None:
    """Keep the state of the gate in the display up to date, if a dispatcher can be asked."""
    address = address_of(target.admin)
    if address is None:
        return
    while True:
        found, why = await running(address)
        screen.gate = sentence_of(found) if found else (why or "")
        await asyncio.sleep(GATE_EVERY_S)


def _say_how_to_go_on(paths: FilePaths, progress: FileProgress | None) -> None:
    if progress is None:
        remark("stopped before anything was submitted")
    elif not isinstance(paths.output, Path):
        remark(f"stopped after {progress.done:,} of {progress.lines:,}; the rest is cancelled")
    else:
        told = f"stopped: {progress.done:,} of {progress.lines:,} are done"
        if progress.in_queue:
            told += f", {progress.in_queue:,} are in the queue and go on being answered"
        remark(f"{told}. The same command goes on from here; nothing is sent twice.")
        if not isinstance(paths.source, Path):
            kept = paths.beside(Path(), ".input")
            remark(f"What came in is kept: --file {kept} does as well.")


def _say_summary(paths: FilePaths, start: FileStart | None, progress: FileProgress, *, as_json: bool) -> None:
    from dispatcher.client.files import summary

    if as_json:
        # If the answers go to standard output, the summary must not mix with them.
        say(json.dumps(asdict(progress)), whole=True, err=not isinstance(paths.output, Path))
        return
    if start is not None and start.finished:
        journal = paths.beside(Path(), ".journal")
        remark(f"finished before: {summary(progress)}. To run it again, remove the output and {journal}.")
        return
    written = f"; the answers are in {paths.output}" if isinstance(paths.output, Path) else ""
    remark(f"{summary(progress)}{written}")
    if progress.failed and paths.errors_path is not None:
        remark(f"what failed is in {paths.errors_path}")


def _wrong(what: str) -> typer.Exit:
    complain(what)
    return typer.Exit(2)
