"""Order in which the lines of a file are sent: by groups, and within a sequence by index.

The lines of a sequence are sent in blocks, with blocks of other sequences between them. So many sequences
make progress at the same time, and a long sequence does not fill the queue with its waiting requests.
"""

from __future__ import annotations

import sqlite3
from collections import Counter

from dispatcher.features.batch_files.line_sequences import LineTurn
from dispatcher.features.sequences.turns import Turn

MAX_OPEN_PER_SEQUENCE = 500
"""Largest number of lines of one sequence that are sent and not done. The queue limits how many requests of
a sequence may wait (`sequences.max_waiting`)."""
_BLOCK_LINES = 100
# Lines without an index, in sequences where other lines have one.
_MIXED = """
select line.n, null, at, bytes from line where idx is null and sequence in (
    select sequence from line group by sequence having count(idx) between 1 and count(*) - 1
) order by line.n limit ?
"""
# Lines with the same index as an earlier line of their sequence.
_SAME_INDEX = """
select line.n, first, at, bytes from (
    select sequence as s, idx as i, min(n) as first from line
    where sequence is not null and idx is not null group by sequence, idx having count(*) > 1
) join line on sequence = s and idx = i where line.n > first order by line.n limit ?
"""
# Lines that come after the last request of their sequence.
_AFTER_LAST = """
select line.n, ending, at, bytes from (
    select sequence as s, min(coalesce(idx, n)) as i, min(n) as ending from line
    where sequence is not null and ends group by sequence
) join line on sequence = s where coalesce(idx, line.n) > i order by line.n limit ?
"""
# The temporary table `numbered` has for each line its index in the order of the file, the number of lines of
# its sequence, and the first line of its sequence.
_FILL_NUMBERED = """
insert into numbered select n, row_number() over lines - 1, count(*) over whole, min(n) over whole
from line where sequence is not null
window lines as (partition by sequence order by n), whole as (partition by sequence)
"""
_SET_OPENS = """
update line set opens = (select opens from numbered where numbered.n = line.n) where sequence is not null
"""
# Lines without an index get the index in the order of the file, and the last one ends its sequence.
_SET_INDEXES = """
update line set
    ends = (select numbered.idx = of - 1 from numbered where numbered.n = line.n),
    idx = (select idx from numbered where numbered.n = line.n)
where sequence is not null and idx is null
"""
# All lines of a sequence join the group of its first line.
_SET_GROUPS = """
update line set grouped = (select opener.grouped from line as opener where opener.n = line.opens)
where sequence is not null
"""
_FIRST_OF_GROUP = " join (select grouped as g, min(n) as first from line group by grouped) on grouped = g"
_MESSAGES = (
    "sequence: other lines of it have an index: give all of them one, or none",
    "sequence.index: line {} of this sequence has the same",
    "sequence: it ends with line {}, which is the last one",
)


def find_misplaced(db: sqlite3.Connection, limit: int) -> list[tuple[int, str, int, int]]:
    """Return up to `limit` lines with an invalid turn: line number, message, offset and size in bytes."""
    if not _has_sequences(db):
        return []
    db.execute("create index turns on line (sequence, idx)")
    try:
        for query, why in zip((_MIXED, _SAME_INDEX, _AFTER_LAST), _MESSAGES, strict=True):
            if rows := db.execute(query, (limit,)).fetchall():
                return [(n, why.format(other), at, size) for n, other, at, size in rows]
        return []
    finally:
        db.execute("drop index turns")


def arrange_lines(db: sqlite3.Connection, *, by_group: bool) -> None:
    """Assign a position in the order of sending to each line.

    With `by_group`, groups are in the order in which they first appear in the input, and the lines of a group
    in the order of the input. Without it, all lines are in the order of the input. Lines of a sequence get
    their indexes, and belong to the group of the first line of the sequence.
    """
    place = "{}, line.n"
    if _has_sequences(db):
        _number_lines(db)
        # First the first block of all sequences, then the second block of all, and so on.
        place = f"coalesce(idx, 0) / {_BLOCK_LINES}, {{}}, coalesce(opens, line.n), coalesce(idx, 0), line.n"
    if by_group:
        db.execute("create index groups on line (grouped, n)")
    join, first = (_FIRST_OF_GROUP, "first") if by_group else ("", "null")
    db.execute(f"insert into place (n) select line.n from line{join} order by {place.format(first)}")  # noqa: S608
    db.execute("drop index if exists groups")


def _has_sequences(db: sqlite3.Connection) -> bool:
    found = db.execute("select exists (select 1 from line where sequence is not null)").fetchone()
    return bool(found[0])


def _number_lines(db: sqlite3.Connection) -> None:
    """Number the lines of sequences without indexes. The last line of each of them ends its sequence."""
    db.execute("create temp table numbered (n integer primary key, idx integer, of integer, opens integer)")
    for statement in (_FILL_NUMBERED, _SET_OPENS, _SET_INDEXES, _SET_GROUPS):
        db.execute(statement)
    db.execute("drop table numbered")


def turn_columns(turn: LineTurn | None) -> tuple[str | None, int | None, bool]:
    """Return the columns `sequence`, `idx` and `ends` of a line."""
    return (None, None, False) if turn is None else (turn.id, turn.index, turn.last)


def build_turn(line_turn: LineTurn, index: int | None, is_last: bool) -> Turn:
    """Return the turn of a line. Index and end come from the journal, so they are the same if the line is
    sent again."""
    return Turn(line_turn.id, index, last=bool(is_last), on_error=line_turn.on_error, carry=line_turn.carry)


class OpenLineCounts:
    """Number of lines of each sequence that are sent and not done."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._counts = Counter(counts)

    def try_add(self, sequence: str | None) -> bool:
        """Count one more line. Return False, and count nothing, if its sequence has too many open lines."""
        if sequence is None:
            return True
        if self._counts[sequence] >= MAX_OPEN_PER_SEQUENCE:
            return False
        self._counts[sequence] += 1
        return True

    def mark_done(self, sequence: str | None) -> None:
        """Count one line of a sequence as done."""
        if sequence is not None:
            self._counts[sequence] -= 1
            if self._counts[sequence] <= 0:
                del self._counts[sequence]
