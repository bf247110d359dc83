"""The order in which lines of a batch file are sent, whatever sequences and groups they are of."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.client.files.journal import FileJournal, InputLine, SendLine
from dispatcher.client.files.line_sequences import LineTurn

A_LINE = st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from([b"x", b"y"]))
LINES = st.lists(A_LINE, max_size=40)
FEW = settings(max_examples=30)
"""Each writes a journal to the disk."""


def sent(lines: list[tuple[str | None, bytes]], *, by_group: bool) -> list[SendLine]:
    with tempfile.TemporaryDirectory() as folder:
        journal = FileJournal(Path(folder) / "journal")
        with journal.transaction():
            turns = [None if name is None else LineTurn(name) for name, _ in lines]
            found = [
                InputLine(n + 1, n, 1, f"c-{n}", group, turn)
                for n, ((_, group), turn) in enumerate(zip(lines, turns, strict=True))
            ]
            journal.add_lines(found, ())
            assert journal.find_misplaced(10) == []
            journal.arrange_lines(by_group=by_group)
        told = journal.next_lines(1000)
        journal.close()
        return told


@FEW
@given(lines=LINES, by_group=st.booleans())
def test_each_line_is_sent_once_and_those_of_a_sequence_in_the_order_of_the_file(
    lines: list[tuple[str | None, bytes]], by_group: bool
) -> None:
    order = sent(lines, by_group=by_group)
    assert sorted(each.line_number for each in order) == [*range(1, len(lines) + 1)]
    for name in ("a", "b", "c"):
        numbers = [n for n, (each, _) in enumerate(lines, 1) if each == name]
        mine = [each for each in order if each.sequence == name]
        assert [each.line_number for each in mine] == numbers
        assert [each.index for each in mine] == [*range(len(numbers))]
        assert [bool(each.is_last) for each in mine] == [n == numbers[-1] for n in numbers]


@FEW
@given(lines=LINES)
def test_a_group_is_sent_without_a_gap_and_a_sequence_goes_with_its_first_line(
    lines: list[tuple[str | None, bytes]],
) -> None:
    groups: dict[str, bytes] = {}
    for name, group in lines:
        if name is not None:
            groups.setdefault(name, group)
    order = [lines[each.line_number - 1] for each in sent(lines, by_group=True)]
    told = [group if name is None else groups[name] for name, group in order]
    assert sum(before != after for before, after in pairwise(told)) <= 1
