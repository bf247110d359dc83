from __future__ import annotations

import re
from pathlib import Path

from tests.tools.structure import FEATURES, TYPING_SEQUENCE, find_code_lines, trace_plain_request

CODE = '''
from collections.abc import Mapping, Sequence


def claim_turn(slice: Sequence[int]) -> None:
    """Claim a turn of a sequence."""
    text = """no code
    of a sequence"""  # but a string
    sequence_id = text  # the sequence
'''


def test_code_lines_have_neither_comments_nor_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CODE)
    assert sorted(find_code_lines(path)) == [2, 5, 7, 8, 9]


def test_words_of_a_feature_are_found_in_names_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CODE)
    lines = {number: TYPING_SEQUENCE.sub("", line) for number, line in find_code_lines(path).items()}
    found = {
        feature: [number for number, line in lines.items() if re.search(rf"\b(?:{pattern})\b", line.lower())]
        for feature, pattern in FEATURES.items()
    }
    assert found == {"sequences": [5, 7, 9], "slices": [], "models": [], "merging": []}


def test_plain_request_enters_the_modules_of_the_loop_and_none_of_the_lab() -> None:
    modules = trace_plain_request()
    assert {"kernel/pipeline.py", "kernel/attempts.py", "kernel/flush.py"} <= modules
    assert not any(name.startswith("lab") for name in modules)
