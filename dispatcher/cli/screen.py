"""What a verb prints. Others have named much of it: a line stays one line, without controls of a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer

from dispatcher.core.plain import plain, shortened


def say(*lines: str, **style: Any) -> None:
    """Each text is one line on standard output. `style`: of `typer.secho`."""
    for line in lines:
        typer.secho(plain(line), **style)


def complain(*lines: str, **style: Any) -> None:
    """The same on standard error, in red unless told otherwise."""
    say(*lines, **{"err": True, "fg": typer.colors.RED, **style})


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns, the first of them the head. On a terminal a line ends where the width does, and the
    first column (an id, say) has at most half of it; in a pipe nothing is cut."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = [[plain(cell) for cell in row] for row in (head, *rows)]
    if width is not None:
        lines = [[shortened(row[0], width // 2), *row[1:]] for row in lines]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = ["  ".join(map(str.ljust, row, sizes)).rstrip() for row in lines]
    return told if width is None else [shortened(line, width) for line in told]
