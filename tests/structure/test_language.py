"""Docstrings and comments of Lua scripts do not open like a fragment of a sentence."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import PACKAGE
from tests.structure.source import MODULES, name_of

FRAGMENT = re.compile(r"(Of|So|Those|What|Who|Whoever|Whatever|Nobody|None:|By this|As long as)\b")
"""Openings of a sentence without a subject. "None if ..." needs its subject, too."""


def docstrings(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of each docstring, those of attributes and constants included."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_docstrings_open_with_a_verb_or_a_noun(path: Path) -> None:
    found = docstrings(path.read_text())
    assert [f"{line}: {text[:60]}" for line, text in found if FRAGMENT.match(text)] == []


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "queue" / "lua").glob("*.lua")), ids=lambda path: path.name
)
def test_header_of_a_script_opens_with_a_verb_or_a_noun(path: Path) -> None:
    header = path.read_text().removeprefix("-- ")
    assert not FRAGMENT.match(header), header.splitlines()[0]


def test_fragment_is_noticed() -> None:
    found = docstrings('def f():\n    """Of what is left."""\n\n\nLIMIT = 3\n"""Number of requests."""\n')
    assert {text: bool(FRAGMENT.match(text)) for _, text in found} == {
        "Of what is left.": True,
        "Number of requests.": False,
    }
