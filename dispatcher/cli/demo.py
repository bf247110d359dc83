"""`batch-dispatcher demo`: a demonstration of the dispatcher on this machine."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli.connection import Json
from dispatcher.cli.terminal import colour_bar, exit_error, print_json, print_lines

EXAMPLES = {"demo": ["batch-dispatcher demo", "batch-dispatcher demo --requests 100"]}


def demo(
    requests: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="Number of batch requests to submit.")
    ] = 300,
    json_output: Json = False,
) -> None:
    """Run a demonstration: a pool with realtime traffic, a queue, and a crash.

    It ends with a verdict. Everything runs on this machine and is removed afterwards. Exit code 1: a check of
    the verdict failed.
    """
    import asyncio

    from dispatcher.cli.demo_run import run_demo
    from dispatcher.cli.terminal import wrap_lines
    from dispatcher.queue.embedded import EmbeddedError

    def print_progress(line: str) -> None:
        # With --json standard output is left to the verdict.
        typer.echo(colour_bar(line), err=json_output)

    width = shutil.get_terminal_size((140, 24)).columns - 1
    with tempfile.TemporaryDirectory(prefix="batch-dispatcher-demo-") as directory:
        try:
            verdict = asyncio.run(run_demo(Path(directory), requests, print_progress, width=width))
        except (RuntimeError, EmbeddedError) as error:
            raise exit_error(str(error)) from error
    checks = verdict.make_checks()
    if json_output:
        print_json({"ok": all(check.ok for check in checks), "checks": [asdict(check) for check in checks]})
    else:
        print_lines("", f"Measured in this run ({verdict.duration_s:.0f} s of batch work):", bold=True)
        for check in checks:
            wrapped = wrap_lines([f"{'✓' if check.ok else '✗'} {check.what}"], width)
            print_lines(*wrapped, fg=typer.colors.GREEN if check.ok else typer.colors.RED)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
