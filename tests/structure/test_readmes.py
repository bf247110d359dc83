"""The README of a folder names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dispatcher.features import ORDER
from tests.paths import PACKAGE, ROOT
from tests.structure.symbols import find_symbols, symbol_exists

FEATURES = [PACKAGE / "features" / name for name in ORDER]
_FILE = re.compile(r"`([a-z_]+(?:\.py|/))`")
_PAGE = re.compile(r"\bdocs/[a-z/-]+\.md")


@pytest.mark.parametrize("folder", [PACKAGE / "kernel", *FEATURES], ids=lambda folder: folder.name)
def test_every_name_in_a_readme_exists(folder: Path) -> None:
    names = find_symbols((folder / "README.md").read_text())
    assert names or not (folder / "hooks.py").exists()
    assert [name for name in names if not symbol_exists(name)] == []


@pytest.mark.parametrize("folder", FEATURES, ids=lambda folder: folder.name)
def test_every_file_and_page_in_the_readme_of_a_feature_exists(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    missing = [name for name in _FILE.findall(text) if not (folder / name).exists()]
    assert missing + [page for page in _PAGE.findall(text) if not (ROOT / page).exists()] == []
