"""`batch-dispatcher submit --file`: run a batch file in the format of OpenAI's API, from check to summary.

Without `--file`, the verb is that of the kernel, which submits one request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from dispatcher.cli import render
from dispatcher.cli.admin_client import StatusProblem, fetch_status, parse_admin_address
from dispatcher.cli.connection import QueueOptions, QueueTarget, find_queue
from dispatcher.cli.submit import (
    JsonResult,
    Payload,
    RequestOptions,
    SingleOptions,
    find_body_mismatch,
    read_body,
    submit_request,
)
from dispatcher.cli.terminal import exit_error, print_error, print_lines, print_note, print_warning
from dispatcher.features.batch_files.display import FileProgressDisplay

if TYPE_CHECKING:
    from dispatcher.features.batch_files.progress import FileProgress
    from dispatcher.features.batch_files.run_options import FileOptions, FilePaths, FileStart

STDIO = Path("-")
GATE_INTERVAL_S = 3.0
EXIT_INTERRUPTED = 130
SKIP_HINT = "--skip-bad runs the others, and these become errors"

DEFAULT_DEADLINE_S = 86_400.0


@dataclass(frozen=True, slots=True)
class FileArguments:
    """Options of `submit` for a batch file."""

    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="A batch file of OpenAI's format (JSONL), instead of one request; - reads standard input.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="With --file: file for answers (2xx); - is standard output.")
    ] = None
    errors: Annotated[
        Path | None, typer.Option(help="With --file: file for all errors. Default: OUTPUT.errors.jsonl")
    ] = None
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad", help="With --file: turn bad lines into errors, instead of refusing the file."
        ),
    ] = False
    ordered: Annotated[
        bool, typer.Option("--ordered", help="With --file: write answers in the order of the input.")
    ] = False
    group: Annotated[
        str,
        typer.Option(
            help="With --file: prefix sends lines with the same model and system prompt together; or none."
        ),
    ] = "prefix"
    sequence_by: Annotated[
        str,
        typer.Option(
            "--sequence-by",
            metavar="FIELD",
            help="With --file: lines with the same value of this field are a sequence: "
            "metadata.conversation.",
        ),
    ] = ""
    template: Annotated[
        Path | None,
        typer.Option(
            "--template",
            help="With --file: file with a request body; each line of the input is text for it.",
        ),
    ] = None
    field: Annotated[
        str, typer.Option("--field", help="With --template: field for the text, such as messages.0.content.")
    ] = ""


def submit(
    payload: Payload = None,
    *,
    files: FileArguments,
    where: QueueOptions,
    options: RequestOptions,
    single: SingleOptions,
    json_output: JsonResult = False,
) -> None:
    """Submit one request and print its result, or submit a whole batch file.

    The id is printed first, on standard error, and `result ID` finds the result again. The same command
    resumes a batch file that was interrupted. Exit code 1: the result is an error, there is no result, or
    some lines of the file failed.
    """
    target = find_queue(where)
    if files.file is not None:
        if payload is not None or single != SingleOptions():
            raise exit_error("--file: give it no request, no --id, no --no-wait and no --sequence", 2)
        submit_file(
            target,
            make_file_paths(files.file, files.output, files.errors),
            make_file_options(target, files, options),
            as_json=json_output,
        )  # exits
    if payload is None:
        raise exit_error("give a request, or --file", 2)
    body = read_body(payload)
    reject_file_as_body(body)
    submit_request(target, body, options, single, json_output=json_output)


def reject_file_as_body(body: bytes) -> None:
    """Exit with 2 if a body is the name of a file, or a line of a batch file."""
    import msgspec

    try:
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except msgspec.MsgspecError:
        name = body.decode(errors="replace")
        try:
            is_file = Path(name).is_file()
        except (OSError, ValueError):  # too long for a name, or with a zero byte
            is_file = False
        if is_file:
            hint = f"a batch file is sent by --file {name}, one body by - < {name}"
            raise exit_error(f"the body must be a JSON object; it is a file: {hint}", 2) from None
        return
    # A line of a batch file is valid JSON, but a model server would reject it.
    if {"custom_id", "url", "body"} <= names:
        message = (
            "this is a line of an OpenAI batch file: submit --file sends those (to send it alone, give what "
            "stands under `body`, and as --path what stands under `url`)"
        )
        raise exit_error(message, 2)


def make_file_paths(source: Path, output: Path | None, errors: Path | None) -> FilePaths:
    """Return the files to read and write. Exits with 2 if the options do not name them."""
    from dispatcher.features.batch_files.run_options import FilePaths

    if output is None:
        raise _usage_error("--file: say by --output where the answers go (- is standard output)")
    if errors == STDIO:
        raise _usage_error("--errors: name a file; without it errors go beside the output")
    input_source: Path | BinaryIO = sys.stdin.buffer if source == STDIO else source
    output_target: Path | BinaryIO = sys.stdout.buffer if output == STDIO else output
    return FilePaths(input_source, output_target, errors)


def make_file_options(target: QueueTarget, files: FileArguments, options: RequestOptions) -> FileOptions:
    """Return the options of a run, from command line and configuration.

    Exits with 2 if they are contradictory.
    """
    from dispatcher.features.batch_files.lines import LineRules
    from dispatcher.features.batch_files.run_options import FileOptions

    template, path = files.template, options.path
    if files.group not in ("prefix", "none"):
        raise _usage_error(f"--group {files.group}: give prefix or none")
    if (template is None) != (not files.field):
        raise _usage_error("give --template and --field together")
    if files.sequence_by and (template is not None or not all(files.sequence_by.split("."))):
        raise _usage_error(
            f"--sequence-by {files.sequence_by}: a path such as metadata.conversation, without --template"
        )
    if path and template is None:
        raise _usage_error("--path: each line of a batch file has its own url")
    settings, rules = target.settings, LineRules()
    if settings is not None:
        paths = (*settings.gateway.allowed_paths, settings.gateway.path)
        rules = LineRules(paths, settings.queue.max_payload_bytes)
    try:
        body = None if template is None else template.read_bytes()
    except OSError as error:
        raise _usage_error(f"--template {template}: {error.strerror or error}") from error
    if body is not None and (
        mismatch := find_body_mismatch(body, path or (settings.gateway.path if settings else ""))
    ):
        print_warning(f"--template {template}: {mismatch}")
    return FileOptions(
        skip_bad=files.skip_bad,
        ordered=files.ordered,
        group="prefix" if files.group == "prefix" else "none",
        sequence_by=files.sequence_by,
        deadline=DEFAULT_DEADLINE_S if options.deadline is None else options.deadline,
        priority=options.priority,
        slicing=not options.no_slicing,
        rules=rules,
        template=body,
        field=files.field,
        path=path,
        **options.parse_maps(),
    )


def submit_file(target: QueueTarget, paths: FilePaths, options: FileOptions, *, as_json: bool) -> None:
    """Run a batch file to its end. Exits with 1 if some lines failed, and with 2 if the input is invalid."""
    from dispatcher.client import QueueUnreachableError
    from dispatcher.features.batch_files.database import JournalError
    from dispatcher.features.batch_files.input_check import BadInputError, InputError
    from dispatcher.features.batch_files.sinks import SinkError
    from dispatcher.features.batch_files.template import TemplateError

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
    from dispatcher.features.batch_files.run import run_file

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
    from dispatcher.features.batch_files.progress import summarize_run

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
