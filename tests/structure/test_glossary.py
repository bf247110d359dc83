"""docs/reference/glossary.md: a word stands there once, and what is named beside it exists under that name."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

import pytest

from dispatcher.core.limit.budget import Reason
from dispatcher.telemetry import status
from dispatcher.telemetry.catalogue import CATALOGUE, OUTCOMES
from dispatcher.telemetry.events import Event
from tests.structure.symbols import PACKAGE, SYMBOL, exists

DOCS = PACKAGE.parent / "docs"
PAGE = (DOCS / "reference" / "glossary.md").read_text()
LUA = PACKAGE / "queue" / "lua"


def rows() -> list[tuple[str, str, str, str, str]]:
    """Word, meaning, code, Lua, shown as."""
    found = []
    for line in PAGE.splitlines():
        if line.startswith("|") and not re.match(r"\| Word|\|-", line):
            word, meaning, code, lua, shown = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((word, meaning, code, lua, shown))
    return found


def quoted(cell: str) -> list[str]:
    """What is named there; nothing else stands in such a cell."""
    names = re.findall(r"`([^`]+)`", cell)
    assert ", ".join(f"`{name}`" for name in names) == cell
    return names


def test_a_word_stands_there_once() -> None:
    words = [word for each in rows() for word in re.split(r", | and ", each[0])]
    assert len(words) > 70
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


def test_a_word_is_told_in_one_sentence() -> None:
    assert [
        word for word, meaning, *_ in rows() if not meaning or ". " in meaning or len(meaning) > 140
    ] == []


def test_code_that_is_named_is_there() -> None:
    named = [name for each in rows() for name in quoted(each[2])]
    assert len(named) > 60
    assert [name for name in named if not SYMBOL.fullmatch(f"`{name}`") or not exists(name)] == []


def test_lua_that_is_named_is_there() -> None:
    sources = {path.name: path.read_text() for path in LUA.iterdir()}
    words = set(re.findall(r"\w+", "\n".join(sources.values())))
    named = {name for each in rows() for name in quoted(each[3])}
    assert named - set(sources) - words == set()


def test_what_is_shown_is_there() -> None:
    settings = set(
        re.findall(
            r"^\| `([a-z_.]+)` \|", (DOCS / "reference" / "configuration.md").read_text(), re.MULTILINE
        )
    )
    parts = [part for part in vars(status).values() if isinstance(part, type) and is_dataclass(part)]
    shown = (
        settings
        | {series.page_name for series in CATALOGUE}
        | {field.name for part in parts for field in fields(part)}
        | {str(reason) for reason in Reason}
        | {event.event_name for event in Event}
        | set(OUTCOMES.values())
    )
    assert {name for each in rows() for name in quoted(each[4])} - shown == set()


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/explanation/architecture.md", "docs/explanation/concepts.md", "CONTRIBUTING.md"],
)
def test_the_glossary_is_found(page: str) -> None:
    assert "glossary.md)" in (PACKAGE.parent / page).read_text()
