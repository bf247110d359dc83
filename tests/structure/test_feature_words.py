"""The folders of the kernel contain no word of a feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher import features
from tests.structure.feature_words import FOLDERS, PHRASES, WORDS, find_features, find_lines


def test_folders_of_the_kernel_have_no_word_of_a_feature() -> None:
    assert list(find_lines()) == []


def test_every_feature_has_words() -> None:
    assert set(WORDS | PHRASES) == set(features.ORDER)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("class TurnChecker:", {"sequences"}),
        ("    end = settlement.turn_end", {"sequences"}),
        ("-- Delete the conversation of a sequence", {"sequences"}),
        ("from dispatcher.features.slices.slicer import Slicer", {"slices"}),
        ("has_merged_call: bool", {"merging"}),
        ("local WARM_UP_LOCKS = KEYS[3]", {"models"}),
        ("requests that wait for their model", {"models"}),
        ("stream_keys of a named stream", {"named_streams"}),
        ("lines of a BatchFile", {"batch_files"}),
        ("versions of merged calls", {"models", "merging"}),
        ("rows: Sequence[tuple[str, int]]", set()),
        ("return islice(rows, 3)", set()),
        ("async with asyncio.TaskGroup() as tasks:", set()),
        ("the model of a request, and the stream of its answer", set()),
    ],
)
def test_words_of_features_are_found(line: str, found: set[str]) -> None:
    assert set(find_features(line)) == found


def test_lines_and_names_of_files_with_words_of_features_are_found(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "kernel" / "loop.py").write_text("turn_end = 1\n\nslicer = 2\n")
    (tmp_path / "limit" / "merger.py").write_text("")
    assert list(find_lines(tmp_path)) == [
        "kernel/loop.py:1: a word of sequences",
        "kernel/loop.py:3: a word of slices",
        "limit/merger.py:0: a word of merging",
    ]
