"""`batch-dispatcher check`: validate the configuration, print its settings, and try all connections."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.check import settings as of_settings
from dispatcher.check.connections import check_connections
from dispatcher.check.feature_check import list_feature_checks
from dispatcher.check.finding import Finding
from dispatcher.cli.admin_client import StatusProblem, fetch_status, parse_admin_address
from dispatcher.cli.connection import Config, Json, find_config_path
from dispatcher.cli.terminal import print_error, print_json, print_lines, print_note
from dispatcher.settings.effective import render_lines, select_explicit
from dispatcher.settings.effective import settings_as_json as settings_as_json
from dispatcher.settings.load import load_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.yaml_source import Problem

if TYPE_CHECKING:
    from dispatcher.check.probe import ProbePlan

PROBE_MIN_S, PROBE_MAX_S = 10.0, 300.0
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "failed": typer.colors.RED}

EXAMPLES = {
    "check": [
        "batch-dispatcher check",
        "batch-dispatcher check --offline     # validate only",
        "batch-dispatcher check --strict && batch-dispatcher run",
        "batch-dispatcher check --probe --probe-model qwen   # measure what the pool runs at once",
    ]
}


def check(
    config: Config = None,
    offline: Annotated[
        bool, typer.Option("--offline", "--no-connect", help="Validate only; try no connection.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 1 if a connection fails, not only if a file cannot be read."
        ),
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the settings at their defaults, too.")
    ] = False,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Send real requests, to measure how many the pool runs at once. For a quiet hour."
        ),
    ] = False,
    probe_model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Model that the requests of --probe ask for. Default: the only one in the settings.",
        ),
    ] = "",
    probe_seconds: Annotated[
        float, typer.Option(metavar="N", help="Longest duration of --probe in seconds, 10 to 300.")
    ] = 60.0,
    probe_most: Annotated[
        int, typer.Option(min=1, metavar="N", help="Most requests that --probe has in flight at once.")
    ] = 256,
    json_output: Json = False,
) -> None:
    """Validate a configuration, print its settings, and try every connection.

    Secrets are masked, and values from the environment are marked. Nothing is taken from the queue, and
    without --probe nothing is sent to a model. The last line is the verdict.

    With --probe real requests are sent through the gateway, more and more at once, until some have to wait.
    This measures how many requests the pool runs at once, for budget.per_endpoint. The probe sends nothing
    while a dispatcher runs on this configuration or others use the pool, and it cancels all its requests at
    its end. Then the model is checked for slices, as the dispatcher does before it slices. If a dispatcher
    runs, its own results are shown.

    Exit code 2: the configuration is wrong; 1: a file that it names cannot be read, or, with --strict, a
    connection failed. Without --strict a failed connection is reported but does not fail the check, because a
    configuration is often checked where its servers cannot be reached.
    """
    if probe and offline:
        raise typer.BadParameter(
            "--probe sends requests, and --offline tries no connection: give one of them"
        )
    path = find_config_path(config)
    settings = load_settings(path, os.environ)
    if isinstance(settings, list):
        _print_problems(settings, json_output)
        raise typer.Exit(2)
    plan = _make_probe_plan(settings, probe_model, probe_seconds, probe_most) if probe else None
    if not json_output:
        _print_settings(
            settings, "the environment alone" if path is None else str(path), everything=everything
        )
    findings: list[Finding] = []

    # Findings are printed as they come, because a connection may take seconds to fail.
    def report(finding: Finding) -> None:
        findings.append(finding)
        if not json_output:
            print_lines(str(finding), err=finding.level != "ok", fg=_COLOURS[finding.level])

    for finding in (
        *of_settings.find_doubts(settings),
        *of_settings.check_files(settings),
    ):
        report(finding)
    if not offline:
        asyncio.run(check_connections(settings, report))
        dispatcher_runs = _report_running_dispatcher(settings, report)
        if plan is not None:
            _run_probe(settings, plan, report, dispatcher_runs=dispatcher_runs)
    # Without --strict only files count: the servers may be out of reach from where the check runs.
    failed = [finding.where for finding in findings if finding.level == "failed"]
    ok = not failed if strict else not any(where.endswith(of_settings.FILE_ENDINGS) for where in failed)
    if json_output:
        summary = {
            "ok": ok,
            **settings_as_json(settings),
            "problems": [],
            "findings": [asdict(f) for f in findings],
        }
        print_json(summary, indent=2)
    else:
        _print_verdict(findings, ok=ok, offline=offline)
    if not ok:
        raise typer.Exit(1)


def _report_running_dispatcher(settings: Settings, report: Callable[[Finding], None]) -> bool:
    """Report what a dispatcher that runs on this configuration has seen. Return whether there is one."""
    address = parse_admin_address(settings.admin)
    if address is None:
        return False
    status = asyncio.run(fetch_status(address))
    if isinstance(status, StatusProblem):
        return False
    if status.budget.reserve_problem:
        report(Finding("warning", "budget.reserve", status.budget.reserve_problem))
    for check in list_feature_checks():
        for finding in check.report_status(status):
            report(finding)
    return True


def _make_probe_plan(settings: Settings, model_name: str, seconds: float, max_in_flight: int) -> ProbePlan:
    """Return the plan of --probe. Raises BadParameter if the options do not define one."""
    from dispatcher.check.probe import ProbePlan  # the gateway's client is slow to import

    if not PROBE_MIN_S <= seconds <= PROBE_MAX_S:
        raise typer.BadParameter(f"--probe-seconds must be from {PROBE_MIN_S:g} to {PROBE_MAX_S:g}")
    found_names = (check.find_only_model(settings) for check in list_feature_checks())
    model_name = model_name or next(filter(None, found_names), "")
    if not model_name:
        message = "--probe needs --probe-model NAME, because the settings do not name exactly one model"
        raise typer.BadParameter(message)
    return ProbePlan(model_name, seconds, max_in_flight)


def _run_probe(
    settings: Settings, plan: ProbePlan, report: Callable[[Finding], None], *, dispatcher_runs: bool
) -> None:
    """Run the probe. Report what it measured, or why it sent nothing."""
    from dispatcher.check.probe import measure_capacity
    from dispatcher.check.ramp import WHERE

    if dispatcher_runs:
        message = (
            "a dispatcher runs on this configuration, and the two would measure each other: nothing was sent"
        )
        report(Finding("warning", WHERE, message, "stop the dispatcher for the time of the probe"))
        return
    print_note(f"--probe: sending real requests to the model {plan.model} for up to {plan.duration_s:g} s")
    capacity = asyncio.run(measure_capacity(settings, plan))
    report(capacity)
    # Another level means that others use the pool, or that it does not answer.
    if capacity.level == "ok":
        for check in list_feature_checks():
            for finding in asyncio.run(check.probe_model(settings, plan.model, plan.duration_s)):
                report(finding)


def _print_settings(settings: Settings, source: str, *, everything: bool) -> None:
    """Print the settings as YAML.

    Without `everything`, print only the settings that differ from the defaults, with their sections.
    """
    setting_lines = [*render_lines(settings, os.environ)]
    if not everything:
        print_lines(f"# {source}; all else is at its default: --all shows it", dim=True)
        setting_lines = select_explicit(setting_lines)
    for line in setting_lines:
        print_lines(str(line), no_wrap=True, dim=line.is_default or None)


def _print_verdict(findings: list[Finding], *, ok: bool, offline: bool) -> None:
    """Print the verdict in one line. `ok`: true if the exit code is 0."""
    levels = Counter(finding.level for finding in findings)
    counts = [f"{levels['failed']} failed"] if levels["failed"] else []
    if warnings := levels["warning"]:
        counts.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    verdict = ", ".join(counts) or "all well"
    tried = "; no connection was tried (--offline)" if offline else ""
    worst = "failed" if levels["failed"] else "warning" if levels["warning"] else "ok"
    lenient = " (exit code 0 all the same; with --strict: 1)" if levels["failed"] and ok else ""
    print_lines(f"{verdict}{tried}{lenient}", fg=_COLOURS[worst], bold=True)


def _print_problems(problems: list[Problem], json_output: bool) -> None:
    if json_output:
        print_json({"ok": False, "problems": [asdict(problem) for problem in problems]}, indent=2)
    else:
        print_error(*map(str, problems))
