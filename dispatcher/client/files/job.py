"""Files of a run: input, journal, output and errors. Each step is durable, and survives a crash.

Nothing here waits for the queue. Nothing is thread-safe, so one thread makes all calls.
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
"""Largest size of a chunk. A single line may be larger."""
AT_ONCE = 500
_NOT_SENT = (EXPIRED, "the time of the batch was over before this line was sent")
_NO_RESULT = (EXPIRED, "no result came by the deadline")


class FileJob:
    """Files of one run. Raises InputError, TemplateError, JournalError, SinkError."""

    def __init__(self, paths: FilePaths, options: FileOptions, names: Names, folder: Path) -> None:
        """`folder` is the place of the side files if the output is a stream."""
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
        """Stamp of the input when it was last known to be the input that was checked."""
        self._seconds_before = 0.0
        self.naming: Naming
        self.stopped = Event()
        """Event that ends `start_run`, for a caller that no longer waits."""
        self.open = 0
        """Number of lines that were sent and are not done."""
        self.open_bytes = 0
        self._ahead = Ahead({})

    def begin(self) -> FileStart:
        """Check the input of a new run, or find out where an earlier process stopped."""
        self._paths.check()
        path = self._beside(".journal")
        if not path.exists():  # check now, because opening the journal creates it
            self._paths.refuse_unknown_output(path)
        self._journal = self._to_close(FileJournal(path))
        if self.stopped.is_set():  # `interrupt_run` was called before there was a journal to interrupt
            self._journal.end()
        facts = self._journal.facts
        self._seconds_before = facts.seconds
        resumed = facts.checked
        if resumed:
            self._compare()
        else:
            self._paths.refuse_unknown_output(path)
        source = self._source()
        if facts.finished_at and not source.exists():  # a finished run no longer needs its input
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
        if self._spool is not None:  # a crash may have left lines in the spool that were not copied
            self._write_in_order(self._spool)
        return FileStart(
            facts.lines, facts.done, findings.faulty, resumed, name=facts.job, unknown=findings.unknown
        )

    def end(self) -> None:
        """Interrupt the run at once, from another thread. Nothing is lost."""
        self.stopped.set()
        if "_journal" in vars(self):  # the journal may not be open yet
            self._journal.end()

    def close(self) -> None:
        with ExitStack() as stack:  # closes each resource, whatever the others raise
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

    # Start of a run.

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
            # A rejected copy must not become the input of a later call with an empty stream.
            if not isinstance(self._paths.source, Path):
                self._input.path.unlink(missing_ok=True)
            raise

    def _compare(self) -> None:
        """Raise InputError if options or queue differ from those with which the run was begun."""
        facts, shape, path = self._journal.facts, shape_of(self._options), self._journal.path
        other = [name for name, value in shape.items() if facts.shape.get(name) != value]
        if other:
            told = f"{path}: the run was begun with another {', '.join(other)}"
            raise InputError(f"{told}: give the same, or another output")
        if facts.queue != self._names.queue:
            raise InputError(f"{path}: the run was begun on the queue {facts.queue}: give that one")

    def _compare_input(self) -> None:
        """Raise InputError if the input is not the one that was checked. Its path may have changed."""
        known, stamp = self._journal.facts.input, self._input.stamp()
        if stamp == self._stamp:
            return
        # A copy of the input has another modification time. Only then is the whole file read.
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

    # Sending.

    def next_chunk(self, room: int, deadline: int) -> tuple[Chunk, list[Submission]] | None:
        """Record the next lines, up to `room` of them, as a chunk in the journal, and return it.

        Return `None` if too many lines of the sequence that comes next are open.
        """
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
        """Record lost lines as a new chunk, and return it."""
        return self._begin_chunk(self._journal.lines_of(numbers), deadline)

    def _begin_chunk(self, lines: Sequence[SendLine], deadline: int) -> tuple[Chunk, list[Submission]]:
        self._compare_input()  # the input may have changed since the check: nothing unchecked is sent
        now = int(time.time())
        submissions = [self._submission(line, deadline, now) for line in lines]
        with self._journal.step():
            return self._journal.begin_chunk(lines, deadline, now), submissions

    def sure(self, chunk: int) -> None:
        """Record that the queue has accepted a chunk."""
        with self._journal.step():
            self._journal.are_sure([chunk])

    def unsure(self) -> list[Chunk]:
        return self._journal.unsure()

    def submissions(self, chunk: Chunk) -> list[Submission]:
        """Return the submissions of a chunk, with the same bytes as when the chunk was begun."""
        return [self._submission(line, chunk.deadline, chunk.created) for line in chunk.lines]

    def _submission(self, line: SendLine, deadline: int, created: int) -> Submission:
        """Build the request of a line. Raises InputError if the line has changed since the check."""
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

    # Results.

    def take(self, results: Mapping[int, PoppedResult]) -> None:
        """Write the answers of up to a thousand lines. Lines that are already done are skipped."""
        facts = self._journal.facts
        lines = []
        for n, (custom_id, size, sequence) in self._journal.still_open(list(results)).items():
            if results[n].error_code == ErrorCode.SEQUENCE_FULL:
                continue  # the sequence did not accept the request: the line is sent again like a lost one
            lines.append((n, answered_line(self.naming.request_id(n), custom_id, results[n])))
            came, went = tokens(results[n].payload.encode(errors="replace"))
            facts.tokens_in += came
            facts.tokens_out += went
            self._close_line(size, sequence)
        if lines:
            self._write(lines)

    def write_bad(self) -> None:
        """Write the errors of the bad lines."""
        while bad := self._journal.bad_after(0, CHUNK_LINES):
            told = [self._failure(each.n, each.custom_id, (each.code, each.message)) for each in bad]
            self._write(told, bad)

    def give_up_rest(self) -> None:
        """Write errors for all lines that were not sent before the deadline of the run."""
        while lines := self._journal.next_lines(CHUNK_LINES):
            self._journal.facts.sent = lines[-1].position
            self._write([self._failure(line.n, line.custom_id, _NOT_SENT) for line in lines])

    def write_off(self, numbers: Sequence[int]) -> None:
        """Write errors for lines that were sent, and have no result long after their deadline."""
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
        """Return a page of sent lines after a line number that are not done: number, size in bytes, deadline.

        With `confirmed_only`, only lines of chunks that the queue has accepted.
        """
        return self._journal.open_lines(after, AT_ONCE, sure=sure)

    def still_open(self, numbers: Sequence[int]) -> set[int]:
        """Return those of the lines that were sent and are not done."""
        found: set[int] = set()
        for at in range(0, len(numbers), AT_ONCE):
            found.update(self._journal.still_open(numbers[at : at + AT_ONCE]))
        return found

    def finish(self) -> None:
        """Finish the run, and remove what only a continued run would need."""
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
        """Write lines to the files, flush them to the disk, and then record them in the journal.

        In this order, a crash can leave bytes in the files that the journal does not know. They are cut off
        when the run is continued.
        """
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
        """Copy the lines that directly follow the last written one from the spool to the files."""
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
