"""`batch-dispatcher simulate`: estimate what batch work brings and costs in a pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli import realtime_traffic, simulation_runs
from dispatcher.cli.terminal import exit_error, print_warning
from dispatcher.lab.simulation.experiment import PolicyName
from dispatcher.lab.simulation.metrics import Detector, Signals
from dispatcher.lab.simulation.parallel import count_cores
from dispatcher.lab.simulation.scenario import (
    MAX_EXACT_S,
    MIN_JOBS_PER_POD,
    MIN_JOBS_PER_POD_WHEN_SET,
    SLICE_OVERHEAD_S,
    TIME_STEP_S,
    Order,
    Scenario,
)
from dispatcher.lab.simulation.sweep import (
    DEFAULT_RESERVES,
    SWEEPABLE,
    Sweep,
    SweepError,
    parse_sweep,
    parse_target,
)
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.model import BATCH_SPREAD, BATCH_TOKENS
from dispatcher.lab.standin.trace import TraceError


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Realtime traffic: requests with tokens (CSV), or running requests over time "
            "(CSV, Grafana's download, Prometheus range query). idle: no traffic. bursts: synthetic bursts "
            "of dozens. Default: 900 s of a production chat service.",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(metavar="URL", help="Instead of a trace: the running requests in this Prometheus."),
    ] = "",
    last: Annotated[
        str, typer.Option(metavar="TIME", help="With --prometheus: length of the recording, 30m, 3h, 7d.")
    ] = "3h",
    query: Annotated[
        str,
        typer.Option(
            metavar="PROMQL",
            help="With --prometheus: query for the running requests. Default: the metric of vLLM, else "
            "SGLang, else TensorRT-LLM.",
            show_default=False,
        ),
    ] = "",
    token_file: Annotated[
        str,
        typer.Option(metavar="FILE", help="With --prometheus: file with a bearer token.", show_default=False),
    ] = "",
    whole: Annotated[
        bool, typer.Option("--all", help="Play all of a long trace, not only its busiest quarter of an hour.")
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="TIME:LEVEL,…", help="Instead of a trace: number of realtime requests from each time on."
        ),
    ] = None,
    begin: Annotated[float, typer.Option("--from", min=0.0, help="Start in the trace, in seconds.")] = 0.0,
    copies: Annotated[
        int,
        typer.Option(
            min=1, help="Play the trace this many times at once, from different starts: a larger pool."
        ),
    ] = 1,
    echoes: Annotated[
        int, typer.Option(min=1, help="Repeat each request this many times within a second: larger bursts.")
    ] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Capacity in requests, as configured.")] = 64,
    scrape: Annotated[float, typer.Option(min=0.01, help="Seconds between two scrapes.")] = 1.0,
    lag: Annotated[
        float, typer.Option(min=0.0, help="Seconds until the result of a scrape is known.")
    ] = 0.05,
    reserve: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of the capacity that batch work never takes.")
    ] = 0.05,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="OPTION=VALUES",
            help=f"One row per value: reserve=0,.05,.1. Options: {', '.join(SWEEPABLE)}.",
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
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of runs at once. Default: one per core.", show_default=False),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"all, or some of {', '.join(PolicyName)}; separated by commas. Default: dispatcher,none; "
            "with --slice also whole, the dispatcher without slices.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Duration. Default: the whole trace, or the busiest quarter of an hour of a long one.",
            show_default=False,
        ),
    ] = None,
    time_step: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Time step in seconds: batch requests end together at each step, which is faster to play. "
            f"0: one by one. Default: 0, or {TIME_STEP_S:g} if more than {MAX_EXACT_S / 60:g} minutes "
            "are played.",
            show_default=False,
        ),
    ] = None,
    requests_per_job: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of equal batch requests that are simulated as one job with their total weight, "
            f"which is faster. Default: 1, or a pod's slots / {MIN_JOBS_PER_POD} if more than "
            f"{MAX_EXACT_S / 60:g} minutes are played.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw into this file (png, svg, pdf): the timeline of each policy, or with --sweep or "
            "--target the throughput and the impact on realtime of each value."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random batch requests.")] = 0,
    batch_tokens: Annotated[
        float, typer.Option(min=1.0, help="Tokens that a batch request generates, on average.")
    ] = BATCH_TOKENS,
    batch_spread: Annotated[
        float,
        typer.Option(
            min=0.0, max=3.0, help="Standard deviation of the logarithm of the tokens; 0: all are equal."
        ),
    ] = BATCH_SPREAD,
    batch_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="Duration of a batch request in an empty pool, instead of tokens."),
    ] = None,
    slice_tokens: Annotated[
        int | None,
        typer.Option(
            "--slice",
            min=1,
            help="Send batch requests in slices of this many tokens on average. Default: each in one call.",
            show_default=False,
        ),
    ] = None,
    slice_overhead: Annotated[
        float,
        typer.Option(
            min=0.0, help="With --slice: seconds to the first token of each continued slice in an empty pool."
        ),
    ] = SLICE_OVERHEAD_S,
    revoke: Annotated[
        bool,
        typer.Option(
            "--revoke",
            help="With --slice: the dispatcher streams slices, and ends the youngest early when realtime "
            "requests wait. Their tokens are kept.",
        ),
    ] = False,
    evict: Annotated[
        bool,
        typer.Option(
            "--evict",
            help="The EPP stops the newest batch request of a pod for a realtime request that finds no free "
            "slot there. Its tokens are lost.",
        ),
    ] = False,
    transit_time: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Transit time of requests and answers, in seconds. Default: 0.002 and 0.003."
        ),
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Largest delay of a scrape, as a share of the interval.")
    ] = 0.0,
    stamp: Annotated[float, typer.Option(help="Seconds by which samples are dated too late.")] = 0.0,
    flush: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds between two updates of the EPP's averages; 0: always fresh."),
    ] = 5.0,
    flush_phase: Annotated[
        float | None,
        typer.Option(min=0.0, help="Time of the first update. Default: from the seed.", show_default=False),
    ] = None,
    averages_alone: Annotated[
        bool, typer.Option("--averages-alone", help="The EPP does not export how many requests it has sent.")
    ] = False,
    detector: Annotated[
        Detector,
        typer.Option(
            help="Saturation detector of the EPP; utilization is its default. none: no flow control."
        ),
    ] = Detector.UTILIZATION,
    signals: Annotated[
        Signals,
        typer.Option(help="Signals that the dispatcher reads. requests: for an EPP without flow control."),
    ] = Signals.AUTO,
    order: Annotated[
        Order,
        typer.Option(
            help="Order of waiting requests. auto: realtime first in the EPP; first come, first served in "
            "the pods, where requests wait without flow control."
        ),
    ] = Order.AUTO,
    pickers: Annotated[int, typer.Option(min=1, help="Active EPP replicas.")] = 1,
    kv_full: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="KV cache in use with every slot taken, for the utilization detector."
        ),
    ] = 0.1,
    capacity_unset: Annotated[
        bool,
        typer.Option(
            "--capacity-unset",
            help="The configuration does not name the capacity: the dispatcher has to find it.",
        ),
    ] = False,
    true_slots: Annotated[
        int | None, typer.Option(min=1, help="Real capacity of the pool, if the configuration is wrong.")
    ] = None,
    slots_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIME:SLOTS",
            help="Change of the real capacity, which is not reported; may be repeated.",
        ),
    ] = None,
    picker_slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Capacity that the EPP's concurrency detector assumes. Default: that at the start.",
            show_default=False,
        ),
    ] = None,
    queue_limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most requests that wait in the EPP, or without flow control in the pods; others get a 429.",
        ),
    ] = None,
    pods: Annotated[int, typer.Option(min=1, help="Number of pods that share the slots.")] = 1,
    pods_at: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME:PODS", help="Change of the number of pods; may be repeated."),
    ] = None,
    outage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM:UNTIL", help="Time in which the gateway is unreachable (seconds); may be repeated."
        ),
    ] = None,
    metrics_gap: Annotated[
        list[str] | None,
        typer.Option(metavar="FROM:UNTIL", help="Time in which scrapes fail (seconds); may be repeated."),
    ] = None,
    lost: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of scrapes that fail.")] = 0.0,
    clock_step: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME:BY", help="Step of the queue's clock, in seconds; may be repeated."),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="signals.max_age_s. Default: 10 for fresh readings, else 60.", show_default=False
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of dispatchers that share the queue.")] = 1,
    kill: Annotated[
        list[float] | None,
        typer.Option(metavar="TIME", help="Time at which a replica is killed and replaced; may be repeated."),
    ] = None,
    lease: Annotated[float, typer.Option(min=0.1, help="queue.lease_s, for killed replicas.")] = 30.0,
) -> None:
    """Try batch work on a pool in virtual time, before you install anything.

    The result is the throughput of batch work and its impact on your users. With `--target 'p99 <= 1.2'` the
    command finds the reserve that keeps this bound.
    """
    from dispatcher.lab.simulation import plot as picture

    # Check these options before the trace is read, which takes longer.
    names = _parse_policies(policy, has_slices=slice_tokens is not None)
    if revoke and slice_tokens is None:
        raise exit_error("--revoke: only slices can be ended early; give --slice, too", 2)
    if slice_tokens is not None and batch_seconds is not None:
        raise exit_error("--slice needs requests with tokens: leave out --batch-seconds", 2)
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
    where = realtime_traffic.RecordingSource(trace, prometheus, last, [query] if query else (), token_file)
    try:
        chosen = realtime_traffic.choose_traffic(
            where, steps, slots=slots, seed=seed, is_whole=whole or seconds is not None, begin_s=begin
        )
        played = made_up_traffic.add_echoes(
            made_up_traffic.overlay_copies(chosen.traffic, copies), echoes, seed=seed
        )
    except TraceError as error:
        raise exit_error(str(error), 2) from error
    played_s = _choose_length(seconds, played.seconds)
    setting = Scenario(
        slots=slots,
        has_capacity_setting=not capacity_unset,
        true_slots=true_slots,
        slots_at=[
            (at, _parse_whole("--slots-at", value)) for at, value in _parse_pairs("--slots-at", slots_at)
        ],
        picker_slots=picker_slots,
        batch=BatchProfile(batch_tokens, batch_spread, batch_seconds),
        transit_s=transit_time,
        scrape_s=scrape,
        lag_s=lag,
        jitter=jitter,
        flush_s=flush,
        flush_phase_s=flush_phase,
        shows_running=not averages_alone,
        stamp_s=stamp,
        detector=detector,
        signals=signals,
        order=order,
        pickers=pickers,
        kv_full=kv_full,
        reserve=reserve,
        max_age_s=max_age,
        seconds=played_s,
        seed=seed,
        queue_limit=queue_limit,
        pods=pods,
        pods_at=[(at, _parse_whole("--pods-at", value)) for at, value in _parse_pairs("--pods-at", pods_at)],
        outages=_parse_intervals("--outage", outage),
        gaps=_parse_intervals("--metrics-gap", metrics_gap),
        lost=lost,
        clock_steps=_parse_pairs("--clock-step", clock_step),
        replicas=replicas,
        deaths=kill or (),
        lease_s=lease,
        slice_tokens=slice_tokens,
        slice_overhead_s=slice_overhead,
        revokes_slices=revoke,
        evicts=evict,
    )
    setting, coarse = _choose_precision(setting, time_step, requests_per_job)
    if setting.uses_pressure_score_only:
        print_warning(
            f"the saturation of the {detector} detector is a pressure score that can read near 0 while every "
            "slot is taken; alone it cannot keep the reserve. Use --signals both, as signals.use: auto does"
        )
    for note in [*chosen.notes, *coarse]:
        typer.echo(note, err=True)
    for warning in chosen.warnings:
        print_warning(warning)
    at_once = processes or count_cores()
    if swept is not None:
        kept = simulation_runs.run_sweep(
            setting, played, names, at_once, swept, bounds, as_json=json_output, plot=plot
        )
        raise typer.Exit(0 if kept else 1)
    simulation_runs.compare_policies(setting, played, names, at_once, as_json=json_output, plot=plot)


def _choose_precision(
    setting: Scenario, step_s: float | None, requests_per_job: int | None
) -> tuple[Scenario, Sequence[str]]:
    """Return the setting with its time step and requests per job, and sentences about the defaults.

    The defaults depend on the length: short simulations are exact, and long ones are played faster.
    """
    # A job may take at most a tenth of the slots of a pod.
    maximum = max(1, setting.slots // setting.pods // MIN_JOBS_PER_POD_WHEN_SET)
    if requests_per_job is not None and requests_per_job > maximum:
        raise exit_error(
            f"--requests-per-job {requests_per_job}: more than a tenth of a pod's slots; "
            f"{maximum} at the most",
            2,
        )
    is_long = setting.seconds > MAX_EXACT_S
    chosen = replace(
        setting,
        time_step_s=step_s if step_s is not None else TIME_STEP_S if is_long else 0.0,
        requests_per_job=requests_per_job
        if requests_per_job is not None
        else setting.default_requests_per_job
        if is_long
        else 1,
    )
    how, options = [], []
    if step_s is None and is_long:
        how.append(
            f"in steps of {chosen.effective_time_step_s:.3g} s, in each of which batch requests end together"
        )
        options.append("--time-step 0")
    if requests_per_job is None and chosen.requests_per_job > 1:
        how.append(f"with {chosen.requests_per_job} batch requests going as one")
        options.append("--requests-per-job 1")
    if not how:
        return chosen, ()
    minutes = f"{setting.seconds / 60:.0f} min are played"
    return chosen, [f"{minutes} {', '.join(how)} ({' '.join(options)}: one by one, which takes longer)"]


def _choose_length(wanted_s: float | None, available_s: float) -> float:
    # Up to one second more is accepted, because the length of a trace is shown and used rounded.
    if wanted_s is not None and wanted_s > available_s + 1.0:
        raise exit_error(f"--seconds {wanted_s:g}: the trace is {available_s:.0f} s long", 2)
    return wanted_s if wanted_s is not None else max(1.0, float(round(available_s)))


def _parse_policies(policies: str | None, *, has_slices: bool) -> Sequence[PolicyName]:
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


def _parse_pairs(option: str, values: Sequence[str] | None) -> list[tuple[float, float]]:
    pairs = []
    for value in values or ():
        try:
            first, second = (float(part) for part in value.split(":"))
        except ValueError:
            raise exit_error(
                f"{option} {value}: two numbers with a colon between them are needed, such as 300:360", 2
            ) from None
        if first < 0:
            raise exit_error(f"{option} {value}: the simulation starts at 0", 2)
        pairs.append((first, second))
    return sorted(pairs)


def _parse_intervals(option: str, values: Sequence[str] | None) -> list[tuple[float, float]]:
    pairs = _parse_pairs(option, values)
    for start, end in pairs:
        if not start < end:
            raise exit_error(f"{option} {start:g}:{end:g}: ends before it starts", 2)
    for (_, end), (start, _) in itertools.pairwise(pairs):
        if start < end:
            raise exit_error(f"{option}: two of them overlap at {start:g}", 2)
    return pairs


def _parse_whole(option: str, value: float) -> int:
    if value < 0 or value != int(value):
        raise exit_error(
            f"{option}: {value:g} is not a number of {option.removeprefix('--').removesuffix('-at')}", 2
        )
    return int(value)
