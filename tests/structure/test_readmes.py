"""The README of a folder names only what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import PACKAGE
from tests.structure.symbols import find_symbols, symbol_exists


@pytest.mark.parametrize(
    ("path", "min_count"), [pytest.param(PACKAGE / "kernel" / "README.md", 40, id="kernel")]
)
def test_every_name_in_a_readme_exists(path: Path, min_count: int) -> None:
    names = find_symbols(path.read_text())
    assert len(names) > min_count
    assert [name for name in names if not symbol_exists(name)] == []
