"""Runs the commands that docs/how-to/simulator.md shows, and writes what they print below them.

python -m tests.lab.simulation.document        after a change that moves the figures
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout

from dispatcher.cli import app
from tests.paths import DOCS

DOCUMENT = DOCS / "how-to" / "simulator.md"
BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)


def table(command: str) -> str:
    """The table that a command prints, without the legend below it."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        app(shlex.split(command)[1:], prog_name="batch-dispatcher", standalone_mode=False)
    rows = [line.rstrip() for line in printed.getvalue().splitlines()]
    return "\n".join(rows[: next(i for i, row in enumerate(rows) if " slots" in row)])


def blocks(text: str) -> list[str]:
    """The console blocks of the document, as they stand."""
    return BLOCK.findall(text)


def rerun(block: str) -> str:
    """A block as it should be: its commands, each with what it prints now."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"$ {command}\n{table(command)}\n" for command in commands)


def main() -> None:
    text = DOCUMENT.read_text()
    for block in blocks(text):
        text = text.replace(block, rerun(block))
    DOCUMENT.write_text(text)
    plot = DOCUMENT.with_suffix(".png")
    table(f"batch-dispatcher simulate --policy dispatcher,all-knowing,cap,literal,multiplier --plot {plot}")


if __name__ == "__main__":
    main()
