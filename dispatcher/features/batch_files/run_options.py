"""Options and paths of a run of a batch file, and the state in which a run starts."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal

from dispatcher.client.item import Body, Deadline, encode_mapping
from dispatcher.features.batch_files.database import JournalError
from dispatcher.features.batch_files.input_check import InputError, LineReader
from dispatcher.features.batch_files.journal import FaultyLine
from dispatcher.features.batch_files.lines import LineRules
from dispatcher.features.batch_files.template import Template

RUN_FILE_SUFFIXES = (".journal", ".journal-wal", ".journal-shm", ".spool", ".input.partial")
"""Suffixes of the files that a run writes beside the output, which must not be named as input or errors file.
`.input` is allowed: a run can continue with it."""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """Options of a run of a batch file."""

    skip_bad: bool = False
    """If true, bad lines are written to the errors file. If false, a bad line stops the run before it
    begins."""
    ordered: bool = False
    """If true, output and errors are in the order of the input."""
    group: Literal["prefix", "none"] = "prefix"
    """`prefix` to send lines with the same model and system prompt one after another, or `none`."""
    sequence_by: str = ""
    """Field of each line, or of its body, that names the sequence of the line, such as
    `metadata.conversation`."""
    deadline: Deadline = "24h"
    """Deadline of the requests that this process sends, counted from its start."""
    priority: int | None = None
    """Priority of all requests, as in `Item`."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Headers of all requests, as in `Item`."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Metadata of all requests, as in `Item`."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels of all requests, in addition to the label `file` with the name of the run."""
    slicing: bool = True
    """False to send all requests in one call, as in `Item`. A line can also say it for itself."""
    rules: LineRules = dataclasses.field(default_factory=LineRules)
    """Rules for valid lines: allowed paths and the largest body."""
    template: Body | None = None
    """Request body. If it is given, each line of the input is plain text that is inserted into the body."""
    field: str = ""
    """Place in the template for the text, such as `prompt` or `messages.0.content`."""
    path: str = ""
    """Path of requests that are made from a template. If empty, the dispatcher's `gateway.path`."""
    max_pending: int = 20_000
    """Largest number of lines in the queue at a time."""

    def __post_init__(self) -> None:
        if self.max_pending < 1:
            raise ValueError(f"max_pending {self.max_pending}: must be at least 1")
        if self.sequence_by and (self.template is not None or not all(self.sequence_by.split("."))):
            raise ValueError(f"sequence_by {self.sequence_by!r}: a path such as metadata.id, and no template")
        if self.group not in ("prefix", "none"):
            raise ValueError(f"group {self.group!r}: give prefix or none")


def build_line_reader(options: FileOptions) -> LineReader:
    """Return the parser of input lines for these options. Raises TemplateError."""
    rules = dataclasses.replace(options.rules, sequence_by=options.sequence_by)
    template = None if options.template is None else Template(_encode_template(options), options.field)
    return LineReader(rules, template, options.path)


def collect_fixed_options(options: FileOptions) -> dict[str, Any]:
    """Return the options that must not change when a run is continued, by the name of their CLI option."""
    return {
        "--template": sha256(_encode_template(options)).hexdigest(),
        "--field": options.field,
        "--path": options.path,
        "--group": options.group,
        "--ordered": options.ordered,
        "--sequence-by": options.sequence_by,
    }


def _encode_template(options: FileOptions) -> bytes:
    """Return the template as JSON, or empty bytes if there is none."""
    if options.template is None or isinstance(options.template, bytes):
        return options.template or b""
    return encode_mapping(options.template)


@dataclass(frozen=True, slots=True)
class FilePaths:
    """Input and output of a run. A stream can be given instead of a path, for standard input and output."""

    source: Path | BinaryIO
    output: Path | BinaryIO
    errors: Path | None = None
    """Errors file. `None` stands for `out.errors.jsonl` beside an output `out.jsonl`, or for the output if
    that is a stream."""

    def side_path(self, folder: Path, suffix: str) -> Path:
        """Return the path of a side file of the run: beside the output, or in `folder` if the output is a
        stream."""
        if isinstance(self.output, Path):
            return self.output.with_name(self.output.name + suffix)
        return folder / f"stdout{suffix}"

    @property
    def errors_path(self) -> Path | None:
        """Path of the errors file, or `None` if errors are written to the output."""
        if self.errors is None and isinstance(self.output, Path):
            return self.output.with_name(f"{self.output.stem}.errors{self.output.suffix}")
        return self.errors

    def refuse_unknown_output(self, journal: Path) -> None:
        """Raise JournalError if an output file is not empty, although there is no journal.

        The file may belong to another program, or to a run whose journal was lost.
        """
        for path in (self.output, self.errors_path):
            if isinstance(path, Path) and path.is_file() and path.stat().st_size:
                why = f"holds something, and there is no {journal} of a run that could go on"
                raise JournalError(f"{path} {why}: name another file, or remove it")

    def check_paths(self) -> None:
        """Raise InputError if the same file is given for two purposes."""
        given_paths = [
            path for path in (self.source, self.output, self.errors_path) if isinstance(path, Path)
        ]
        run_files = [self.side_path(Path(), suffix) for suffix in RUN_FILE_SUFFIXES]
        for each in (*given_paths, *run_files):
            _refuse_loop(each)
        if len({path.resolve() for path in given_paths}) < len(given_paths):
            raise InputError("input, output and errors must be files of their own")
        if isinstance(self.output, Path):
            taken = {path.resolve() for path in run_files}
            for path in (self.source, self.errors_path):
                if isinstance(path, Path) and path.resolve() in taken:
                    raise InputError(f"{path} is a file of the run's own: name another one")


def _refuse_loop(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path} is a loop of symbolic links: name another file") from error


@dataclass(frozen=True, slots=True)
class FileStart:
    """State of a run after the check of its input."""

    lines: int
    """Number of lines in the input, without blank lines."""
    done: int
    """Number of lines that earlier processes have finished."""
    faulty: Sequence[FaultyLine] = ()
    """Bad lines that are skipped, up to a limit."""
    is_resumed: bool = False
    """True if the run continues an earlier one."""
    is_finished: bool = False
    """True if the run was finished before, so that nothing is left to do."""
    name: str = ""
    """Name of the run. Line 7 is the request `<name>-7` in the queue, and has the label `file=<name>`."""
    unknown_fields: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of lines by unknown field. The fields are ignored, and may be misspelt."""
