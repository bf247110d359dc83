"""Docstrings and header comments of Lua scripts do not start like a sentence fragment."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import PACKAGE
from tests.structure.source import MODULES, name_of

FRAGMENT = re.compile(r"(Of|So|Those|What|Who|Whoever|Whatever|Nobody|None:|By this|As long as)\b")
"""Start of a sentence without a subject."""


def find_docstrings(source: str) -> list[tuple[int, str]]:
    """Return the line and text of each docstring, including those of attributes and constants."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_start_with_a_verb_or_a_noun(path: Path) -> None:
    found = find_docstrings(path.read_text())
    assert [f"{line}: {text[:60]}" for line, text in found if FRAGMENT.match(text)] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/lua/*.lua")), ids=lambda path: path.name)
def test_script_header_starts_with_a_verb_or_a_noun(path: Path) -> None:
    header = path.read_text().removeprefix("-- ")
    assert not FRAGMENT.match(header), header.splitlines()[0]


def test_fragment_is_found() -> None:
    found = find_docstrings(
        'def f():\n    """Of what is left."""\n\n\nLIMIT = 3\n"""Number of requests."""\n'
    )
    assert {text: bool(FRAGMENT.match(text)) for _, text in found} == {
        "Of what is left.": True,
        "Number of requests.": False,
    }
