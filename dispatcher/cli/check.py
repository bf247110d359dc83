"""`batch-dispatcher check`: is the configuration right, what does it come to, is there what it names?"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.check import settings as of_settings
from dispatcher.check.connections import connections
from dispatcher.check.finding import Finding
from dispatcher.cli.running import running
from dispatcher.cli.screen import complain, say
from dispatcher.settings import Problem, load
from dispatcher.settings.effective import as_json as settings_as_json
from dispatcher.settings.effective import lines

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failed": typer.colors.RED}


def check(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="The configuration file.", show_default=False)
    ],
    offline: Annotated[
        bool, typer.Option("--offline", "--no-connect", help="Validate only; try no connection.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 when a connection failed, not only when a file did.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Validate a configuration, print what is in effect, then try every connection and say what each found.

    Secrets are masked, defaults marked. Nothing is sent to a model and nothing taken from the queue.

    Exit code 2: the configuration is wrong; 1: a file that it names cannot be read, or, with --strict, a
    connection failed. Without --strict a connection that fails is told but does not fail the check: a
    configuration is often checked where its servers cannot be reached.
    """
    found = load(config, os.environ)
    if isinstance(found, list):
        _refuse(found, json_output)
        raise typer.Exit(2)
    if not json_output:
        for line in lines(found):
            say(str(line), dim=line.default or None)
    told: list[Finding] = []

    def tell(finding: Finding) -> None:
        told.append(finding)
        if not json_output:
            say(str(finding), err=finding.level != "ok", fg=_COLOURS[finding.level])

    for finding in (*of_settings.doubts(found), *of_settings.files(found)):
        tell(finding)
    if not offline:
        asyncio.run(connections(found, tell))
        status, _ = asyncio.run(running(found.admin))
        for finding in of_settings.of_running(status):
            tell(finding)
    failed = [finding.where for finding in told if finding.level == "failed"]
    ok = not failed if strict else not any(where.endswith("_file") for where in failed)
    if json_output:
        answer = {"ok": ok, **settings_as_json(found), "problems": [], "findings": [asdict(f) for f in told]}
        typer.echo(json.dumps(answer, indent=2))
    if not ok:
        raise typer.Exit(1)


def _refuse(problems: list[Problem], json_output: bool) -> None:
    if json_output:
        answer = {"ok": False, "problems": [asdict(problem) for problem in problems]}
        typer.echo(json.dumps(answer, indent=2))
        return
    for problem in problems:
        complain(str(problem))
