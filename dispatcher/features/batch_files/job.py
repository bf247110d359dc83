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

from dispatcher.features.batch_files.input_check import (
    InputError,
    InputFile,
    InputFindings,
    check_input,
    spool_stream,
)
from dispatcher.features.batch_files.job_names import JobNames
from dispatcher.features.batch_files.journal import Chunk, DoneLine, FaultyLine, FileJournal, SendLine
from dispatcher.features.batch_files.lines import (
    EXPIRED_CODE,
    BatchLine,
    OutLine,
    build_answer_line,
    build_error_line,
)
from dispatcher.features.batch_files.order import OpenLineCounts, build_turn
from dispatcher.features.batch_files.progress import FileProgress
from dispatcher.features.batch_files.run_options import (
    FileOptions,
    FilePaths,
    FileStart,
    build_line_reader,
    collect_fixed_options,
)
from dispatcher.features.batch_files.sinks import FileSink, Sink, StreamSink, check_written_file
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.requests.usage import parse_token_usage
from dispatcher.wire_format import ONE_CALL, ErrorCode, PoppedResult

T = TypeVar("T")

MAX_CHUNK_LINES = 1000
MAX_CHUNK_BYTES = 1 << 20
"""Largest size of a chunk. A single line may be larger."""
PAGE_LINES = 500
_NOT_SENT = (EXPIRED_CODE, "the time of the batch was over before this line was sent")
_NO_RESULT = (EXPIRED_CODE, "no result came by the deadline")


class FileJob:
    """Files of one run. Raises InputError, TemplateError, JournalError, SinkError."""

    def __init__(self, paths: FilePaths, options: FileOptions, names: QueueNames, folder: Path) -> None:
        """`folder` is the place of the side files if the output is a stream."""
        self._paths, self._options, self._names, self._folder = paths, options, names, folder
        self._reader = build_line_reader(options)
        self._began_at = time.monotonic()
        self._opened_resources: list[FileJournal | InputFile | Sink] = []
        self._journal: FileJournal
        self._input: InputFile
        self._output: Sink
        self._errors: Sink
        self._spool: FileSink | None = None
        self._checked_stamp: dict[str, Any] = {}
        """Stamp of the input when it was last known to be the input that was checked."""
        self._earlier_s = 0.0
        self.job_names: JobNames
        self.stop_event = Event()
        """Event that ends `start_run`, for a caller that no longer waits."""
        self.open_count = 0
        """Number of lines that were sent and are not done."""
        self.open_bytes = 0
        self._open_by_sequence = OpenLineCounts({})

    def start_run(self) -> FileStart:
        """Check the input of a new run, or find out where an earlier process stopped."""
        self._paths.check_paths()
        path = self._side_path(".journal")
        if not path.exists():  # check now, because opening the journal creates it
            self._paths.refuse_unknown_output(path)
        self._journal = self._close_later(FileJournal(path))
        if self.stop_event.is_set():  # `interrupt_run` was called before there was a journal to interrupt
            self._journal.interrupt_run()
        facts = self._journal.facts
        self._earlier_s = facts.seconds
        resumed = facts.checked
        if resumed:
            self._check_same_run()
        else:
            self._paths.refuse_unknown_output(path)
        source = self._source_path()
        if facts.finished_at:
            self._check_finished_output()
            if not source.exists():  # a finished run no longer needs its input
                return FileStart(facts.lines, facts.done, is_resumed=True, is_finished=True)
        self._input = self._close_later(InputFile(source, self.stop_event))
        findings = InputFindings()
        if resumed:
            self._check_same_input()
            if facts.finished_at:
                self._remove_side_files()
                return FileStart(facts.lines, facts.done, is_resumed=True, is_finished=True)
            self._count_open()
        else:
            findings = self._check_input()
        self.job_names = JobNames(facts, self._names)
        results = self.job_names.result_list
        if (why := self._names.find_list_problem(results)) is not None:
            raise InputError(f"the result list {results} {why}: add batch-results:* to queue.result_lists")
        self._open_sinks()
        if self._spool is not None:  # a crash may have left lines in the spool that were not copied
            self._write_in_order(self._spool)
        return FileStart(
            facts.lines,
            facts.done,
            findings.faulty,
            resumed,
            name=facts.job,
            unknown_fields=findings.unknown_fields,
        )

    def interrupt_run(self) -> None:
        """Interrupt the run at once, from another thread. Nothing is lost."""
        self.stop_event.set()
        if "_journal" in vars(self):  # the journal may not be open yet
            self._journal.interrupt_run()

    def close(self) -> None:
        with ExitStack() as stack:  # closes each resource, whatever the others raise
            for opened in self._opened_resources:
                stack.callback(opened.close)

    @property
    def is_complete(self) -> bool:
        return self._journal.facts.done == self._journal.facts.lines

    @property
    def is_all_sent(self) -> bool:
        return self._journal.facts.sent == self._journal.facts.positions

    def get_progress(self, rate: float | None = None, connection_error: str = "") -> FileProgress:
        facts = self._journal.facts
        return FileProgress(
            lines=facts.lines,
            done=facts.done,
            failed=facts.failed,
            bad=facts.bad,
            in_queue=self.open_count,
            tokens_in=facts.tokens_in,
            tokens_out=facts.tokens_out,
            seconds=facts.seconds if facts.finished_at else self._elapsed_s,
            rate=rate,
            connection_error=connection_error,
        )

    @property
    def _elapsed_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._began_at

    def _side_path(self, suffix: str) -> Path:
        return self._paths.side_path(self._folder, suffix)

    def _close_later(self, opened: T) -> T:
        self._opened_resources.append(opened)  # type: ignore[arg-type]
        return opened

    # Start of a run.

    def _source_path(self) -> Path:
        source = self._paths.source
        if isinstance(source, Path):
            return source
        path = self._side_path(".input")
        spool_stream(source, path, self.stop_event, self._journal.facts.input.get("sha256", ""))
        return path

    def _check_input(self) -> InputFindings:
        facts, options = self._journal.facts, self._options
        facts.job = f"file-{secrets.token_hex(5)}"
        facts.secret = secrets.token_bytes(16)
        facts.begun_at = time.time()
        facts.queue = self._names.queue
        facts.shape = collect_fixed_options(options)
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

    def _check_same_run(self) -> None:
        """Raise InputError if options or queue differ from those with which the run was begun."""
        facts, shape, path = self._journal.facts, collect_fixed_options(self._options), self._journal.path
        changed_options = [name for name, value in shape.items() if facts.shape.get(name) != value]
        if changed_options:
            message = f"{path}: the run was begun with another {', '.join(changed_options)}"
            raise InputError(f"{message}: give the same, or another output")
        if facts.queue != self._names.queue:
            raise InputError(f"{path}: the run was begun on the queue {facts.queue}: give that one")

    def _check_same_input(self) -> None:
        """Raise InputError if the input is not the one that was checked. Its path may have changed."""
        known, stamp = self._journal.facts.input, self._input.file_stamp()
        if stamp == self._checked_stamp:
            return
        # A copy of the input has another modification time. Only then is the whole file read.
        if known["bytes"] == stamp["bytes"] and (
            known["changed_ns"] == stamp["changed_ns"] or known["sha256"] == self._input.compute_digest()
        ):
            self._checked_stamp = stamp
            return
        message = f"{self._input.path} is not the input that {self._journal.path} is of"
        raise InputError(f"{message}: give that one, or another output")

    def _check_finished_output(self) -> None:
        """Raise SinkError if the answers of the finished run are gone, because nothing writes them again."""
        if isinstance(self._paths.output, Path):
            check_written_file(self._paths.output, self._journal.facts.output_bytes, self._journal.path)

    def _open_sinks(self) -> None:
        facts, output, path = self._journal.facts, self._paths.output, self._journal.path
        if isinstance(output, Path):
            self._output = self._close_later(FileSink(output, facts.output_bytes, path))
        else:
            self._output = self._close_later(StreamSink(output))
        errors = self._paths.errors_path
        self._errors = self._output
        if errors is not None:
            self._errors = self._close_later(FileSink(errors, facts.errors_bytes, path))
        if self._options.ordered:
            self._spool = self._close_later(FileSink(self._side_path(".spool"), facts.spool_bytes, path))

    def _count_open(self) -> None:
        after = 0
        while page := self.open_lines(after):
            after = page[-1][0]
            self.open_count += len(page)
            self.open_bytes += sum(size for _, size, _ in page)
        self._open_by_sequence = OpenLineCounts(self._journal.count_open_by_sequence())

    # Sending.

    def begin_next_chunk(self, room: int, deadline: int) -> tuple[Chunk, list[Submission]] | None:
        """Record the next lines, up to `room` of them, as a chunk in the journal, and return it.

        Return `None` if too many lines of the sequence that comes next are open.
        """
        lines: list[SendLine] = []
        size = 0
        for line in self._journal.next_lines(min(room, MAX_CHUNK_LINES)):
            size += line.size_bytes
            if (lines and size > MAX_CHUNK_BYTES) or not self._open_by_sequence.try_add(line.sequence):
                break
            lines.append(line)
        if not lines:
            return None
        chunk = self._begin_chunk(lines, deadline)
        self.open_count += len(lines)
        self.open_bytes += sum(line.size_bytes for line in lines)
        return chunk

    def begin_lost_chunk(self, numbers: Sequence[int], deadline: int) -> tuple[Chunk, list[Submission]]:
        """Record lost lines as a new chunk, and return it."""
        return self._begin_chunk(self._journal.lines_by_number(numbers), deadline)

    def _begin_chunk(self, lines: Sequence[SendLine], deadline: int) -> tuple[Chunk, list[Submission]]:
        self._check_same_input()  # the input may have changed since the check: nothing unchecked is sent
        now = int(time.time())
        submissions = [self._build_submission(line, deadline, now) for line in lines]
        with self._journal.transaction():
            return self._journal.begin_chunk(lines, deadline, now), submissions

    def confirm_chunk(self, chunk: int) -> None:
        """Record that the queue has accepted a chunk."""
        with self._journal.transaction():
            self._journal.confirm_chunks([chunk])

    def unconfirmed_chunks(self) -> list[Chunk]:
        return self._journal.unconfirmed_chunks()

    def build_submissions(self, chunk: Chunk) -> list[Submission]:
        """Return the submissions of a chunk, with the same bytes as when the chunk was begun."""
        return [self._build_submission(line, chunk.deadline, chunk.created_at) for line in chunk.lines]

    def _build_submission(self, line: SendLine, deadline: int, created: int) -> Submission:
        """Build the request of a line. Raises InputError if the line has changed since the check."""
        parsed = self._reader.parse_input_line(
            line.line_number, self._input.read_at(line.offset, line.size_bytes)
        )
        if not isinstance(parsed, BatchLine) or parsed.custom_id != line.custom_id:
            raise InputError(f"{self._input.path}: line {line.line_number} has changed since it was checked")
        options = self._options
        request_id, token = (
            self.job_names.request_id(line.line_number),
            self.job_names.request_token(line.line_number, line.position),
        )
        member = encode_member(
            request_id,
            parsed.body,
            deadline,
            created=created,
            token=token,
            results=self.job_names.result_list,
            endpoint=parsed.url,
            headers=options.headers,
            metadata=options.metadata
            if options.slicing and parsed.slicing
            else {**options.metadata, **ONE_CALL},
            labels={**options.labels, "file": self._journal.facts.job},
            extra=None if parsed.turn is None else build_turn(parsed.turn, line.index, line.is_last),
        )
        return Submission(member, compute_score(deadline, options.priority), request_id, token, deadline)

    # Results.

    def write_results(self, results: Mapping[int, PoppedResult]) -> None:
        """Write the answers of up to a thousand lines. Lines that are already done are skipped."""
        facts = self._journal.facts
        lines = []
        for n, (custom_id, size, sequence) in self._journal.select_open_lines(list(results)).items():
            if results[n].error_code == ErrorCode.SEQUENCE_FULL:
                continue  # the sequence did not accept the request: the line is sent again like a lost one
            lines.append((n, build_answer_line(self.job_names.request_id(n), custom_id, results[n])))
            prompt_tokens, completion_tokens, _ = parse_token_usage(
                results[n].payload.encode(errors="replace")
            )
            facts.tokens_in += prompt_tokens
            facts.tokens_out += completion_tokens
            self._count_done_line(size, sequence)
        if lines:
            self._write_lines(lines)

    def write_bad_lines(self) -> None:
        """Write the errors of the bad lines."""
        while bad := self._journal.bad_lines_after(0, MAX_CHUNK_LINES):
            failures = [
                self._failed_line(each.line_number, each.custom_id, (each.code, each.message)) for each in bad
            ]
            self._write_lines(failures, bad)

    def expire_unsent(self) -> None:
        """Write errors for all lines that were not sent before the deadline of the run."""
        while lines := self._journal.next_lines(MAX_CHUNK_LINES):
            self._journal.facts.sent = lines[-1].position
            self._write_lines(
                [self._failed_line(line.line_number, line.custom_id, _NOT_SENT) for line in lines]
            )

    def expire_lines(self, numbers: Sequence[int]) -> None:
        """Write errors for lines that were sent, and have no result long after their deadline."""
        lines = []
        for n, (custom_id, size, sequence) in self._journal.select_open_lines(numbers).items():
            lines.append(self._failed_line(n, custom_id, _NO_RESULT))
            self._count_done_line(size, sequence)
        self._write_lines(lines)

    def _count_done_line(self, size: int, sequence: str | None) -> None:
        self.open_count -= 1
        self.open_bytes -= size
        self._open_by_sequence.mark_done(sequence)

    def open_lines(self, after: int, confirmed_only: bool = False) -> list[tuple[int, int, int]]:
        """Return a page of sent lines after a line number that are not done: number, size in bytes, deadline.

        With `confirmed_only`, only lines of chunks that the queue has accepted.
        """
        return self._journal.open_lines(after, PAGE_LINES, confirmed_only=confirmed_only)

    def select_open(self, numbers: Sequence[int]) -> set[int]:
        """Return those of the lines that were sent and are not done."""
        open_numbers: set[int] = set()
        for at in range(0, len(numbers), PAGE_LINES):
            open_numbers.update(self._journal.select_open_lines(numbers[at : at + PAGE_LINES]))
        return open_numbers

    def finish_run(self) -> None:
        """Finish the run, and remove what only a continued run would need."""
        facts = self._journal.facts
        with self._journal.transaction():
            facts.finished_at = time.time()
            facts.seconds = self._elapsed_s
            facts.secret = b""
        self._remove_side_files()
        self._journal.drop_lines()

    def _remove_side_files(self) -> None:
        for suffix in (".spool", *([".input"] if self._journal.facts.from_stream else [])):
            with suppress(OSError):
                self._side_path(suffix).unlink(missing_ok=True)

    def _failed_line(
        self, n: int, custom_id: str | None, code_and_message: tuple[str, str]
    ) -> tuple[int, OutLine]:
        return n, build_error_line(self.job_names.request_id(n), custom_id, *code_and_message, n)

    def _write_lines(self, lines: Sequence[tuple[int, OutLine]], bad: Sequence[FaultyLine] = ()) -> None:
        """Write lines to the files, flush them to the disk, and then record them in the journal.

        In this order, a crash can leave bytes in the files that the journal does not know. They are cut off
        when the run is continued.
        """
        offset = self._journal.facts.spool_bytes
        done = []
        for n, line in lines:
            if self._spool is None:
                self._sink_for(line.is_answer).add_line(line.text)
                done.append(DoneLine(n, line.is_answer))
            else:
                self._spool.add_line(line.text)
                done.append(DoneLine(n, line.is_answer, offset, len(line.text)))
                offset += len(line.text)
        with self._journal.transaction():
            self._sync_sinks()
            if bad:
                self._journal.finish_bad_lines(list(zip(bad, done, strict=True)))
            else:
                self._journal.finish_lines(done)
        if self._spool is not None:
            self._write_in_order(self._spool)

    def _write_in_order(self, spool: FileSink) -> None:
        """Copy the lines that directly follow the last written one from the spool to the files."""
        while lines := self._journal.next_in_order(MAX_CHUNK_LINES):
            for line in lines:
                self._sink_for(line.is_answer).add_line(
                    spool.read_at(line.spool_offset or 0, line.spool_bytes or 0)
                )
            with self._journal.transaction():
                self._sync_sinks()
                self._journal.facts.in_order = lines[-1].line_number

    def _sink_for(self, is_answer: bool) -> Sink:
        return self._output if is_answer else self._errors

    def _sync_sinks(self) -> None:
        facts = self._journal.facts
        facts.output_bytes = self._output.sync()
        facts.errors_bytes = self._errors.sync()
        if self._spool is not None:
            facts.spool_bytes = self._spool.sync()
        facts.seconds = self._elapsed_s
