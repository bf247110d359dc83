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
from dispatcher.common.printable import escape_unprintable, truncate_text

is_json_output: ContextVar[bool] = ContextVar("for_programs", default=False)
"""True if the command line has --json."""


# An indented `name  value`, up to the value.
_VALUE = re.compile(r" +\S+(?: \S+)*  +")
_COLOURS = {
    bar.REALTIME: typer.colors.BLUE,
    bar.WAITING: typer.colors.YELLOW,
    bar.BATCH: typer.colors.GREEN,
    bar.RESERVE: typer.colors.BRIGHT_BLACK,
}


def has_colours() -> bool:
    """Return true if terminals may get colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colour_bar(row: str) -> str:
    """Return the row with the bar characters of a pool in their colours, if colours are enabled."""
    if not has_colours() or not _COLOURS.keys() & set(row):
        return row
    return "".join(typer.style(char, fg=_COLOURS[char]) if char in _COLOURS else char for char in row)


def wrap_lines(rows: Sequence[str], width: int, *, break_words: bool = True) -> list[str]:
    """Escape control characters in the rows, and wrap rows that are too long between words.

    Continued lines are indented by two columns, or start below the value of an indented `name  value`. With
    `break_words`, words longer than the width are broken; otherwise they stay whole, so that they can be
    copied.
    """
    wrapped: list[str] = []
    for row in rows:
        text = escape_unprintable(row)
        if len(text) <= width:
            wrapped.append(text)
            continue
        value = _VALUE.match(text)
        # A value far to the right would leave too little room below it.
        indent = " " * (value.end() if value and value.end() < width // 2 else 2)
        wrapped += textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=break_words, break_on_hyphens=False
        )
    return wrapped


def print_lines(*lines: str, no_wrap: bool = False, **style: Any) -> None:
    """Print each text as one line on standard output.

    On a terminal, lines are wrapped between words, unless `no_wrap` is true. `style`: arguments of
    `typer.secho`.
    """
    err = style.pop("err", False)  # for echo(), not for style()
    texts = [escape_unprintable(line) for line in lines]
    if not no_wrap and (sys.stderr if err else sys.stdout).isatty():
        texts = wrap_lines(texts, shutil.get_terminal_size().columns, break_words=False)
    for line in texts:
        typer.echo(typer.style(line, **style) if style and has_colours() else line, err=err)


def print_error(*lines: str, **style: Any) -> None:
    """Print errors on standard error, in red by default. With --json: `{"error": …}`."""
    if is_json_output.get():
        _print_json_lines("error", *lines)
    else:
        print_lines(*lines, **{"err": True, "fg": typer.colors.RED, **style})


def print_warning(*lines: str) -> None:
    """Print warnings on standard error. With --json: `{"warning": …}`."""
    if is_json_output.get():
        _print_json_lines("warning", *lines)
    else:
        print_lines(*lines, err=True, fg=typer.colors.YELLOW)


def print_note(*lines: str) -> None:
    """Print notes on the progress on standard error. With --json: `{"note": …}`."""
    if is_json_output.get():
        _print_json_lines("note", *lines)
    else:
        print_lines(*lines, err=True)


def exit_error(message: str, code: int = 1) -> typer.Exit:
    """Print an error, and return the exception that exits with this code: `raise exit_error(…)`."""
    print_error(message)
    return typer.Exit(code)


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print the answer of a verb as JSON, on standard output."""
    typer.echo(json.dumps(value, indent=indent))


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with the header first.

    On a terminal, lines are cut at its width, and the first column (usually an id) gets at most half of it.
    In a pipe nothing is cut.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = [[escape_unprintable(cell) for cell in row] for row in (header, *rows)]
    if width is not None:
        lines = [[truncate_text(row[0], width // 2), *row[1:]] for row in lines]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(map(str.ljust, row, sizes)).rstrip() for row in lines]
    return texts if width is None else [truncate_text(line, width) for line in texts]


def _print_json_lines(kind: str, *lines: str) -> None:
    for line in lines:
        typer.echo(json.dumps({kind: line}), err=True)
