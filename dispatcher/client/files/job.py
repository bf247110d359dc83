"""A run's side of the disk: input, journal, output and errors, each step of which survives any end.

Nothing here waits for the queue, and nothing is safe for threads: one thread does it all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from dispatcher.client.files.intake import Findings, Input, InputError, check_input, spool
from dispatcher.client.files.journal import Chunk, DoneLine, FaultyLine, FileJournal, SendLine
from dispatcher.client.files.lines import EXPIRED, BatchLine, OutLine, answered_line, error_line
from dispatcher.client.files.naming import Naming
from dispatcher.client.files.options import FileOptions, FilePaths, FileStart, reader_of, shape_of
from dispatcher.client.files.order import Ahead, turn_of
from dispatcher.client.files.progress import FileProgress
from dispatcher.client.files.sinks import FileSink, Sink, StreamSink
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.result import ErrorCode, PoppedResult
from dispatcher.core.requests.score import score_of
from dispatcher.core.requests.submission import Submission
from dispatcher.core.requests.usage import tokens
from dispatcher.queue.keys import Names

T = TypeVar("T")

CHUNK_LINES = 1000
CHUNK_BYTES = 1 << 20
"""A chunk has no more, or one line."""
AT_ONCE = 500
_NOT_SENT = (EXPIRED, "the time of the batch was over before this line was sent")
_NO_RESULT = (EXPIRED, "no result came by the deadline")


class FileJob:
    """One run, opened or begun. Raises InputError, TemplateError, JournalError, SinkError."""

    def __init__(self, paths: FilePaths, options: FileOptions, names: Names, folder: Path) -> None:
        """`folder`: for what lies beside the output where that is a stream."""
        self._paths, self._options, self._names, self._folder = paths, options, names, folder
        self._reader = reader_of(options)
        self._began = time.monotonic()
        self._opened: list[FileJournal | Input | Sink] = []
        self._journal: FileJournal
        self._input: Input
        self._output: Sink
        self._errors: Sink
        self._spool: FileSink | None = None
        self._stamp: dict[str, Any] = {}
        """The input's, when it was last known to be what was checked."""
        self._seconds_before = 0.0
        self.naming: Naming
        self.stopped = Event()
        """Set by who does not wait any longer: `begin` ends."""
        self.open = 0
        """Lines that were sent and are not done."""
        self.open_bytes = 0
        self._ahead = Ahead({})

    def begin(self) -> FileStart:
        """Check the input, or find out where an earlier process was."""
        self._paths.check()
        path = self._beside(".journal")
        if not path.exists():
            self._paths.refuse_unknown_output(path)
        self._journal = self._to_close(FileJournal(path))
        if self.stopped.is_set():  # while it was opened
            self._journal.end()
        facts = self._journal.facts
        self._seconds_before = facts.seconds
        resumed = facts.checked
        if resumed:
            self._compare()
        else:
            self._paths.refuse_unknown_output(path)
        source = self._source()
        if facts.finished_at and not source.exists():
            return FileStart(facts.lines, facts.done, resumed=True, finished=True)
        self._input = self._to_close(Input(source, self.stopped))
        findings = Findings()
        if resumed:
            self._compare_input()
            if facts.finished_at:
                self._tidy()
                return FileStart(facts.lines, facts.done, resumed=True, finished=True)
            self._count_open()
        else:
            findings = self._check()
        self.naming = Naming(facts, self._names)
        results = self.naming.results
        if (why := self._names.refused_list(results)) is not None:
            raise InputError(f"the result list {results} {why}: add batch-results:* to queue.result_lists")
        self._open_sinks()
        if self._spool is not None:
            self._write_in_order(self._spool)
        return FileStart(
            facts.lines, facts.done, findings.faulty, resumed, name=facts.job, unknown=findings.unknown
        )

    def end(self) -> None:
        """From another thread: break off, however long it would still take. Nothing is lost."""
        self.stopped.set()
        if "_journal" in vars(self):
            self._journal.end()

    def close(self) -> None:
        with ExitStack() as stack:  # each of them, whatever the others raise
            for opened in self._opened:
                stack.callback(opened.close)

    @property
    def complete(self) -> bool:
        return self._journal.facts.done == self._journal.facts.lines

    @property
    def all_sent(self) -> bool:
        return self._journal.facts.sent == self._journal.facts.positions

    def progress(self, rate: float | None = None, trouble: str = "") -> FileProgress:
        facts = self._journal.facts
        return FileProgress(
            lines=facts.lines,
            done=facts.done,
            failed=facts.failed,
            bad=facts.bad,
            in_queue=self.open,
            tokens_in=facts.tokens_in,
            tokens_out=facts.tokens_out,
            seconds=facts.seconds if facts.finished_at else self._seconds,
            rate=rate,
            trouble=trouble,
        )

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began

    def _beside(self, suffix: str) -> Path:
        return self._paths.beside(self._folder, suffix)

    def _to_close(self, opened: T) -> T:
        self._opened.append(opened)  # type: ignore[arg-type]
        return opened

    # The begin.

    def _source(self) -> Path:
        source = self._paths.source
        if isinstance(source, Path):
            return source
        path = self._beside(".input")
        spool(source, path, self.stopped, self._journal.facts.input.get("sha256", ""))
        return path

    def _check(self) -> Findings:
        facts, options = self._journal.facts, self._options
        facts.job = f"file-{secrets.token_hex(5)}"
        facts.secret = secrets.token_bytes(16)
        facts.begun_at = time.time()
        facts.queue = self._names.queue
        facts.shape = shape_of(options)
        facts.from_stream = not isinstance(self._paths.source, Path)
        by_group = options.group == "prefix"
        try:
            return check_input(
                self._input, self._reader, self._journal, skip_bad=options.skip_bad, by_group=by_group
            )
        except InputError:
            if not isinstance(self._paths.source, Path):
                self._input.path.unlink(missing_ok=True)
            raise

    def _compare(self) -> None:
        """A run goes on with the same options, and on the same queue."""
        facts, shape, path = self._journal.facts, shape_of(self._options), self._journal.path
        other = [name for name, value in shape.items() if facts.shape.get(name) != value]
        if other:
            told = f"{path}: the run was begun with another {', '.join(other)}"
            raise InputError(f"{told}: give the same, or another output")
        if facts.queue != self._names.queue:
            raise InputError(f"{path}: the run was begun on the queue {facts.queue}: give that one")

    def _compare_input(self) -> None:
        """A run goes on with the same input, wherever that lies by now."""
        known, stamp = self._journal.facts.input, self._input.stamp()
        if stamp == self._stamp:
            return
        if known["bytes"] == stamp["bytes"] and (
            known["changed_ns"] == stamp["changed_ns"] or known["sha256"] == self._input.digest()
        ):
            self._stamp = stamp
            return
        told = f"{self._input.path} is not the input that {self._journal.path} is of"
        raise InputError(f"{told}: give that one, or another output")

    def _open_sinks(self) -> None:
        facts, output, path = self._journal.facts, self._paths.output, self._journal.path
        if isinstance(output, Path):
            self._output = self._to_close(FileSink(output, facts.output_bytes, path))
        else:
            self._output = self._to_close(StreamSink(output))
        errors = self._paths.errors_path
        self._errors = self._output
        if errors is not None:
            self._errors = self._to_close(FileSink(errors, facts.errors_bytes, path))
        if self._options.ordered:
            self._spool = self._to_close(FileSink(self._beside(".spool"), facts.spool_bytes, path))

    def _count_open(self) -> None:
        after = 0
        while page := self.open_lines(after):
            after = page[-1][0]
            self.open += len(page)
            self.open_bytes += sum(size for _, size, _ in page)
        self._ahead = Ahead(self._journal.open_of_sequences())

    # What is sent.

    def next_chunk(self, room: int, deadline: int) -> tuple[Chunk, list[Submission]] | None:
        """The next lines, at most so many, as a chunk that the journal knows. None: too many of the sequence
        whose turn it is are open."""
        lines: list[SendLine] = []
        size = 0
        for line in self._journal.next_lines(min(room, CHUNK_LINES)):
            size += line.size
            if (lines and size > CHUNK_BYTES) or not self._ahead.add(line.sequence):
                break
            lines.append(line)
        if not lines:
            return None
        found = self._begin_chunk(lines, deadline)
        self.open += len(lines)
        self.open_bytes += sum(line.size for line in lines)
        return found

    def chunk_again(self, numbers: Sequence[int], deadline: int) -> tuple[Chunk, list[Submission]]:
        """Lines that were lost, as a chunk of their own."""
        return self._begin_chunk(self._journal.lines_of(numbers), deadline)

    def _begin_chunk(self, lines: Sequence[SendLine], deadline: int) -> tuple[Chunk, list[Submission]]:
        self._compare_input()
        now = int(time.time())
        submissions = [self._submission(line, deadline, now) for line in lines]
        with self._journal.step():
            return self._journal.begin_chunk(lines, deadline, now), submissions

    def sure(self, chunk: int) -> None:
        """The queue has taken it."""
        with self._journal.step():
            self._journal.are_sure([chunk])

    def unsure(self) -> list[Chunk]:
        return self._journal.unsure()

    def submissions(self, chunk: Chunk) -> list[Submission]:
        """The same as when it was begun."""
        return [self._submission(line, chunk.deadline, chunk.created) for line in chunk.lines]

    def _submission(self, line: SendLine, deadline: int, created: int) -> Submission:
        """The request of a line. Raises InputError where the input has changed."""
        found = self._reader.read(line.n, self._input.read(line.at, line.size))
        if not isinstance(found, BatchLine) or found.custom_id != line.custom_id:
            raise InputError(f"{self._input.path}: line {line.n} has changed since it was checked")
        options = self._options
        request_id, token = self.naming.request_id(line.n), self.naming.token(line.n, line.position)
        member = encode_member(
            request_id,
            found.body,
            deadline,
            created=created,
            token=token,
            results=self.naming.results,
            endpoint=found.url,
            headers=options.headers,
            metadata=options.metadata,
            labels={**options.labels, "file": self._journal.facts.job},
            sequence=None if found.turn is None else turn_of(found.turn, line.index, line.ends),
        )
        return Submission(member, score_of(deadline, options.priority), request_id, token, deadline)

    # What is done.

    def take(self, results: Mapping[int, PoppedResult]) -> None:
        """Write the lines of at most a thousand results, each once."""
        facts = self._journal.facts
        lines = []
        for n, (custom_id, size, sequence) in self._journal.still_open(list(results)).items():
            if results[n].error_code == ErrorCode.SEQUENCE_FULL:
                continue  # it never was of its sequence: like what is lost it is sent again
            lines.append((n, answered_line(self.naming.request_id(n), custom_id, results[n])))
            came, went = tokens(results[n].payload.encode(errors="replace"))
            facts.tokens_in += came
            facts.tokens_out += went
            self._close_line(size, sequence)
        if lines:
            self._write(lines)

    def write_bad(self) -> None:
        """The errors of bad lines."""
        while bad := self._journal.bad_after(0, CHUNK_LINES):
            told = [self._failure(each.n, each.custom_id, (each.code, each.message)) for each in bad]
            self._write(told, bad)

    def give_up_rest(self) -> None:
        """The time is over before all was sent."""
        while lines := self._journal.next_lines(CHUNK_LINES):
            self._journal.facts.sent = lines[-1].position
            self._write([self._failure(line.n, line.custom_id, _NOT_SENT) for line in lines])

    def write_off(self, numbers: Sequence[int]) -> None:
        """Lines that were sent, and have no result long after their deadline."""
        lines = []
        for n, (custom_id, size, sequence) in self._journal.still_open(numbers).items():
            lines.append(self._failure(n, custom_id, _NO_RESULT))
            self._close_line(size, sequence)
        self._write(lines)

    def _close_line(self, size: int, sequence: str | None) -> None:
        self.open -= 1
        self.open_bytes -= size
        self._ahead.done(sequence)

    def open_lines(self, after: int, sure: bool = False) -> list[tuple[int, int, int]]:
        """Lines that were sent (`sure`: and that the queue has taken) and are not done, AT_ONCE from a number
        on: number, bytes, deadline."""
        return self._journal.open_lines(after, AT_ONCE, sure=sure)

    def still_open(self, numbers: Sequence[int]) -> set[int]:
        """Those that are not done."""
        found: set[int] = set()
        for at in range(0, len(numbers), AT_ONCE):
            found.update(self._journal.still_open(numbers[at : at + AT_ONCE]))
        return found

    def finish(self) -> None:
        """All is done: what only a run that goes on would need goes."""
        facts = self._journal.facts
        with self._journal.step():
            facts.finished_at = time.time()
            facts.seconds = self._seconds
            facts.secret = b""
        self._tidy()
        self._journal.shrink()

    def _tidy(self) -> None:
        for suffix in (".spool", *([".input"] if self._journal.facts.from_stream else [])):
            with suppress(OSError):
                self._beside(suffix).unlink(missing_ok=True)

    def _failure(self, n: int, custom_id: str | None, why: tuple[str, str]) -> tuple[int, OutLine]:
        return n, error_line(self.naming.request_id(n), custom_id, *why, n)

    def _write(self, lines: Sequence[tuple[int, OutLine]], bad: Sequence[FaultyLine] = ()) -> None:
        """Into the files, onto the disk, into the journal: in this order."""
        at = self._journal.facts.spool_bytes
        done = []
        for n, line in lines:
            if self._spool is None:
                self._sink(line.is_answer).add(line.text)
                done.append(DoneLine(n, line.is_answer))
            else:
                self._spool.add(line.text)
                done.append(DoneLine(n, line.is_answer, at, len(line.text)))
                at += len(line.text)
        with self._journal.step():
            self._sync()
            if bad:
                self._journal.wrote_bad(list(zip(bad, done, strict=True)))
            else:
                self._journal.finish_lines(done)
        if self._spool is not None:
            self._write_in_order(self._spool)

    def _write_in_order(self, spool: FileSink) -> None:
        """What follows on the last line without a gap, from the spool into the files."""
        while lines := self._journal.next_in_order(CHUNK_LINES):
            for line in lines:
                self._sink(line.is_answer).add(spool.read(line.spool_at or 0, line.spool_bytes or 0))
            with self._journal.step():
                self._sync()
                self._journal.facts.in_order = lines[-1].n

    def _sink(self, is_answer: bool) -> Sink:
        return self._output if is_answer else self._errors

    def _sync(self) -> None:
        facts = self._journal.facts
        facts.output_bytes = self._output.sync()
        facts.errors_bytes = self._errors.sync()
        if self._spool is not None:
            facts.spool_bytes = self._spool.sync()
        facts.seconds = self._seconds
