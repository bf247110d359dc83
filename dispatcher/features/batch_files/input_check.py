"""Input of a run: reads the lines, and reports what is wrong with lines that are not requests."""

from __future__ import annotations

import hashlib
import os
import select
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

from dispatcher.common.errors import BatchError
from dispatcher.features.batch_files.journal import FaultyLine, FileJournal, InputLine
from dispatcher.features.batch_files.lines import (
    BadLine,
    BatchLine,
    LineFault,
    LineRules,
    group_key,
    parse_line,
)
from dispatcher.features.batch_files.template import Template

MAX_FAULTS = 10_000
"""Number of bad lines after which the check stops, unless bad lines are skipped."""
MAX_UNKNOWN_FIELDS = 20
STOP_CHECK_INTERVAL_S = 0.2
"""Seconds between two checks for a stop request while reading a stream."""
_LINES_PER_STEP = 5_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_BYTES = 1 << 20


class InputError(BatchError):
    """The input cannot be used, and nothing was submitted. The message says why."""


class BadInputError(InputError):
    """The input has lines that are not valid requests."""

    def __init__(self, faulty: list[FaultyLine], *, has_more: bool) -> None:
        lines = "1 bad line" if len(faulty) == 1 else f"{len(faulty):,} bad lines"
        super().__init__(f"{lines}: nothing was submitted")
        self.faulty = faulty
        """The bad lines, up to MAX_FAULTS of them."""
        self.has_more = has_more
        """True if the check stopped early, so that there may be more bad lines."""


@dataclass(frozen=True, slots=True)
class LineReader:
    """Parser of input lines. A line is a request, or text that is inserted into a template."""

    rules: LineRules
    template: Template | None = None
    path: str = ""
    """Path at the gateway for requests that are made from a template."""

    def parse_input_line(self, line_number: int, text: bytes) -> BatchLine | BadLine:
        if self.template is None:
            return parse_line(text, self.rules)
        try:
            body = self.template.fill_body(text.rstrip(b"\r\n").decode())
        except UnicodeDecodeError as error:
            return BadLine(
                (LineFault("invalid_encoding", f"not UTF-8 at byte {error.start}"),), f"line-{line_number}"
            )
        if len(body) > self.rules.max_body_bytes:
            message = f"the body: {len(body)} bytes, at most {self.rules.max_body_bytes} are accepted"
            return BadLine((LineFault("line_too_large", message),), f"line-{line_number}")
        return BatchLine(f"line-{line_number}", self.path, body)


@dataclass(frozen=True, slots=True)
class RawLine:
    """Line of the input that is not parsed yet."""

    line_number: int
    """Line number, from 1."""
    offset: int
    """Offset in the file, in bytes."""
    text: bytes
    """Bytes of the line. A line that is too long is cut off just after the limit."""


class StoppedError(BatchError):
    """Reading was stopped, because the caller no longer waits for the run."""


class InputFile:
    """Input file of a run. The file must not change until the run has ended."""

    def __init__(self, path: Path, stop_event: Event) -> None:
        """When `stop_event` is set, reading raises StoppedError, because a check may take minutes."""
        self.path = path
        self._stop_event = stop_event
        try:
            if not path.is_file() and path.stat():  # opening a pipe would block until it has a writer
                raise InputError(f"{path}: is no file; give - to read what comes in by standard input")
            self._file = path.open("rb")
        except OSError as error:
            raise self._input_error(error) from error

    def close(self) -> None:
        self._file.close()

    def read_lines(self, max_line_bytes: int, digest: Any) -> Iterator[RawLine]:
        """Yield the lines that are not blank, and update `digest` with every byte of the file."""
        self._file.seek(0)
        offset = n = 0
        while text := self._read_line(max_line_bytes + 2):
            digest.update(text)
            n += 1
            size = len(text)
            # Skip the rest of a line that is too long, without holding it in memory.
            while not text.endswith(b"\n") and (rest := self._read_line(_BLOCK_BYTES)):
                digest.update(rest)
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            skipped = len(_BYTE_ORDER_MARK) if n == 1 and text.startswith(_BYTE_ORDER_MARK) else 0
            if text.strip():
                yield RawLine(n, offset + skipped, text[skipped:])
            offset += size

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), size, offset)
        except OSError as error:
            raise self._input_error(error) from error

    def _read_line(self, max_bytes: int) -> bytes:
        if self._stop_event.is_set():
            raise StoppedError(f"{self.path}: reading it was stopped")
        try:
            return self._file.readline(max_bytes)
        except OSError as error:
            raise self._input_error(error) from error

    def _input_error(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: {error.strerror or error}")

    def file_stamp(self) -> dict[str, Any]:
        """Return the size and the modification time, which show a change without reading the file."""
        stat = os.fstat(self._file.fileno())
        return {"bytes": stat.st_size, "changed_ns": stat.st_mtime_ns}

    def compute_digest(self) -> str:
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()


@dataclass(slots=True)
class InputFindings:
    """Result of the check of an input."""

    faulty: list[FaultyLine] = field(default_factory=list)
    """Bad lines, up to MAX_FAULTS of them."""
    unknown_fields: dict[str, int] = field(default_factory=dict)
    """Number of valid lines by unknown field, for up to MAX_UNKNOWN_FIELDS fields."""

    def note_unknown(self, unknown: Iterable[str]) -> None:
        for name in unknown:
            if name in self.unknown_fields or len(self.unknown_fields) < MAX_UNKNOWN_FIELDS:
                self.unknown_fields[name] = self.unknown_fields.get(name, 0) + 1


def check_input(
    source: InputFile, reader: LineReader, journal: FileJournal, *, skip_bad: bool, by_group: bool
) -> InputFindings:
    """Check the whole input, and write the lines and their order of sending to the journal.

    Raises BadInputError if there are bad lines, unless they are skipped.
    """
    stamp = source.file_stamp()
    digest = hashlib.sha256()
    with journal.transaction():
        journal.clear_lines()  # an earlier check may have been interrupted
    findings = InputFindings()
    has_more = _read_all(source, reader, journal, digest, findings, skip_bad=skip_bad)
    faulty = findings.faulty
    with journal.transaction():
        # Each pass finds up to MAX_FAULTS lines, and removes them. Turns in sequences are checked once no
        # duplicate id is left, because a removed line has no turn.
        while bad_lines := [
            _duplicate_line(source, reader, *row) for row in journal.find_duplicates(MAX_FAULTS)
        ] or [_misplaced_line(source, reader, *row) for row in journal.find_misplaced(MAX_FAULTS)]:
            journal.mark_bad(bad_lines)
            faulty += bad_lines
            faulty.sort(key=lambda each: each.line_number)
            if not skip_bad:
                break
        has_more = has_more or len(faulty) > MAX_FAULTS
        del faulty[MAX_FAULTS:]
        if faulty and not skip_bad:
            raise BadInputError(faulty, has_more=has_more)
        journal.arrange_lines(by_group=by_group)
        if not journal.facts.lines:
            name = "standard input" if journal.facts.from_stream else source.path
            raise InputError(f"{name}: holds no line")
        if source.file_stamp() != stamp:
            raise InputError(f"{source.path}: was changed while it was read")
        journal.facts.input = {**stamp, "sha256": digest.hexdigest()}
        journal.facts.checked = True
    return findings


def _read_all(
    source: InputFile,
    reader: LineReader,
    journal: FileJournal,
    digest: Any,
    findings: InputFindings,
    *,
    skip_bad: bool,
) -> bool:
    """Write all lines to the journal. Return True if reading stopped early because of too many bad lines."""
    good: list[InputLine] = []
    bad: list[FaultyLine] = []

    def flush_lines() -> None:
        with journal.transaction():
            journal.add_lines(good, bad)
        good.clear()
        bad.clear()

    for piece in source.read_lines(reader.rules.max_line_bytes, digest):
        line = reader.parse_input_line(piece.line_number, piece.text)
        if isinstance(line, BatchLine):
            good.append(
                InputLine(
                    piece.line_number,
                    piece.offset,
                    len(piece.text),
                    line.custom_id,
                    group_key(line),
                    line.turn,
                )
            )
            findings.note_unknown(line.unknown_fields)
        else:
            message = "; ".join(fault.message for fault in line.faults)
            bad.append(FaultyLine(piece.line_number, line.custom_id, line.faults[0].code, message))
            if len(findings.faulty) < MAX_FAULTS:
                findings.faulty.append(bad[-1])
            elif not skip_bad:
                return True
        if len(good) + len(bad) >= _LINES_PER_STEP:
            flush_lines()
    flush_lines()
    return False


def _duplicate_line(
    source: InputFile, reader: LineReader, n: int, first_line: int, offset: int, size: int
) -> FaultyLine:
    line = reader.parse_input_line(n, source.read_at(offset, size))
    custom_id = line.custom_id or ""
    return FaultyLine(n, custom_id, "duplicate_custom_id", f"custom_id: line {first_line} has the same")


def _misplaced_line(
    source: InputFile, reader: LineReader, n: int, message: str, offset: int, size: int
) -> FaultyLine:
    return FaultyLine(
        n, reader.parse_input_line(n, source.read_at(offset, size)).custom_id, "invalid_sequence", message
    )


def spool_stream(stream: BinaryIO, path: Path, stop_event: Event, known_sha256: str = "") -> None:
    """Write a stream to a file, so that it can be read again.

    An existing file is kept if the stream is empty. If the digest of the input is known, because an earlier
    run is continued, another input raises InputError and also leaves the file as it is: it may be the only
    copy.
    """
    partial = path.with_name(path.name + ".partial")
    digest = hashlib.sha256()
    try:
        try:
            with partial.open("wb") as file:
                for block in _read_blocks(stream, stop_event):
                    file.write(block)
                    digest.update(block)
            if not partial.stat().st_size and (path.exists() or known_sha256):
                return
            if known_sha256 not in ("", digest.hexdigest()):
                message = "what came in is not the input that this run was begun with"
                raise InputError(f"{message}: give that again, or nothing, or another output")
            partial.replace(path)  # only a complete input may have this name
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{partial}: {error.strerror or error}") from error


def _read_blocks(stream: BinaryIO, stop_event: Event) -> Iterator[bytes]:
    """Yield blocks of a stream as they arrive. Raises StoppedError once `stop_event` is set."""
    poller = select.poll()
    try:
        poller.register(stream.fileno(), select.POLLIN)
        can_poll = True
    except (OSError, ValueError, AttributeError):  # a stream in memory has no descriptor
        can_poll = False
    # `read1` returns what is there, where `read` would wait for a full block.
    read_block = getattr(stream, "read1", stream.read)
    while True:
        if stop_event.is_set():
            raise StoppedError("reading the input was stopped")
        # A read cannot be interrupted, and the writer may pause for ever: read only when there is something.
        if can_poll and not poller.poll(STOP_CHECK_INTERVAL_S * 1000):
            continue
        if not (block := read_block(_BLOCK_BYTES)):
            return
        yield block
