"""`batch-dispatcher demo`: a demonstration of the dispatcher on this machine."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli.connection import Json
from dispatcher.cli.terminal import answer, fail, paint, say

EXAMPLES = {"demo": ["batch-dispatcher demo", "batch-dispatcher demo --requests 100"]}


def demo(
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Number of batch requests to submit.")
    ] = 300,
    json_output: Json = False,
) -> None:
    """Run a demonstration: a pool with realtime traffic, a queue, a crash, and a verdict.

    Everything runs on this machine and is removed afterwards. Exit code 1: a check of the verdict failed.
    """
    import asyncio

    from dispatcher.cli.demo_run import play
    from dispatcher.cli.terminal import fold
    from dispatcher.queue.embedded import EmbeddedError

    def tell(line: str) -> None:
        # With --json standard output is left to the verdict.
        typer.echo(paint(line), err=json_output)

    width = shutil.get_terminal_size((140, 24)).columns - 1
    with tempfile.TemporaryDirectory(prefix="batch-dispatcher-demo-") as directory:
        try:
            verdict = asyncio.run(play(Path(directory), requests, tell, width=width))
        except (RuntimeError, EmbeddedError) as error:
            raise fail(str(error)) from error
    checks = verdict.checks()
    if json_output:
        answer({"ok": all(check.ok for check in checks), "checks": [asdict(check) for check in checks]})
    else:
        say("", f"Measured in this run ({verdict.seconds:.0f} s of batch work):", bold=True)
        for check in checks:
            told = fold([f"{'✓' if check.ok else '✗'} {check.what}"], width)
            say(*told, fg=typer.colors.GREEN if check.ok else typer.colors.RED)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
