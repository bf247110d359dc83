"""docs/contributing/architecture.md names every folder, and only functions and files that exist."""

from __future__ import annotations

import re

from tests.paths import DOCS, PACKAGE
from tests.structure.symbols import find_symbols, symbol_exists

PAGE = (DOCS / "contributing" / "architecture.md").read_text()


def read_section(title: str) -> str:
    found = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert found, title
    return found


def test_every_folder_with_code_is_described() -> None:
    folders = {
        str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE
    }
    described = read_section("Folders")
    missing = [
        folder
        for folder in sorted(folders)
        if f"`{folder}/`" not in described and f"`{folder.rpartition('/')[2]}/`" not in described
    ]
    assert missing == []


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|lua|js|yaml))`", PAGE)
    roots = (PACKAGE, PACKAGE.parent)
    assert len(named) > 20
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_every_symbol_that_is_named_exists() -> None:
    assert len(find_symbols(PAGE)) > 10
    assert [name for name in find_symbols(PAGE) if not symbol_exists(name)] == []


def test_missing_symbol_is_noticed() -> None:
    named = find_symbols("`limit.limiter.Limiter.pole`, `limit.limits`, `claim.lua`, `limit.limiter.Limiter`")
    assert [symbol_exists(name) for name in named] == [False, False, True]
