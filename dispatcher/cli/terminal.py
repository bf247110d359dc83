"""Output of verbs: lines, errors, warnings, notes, tables and JSON.

Much of the text comes from producers, gateways and other third parties. Therefore control characters are
escaped, and a line stays one line. With --json, errors, warnings and notes are JSON, too: one object per line
on standard error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import typer

from dispatcher.cli import bar
from dispatcher.core.printable import plain, shortened

for_programs: ContextVar[bool] = ContextVar("for_programs", default=False)
"""True if the command line has --json."""


# An indented `name  value`, up to the value.
_VALUE = re.compile(r" +\S+(?: \S+)*  +")
_COLOURS = {
    bar.REALTIME: typer.colors.BLUE,
    bar.WAITING: typer.colors.YELLOW,
    bar.OURS: typer.colors.GREEN,
    bar.RESERVE: typer.colors.BRIGHT_BLACK,
}


def coloured() -> bool:
    """Return true if terminals may get colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(row: str) -> str:
    """Return the row with the bar characters of a pool in their colours, if colours are enabled."""
    if not coloured() or not _COLOURS.keys() & set(row):
        return row
    return "".join(typer.style(char, fg=_COLOURS[char]) if char in _COLOURS else char for char in row)


def fold(rows: Sequence[str], width: int, *, cut: bool = True) -> list[str]:
    """Escape control characters in the rows, and wrap rows that are too long between words.

    Continued lines are indented by two columns, or start below the value of an indented `name  value`. With
    `break_words`, words longer than the width are broken; otherwise they stay whole, so that they can be
    copied.
    """
    found: list[str] = []
    for row in rows:
        told = plain(row)
        if len(told) <= width:
            found.append(told)
            continue
        value = _VALUE.match(told)
        # A value far to the right would leave too little room below it.
        under = " " * (value.end() if value and value.end() < width // 2 else 2)
        found += textwrap.wrap(
            told, width, subsequent_indent=under, break_long_words=cut, break_on_hyphens=False
        )
    return found


def say(*lines: str, whole: bool = False, **style: Any) -> None:
    """Print each text as one line on standard output.

    On a terminal, lines are wrapped between words, unless `no_wrap` is true. `style`: arguments of
    `typer.secho`.
    """
    err = style.pop("err", False)  # for echo(), not for style()
    told = [plain(line) for line in lines]
    if not whole and (sys.stderr if err else sys.stdout).isatty():
        told = fold(told, shutil.get_terminal_size().columns, cut=False)
    for line in told:
        typer.echo(typer.style(line, **style) if style and coloured() else line, err=err)


def complain(*lines: str, **style: Any) -> None:
    """Print errors on standard error, in red by default. With --json: `{"error": …}`."""
    if for_programs.get():
        _tell("error", *lines)
    else:
        say(*lines, **{"err": True, "fg": typer.colors.RED, **style})


def warn(*lines: str) -> None:
    """Print warnings on standard error. With --json: `{"warning": …}`."""
    if for_programs.get():
        _tell("warning", *lines)
    else:
        say(*lines, err=True, fg=typer.colors.YELLOW)


def remark(*lines: str) -> None:
    """Print notes on the progress on standard error. With --json: `{"note": …}`."""
    if for_programs.get():
        _tell("note", *lines)
    else:
        say(*lines, err=True)


def fail(what: str, code: int = 1) -> typer.Exit:
    """Print an error, and return the exception that exits with this code: `raise exit_error(…)`."""
    complain(what)
    return typer.Exit(code)


def answer(found: object, *, indent: int | None = None) -> None:
    """Print the answer of a verb as JSON, on standard output."""
    typer.echo(json.dumps(found, indent=indent))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the header first.

    On a terminal, lines are cut at its width, and the first column (usually an id) gets at most half of it.
    In a pipe nothing is cut.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = [[plain(cell) for cell in row] for row in (head, *rows)]
    if width is not None:
        lines = [[shortened(row[0], width // 2), *row[1:]] for row in lines]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = ["  ".join(map(str.ljust, row, sizes)).rstrip() for row in lines]
    return told if width is None else [shortened(line, width) for line in told]


def _tell(kind: str, *lines: str) -> None:
    for line in lines:
        typer.echo(json.dumps({kind: line}), err=True)
