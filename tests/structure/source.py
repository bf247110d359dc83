"""Modules of the program, for tests of the source code."""

from __future__ import annotations

from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "dispatcher"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
