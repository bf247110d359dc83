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

from dispatcher.cli import render
from dispatcher.cli.admin_client import StatusProblem, fetch_status, parse_admin_address
from dispatcher.cli.connection import QueueTarget
from dispatcher.cli.file_progress import FileProgressDisplay
from dispatcher.cli.terminal import print_error, print_lines, print_note, print_warning

if TYPE_CHECKING:
    from dispatcher.client.files import FileOptions, FilePaths, FileProgress, FileStart

STDIO = Path("-")
GATE_INTERVAL_S = 3.0
EXIT_INTERRUPTED = 130
SKIP_HINT = "--skip-bad runs the others, and these become errors"

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


def make_file_paths(source: Path, output: Path | None, errors: Path | None) -> FilePaths:
    """Return the files to read and write. Exits with 2 if the options do not name them."""
    from dispatcher.client.files import FilePaths

    if output is None:
        raise _usage_error("--file: say by --output where the answers go (- is standard output)")
    if errors == STDIO:
        raise _usage_error("--errors: name a file; without it errors go beside the output")
    input_source: Path | BinaryIO = sys.stdin.buffer if source == STDIO else source
    output_target: Path | BinaryIO = sys.stdout.buffer if output == STDIO else output
    return FilePaths(input_source, output_target, errors)


def make_file_options(
    target: QueueTarget,
    *,
    deadline: float,
    priority: int | None,
    headers: Mapping[str, str],
    metadata: Mapping[str, str],
    labels: Mapping[str, str],
    slicing: bool,
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
        raise _usage_error(f"--group {group}: give prefix or none")
    if (template is None) != (not field):
        raise _usage_error("give --template and --field together")
    if sequence_by and (template is not None or not all(sequence_by.split("."))):
        raise _usage_error(
            f"--sequence-by {sequence_by}: a path such as metadata.conversation, without --template"
        )
    if endpoint and template is None:
        raise _usage_error("--endpoint: each line of a batch file has its own url")
    settings, rules = target.settings, LineRules()
    if settings is not None:
        paths = (*settings.gateway.allowed_paths, settings.gateway.path)
        rules = LineRules(paths, settings.queue.max_payload_bytes)
    try:
        body = None if template is None else template.read_bytes()
    except OSError as error:
        raise _usage_error(f"--template {template}: {error.strerror or error}") from error
    if body is not None and (
        mismatch := find_body_mismatch(body, endpoint or (settings.gateway.path if settings else ""))
    ):
        print_warning(f"--template {template}: {mismatch}")
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
        slicing=slicing,
        rules=rules,
        template=body,
        field=field,
        path=endpoint,
    )


def find_body_mismatch(body: bytes, path: str) -> str:
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
    from dispatcher.client import QueueUnreachableError
    from dispatcher.client.files import BadInputError, InputError, JournalError, SinkError, TemplateError

    name = paths.source.name if isinstance(paths.source, Path) else "standard input"
    display = FileProgressDisplay(name)
    try:
        with display:
            progress = asyncio.run(_run_file(target, paths, options, display))
    except KeyboardInterrupt:
        _print_resume_hint(paths, display.last_progress)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BadInputError as error:
        for line in error.faulty:
            print_error(f"{name}:{line.line_number}: {line.message}", fg=None)
        more = ", and more that were not looked at" if error.has_more else ""
        is_text = options.template is None and all(line.code == "invalid_json_line" for line in error.faulty)
        hint = "lines of plain text need --template and --field" if is_text else SKIP_HINT
        print_error(f"{name}: {error}{more}; {hint}")
        raise typer.Exit(2) from error
    except (InputError, TemplateError, ValueError) as error:
        raise _usage_error(str(error)) from error
    except BrokenPipeError:  # the reader of standard output has ended, such as `head`
        raise typer.Exit(1) from None
    except (JournalError, SinkError, QueueUnreachableError) as error:
        print_error(str(error))
        raise typer.Exit(1) from error
    _print_summary(paths, display.start, progress, as_json=as_json)
    raise typer.Exit(1 if progress.failed else 0)


async def _run_file(
    target: QueueTarget, paths: FilePaths, options: FileOptions, display: FileProgressDisplay
) -> FileProgress:
    from dispatcher.client.files import run_file

    # A task beside the run: asking the dispatcher must not delay the file.
    gate_watch = asyncio.create_task(_watch_gate(target, display))
    try:
        return await run_file(
            target.url,
            target.names,
            paths,
            options,
            on_start=display.show_start,
            on_progress=display.show_progress,
        )
    finally:
        gate_watch.cancel()
        with suppress(asyncio.CancelledError):
            await gate_watch


async def _watch_gate(target: QueueTarget, display: FileProgressDisplay) -> None:
    """Keep the state of the gate in the display up to date, if a dispatcher can be asked."""
    address = parse_admin_address(target.admin)
    if address is None:
        return
    while True:
        status = await fetch_status(address)
        display.gate = str(status) if isinstance(status, StatusProblem) else render.format_gate(status)
        await asyncio.sleep(GATE_INTERVAL_S)


def _print_resume_hint(paths: FilePaths, progress: FileProgress | None) -> None:
    if progress is None:
        print_note("stopped before anything was submitted")
    elif not isinstance(paths.output, Path):
        print_note(f"stopped after {progress.done:,} of {progress.lines:,}; the rest is cancelled")
    else:
        text = f"stopped: {progress.done:,} of {progress.lines:,} are done"
        if progress.in_queue:
            text += f", {progress.in_queue:,} are in the queue and go on being answered"
        print_note(f"{text}. The same command goes on from here; nothing is sent twice.")
        if not isinstance(paths.source, Path):
            input_copy = paths.side_path(Path(), ".input")
            print_note(f"What came in is kept: --file {input_copy} does as well.")


def _print_summary(
    paths: FilePaths, start: FileStart | None, progress: FileProgress, *, as_json: bool
) -> None:
    from dispatcher.client.files import summarize_run

    if as_json:
        # If the answers go to standard output, the summary must not mix with them.
        print_lines(json.dumps(asdict(progress)), no_wrap=True, err=not isinstance(paths.output, Path))
        return
    if start is not None and start.is_finished:
        journal = paths.side_path(Path(), ".journal")
        print_note(
            f"finished before: {summarize_run(progress)}. To run it again, remove the output and {journal}."
        )
        return
    written = f"; the answers are in {paths.output}" if isinstance(paths.output, Path) else ""
    print_note(f"{summarize_run(progress)}{written}")
    if progress.failed and paths.errors_path is not None:
        print_note(f"what failed is in {paths.errors_path}")


def _usage_error(message: str) -> typer.Exit:
    print_error(message)
    return typer.Exit(2)
