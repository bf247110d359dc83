"""How and where a batch file is run, and what is known when its run begins."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal

from dispatcher.client.files.database import JournalError
from dispatcher.client.files.intake import InputError, LineReader
from dispatcher.client.files.journal import FaultyLine
from dispatcher.client.files.lines import LineRules
from dispatcher.client.files.template import Template
from dispatcher.client.item import Body, Deadline, encoded

OF_A_RUN = (".journal", ".journal-wal", ".journal-shm", ".spool", ".input.partial")
"""What a run writes for itself beside the output. (`.input` may be named: a run goes on with it.)"""


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How a batch file is run."""

    skip_bad: bool = False
    """Bad lines become lines of the errors file, instead of stopping the run before it begins."""
    ordered: bool = False
    """Output and errors are in the order of the input."""
    group: Literal["prefix", "none"] = "prefix"
    """`prefix`: lines of one model and system prompt are sent one after another."""
    sequence_by: str = ""
    """A field of each line, or of its body, that names its sequence, such as `metadata.conversation`."""
    deadline: Deadline = "24h"
    """Counted from the start of this process, for what it sends."""
    priority: int | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rules: LineRules = dataclasses.field(default_factory=LineRules)
    template: Body | None = None
    """A body; each line of the input is text for it."""
    field: str = ""
    """Where in the template the text comes in: `prompt`, `messages.0.content`."""
    path: str = ""
    """Of the requests of a template; empty: the dispatcher's `gateway.path`."""
    max_pending: int = 20_000
    """So many lines may be in the queue at a time."""

    def __post_init__(self) -> None:
        if self.max_pending < 1:
            raise ValueError(f"max_pending {self.max_pending}: must be at least 1")
        if self.sequence_by and (self.template is not None or not all(self.sequence_by.split("."))):
            raise ValueError(f"sequence_by {self.sequence_by!r}: a path such as metadata.id, and no template")
        if self.group not in ("prefix", "none"):
            raise ValueError(f"group {self.group!r}: give prefix or none")


def reader_of(options: FileOptions) -> LineReader:
    """What lines mean. Raises TemplateError."""
    rules = dataclasses.replace(options.rules, sequence_by=options.sequence_by)
    template = None if options.template is None else Template(_body_of(options), options.field)
    return LineReader(rules, template, options.path)


def shape_of(options: FileOptions) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    return {
        "--template": sha256(_body_of(options)).hexdigest(),
        "--field": options.field,
        "--endpoint": options.path,
        "--group": options.group,
        "--ordered": options.ordered,
        "--sequence-by": options.sequence_by,
    }


def _body_of(options: FileOptions) -> bytes:
    """Of the template."""
    if options.template is None or isinstance(options.template, bytes):
        return options.template or b""
    return encoded(options.template)


@dataclass(frozen=True, slots=True)
class FilePaths:
    """Where a run reads and writes. A stream instead of a path: standard input and output."""

    source: Path | BinaryIO
    output: Path | BinaryIO
    errors: Path | None = None
    """None: beside the output, `out.errors.jsonl`; with a stream for output, that stream."""

    def beside(self, folder: Path, suffix: str) -> Path:
        """A file of the run's own: beside the output, or in `folder` where that is a stream."""
        if isinstance(self.output, Path):
            return self.output.with_name(self.output.name + suffix)
        return folder / f"stdout{suffix}"

    @property
    def errors_path(self) -> Path | None:
        """None: errors go where the output goes."""
        if self.errors is None and isinstance(self.output, Path):
            return self.output.with_name(f"{self.output.stem}.errors{self.output.suffix}")
        return self.errors

    def refuse_unknown_output(self, journal: Path) -> None:
        """What somebody else has written is not overwritten, nor what a run wrote whose journal is lost."""
        for path in (self.output, self.errors_path):
            if isinstance(path, Path) and path.is_file() and path.stat().st_size:
                why = f"holds something, and there is no {journal} of a run that could go on"
                raise JournalError(f"{path} {why}: name another file, or remove it")

    def check(self) -> None:
        """Raises InputError where one file would be two."""
        named = [path for path in (self.source, self.output, self.errors_path) if isinstance(path, Path)]
        of_run = [self.beside(Path(), suffix) for suffix in OF_A_RUN]
        for each in (*named, *of_run):
            _refuse_loop(each)
        if len({path.resolve() for path in named}) < len(named):
            raise InputError("input, output and errors must be files of their own")
        if isinstance(self.output, Path):
            taken = {path.resolve() for path in of_run}
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
    """What is known after the check."""

    lines: int
    """Of the input, blank ones left out."""
    done: int
    """By earlier processes."""
    faulty: Sequence[FaultyLine] = ()
    """Bad lines that are skipped, the first ones."""
    resumed: bool = False
    finished: bool = False
    """It was finished before: nothing is to do."""
    name: str = ""
    """Of the run: line 7 is the request `<name>-7` in the queue, and its label is `file=<name>`."""
    unknown: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Fields of lines that mean nothing, perhaps misspelt ones, and how many lines have each."""
