"""Run the commands of the pages on the simulator and write their output below them.

python -m tests.lab.simulation.simulator_page    after a change that moves the figures
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout

from dispatcher.cli import app
from tests.paths import DOCS

PAGES = (DOCS / "how-to" / "simulator.md", DOCS / "contributing" / "simulation.md")
BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)


def run_command(command: str) -> str:
    """Run a command and return the table that it prints, without the legend."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        app(shlex.split(command)[1:], prog_name="batch-dispatcher", standalone_mode=False)
    rows = [line.rstrip() for line in printed.getvalue().splitlines()]
    return "\n".join(rows[: next(i for i, row in enumerate(rows) if " slots" in row)])


def find_blocks(text: str) -> list[str]:
    """Return the console blocks of the page."""
    return BLOCK.findall(text)


def rerun_block(block: str) -> str:
    """Return a block with the current output of each of its commands."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"$ {command}\n{run_command(command)}\n" for command in commands)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        for block in find_blocks(text):
            text = text.replace(block, rerun_block(block))
        page.write_text(text)
    plot = DOCS / "images" / "simulator.png"
    run_command(
        f"batch-dispatcher simulate --policy dispatcher,all-knowing,cap,literal,multiplier --plot {plot}"
    )


if __name__ == "__main__":
    main()
