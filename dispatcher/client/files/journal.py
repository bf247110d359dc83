"""What a run of a batch file has done so far, in a SQLite file beside the output: it survives any end.

SQLite brings what would be hard to get right by hand: whole steps or none, sorting on disk, and a lock that
ends with its process.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dispatcher.client.files.database import JournalError, journal_error, open_locked, remove_locked
from dispatcher.client.files.line_sequences import LineTurn
from dispatcher.client.files.order import arrange, columns_of, misplaced

FORMAT = 3
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
_SEND_LINES = (
    "select line.n, position, at, bytes, custom_id, sequence, idx, ends"
    " from place join line on line.n = place.n where "
)
_LARGE = ("line", "bad", "place", "chunk")


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line of the input that is a request."""

    n: int
    """Its number, from 1."""
    at: int
    """Where it begins, in bytes."""
    size: int
    custom_id: str
    group: bytes
    turn: LineTurn | None = None


@dataclass(frozen=True, slots=True)
class FaultyLine:
    """A line of the input that is no request, and the first thing that is wrong with it."""

    n: int
    custom_id: str | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SendLine:
    """A line that is to be sent, at its place in the order of sending."""

    n: int
    position: int
    at: int
    size: int
    custom_id: str
    sequence: str | None = None
    index: int | None = None
    ends: bool = False
    """It is the last one of its sequence."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines that are submitted in one call."""

    number: int
    deadline: int
    created: int
    """When it was begun: submitted again, its members are the same bytes."""
    lines: Sequence[SendLine]


@dataclass(frozen=True, slots=True)
class DoneLine:
    """A line whose answer or error is written, and where in the spool where there is one."""

    n: int
    is_answer: bool
    spool_at: int | None = None
    spool_bytes: int | None = None


class Facts(msgspec.Struct, kw_only=True):
    """What is known of a run as a whole. It is small, and written anew in each step."""

    format: int = FORMAT
    job: str = ""
    """Names its requests; drawn when the run begins."""
    secret: bytes = b""
    """What their tokens are made of."""
    queue: str = ""
    input: dict[str, Any] = {}
    """Size, digest and time of change of the input."""
    from_stream: bool = False
    """The input came in by a stream, and lies beside the output until the run has ended."""
    shape: dict[str, Any] = {}
    """The options that decide which requests the input stands for."""
    checked: bool = False
    begun_at: float = 0.0
    finished_at: float = 0.0
    seconds: float = 0.0
    """That its processes have run."""
    lines: int = 0
    """Requests and bad lines."""
    bad: int = 0
    positions: int = 0
    sent: int = 0
    """The last position that is in a chunk."""
    chunks: int = 0
    done: int = 0
    failed: int = 0
    """Of those that are done: all but answers."""
    tokens_in: int = 0
    tokens_out: int = 0
    output_bytes: int = 0
    errors_bytes: int = 0
    spool_bytes: int = 0
    in_order: int = 0
    """`--ordered`: the last line up to which output and errors are written."""


class FileJournal:
    """One run. Whoever opens it is alone with it; a second one gets JournalError. Not safe for threads that
    use it at one time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = Facts()
        self._ending = False
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
        found = self._db.execute("select value from fact where name = 'facts'").fetchone()
        if found is None:
            return  # it ended before it had begun
        try:
            self.facts = msgspec.msgpack.decode(found[0], type=Facts)
        except msgspec.DecodeError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        if self.facts.format != FORMAT:
            raise JournalError(f"{self.path} was written by another version: let that one finish it")

    def close(self) -> None:
        """Let others have it. One whose run did not come past the check is removed."""
        if not self.facts.checked:
            remove_locked(self.path)
        self._db.close()

    def end(self) -> None:
        """From another thread: what is under way breaks off, and nothing more is begun."""
        self._ending = True
        with suppress(sqlite3.Error):  # closed already
            self._db.interrupt()

    @contextmanager
    def step(self) -> Iterator[None]:
        """All that is written in the block, and the facts, become durable together."""
        if self._ending:
            raise JournalError(f"{self.path}: the run was ended")
        try:
            self._db.execute("begin immediate")
            yield
            encoded = msgspec.msgpack.encode(self.facts)
            self._db.execute("insert or replace into fact values ('facts', ?)", (encoded,))
            self._db.execute("commit")
        except sqlite3.Error as error:
            self._undo()
            raise JournalError(f"{self.path} cannot be written: {error}") from error
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):
                self._db.execute("rollback")

    def _rows(self, query: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        """Raises JournalError, for a journal may turn out to be damaged wherever it is read."""
        try:
            return self._db.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            raise journal_error(self.path, error) from error

    # The input, before anything is sent.

    def clear(self) -> None:
        """Forget what an earlier check has found."""
        self._db.execute("drop index if exists places")
        for table in _LARGE:
            self._db.execute(f"delete from {table}")  # noqa: S608 - names of ours

    def add(self, lines: Iterable[InputLine], bad: Iterable[FaultyLine]) -> None:
        self._db.executemany(
            "insert into line (n, at, bytes, custom_id, grouped, sequence, idx, ends)"
            " values (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                (each.n, each.at, each.size, each.custom_id, each.group, *columns_of(each.turn))
                for each in lines
            ),
        )
        self._db.executemany(
            "insert into bad values (?, ?, ?, ?)",
            ((each.n, each.custom_id, each.code, each.message) for each in bad),
        )

    def repeated(self, most: int) -> list[tuple[int, int, int, int]]:
        """Lines whose custom_id stands in an earlier one: number, number of that one, place, bytes."""
        self._db.execute("create index customs on line (custom_id, n)")
        found = self._db.execute(
            "select line.n, first, at, bytes from"
            " (select custom_id, min(n) as first from line group by custom_id having count(*) > 1) as again"
            " join line on line.custom_id = again.custom_id where line.n > first order by line.n limit ?",
            (most,),
        ).fetchall()
        self._db.execute("drop index customs")
        return found

    def misplaced(self, most: int) -> list[tuple[int, str, int, int]]:
        """Lines that can have no turn in their sequence: number, why, place, bytes."""
        return misplaced(self._db, most)

    def refuse(self, bad: Sequence[FaultyLine]) -> None:
        """Lines that turned out to be no requests."""
        self._db.executemany("delete from line where n = ?", ((each.n,) for each in bad))
        self.add((), bad)

    def arrange(self, *, by_group: bool) -> None:
        """Decide in which order lines are sent."""
        arrange(self._db, by_group=by_group)
        self._db.execute("create unique index places on place (n)")
        (self.facts.positions,) = self._db.execute("select count(*) from place").fetchone()
        (self.facts.bad,) = self._db.execute("select count(*) from bad").fetchone()
        self.facts.lines = self.facts.positions + self.facts.bad

    def bad_after(self, n: int, most: int) -> list[FaultyLine]:
        """Bad lines that are not written yet."""
        rows = self._rows(
            "select n, custom_id, code, message from bad where n > ? order by n limit ?", (n, most)
        )
        return [FaultyLine(*row) for row in rows]

    def wrote_bad(self, lines: Sequence[tuple[FaultyLine, DoneLine]]) -> None:
        """Inside a step: bad lines whose errors are written. In the spool each is like any other."""
        self._db.executemany(
            "insert or replace into line (n, done, spool_at, spool_bytes, is_answer) values (?, 1, ?, ?, 0)",
            ((done.n, done.spool_at, done.spool_bytes) for _, done in lines if done.spool_at is not None),
        )
        self._db.executemany("delete from bad where n = ?", ((bad.n,) for bad, _ in lines))
        self.facts.done += len(lines)
        self.facts.failed += len(lines)

    # What is sent.

    def next_lines(self, most: int) -> list[SendLine]:
        """Those whose turn it is."""
        return self._send_lines("position > ? order by position limit ?", (self.facts.sent, most))

    def begin_chunk(self, lines: Sequence[SendLine], deadline: int, created: int) -> Chunk:
        """Inside a step: these lines will be submitted together."""
        self.facts.chunks += 1
        number = self.facts.chunks
        self._db.execute(
            "insert into chunk (number, deadline, created) values (?, ?, ?)", (number, deadline, created)
        )
        self._db.executemany("update line set chunk = ? where n = ?", ((number, each.n) for each in lines))
        self.facts.sent = max(self.facts.sent, *(each.position for each in lines))
        return Chunk(number, deadline, created, lines)

    def are_sure(self, numbers: Iterable[int]) -> None:
        """Inside a step: these chunks are in the queue, or were."""
        self._db.executemany("update chunk set sure = 1 where number = ?", ((number,) for number in numbers))

    def unsure(self) -> list[Chunk]:
        """Chunks of which it is not known whether they were submitted."""
        rows = self._rows("select number, deadline, created from chunk where not sure order by number")
        return [
            Chunk(number, deadline, created, self._send_lines("line.chunk = ? order by position", (number,)))
            for number, deadline, created in rows
        ]

    def open_lines(self, after: int, most: int, *, sure: bool) -> list[tuple[int, int, int]]:
        """Lines in chunks (`sure`: in those that the queue has taken) that are not done, from a number on:
        numbers, bytes, deadlines of the chunks."""
        return self._rows(
            "select line.n, line.bytes, chunk.deadline from line join chunk on line.chunk = chunk.number"
            " where line.n > ? and not done and sure >= ? order by line.n limit ?",
            (after, int(sure), most),
        )

    def lines_of(self, numbers: Sequence[int]) -> list[SendLine]:
        """Of at most a thousand lines."""
        marks = ",".join("?" * len(numbers))
        return self._send_lines(f"line.n in ({marks}) order by position", tuple(numbers))

    def _send_lines(self, where: str, arguments: tuple[Any, ...]) -> list[SendLine]:
        return [SendLine(*row) for row in self._rows(_SEND_LINES + where, arguments)]

    # What is done.

    def still_open(self, numbers: Sequence[int]) -> Mapping[int, tuple[str, int, str | None]]:
        """Those of at most a thousand lines that were sent and are not done: custom_id, bytes and sequence of
        each."""
        marks = ",".join("?" * len(numbers))
        where = f"not done and chunk is not null and n in ({marks})"
        query = f"select n, custom_id, bytes, sequence from line where {where}"  # noqa: S608
        rows = self._rows(query, tuple(numbers))
        return {n: (custom_id, size, sequence) for n, custom_id, size, sequence in rows}

    def open_of_sequences(self) -> dict[str, int]:
        """Of each sequence, how many lines were sent and are not done."""
        where = "sequence is not null and not done and chunk is not null"
        return dict(self._rows(f"select sequence, count(*) from line where {where} group by sequence"))  # noqa: S608

    def finish_lines(self, lines: Sequence[DoneLine]) -> None:
        """Inside a step: what they got is written."""
        self._db.executemany(
            "update line set done = 1, spool_at = ?, spool_bytes = ?, is_answer = ? where n = ?",
            ((each.spool_at, each.spool_bytes, each.is_answer, each.n) for each in lines),
        )
        self.facts.done += len(lines)
        self.facts.failed += sum(not each.is_answer for each in lines)

    def next_in_order(self, most: int) -> list[DoneLine]:
        """Lines that follow on the last one in order without a gap, and are done."""
        rows = self._rows(
            "select n, done, is_answer, spool_at, spool_bytes from line where n > ? order by n limit ?",
            (self.facts.in_order, most),
        )
        found = []
        for n, done, is_answer, at, size in rows:
            if not done:
                break
            found.append(DoneLine(n, bool(is_answer), at, size))
        return found

    def shrink(self) -> None:
        """Keep the facts alone, once all is done; what cannot be done for want of room is left."""
        with suppress(sqlite3.Error):
            for table in _LARGE:
                self._db.execute(f"drop table if exists {table}")
            self._db.execute("vacuum")
