"""`batch-dispatcher simulate`: estimate what batch work brings and costs in a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.terminal import exit_error, print_error, print_warning

# The simulator takes long to import, which completion and --help do not need.
if TYPE_CHECKING:
    from dispatcher.lab.simulation.experiment import PolicyName
    from dispatcher.lab.simulation.scenario import Scenario
    from dispatcher.lab.simulation.scenario_file import ScenarioFile

EXAMPLES = {
    "simulate": [
        "batch-dispatcher simulate --trace pool.csv --slots 400 --target 'p99 <= 1.2'",
        "batch-dispatcher simulate --set detector=none --set scrape_s=5",
        "batch-dispatcher simulate --scenario night.yaml --sweep reserve=0,.1,.2 --plot price.png",
    ]
}


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Option(
            "--scenario", "-f", metavar="FILE", help="YAML file with the pool, its traffic, and its faults."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Set a key of the scenario, such as scrape_s=5; may be repeated.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Realtime traffic: requests with tokens, or running requests over time (CSV, Grafana, "
            "Prometheus), idle, or bursts. Default: 900 s of a production chat service.",
        ),
    ] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Instead of a trace: the running requests in this Prometheus."),
    ] = None,
    last: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --prometheus: length of the recording. Default: 3h."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(metavar="N", help="Capacity in requests, as configured. Default: 64.")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Share of the capacity that batch work never takes. Default: 0.05."
        ),
    ] = None,
    batch_tokens: Annotated[
        float | None,
        typer.Option(metavar="N", help="Tokens that a batch request generates, on average. Default: 145."),
    ] = None,
    slice_tokens: Annotated[
        int | None,
        typer.Option(
            "--slice", metavar="N", help="Send batch requests in slices of this many tokens on average."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Duration. Default: the whole trace, or the busiest quarter of an hour of a long one.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Seed of the random batch requests. Default: 0.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="all, or names separated by commas. Default: dispatcher,none; with slices also whole.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="One row per value: reserve=0,.05,.1. Keys: reserve, scrape_s, lag_s, batch_tokens.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="BOUND",
            help="Find the reserve that keeps this bound: 'p99 <= 1.2' (latency of users relative to that "
            "without batch work) or 'wait p99 <= 0.5' (additional seconds), joined by `and`.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw into this file (png, svg, pdf): the timeline of each policy, or with --sweep or "
            "--target the throughput and the impact on realtime of each value.",
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try batch work on a pool in virtual time, before you install anything.

    The result is the throughput of batch work and its impact on your users. With `--target 'p99 <= 1.2'` the
    command finds the reserve that keeps this bound. A scenario file describes the pool, its monitoring and
    its faults; --set and the other options override its keys.
    """
    from dispatcher.cli import simulation_runs
    from dispatcher.cli.realtime_traffic import choose_traffic
    from dispatcher.lab.simulation import plot as picture
    from dispatcher.lab.simulation.parallel import count_cores
    from dispatcher.lab.simulation.sweep import DEFAULT_RESERVES, Sweep, SweepError, parse_sweep, parse_target
    from dispatcher.lab.standin.trace import TraceError

    options = {
        "--trace": ("trace", None if trace is None else str(trace)),
        "--prometheus": ("prometheus", prometheus),
        "--last": ("last", last),
        "--slots": ("slots", slots),
        "--reserve": ("reserve", reserve),
        "--batch-tokens": ("batch_tokens", batch_tokens),
        "--slice": ("slice_tokens", slice_tokens),
        "--seconds": ("seconds", seconds),
        "--seed": ("seed", seed),
    }
    # Check everything before the trace is read, which takes longer.
    file = _load_scenario(scenario, settings or (), options)
    names = _parse_policies(policy, has_slices=file.slice_tokens is not None)
    try:
        bounds = parse_target(target) if target is not None else []
        swept = (
            parse_sweep(sweep)
            if sweep is not None
            else Sweep("reserve", DEFAULT_RESERVES)
            if bounds
            else None
        )
    except SweepError as error:
        raise exit_error(str(error), 2) from error
    if plot is not None and not picture.is_available():
        raise exit_error(f"--plot needs matplotlib: {picture.INSTALL}")
    try:
        chosen = choose_traffic(file)
    except TraceError as error:
        raise exit_error(str(error), 2) from error
    played = chosen.traffic
    setting, coarse = _choose_precision(file, _choose_length(file.seconds, played.seconds))
    if setting.uses_pressure_score_only:
        print_warning(
            f"the saturation of the {setting.detector} detector is a pressure score that can read near 0 "
            "while every slot is taken; alone it cannot keep the reserve. Use --set signals=both, as "
            "signals.use: auto does"
        )
    for note in [*chosen.notes, *coarse]:
        typer.echo(note, err=True)
    for warning in chosen.warnings:
        print_warning(warning)
    at_once = file.processes or count_cores()
    if swept is not None:
        kept = simulation_runs.run_sweep(
            setting, played, names, at_once, swept, bounds, as_json=json_output, plot=plot
        )
        raise typer.Exit(0 if kept else 1)
    simulation_runs.compare_policies(setting, played, names, at_once, as_json=json_output, plot=plot)


def _load_scenario(
    path: Path | None, settings: Sequence[str], options: Mapping[str, tuple[str, object]]
) -> ScenarioFile:
    """Return the scenario. Prints the problems and exits with 2 if it is invalid."""
    from dispatcher.lab.simulation.scenario_file import Override, load_scenario, parse_set
    from dispatcher.settings.yaml_source import Problem

    parsed = [parse_set(text) for text in settings]
    problems = [each for each in parsed if isinstance(each, Problem)]
    overrides = [each for each in parsed if isinstance(each, Override)]
    overrides += [Override(name, key, value) for name, (key, value) in options.items() if value is not None]
    scenario = load_scenario(path, overrides)
    if isinstance(scenario, list):
        problems += scenario
    if problems or isinstance(scenario, list):
        print_error(*map(str, problems))
        raise typer.Exit(2)
    return scenario


def _choose_precision(file: ScenarioFile, seconds: float) -> tuple[Scenario, Sequence[str]]:
    """Return the scenario with its time step and requests per job, and sentences about the defaults.

    The defaults depend on the length: short simulations are exact, and long ones are played faster.
    """
    from dispatcher.lab.simulation.scenario import MAX_EXACT_S, TIME_STEP_S

    setting = file.make_scenario(seconds)
    is_long = seconds > MAX_EXACT_S
    time_step_s, requests_per_job = file.time_step_s, file.requests_per_job
    how, keys = [], []
    if time_step_s is None:
        time_step_s = TIME_STEP_S if is_long else 0.0
    if requests_per_job is None:
        requests_per_job = setting.default_requests_per_job if is_long else 1
    chosen = replace(setting, time_step_s=time_step_s, requests_per_job=requests_per_job)
    if file.time_step_s is None and is_long:
        how.append(
            f"in steps of {chosen.effective_time_step_s:.3g} s, and batch requests end together in each"
        )
        keys.append("time_step_s=0")
    if file.requests_per_job is None and requests_per_job > 1:
        how.append(f"with {requests_per_job} batch requests going as one")
        keys.append("requests_per_job=1")
    if not how:
        return chosen, ()
    exact = " ".join(f"--set {key}" for key in keys)
    return chosen, [
        f"{seconds / 60:.0f} min are played {', '.join(how)} ({exact}: one by one, which takes longer)"
    ]


def _choose_length(wanted_s: float | None, available_s: float) -> float:
    # Up to one second more is accepted, because the length of a trace is shown and used rounded.
    if wanted_s is not None and wanted_s > available_s + 1.0:
        raise exit_error(f"--seconds {wanted_s:g}: the trace is {available_s:.0f} s long", 2)
    return wanted_s if wanted_s is not None else max(1.0, float(round(available_s)))


def _parse_policies(policies: str | None, *, has_slices: bool) -> Sequence[PolicyName]:
    from dispatcher.lab.simulation.experiment import PolicyName

    if policies is None:
        policies = "dispatcher,whole,none" if has_slices else "dispatcher,none"
    if policies.strip() == "all":
        return [name for name in PolicyName if has_slices or name is not PolicyName.WHOLE]
    try:
        names = [PolicyName(name.strip()) for name in policies.split(",")]
    except ValueError:
        raise exit_error(
            f"--policy {policies}: no such policy; there are all, {', '.join(PolicyName)}", 2
        ) from None
    if PolicyName.WHOLE in names and not has_slices:
        raise exit_error("--policy whole: without --slice, dispatcher sends requests whole as well", 2)
    return names
