"""Only the in-flight table writes its entries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from dispatcher.kernel.in_flight import InFlightLease
from tests.paths import PACKAGE

OWNER = PACKAGE / "kernel" / "in_flight.py"
FIELDS = {field.name for field in fields(InFlightLease)}
OTHER_OBJECTS = {"self", "claimed"}
"""Names of objects of other classes that have fields with the same names."""


def find_writes(path: Path) -> Iterator[str]:
    """Yield each assignment to a field of an entry, with its line."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr in FIELDS
            and not (isinstance(node.value, ast.Name) and node.value.id in OTHER_OBJECTS)
        ):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"


def test_entries_of_the_in_flight_table_are_written_by_the_table_alone() -> None:
    assert len(list(find_writes(OWNER))) > 10, "the search finds the assignments of the table"
    found = [
        write for path in (PACKAGE / "kernel").rglob("*.py") if path != OWNER for write in find_writes(path)
    ]
    assert found == []
