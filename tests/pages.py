"""Readers for the Markdown of docs/: anchors of headings, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def rows(page: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the table whose first column has this heading, without their backticks."""
    table = page.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    for line in table.splitlines()[2:]:
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]
