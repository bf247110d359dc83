"""What a verb prints. Others have named much of it: a line stays one line, without controls of a terminal."""

from __future__ import annotations

from typing import Any

import typer

from dispatcher.core.plain import plain


def say(*lines: str, **style: Any) -> None:
    """Each text is one line on standard output. `style`: of `typer.secho`."""
    for line in lines:
        typer.secho(plain(line), **style)


def complain(*lines: str, **style: Any) -> None:
    """The same on standard error, in red unless told otherwise."""
    say(*lines, **{"err": True, "fg": typer.colors.RED, **style})
