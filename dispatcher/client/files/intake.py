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

from dispatcher.batched.errors import BatchError
from dispatcher.client.files.journal import FaultyLine, FileJournal, InputLine
from dispatcher.client.files.lines import BadLine, BatchLine, LineFault, LineRules, group_of, read_line
from dispatcher.client.files.template import Template

FAULTS_MOST = 10_000
"""Number of bad lines after which the check stops, unless bad lines are skipped."""
UNKNOWN_MOST = 20
STOPPED_WITHIN_S = 0.2
"""Seconds between two checks for a stop request while reading a stream."""
_AT_ONCE = 5_000
_MARK = b"\xef\xbb\xbf"
_BLOCK = 1 << 20


class InputError(BatchError):
    """The input cannot be used, and nothing was submitted. The message says why."""


class BadInputError(InputError):
    """The input has lines that are not valid requests."""

    def __init__(self, faulty: list[FaultyLine], *, more: bool) -> None:
        lines = "1 bad line" if len(faulty) == 1 else f"{len(faulty):,} bad lines"
        super().__init__(f"{lines}: nothing was submitted")
        self.faulty = faulty
        """The bad lines, up to MAX_FAULTS of them."""
        self.more = more
        """True if the check stopped early, so that there may be more bad lines."""


@dataclass(frozen=True, slots=True)
class LineReader:
    """Parser of input lines. A line is a request, or text that is inserted into a template."""

    rules: LineRules
    template: Template | None = None
    path: str = ""
    """Path at the gateway for requests that are made from a template."""

    def read(self, n: int, text: bytes) -> BatchLine | BadLine:
        if self.template is None:
            return read_line(text, self.rules)
        try:
            body = self.template.body(text.rstrip(b"\r\n").decode())
        except UnicodeDecodeError as error:
            return BadLine((LineFault("invalid_encoding", f"not UTF-8 at byte {error.start}"),), f"line-{n}")
        if len(body) > self.rules.max_body_bytes:
            what = f"the body: {len(body)} bytes, at most {self.rules.max_body_bytes} are accepted"
            return BadLine((LineFault("line_too_large", what),), f"line-{n}")
        return BatchLine(f"line-{n}", self.path, body)


@dataclass(frozen=True, slots=True)
class Piece:
    """Line of the input that is not parsed yet."""

    n: int
    """Line number, from 1."""
    at: int
    """Offset in the file, in bytes."""
    text: bytes
    """Bytes of the line. A line that is too long is cut off just after the limit."""


class StoppedError(BatchError):
    """Reading was stopped, because the caller no longer waits for the run."""


class Input:
    """Input file of a run. The file must not change until the run has ended."""

    def __init__(self, path: Path, stopped: Event) -> None:
        """When `stop_event` is set, reading raises StoppedError, because a check may take minutes."""
        self.path = path
        self._stopped = stopped
        try:
            if not path.is_file() and path.stat():  # opening a pipe would block until it has a writer
                raise InputError(f"{path}: is no file; give - to read what comes in by standard input")
            self._file = path.open("rb")
        except OSError as error:
            raise self._told(error) from error

    def close(self) -> None:
        self._file.close()

    def pieces(self, longest: int, digest: Any) -> Iterator[Piece]:
        """Yield the lines that are not blank, and update `digest` with every byte of the file."""
        self._file.seek(0)
        at = n = 0
        while text := self._readline(longest + 2):
            digest.update(text)
            n += 1
            size = len(text)
            # Skip the rest of a line that is too long, without holding it in memory.
            while not text.endswith(b"\n") and (rest := self._readline(_BLOCK)):
                digest.update(rest)
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            skipped = len(_MARK) if n == 1 and text.startswith(_MARK) else 0
            if text.strip():
                yield Piece(n, at + skipped, text[skipped:])
            at += size

    def read(self, at: int, size: int) -> bytes:
        try:
            return os.pread(self._file.fileno(), size, at)
        except OSError as error:
            raise self._told(error) from error

    def _readline(self, most: int) -> bytes:
        if self._stopped.is_set():
            raise StoppedError(f"{self.path}: reading it was stopped")
        try:
            return self._file.readline(most)
        except OSError as error:
            raise self._told(error) from error

    def _told(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: {error.strerror or error}")

    def stamp(self) -> dict[str, Any]:
        """Return the size and the modification time, which show a change without reading the file."""
        found = os.fstat(self._file.fileno())
        return {"bytes": found.st_size, "changed_ns": found.st_mtime_ns}

    def digest(self) -> str:
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()


@dataclass(slots=True)
class Findings:
    """Result of the check of an input."""

    faulty: list[FaultyLine] = field(default_factory=list)
    """Bad lines, up to MAX_FAULTS of them."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Number of valid lines by unknown field, for up to MAX_UNKNOWN_FIELDS fields."""

    def note(self, unknown: Iterable[str]) -> None:
        for name in unknown:
            if name in self.unknown or len(self.unknown) < UNKNOWN_MOST:
                self.unknown[name] = self.unknown.get(name, 0) + 1


def check_input(
    source: Input, reader: LineReader, journal: FileJournal, *, skip_bad: bool, by_group: bool
) -> Findings:
    """Check the whole input, and write the lines and their order of sending to the journal.

    Raises BadInputError if there are bad lines, unless they are skipped.
    """
    stamp = source.stamp()
    digest = hashlib.sha256()
    with journal.step():
        journal.clear()  # an earlier check may have been interrupted
    findings = Findings()
    more = _read_all(source, reader, journal, digest, findings, skip_bad=skip_bad)
    faulty = findings.faulty
    with journal.step():
        # Each pass finds up to MAX_FAULTS lines, and removes them. Turns in sequences are checked once no
        # duplicate id is left, because a removed line has no turn.
        while found := [_repeated(source, reader, *row) for row in journal.repeated(FAULTS_MOST)] or [
            _misplaced(source, reader, *row) for row in journal.misplaced(FAULTS_MOST)
        ]:
            journal.refuse(found)
            faulty += found
            faulty.sort(key=lambda each: each.n)
            if not skip_bad:
                break
        more = more or len(faulty) > FAULTS_MOST
        del faulty[FAULTS_MOST:]
        if faulty and not skip_bad:
            raise BadInputError(faulty, more=more)
        journal.arrange(by_group=by_group)
        if not journal.facts.lines:
            name = "standard input" if journal.facts.from_stream else source.path
            raise InputError(f"{name}: holds no line")
        if source.stamp() != stamp:
            raise InputError(f"{source.path}: was changed while it was read")
        journal.facts.input = {**stamp, "sha256": digest.hexdigest()}
        journal.facts.checked = True
    return findings


def _read_all(
    source: Input,
    reader: LineReader,
    journal: FileJournal,
    digest: Any,
    findings: Findings,
    *,
    skip_bad: bool,
) -> bool:
    """Write all lines to the journal. Return True if reading stopped early because of too many bad lines."""
    good: list[InputLine] = []
    bad: list[FaultyLine] = []

    def flush() -> None:
        with journal.step():
            journal.add(good, bad)
        good.clear()
        bad.clear()

    for piece in source.pieces(reader.rules.longest_bytes, digest):
        line = reader.read(piece.n, piece.text)
        if isinstance(line, BatchLine):
            good.append(
                InputLine(piece.n, piece.at, len(piece.text), line.custom_id, group_of(line), line.turn)
            )
            findings.note(line.unknown)
        else:
            told = "; ".join(fault.message for fault in line.faults)
            bad.append(FaultyLine(piece.n, line.custom_id, line.faults[0].code, told))
            if len(findings.faulty) < FAULTS_MOST:
                findings.faulty.append(bad[-1])
            elif not skip_bad:
                return True
        if len(good) + len(bad) >= _AT_ONCE:
            flush()
    flush()
    return False


def _repeated(source: Input, reader: LineReader, n: int, first: int, at: int, size: int) -> FaultyLine:
    line = reader.read(n, source.read(at, size))
    custom_id = line.custom_id or ""
    return FaultyLine(n, custom_id, "duplicate_custom_id", f"custom_id: line {first} has the same")


def _misplaced(source: Input, reader: LineReader, n: int, why: str, at: int, size: int) -> FaultyLine:
    return FaultyLine(n, reader.read(n, source.read(at, size)).custom_id, "invalid_sequence", why)


def spool(stream: BinaryIO, path: Path, stopped: Event, known_sha256: str = "") -> None:
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
                for block in _blocks(stream, stopped):
                    file.write(block)
                    digest.update(block)
            if not partial.stat().st_size and (path.exists() or known_sha256):
                return
            if known_sha256 not in ("", digest.hexdigest()):
                told = "what came in is not the input that this run was begun with"
                raise InputError(f"{told}: give that again, or nothing, or another output")
            partial.replace(path)  # only a complete input may have this name
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{partial}: {error.strerror or error}") from error


def _blocks(stream: BinaryIO, stopped: Event) -> Iterator[bytes]:
    """Yield blocks of a stream as they arrive. Raises StoppedError once `stop_event` is set."""
    waits = select.poll()
    try:
        waits.register(stream.fileno(), select.POLLIN)
        is_there = True
    except (OSError, ValueError, AttributeError):  # a stream in memory has no descriptor
        is_there = False
    # `read1` returns what is there, where `read` would wait for a full block.
    read = getattr(stream, "read1", stream.read)
    while True:
        if stopped.is_set():
            raise StoppedError("reading the input was stopped")
        # A read cannot be interrupted, and the writer may pause for ever: read only when there is something.
        if is_there and not waits.poll(STOPPED_WITHIN_S * 1000):
            continue
        if not (block := read(_BLOCK)):
            return
        yield block
