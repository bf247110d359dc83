"""`batch-dispatcher demo`: the dispatcher at work on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = {"demo": ["batch-dispatcher demo", "batch-dispatcher demo --requests 100"]}


def demo(
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="Batch requests to submit.")] = 300,
) -> None:
    """Show the dispatcher at work: a pool with realtime traffic, a queue, a crash, and a verdict.

    Everything runs on this machine and is gone afterwards. Exit code 1: the verdict is against us.
    """
    import asyncio

    from dispatcher.queue.embedded import EmbeddedError
    from dispatcher.standin.demo import play

    with tempfile.TemporaryDirectory(prefix="batch-dispatcher-demo-") as directory:
        try:
            verdict = asyncio.run(play(Path(directory), requests, typer.echo))
        except (RuntimeError, EmbeddedError) as error:
            typer.secho(str(error), err=True, fg=typer.colors.RED)
            raise typer.Exit(1) from error
    checks = verdict.checks()
    typer.secho(f"\nMeasured in this run ({verdict.seconds:.0f} s of batch work):", bold=True)
    for check in checks:
        typer.secho(
            f"  {'✓' if check.ok else '✗'} {check.what}",
            fg=typer.colors.GREEN if check.ok else typer.colors.RED,
        )
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
