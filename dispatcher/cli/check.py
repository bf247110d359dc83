"""`batch-dispatcher check`: is the configuration right, what does it come to, is there what it names?"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli.probes import Finding, connections
from dispatcher.cli.running import running
from dispatcher.cli.screen import complain, say
from dispatcher.settings import Problem, Settings, load
from dispatcher.settings.effective import as_json as settings_as_json
from dispatcher.settings.effective import lines
from dispatcher.settings.load import key_paths

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

    for finding in (*_doubtful(found), *_files(found)):
        tell(finding)
    if not offline:
        asyncio.run(connections(found, tell))
        for finding in asyncio.run(_lately(found)):
            tell(finding)
    failed = [finding.where for finding in told if finding.level == "failed"]
    ok = not failed if strict else not any(where.endswith("_file") for where in failed)
    if json_output:
        answer = {"ok": ok, **settings_as_json(found), "problems": [], "findings": [asdict(f) for f in told]}
        typer.echo(json.dumps(answer, indent=2))
    if not ok:
        raise typer.Exit(1)


async def _lately(settings: Settings) -> list[Finding]:
    """What a dispatcher that runs by this configuration has seen: `check` itself sends nothing."""
    told, _ = await running(settings.admin)
    little = told.get("reserve_problem") if told else None
    return [Finding("warning", "budget.reserve", str(little))] if little else []


def _refuse(problems: list[Problem], json_output: bool) -> None:
    if json_output:
        answer = {"ok": False, "problems": [asdict(problem) for problem in problems]}
        typer.echo(json.dumps(answer, indent=2))
        return
    for problem in problems:
        complain(str(problem))


def _doubtful(settings: Settings) -> Iterator[Finding]:
    """What is allowed, but seldom meant, or cannot be done here."""
    gateway, signals = settings.gateway, settings.signals
    for where in key_paths(Settings):
        if where.endswith(".insecure_skip_verify") and attrgetter(where)(settings):
            yield Finding("warning", where, "anybody on the way can read and answer")
    if not gateway.objective:
        what = "none named: batch requests compete with everything of priority 0"
        yield Finding("warning", "gateway.objective", what)
    if settings.tracing.endpoint:
        from dispatcher.telemetry import otlp  # the log comes with it

        try:
            otlp.prepare(settings)
        except OSError as error:
            yield Finding("failed", "tracing.endpoint", str(error))
    if signals.use == "saturation":
        what = (
            "the EPP's default detector can read near 0 while every slot is taken; use auto unless it runs "
        )
        yield Finding("warning", "signals.use", what + "the concurrency detector")


def _files(settings: Settings) -> Iterator[Finding]:
    """Every file that a setting names: their keys end in `_file`."""
    for where in key_paths(Settings):
        if where.endswith("_file"):
            name = attrgetter(where)(settings)
            if name:
                yield _file(where, Path(name))


def _file(where: str, path: Path) -> Finding:
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        return Finding("failed", where, f"{path}: {error.strerror or error}")
    if empty:
        return Finding("failed", where, f"{path}: is empty")
    return Finding("ok", where, f"{path} is readable")
