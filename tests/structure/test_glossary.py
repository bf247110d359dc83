"""docs/reference/glossary.md defines each term once and names only existing modules, settings and metrics."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass

from dispatcher.features import import_modules
from dispatcher.limit.budget import Reason
from dispatcher.telemetry import status
from dispatcher.telemetry.catalogue import CATALOGUE, OUTCOMES
from dispatcher.telemetry.events import Event
from tests.paths import DOCS, PACKAGE

PAGE = (DOCS / "reference" / "glossary.md").read_text()


def parse_rows() -> list[tuple[str, str, str, str]]:
    """Return term, meaning, code and "shown as" of each row."""
    found = []
    for line in PAGE.splitlines():
        if line.startswith("|") and not re.match(r"\| Term|\|-", line):
            term, meaning, code, shown = (cell.strip() for cell in line.strip("|").split("|"))
            found.append((term, meaning, code, shown))
    return found


def parse_quoted_names(cell: str) -> list[str]:
    """Return the names in backticks of a cell that holds nothing else."""
    names = re.findall(r"`([^`]+)`", cell)
    assert ", ".join(f"`{name}`" for name in names) == cell
    return names


def test_each_term_is_defined_once() -> None:
    terms = [term for each in parse_rows() for term in each[0].split(", ")]
    assert len(terms) > 100
    assert sorted(term for term in set(terms) if terms.count(term) > 1) == []


def test_each_meaning_is_one_short_sentence() -> None:
    assert [
        term for term, meaning, *_ in parse_rows() if not meaning or ". " in meaning or len(meaning) > 160
    ] == []


def test_each_named_module_exists() -> None:
    named = [name for each in parse_rows() for name in parse_quoted_names(each[2])]
    assert len(named) > 60
    assert [name for name in named if not (PACKAGE / name).exists()] == []


def test_each_name_in_the_last_column_exists() -> None:
    settings = re.findall(
        r"^\| `([a-z_.\[\]]+)` \|", (DOCS / "reference" / "configuration.md").read_text(), re.MULTILINE
    )
    modules = (status, *import_modules("status").values())
    parts = [
        part
        for module in modules
        for part in vars(module).values()
        if isinstance(part, type) and is_dataclass(part)
    ]
    shown = (
        set(settings)
        | {series.page_name for series in CATALOGUE}
        | {field.name for part in parts for field in fields(part)}
        | {str(reason) for reason in Reason}
        | {event.event_name for event in Event}
        | set(OUTCOMES.values())
    )
    assert {name for each in parse_rows() for name in parse_quoted_names(each[3])} - shown == set()
