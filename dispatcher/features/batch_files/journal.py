"""Journal of a run of a batch file: a SQLite file beside the output that records what was sent and written.

SQLite provides atomic transactions, sorting on disk, and a lock that ends with its process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dispatcher.features.batch_files.database import JournalError, journal_error, open_locked, remove_locked
from dispatcher.features.batch_files.line_sequences import LineTurn
from dispatcher.features.batch_files.order import arrange_lines, find_misplaced, turn_columns

JOURNAL_FORMAT = 3
_SCHEMA = """
create table fact (name text primary key, value blob) without rowid;
create table line (
    n integer primary key, at integer, bytes integer, custom_id text, grouped blob, chunk integer,
    sequence text, idx integer, ends integer, opens integer,
    done integer default 0, spool_at integer, spool_bytes integer, is_answer integer
);
create table bad (n integer primary key, custom_id text, code text, message text);
create table place (position integer primary key, n integer);
create table chunk (number integer primary key, deadline integer, created integer, sure integer default 0);
"""
_SELECT_SEND_LINES = (
    "select line.n, position, at, bytes, custom_id, sequence, idx, ends"
    " from place join line on line.n = place.n where "
)
_LINE_TABLES = ("line", "bad", "place", "chunk")


@dataclass(frozen=True, slots=True)
class InputLine:
    """Line of the input that is a valid request."""

    line_number: int
    """Line number, from 1."""
    offset: int
    """Offset in the input, in bytes."""
    size_bytes: int
    custom_id: str
    group: bytes
    turn: LineTurn | None = None


@dataclass(frozen=True, slots=True)
class FaultyLine:
    """Line of the input that is not a valid request, with the code of its first fault and all messages."""

    line_number: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SendLine:
    """Line with its position in the order of sending."""

    line_number: int
    position: int
    offset: int
    size_bytes: int
    custom_id: str
    sequence: str | None = None
    index: int | None = None
    is_last: bool = False
    """True if the line is the last one of its sequence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are submitted in one call."""

    number: int
    deadline: int
    created_at: int
    """Unix time at which the chunk was begun. It is part of the members, so that a chunk that is submitted
    again has the same bytes."""
    lines: Sequence[SendLine]


@dataclass(frozen=True, slots=True)
class DoneLine:
    """Line whose answer or error is written, with its place in the spool file if the run has one."""

    line_number: int
    is_answer: bool
    spool_offset: int | None = None
    spool_bytes: int | None = None


class RunFacts(msgspec.Struct, kw_only=True):
    """State of a run as a whole. It is small, and is written in each transaction.

    The field names are part of the journal format.
    """

    format: int = JOURNAL_FORMAT
    job: str = ""
    """Random name of the run, with which the ids of its requests begin."""
    secret: bytes = b""
    """Key from which the tokens of the requests are derived."""
    queue: str = ""
    input: dict[str, Any] = {}
    """Size, digest and modification time of the input."""
    from_stream: bool = False
    """True if the input was a stream, whose copy is kept beside the output until the run has ended."""
    shape: dict[str, Any] = {}
    """Options that must not change when the run is continued."""
    checked: bool = False
    """True if the whole input was checked."""
    begun_at: float = 0.0
    finished_at: float = 0.0
    """Unix time at which the run was finished, or 0."""
    seconds: float = 0.0
    """Seconds for which processes worked on the run."""
    lines: int = 0
    """Number of valid and bad lines."""
    bad: int = 0
    positions: int = 0
    """Number of valid lines."""
    sent: int = 0
    """Position up to which lines are in chunks."""
    chunks: int = 0
    done: int = 0
    failed: int = 0
    """Number of done lines that are in the errors file."""
    tokens_in: int = 0
    tokens_out: int = 0
    output_bytes: int = 0
    errors_bytes: int = 0
    spool_bytes: int = 0
    in_order: int = 0
    """Number of the line up to which output and errors are written, with the option `ordered`."""


class FileJournal:
    """Journal of one run. A second process that opens it gets JournalError. Not thread-safe, except for
    `interrupt_run`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = RunFacts()
        self._is_ending = False
        self._db = open_locked(path)
        try:
            if self._db.execute("select count(*) from sqlite_schema").fetchone()[0]:
                self._read_facts()
            else:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
            self._db.execute("commit")
        except sqlite3.Error as error:
            self._db.close()
            raise journal_error(path, error) from error
        except JournalError:
            self._db.close()
            raise

    def _read_facts(self) -> None:
        row = self._db.execute("select value from fact where name = 'facts'").fetchone()
        if row is None:
            return  # the earlier process ended before its first transaction
        try:
            self.facts = msgspec.msgpack.decode(row[0], type=RunFacts)
        except msgspec.DecodeError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        if self.facts.format != JOURNAL_FORMAT:
            raise JournalError(f"{self.path} was written by another version: let that one finish it")

    def close(self) -> None:
        """Close the journal, and remove it if the check of the input was not finished."""
        if not self.facts.checked:
            remove_locked(self.path)
        self._db.close()

    def interrupt_run(self) -> None:
        """Interrupt the statement in progress, and allow no further transaction. May be called from another
        thread."""
        self._is_ending = True
        with suppress(sqlite3.Error):  # the connection may be closed already
            self._db.interrupt()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all writes of the block, and the facts, durable in one transaction."""
        if self._is_ending:
            raise JournalError(f"{self.path}: the run was ended")
        try:
            self._db.execute("begin immediate")
            yield
            encoded = msgspec.msgpack.encode(self.facts)
            self._db.execute("insert or replace into fact values ('facts', ?)", (encoded,))
            self._db.execute("commit")
        except sqlite3.Error as error:
            self._roll_back()
            raise JournalError(f"{self.path} cannot be written: {error}") from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("rollback")

    def _fetch_rows(self, query: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        """Run a query, and return its rows. Raises JournalError, because any read may find damaged data."""
        try:
            return self._db.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            raise journal_error(self.path, error) from error

    # Check of the input, before anything is sent.

    def clear_lines(self) -> None:
        """Delete the lines of an earlier check that was not finished."""
        self._db.execute("drop index if exists places")
        for table in _LINE_TABLES:
            self._db.execute(f"delete from {table}")  # noqa: S608 - names of ours

    def add_lines(self, lines: Iterable[InputLine], bad: Iterable[FaultyLine]) -> None:
        self._db.executemany(
            "insert into line (n, at, bytes, custom_id, grouped, sequence, idx, ends)"
            " values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    each.line_number,
                    each.offset,
                    each.size_bytes,
                    each.custom_id,
                    each.group,
                    *turn_columns(each.turn),
                )
                for each in lines
            ),
        )
        self._db.executemany(
            "insert into bad values (?, ?, ?, ?)",
            ((each.line_number, each.custom_id, each.code, each.message) for each in bad),
        )

    def find_duplicates(self, limit: int) -> list[tuple[int, int, int, int]]:
        """Return lines with the custom_id of an earlier line: number, number of the earlier one, offset, size
        in bytes."""
        self._db.execute("create index customs on line (custom_id, n)")
        rows = self._db.execute(
            "select line.n, first, at, bytes from"
            " (select custom_id, min(n) as first from line group by custom_id having count(*) > 1) as again"
            " join line on line.custom_id = again.custom_id where line.n > first order by line.n limit ?",
            (limit,),
        ).fetchall()
        self._db.execute("drop index customs")  # only this query needs the index
        return rows

    def find_misplaced(self, limit: int) -> list[tuple[int, str, int, int]]:
        """Return lines with an invalid turn: number, message, offset, size in bytes."""
        return find_misplaced(self._db, limit)

    def mark_bad(self, bad: Sequence[FaultyLine]) -> None:
        """Turn valid lines into bad lines."""
        self._db.executemany("delete from line where n = ?", ((each.line_number,) for each in bad))
        self.add_lines((), bad)

    def arrange_lines(self, *, by_group: bool) -> None:
        """Assign each line its position in the order of sending."""
        arrange_lines(self._db, by_group=by_group)
        self._db.execute("create unique index places on place (n)")
        (self.facts.positions,) = self._db.execute("select count(*) from place").fetchone()
        (self.facts.bad,) = self._db.execute("select count(*) from bad").fetchone()
        self.facts.lines = self.facts.positions + self.facts.bad

    def bad_lines_after(self, n: int, limit: int) -> list[FaultyLine]:
        """Return bad lines after a line number whose errors are not written yet."""
        rows = self._fetch_rows(
            "select n, custom_id, code, message from bad where n > ? order by n limit ?", (n, limit)
        )
        return [FaultyLine(*row) for row in rows]

    def finish_bad_lines(self, lines: Sequence[tuple[FaultyLine, DoneLine]]) -> None:
        """Record bad lines as done, in a transaction. With a spool they are then handled like other lines."""
        self._db.executemany(
            "insert or replace into line (n, done, spool_at, spool_bytes, is_answer) values (?, 1, ?, ?, 0)",
            (
                (done.line_number, done.spool_offset, done.spool_bytes)
                for _, done in lines
                if done.spool_offset is not None
            ),
        )
        self._db.executemany("delete from bad where n = ?", ((bad.line_number,) for bad, _ in lines))
        self.facts.done += len(lines)
        self.facts.failed += len(lines)

    # Sending.

    def next_lines(self, limit: int) -> list[SendLine]:
        """Return the next lines in the order of sending."""
        return self._fetch_send_lines("position > ? order by position limit ?", (self.facts.sent, limit))

    def begin_chunk(self, lines: Sequence[SendLine], deadline: int, created: int) -> Chunk:
        """Record, in a transaction, a chunk of lines that will be submitted together."""
        self.facts.chunks += 1
        number = self.facts.chunks
        self._db.execute(
            "insert into chunk (number, deadline, created) values (?, ?, ?)", (number, deadline, created)
        )
        self._db.executemany(
            "update line set chunk = ? where n = ?", ((number, each.line_number) for each in lines)
        )
        # A chunk of lost lines has earlier positions, and does not move the end.
        self.facts.sent = max(self.facts.sent, *(each.position for each in lines))
        return Chunk(number, deadline, created, lines)

    def confirm_chunks(self, numbers: Iterable[int]) -> None:
        """Record, in a transaction, that the queue has accepted these chunks."""
        self._db.executemany("update chunk set sure = 1 where number = ?", ((number,) for number in numbers))

    def unconfirmed_chunks(self) -> list[Chunk]:
        """Return the chunks that the queue may or may not have accepted."""
        rows = self._fetch_rows("select number, deadline, created from chunk where not sure order by number")
        return [
            Chunk(
                number,
                deadline,
                created,
                self._fetch_send_lines("line.chunk = ? order by position", (number,)),
            )
            for number, deadline, created in rows
        ]

    def open_lines(self, after: int, limit: int, *, confirmed_only: bool) -> list[tuple[int, int, int]]:
        """Return sent lines after a line number that are not done: number, size in bytes, deadline.

        With `confirmed_only`, only lines of chunks that the queue has accepted.
        """
        return self._fetch_rows(
            "select line.n, line.bytes, chunk.deadline from line join chunk on line.chunk = chunk.number"
            " where line.n > ? and not done and sure >= ? order by line.n limit ?",
            (after, int(confirmed_only), limit),
        )

    def lines_by_number(self, numbers: Sequence[int]) -> list[SendLine]:
        """Return the lines with these numbers, up to a thousand."""
        marks = ",".join("?" * len(numbers))
        return self._fetch_send_lines(f"line.n in ({marks}) order by position", tuple(numbers))

    def _fetch_send_lines(self, where: str, arguments: tuple[Any, ...]) -> list[SendLine]:
        return [SendLine(*row) for row in self._fetch_rows(_SELECT_SEND_LINES + where, arguments)]

    # Results.

    def select_open_lines(self, numbers: Sequence[int]) -> Mapping[int, tuple[str, int, str | None]]:
        """Return custom_id, size in bytes and sequence of those lines that were sent and are not done.

        Takes up to a thousand numbers.
        """
        marks = ",".join("?" * len(numbers))
        where = f"not done and chunk is not null and n in ({marks})"
        query = f"select n, custom_id, bytes, sequence from line where {where}"  # noqa: S608
        rows = self._fetch_rows(query, tuple(numbers))
        return {n: (custom_id, size, sequence) for n, custom_id, size, sequence in rows}

    def count_open_by_sequence(self) -> dict[str, int]:
        """Return the number of lines that were sent and are not done, by sequence."""
        where = "sequence is not null and not done and chunk is not null"
        return dict(self._fetch_rows(f"select sequence, count(*) from line where {where} group by sequence"))  # noqa: S608

    def finish_lines(self, lines: Sequence[DoneLine]) -> None:
        """Record lines as done, in a transaction, after their output was written."""
        self._db.executemany(
            "update line set done = 1, spool_at = ?, spool_bytes = ?, is_answer = ? where n = ?",
            ((each.spool_offset, each.spool_bytes, each.is_answer, each.line_number) for each in lines),
        )
        self.facts.done += len(lines)
        self.facts.failed += sum(not each.is_answer for each in lines)

    def next_in_order(self, limit: int) -> list[DoneLine]:
        """Return the done lines that directly follow the last line that was written in order."""
        rows = self._fetch_rows(
            "select n, done, is_answer, spool_at, spool_bytes from line where n > ? order by n limit ?",
            (self.facts.in_order, limit),
        )
        in_order = []
        for n, done, is_answer, offset, size in rows:
            if not done:
                break
            in_order.append(DoneLine(n, bool(is_answer), offset, size))
        return in_order

    def drop_lines(self) -> None:
        """Drop all tables of lines after the end of the run, and keep only the facts."""
        with suppress(sqlite3.Error):  # `vacuum` needs space on the disk; without it the file stays large
            for table in _LINE_TABLES:
                self._db.execute(f"drop table if exists {table}")
            self._db.execute("vacuum")
