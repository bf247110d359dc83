"""The folders of the kernel contain no word of a feature, except for the lines that a list still allows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dispatcher import features
from tests.structure.feature_words import (
    FOLDERS,
    PHRASES,
    WORDS,
    count_lines,
    find_differences,
    find_features,
    read_list,
)


def test_folders_of_the_kernel_have_no_more_words_of_features_than_listed_and_no_fewer() -> None:
    """If there are fewer, `python -m tests.structure.feature_words` lowers the list."""
    assert find_differences(count_lines(), read_list()) == []


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


def test_more_lines_and_fewer_lines_than_listed_are_both_reported(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "kernel" / "loop.py").write_text("turn_end = 1\nslicer = 2\nslices = 3\n")
    listed = Counter({("kernel/loop.py", "slices"): 3, ("kernel/loop.py", "merging"): 1})
    assert find_differences(count_lines(tmp_path), listed) == [
        "kernel/loop.py: 0 lines with words of merging, 1 are listed",
        "kernel/loop.py: 1 lines with words of sequences, 0 are listed",
        "kernel/loop.py: 2 lines with words of slices, 3 are listed",
    ]
