"""What a verb prints. Others have named much of it: a line stays one line, without controls of a terminal.

With --json what goes wrong, and how it goes, is told as JSON too: one object a line on standard error.
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
"""Whether --json was given."""


_VALUE = re.compile(r" +\S+(?: \S+)*  +")
_COLOURS = {
    bar.REALTIME: typer.colors.BLUE,
    bar.WAITING: typer.colors.YELLOW,
    bar.OURS: typer.colors.GREEN,
    bar.RESERVE: typer.colors.BRIGHT_BLACK,
}


def coloured() -> bool:
    """Whether colours are wanted where a terminal can show them (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(row: str) -> str:
    """A row with the characters of a pool's bar in their colours, where those are wanted."""
    if not coloured() or not _COLOURS.keys() & set(row):
        return row
    return "".join(typer.style(char, fg=_COLOURS[char]) if char in _COLOURS else char for char in row)


def fold(rows: Sequence[str], width: int, *, cut: bool = True) -> list[str]:
    """Rows without controls of a terminal, broken between words where they are too long.

    What follows stands two columns in, or under the value of an indented `name  value`. `cut`: a word that is
    longer than the width is broken, too; else it stays whole, to be copied.
    """
    found: list[str] = []
    for row in rows:
        told = plain(row)
        if len(told) <= width:
            found.append(told)
            continue
        value = _VALUE.match(told)
        under = " " * (value.end() if value and value.end() < width // 2 else 2)
        found += textwrap.wrap(
            told, width, subsequent_indent=under, break_long_words=cut, break_on_hyphens=False
        )
    return found


def say(*lines: str, whole: bool = False, **style: Any) -> None:
    """Each text is one line on standard output; on a terminal it is broken between words where the width
    ends, unless it is to stay `whole`. `style`: of `typer.secho`."""
    err = style.pop("err", False)
    told = [plain(line) for line in lines]
    if not whole and (sys.stderr if err else sys.stdout).isatty():
        told = fold(told, shutil.get_terminal_size().columns, cut=False)
    for line in told:
        typer.echo(typer.style(line, **style) if style and coloured() else line, err=err)


def complain(*lines: str, **style: Any) -> None:
    """The same on standard error, in red unless told otherwise; with --json: `{"error": …}`."""
    if for_programs.get():
        _tell("error", *lines)
    else:
        say(*lines, **{"err": True, "fg": typer.colors.RED, **style})


def warn(*lines: str) -> None:
    """What is wrong, but stops nothing; with --json: `{"warning": …}`."""
    if for_programs.get():
        _tell("warning", *lines)
    else:
        say(*lines, err=True, fg=typer.colors.YELLOW)


def remark(*lines: str) -> None:
    """How it goes, on standard error, where nothing is wrong; with --json: `{"note": …}`."""
    if for_programs.get():
        _tell("note", *lines)
    else:
        say(*lines, err=True)


def fail(what: str, code: int = 1) -> typer.Exit:
    """Complain, and what to raise for it."""
    complain(what)
    return typer.Exit(code)


def answer(found: object, *, indent: int | None = None) -> None:
    """A verb's answer as JSON, on standard output."""
    typer.echo(json.dumps(found, indent=indent))


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


def _tell(kind: str, *lines: str) -> None:
    for line in lines:
        typer.echo(json.dumps({kind: line}), err=True)
