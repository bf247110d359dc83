"""Readers for the Markdown pages of docs/: anchors of headings, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def find_anchors(page: Path) -> set[str]:
    """Return the anchors by which links refer to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def read_table_rows(page: Path, heading: str) -> Iterator[list[str]]:
    """Yield the rows of the table whose first column has this heading. Backticks around cells are removed."""
    table = page.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]
