"""`batch-dispatcher help`: show the help of a verb."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = {"help": ["batch-dispatcher help status", "batch-dispatcher help dead requeue"]}


def help(  # noqa: A001 - it is the verb's name
    ctx: typer.Context,
    verb: Annotated[list[str] | None, typer.Argument(metavar="VERB…", help="Default: all verbs.")] = None,
) -> None:
    """Show the help of a verb."""
    from dispatcher.cli import app  # it imports this module

    typer.main.get_command(app).main([*(verb or ()), "--help"], prog_name=ctx.find_root().info_name)
