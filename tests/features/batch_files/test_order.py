"""Order in which lines of a batch file are sent, for any sequences and groups."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.features.batch_files.journal import FileJournal, InputLine, SendLine
from dispatcher.features.batch_files.line_sequences import LineTurn

LINE = st.tuples(st.sampled_from([None, "a", "b", "c"]), st.sampled_from([b"x", b"y"]))
LINES = st.lists(LINE, max_size=40)
FEW_EXAMPLES = settings(max_examples=30)
"""Each example writes a journal to the disk."""


def get_sending_order(lines: list[tuple[str | None, bytes]], *, by_group: bool) -> list[SendLine]:
    with tempfile.TemporaryDirectory() as folder:
        journal = FileJournal(Path(folder) / "journal")
        with journal.transaction():
            turns = [None if name is None else LineTurn(name) for name, _ in lines]
            input_lines = [
                InputLine(n + 1, n, 1, f"c-{n}", group, turn)
                for n, ((_, group), turn) in enumerate(zip(lines, turns, strict=True))
            ]
            journal.add_lines(input_lines, ())
            assert journal.find_misplaced(10) == []
            journal.arrange_lines(by_group=by_group)
        order = journal.next_lines(1000)
        journal.close()
        return order


@FEW_EXAMPLES
@given(lines=LINES, by_group=st.booleans())
def test_each_line_is_sent_once_and_lines_of_a_sequence_in_file_order(
    lines: list[tuple[str | None, bytes]], by_group: bool
) -> None:
    order = get_sending_order(lines, by_group=by_group)
    assert sorted(each.line_number for each in order) == [*range(1, len(lines) + 1)]
    for name in ("a", "b", "c"):
        numbers = [n for n, (each, _) in enumerate(lines, 1) if each == name]
        lines_of_sequence = [each for each in order if each.sequence == name]
        assert [each.line_number for each in lines_of_sequence] == numbers
        assert [each.index for each in lines_of_sequence] == [*range(len(numbers))]
        assert [bool(each.is_last) for each in lines_of_sequence] == [n == numbers[-1] for n in numbers]


@FEW_EXAMPLES
@given(lines=LINES)
def test_group_is_sent_contiguously_and_a_sequence_with_the_group_of_its_first_line(
    lines: list[tuple[str | None, bytes]],
) -> None:
    groups: dict[str, bytes] = {}
    for name, group in lines:
        if name is not None:
            groups.setdefault(name, group)
    order = [lines[each.line_number - 1] for each in get_sending_order(lines, by_group=True)]
    sent_groups = [group if name is None else groups[name] for name, group in order]
    assert sum(before != after for before, after in pairwise(sent_groups)) <= 1
