"""Paths of the repository, for tests that read its files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dispatcher"
DOCS = ROOT / "docs"
