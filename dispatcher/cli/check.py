"""`batch-dispatcher check`: is the configuration right, what does it come to, is there what it names?"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from dispatcher.check import settings as of_settings
from dispatcher.check.connections import connections
from dispatcher.check.finding import Finding
from dispatcher.cli.running import address_of, running
from dispatcher.cli.screen import answer, complain, say
from dispatcher.cli.target import Config, Json, config_path
from dispatcher.settings import Problem, Settings, load
from dispatcher.settings.effective import as_json as settings_as_json
from dispatcher.settings.effective import lines, set_by_hand

_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failed": typer.colors.RED}

EXAMPLES = {
    "check": [
        "batch-dispatcher check",
        "batch-dispatcher check --offline     # validate only",
        "batch-dispatcher check --strict && batch-dispatcher run",
    ]
}


def check(
    config: Config = None,
    offline: Annotated[
        bool, typer.Option("--offline", "--no-connect", help="Validate only; try no connection.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 when a connection failed, not only when a file did.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the settings left at their defaults too.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Validate a configuration, print what it sets, then try every connection and say what each found.

    Secrets are masked, what the environment set is marked. Nothing is sent to a model and nothing taken from
    the queue. The last line is the verdict.

    Exit code 2: the configuration is wrong; 1: a file that it names cannot be read, or, with --strict, a
    connection failed. Without --strict a connection that fails is told but does not fail the check: a
    configuration is often checked where its servers cannot be reached.
    """
    path = config_path(config)
    found = load(path, os.environ)
    if isinstance(found, list):
        _refuse(found, json_output)
        raise typer.Exit(2)
    if not json_output:
        _show(found, "the environment alone" if path is None else str(path), everything=everything)
    told: list[Finding] = []

    def tell(finding: Finding) -> None:
        told.append(finding)
        if not json_output:
            say(str(finding), err=finding.level != "ok", fg=_COLOURS[finding.level])

    for finding in (*of_settings.doubts(found), *of_settings.taken(found), *of_settings.files(found)):
        tell(finding)
    if not offline:
        asyncio.run(connections(found, tell))
        if (address := address_of(found.admin)) is not None:
            status, _ = asyncio.run(running(address))
            for finding in of_settings.of_running(status):
                tell(finding)
    failed = [finding.where for finding in told if finding.level == "failed"]
    ok = not failed if strict else not any(where.endswith(of_settings.FILE_ENDINGS) for where in failed)
    if json_output:
        shown = {"ok": ok, **settings_as_json(found), "problems": [], "findings": [asdict(f) for f in told]}
        answer(shown, indent=2)
    else:
        _conclude(told, ok=ok, offline=offline)
    if not ok:
        raise typer.Exit(1)


def _show(settings: Settings, source: str, *, everything: bool) -> None:
    """The settings as YAML; without `everything` those alone that somebody set, with their sections."""
    shown = [*lines(settings, os.environ)]
    if not everything:
        say(f"# {source}; all else is at its default: --all shows it", dim=True)
        shown = set_by_hand(shown)
    for line in shown:
        say(str(line), whole=True, dim=line.default or None)


def _conclude(told: list[Finding], *, ok: bool, offline: bool) -> None:
    """The verdict, in one line; `ok`: the exit code is 0."""
    levels = Counter(finding.level for finding in told)
    found = [f"{levels['failed']} failed"] if levels["failed"] else []
    if warnings := levels["warning"]:
        found.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    verdict = ", ".join(found) or "all well"
    tried = "; no connection was tried (--offline)" if offline else ""
    worst = "failed" if levels["failed"] else "warning" if levels["warning"] else "ok"
    lenient = " (exit code 0 all the same; with --strict: 1)" if levels["failed"] and ok else ""
    say(f"{verdict}{tried}{lenient}", fg=_COLOURS[worst], bold=True)


def _refuse(problems: list[Problem], json_output: bool) -> None:
    if json_output:
        answer({"ok": False, "problems": [asdict(problem) for problem in problems]}, indent=2)
    else:
        complain(*map(str, problems))
