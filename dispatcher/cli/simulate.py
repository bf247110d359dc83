"""`batch-dispatcher simulate`: what would batch work cost realtime in your pool, and what would it bring?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli import realtime_traffic, simulation_runs
from dispatcher.cli.terminal import fail, warn
from dispatcher.lab.simulation.experiment import Name
from dispatcher.lab.simulation.metrics import Detector, Signals
from dispatcher.lab.simulation.parallel import cores
from dispatcher.lab.simulation.scenario import EXACT_S, GRAINS, GRAINS_LEAST, STEP_S, Order, Setting
from dispatcher.lab.simulation.sweep import RESERVES, SWEPT, Sweep, SweepError, parse_sweep, parse_target
from dispatcher.lab.simulation.world import Batch
from dispatcher.lab.standin import shapes
from dispatcher.lab.standin.model import BATCH_SPREAD, BATCH_TOKENS
from dispatcher.lab.standin.trace import TraceError


def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Realtime traffic: requests with tokens (CSV), or running requests over time "
            "(CSV, Grafana's download, Prometheus range query). idle: nobody comes. bursts: dozens at once, "
            "made up. Default: 900 s of a production chat service.",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        str,
        typer.Option(metavar="URL", help="Instead of a trace: what this Prometheus has of running requests."),
    ] = "",
    last: Annotated[
        str, typer.Option(metavar="TIME", help="With --prometheus, so much: 30m, 3h, 7d.")
    ] = "3h",
    query: Annotated[
        str,
        typer.Option(
            metavar="PROMQL",
            help="With --prometheus, what counts them. Default: of vLLM, else SGLang, else TensorRT-LLM, all "
            "that there are.",
            show_default=False,
        ),
    ] = "",
    token_file: Annotated[
        str, typer.Option(metavar="FILE", help="With --prometheus, a bearer token.", show_default=False)
    ] = "",
    whole: Annotated[
        bool, typer.Option("--all", help="All of a long trace, not the busiest quarter of an hour alone.")
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="TIME:LEVEL,…", help="Instead of a trace: so many realtime requests from then on."
        ),
    ] = None,
    begin: Annotated[float, typer.Option("--from", min=0.0, help="Where in the trace to begin.")] = 0.0,
    copies: Annotated[
        int, typer.Option(min=1, help="So many of the trace at once, each begun elsewhere: a larger pool's.")
    ] = 1,
    echoes: Annotated[
        int, typer.Option(min=1, help="Each of its requests so many times within a second: larger bursts.")
    ] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Capacity in requests, as configured.")] = 64,
    scrape: Annotated[float, typer.Option(min=0.01, help="Seconds between two scrapes.")] = 1.0,
    lag: Annotated[float, typer.Option(min=0.0, help="Seconds until a scrape is known.")] = 0.05,
    reserve: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="The share that batch work never takes.")
    ] = 0.05,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="OPTION=VALUES", help=f"A row for each: reserve=0,.05,.1. Of {', '.join(SWEPT)}."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="BOUND",
            help="Which reserve keeps it? 'p99 <= 1.2' (users' latency beside what it is without batch work) "
            "or 'wait p99 <= 0.5' (seconds longer), joined by `and`.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="So many runs at once. Default: one a core.", show_default=False),
    ] = None,
    policy: Annotated[
        str, typer.Option(help=f"all, or some of {', '.join(Name)}; separated by commas.")
    ] = "law,none",
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="How long. Default: the whole trace, of a long one the busiest quarter of an hour.",
            show_default=False,
        ),
    ] = None,
    engine_step: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Batch requests end together, at most so many seconds apart, which is cheaper to play; 0: "
            f"one by one. Default: 0, and {STEP_S:g} where more than {EXACT_S / 60:g} minutes are played.",
            show_default=False,
        ),
    ] = None,
    grain: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Batch requests go by so many that are alike, as one that weighs as much: cheaper to play. "
            f"Default: 1, and a pod's slots / {GRAINS} where more than {EXACT_S / 60:g} minutes are "
            "played.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw into this file (png, svg, pdf): the timeline of each policy; with --sweep or --target "
            "what each value brings batch work and costs realtime."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Another seed, other batch requests.")] = 0,
    batch_tokens: Annotated[
        float, typer.Option(min=1.0, help="Tokens that a batch request generates, on average.")
    ] = BATCH_TOKENS,
    batch_spread: Annotated[
        float, typer.Option(min=0.0, max=3.0, help="How much they differ (of the logarithm); 0: not at all.")
    ] = BATCH_SPREAD,
    batch_seconds: Annotated[
        float | None,
        typer.Option(min=0.001, help="A batch request runs so long in an empty pool, whatever its tokens."),
    ] = None,
    travel: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds that requests travel, and answers. Default: 0.002 and 0.003."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Scrapes come up to this share of their interval late.")
    ] = 0.0,
    stamp: Annotated[
        float, typer.Option(help="Samples are dated so many seconds later than they were taken.")
    ] = 0.0,
    flush: Annotated[
        float, typer.Option(min=0.0, help="The EPP renews its averages this often; 0: always fresh.")
    ] = 5.0,
    flush_phase: Annotated[
        float | None,
        typer.Option(min=0.0, help="When it does so first. Default: by the seed.", show_default=False),
    ] = None,
    averages_alone: Annotated[
        bool, typer.Option("--averages-alone", help="The EPP does not show how many requests it has sent.")
    ] = False,
    detector: Annotated[
        Detector,
        typer.Option(
            help="What the EPP's saturation is computed with; utilization is its default. none: it has no "
            "flow control."
        ),
    ] = Detector.UTILIZATION,
    signals: Annotated[
        Signals, typer.Option(help="What the dispatcher reads. requests: of an EPP without flow control.")
    ] = Signals.AUTO,
    order: Annotated[
        Order,
        typer.Option(
            help="Who goes first of those that wait. auto: realtime in the EPP, whoever came first in the "
            "pods, where all wait without flow control."
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
        int | None, typer.Option(min=1, help="What the pool really takes, where the configuration is wrong.")
    ] = None,
    slots_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TIME:SLOTS",
            help="From then on the pool really takes so many, and nobody tells; may be repeated.",
        ),
    ] = None,
    picker_slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="What the EPP's concurrency detector takes the pool for. Default: what it is at the start.",
            show_default=False,
        ),
    ] = None,
    queue_limit: Annotated[
        int | None,
        typer.Option(
            min=0, help="So many may wait in the EPP, without flow control in the pods; the next gets a 429."
        ),
    ] = None,
    pods: Annotated[int, typer.Option(min=1, help="Pods that the slots are spread over.")] = 1,
    pods_at: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME:PODS", help="From then on there are so many pods; may be repeated."),
    ] = None,
    outage: Annotated[
        list[str] | None,
        typer.Option(metavar="FROM:UNTIL", help="The gateway is away (seconds); may be repeated."),
    ] = None,
    metrics_gap: Annotated[
        list[str] | None,
        typer.Option(metavar="FROM:UNTIL", help="Scrapes fail (seconds); may be repeated."),
    ] = None,
    lost: Annotated[float, typer.Option(min=0.0, max=1.0, help="The share of scrapes that fail.")] = 0.0,
    clock_step: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME:BY", help="The queue's clock steps by so many seconds; may be repeated."),
    ] = None,
    max_age: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="signals.max_age_s. Default: 10 for fresh readings, else 60.", show_default=False
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Dispatchers that share the queue.")] = 1,
    kill: Annotated[
        list[float] | None,
        typer.Option(metavar="TIME", help="A replica is killed then, and replaced; may be repeated."),
    ] = None,
    lease: Annotated[float, typer.Option(min=0.1, help="queue.lease_s, for killed replicas.")] = 30.0,
) -> None:
    """Try batch work on a pool in virtual time, before you install anything.

    What batch work brings, and what your users pay for it: `--target 'p99 <= 1.2'` finds the reserve.
    """
    from dispatcher.lab.simulation import plot as picture

    names = _policies(policy)
    try:
        bounds = parse_target(target) if target is not None else []
        swept = parse_sweep(sweep) if sweep is not None else Sweep("reserve", RESERVES) if bounds else None
    except SweepError as error:
        raise fail(str(error), 2) from error
    if plot is not None and not picture.available():
        raise fail(f"--plot needs matplotlib: {picture.INSTALL}")
    where = realtime_traffic.Recorded(trace, prometheus, last, [query] if query else (), token_file)
    try:
        chosen = realtime_traffic.choose(
            where, steps, slots=slots, seed=seed, whole=whole or seconds is not None, begin=begin
        )
        played = shapes.echoes(shapes.copies(chosen.traffic, copies), echoes, seed=seed)
    except TraceError as error:
        raise fail(str(error), 2) from error
    played_s = _seconds(seconds, played.seconds)
    setting = Setting(
        slots=slots,
        capacity_set=not capacity_unset,
        true_slots=true_slots,
        slots_at=[(at, _whole("--slots-at", value)) for at, value in _pairs("--slots-at", slots_at)],
        picker_slots=picker_slots,
        batch=Batch(batch_tokens, batch_spread, batch_seconds),
        travel_s=travel,
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
        pods_at=[(at, _whole("--pods-at", value)) for at, value in _pairs("--pods-at", pods_at)],
        outages=_stretches("--outage", outage),
        gaps=_stretches("--metrics-gap", metrics_gap),
        lost=lost,
        clock_steps=_pairs("--clock-step", clock_step),
        replicas=replicas,
        deaths=kill or (),
        lease_s=lease,
    )
    setting, coarse = _coarse(setting, engine_step, grain)
    if setting.pressure_score_alone:
        warn(
            f"the saturation of the {detector} detector is a pressure score that can read near 0 while every "
            "slot is taken; alone it cannot keep the reserve. Use --signals both, as signals.use: auto does"
        )
    for note in [*chosen.notes, *coarse]:
        typer.echo(note, err=True)
    for warning in chosen.warnings:
        warn(warning)
    at_once = processes or cores()
    if swept is not None:
        kept = simulation_runs.sweep(
            setting, played, names, at_once, swept, bounds, as_json=json_output, plot=plot
        )
        raise typer.Exit(0 if kept else 1)
    simulation_runs.compare(setting, played, names, at_once, as_json=json_output, plot=plot)


def _coarse(setting: Setting, step_s: float | None, grain: int | None) -> tuple[Setting, Sequence[str]]:
    """The setting with the step and the grain asked for, or with those that its length asks for, and then a
    sentence about them."""
    most = max(1, setting.slots // setting.pods // GRAINS_LEAST)
    if grain is not None and grain > most:
        raise fail(f"--grain {grain}: more than a tenth of a pod's slots; {most} at the most", 2)
    long = setting.seconds > EXACT_S
    chosen = replace(
        setting,
        step_s=step_s if step_s is not None else STEP_S if long else 0.0,
        grain=grain if grain is not None else setting.fine_grain if long else 1,
    )
    how, options = [], []
    if step_s is None and long:
        how.append(f"in steps of {chosen.steps_s:.3g} s, in each of which batch requests end together")
        options.append("--engine-step 0")
    if grain is None and chosen.grain > 1:
        how.append(f"with {chosen.grain} batch requests going as one")
        options.append("--grain 1")
    if not how:
        return chosen, ()
    minutes = f"{setting.seconds / 60:.0f} min are played"
    return chosen, [f"{minutes} {', '.join(how)} ({' '.join(options)}: one by one, which takes longer)"]


def _seconds(wanted: float | None, there: float) -> float:
    if wanted is not None and wanted > there + 1.0:
        raise fail(f"--seconds {wanted:g}: the trace is {there:.0f} s long", 2)
    return wanted if wanted is not None else max(1.0, float(round(there)))


def _policies(wanted: str) -> Sequence[Name]:
    if wanted.strip() == "all":
        return list(Name)
    try:
        return [Name(name.strip()) for name in wanted.split(",")]
    except ValueError:
        raise fail(f"--policy {wanted}: no such policy; there are all, {', '.join(Name)}", 2) from None


def _pairs(option: str, values: Sequence[str] | None) -> list[tuple[float, float]]:
    pairs = []
    for value in values or ():
        try:
            first, second = (float(part) for part in value.split(":"))
        except ValueError:
            raise fail(
                f"{option} {value}: two numbers with a colon between them are needed, such as 300:360", 2
            ) from None
        if first < 0:
            raise fail(f"{option} {value}: the simulation starts at 0", 2)
        pairs.append((first, second))
    return sorted(pairs)


def _stretches(option: str, values: Sequence[str] | None) -> list[tuple[float, float]]:
    pairs = _pairs(option, values)
    for start, end in pairs:
        if not start < end:
            raise fail(f"{option} {start:g}:{end:g}: ends before it starts", 2)
    for (_, end), (start, _) in itertools.pairwise(pairs):
        if start < end:
            raise fail(f"{option}: two of them overlap at {start:g}", 2)
    return pairs


def _whole(option: str, value: float) -> int:
    if value < 0 or value != int(value):
        raise fail(
            f"{option}: {value:g} is not a number of {option.removeprefix('--').removesuffix('-at')}", 2
        )
    return int(value)
