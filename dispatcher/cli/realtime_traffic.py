"""Realtime traffic for `simulate`: from a file, from Prometheus, or synthetic."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dispatcher.common.duration import parse_duration
from dispatcher.lab.simulation.scenario_file import ScenarioFile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import (
    BUNDLED,
    Recording,
    Trace,
    TraceError,
    parse_recording,
    read_recording,
)

WINDOW_S = 900.0
"""Length of the part of a long recording that is played: the busiest one, where batch work hurts most.
"""
LONG_RECORDING_S = 1.5 * WINDOW_S
"""Length from which a recording is cut to its busiest part."""
MAX_LAST_S = 31 * 86_400.0


@dataclass(frozen=True, slots=True)
class ChosenTraffic:
    """Traffic to play, with notes and warnings for the user."""

    traffic: Trace
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def choose_traffic(scenario: ScenarioFile) -> ChosenTraffic:
    """Return the traffic that a scenario selects. Raises TraceError."""
    chosen = _choose_recording(scenario)
    return replace(chosen, traffic=made_up_traffic.overlay_copies(chosen.traffic, scenario.copies))


def _choose_recording(scenario: ScenarioFile) -> ChosenTraffic:
    slots, seed, begin_s = scenario.slots, scenario.seed, scenario.from_s
    if scenario.steps:
        steps = made_up_traffic.parse_steps(scenario.steps)
        return _start_at(
            ChosenTraffic(made_up_traffic.make_step_trace(steps, slots=slots, seed=seed)), begin_s
        )
    made_up = made_up_traffic.TRACE_MAKERS.get(scenario.trace)
    if made_up is not None:
        return _start_at(ChosenTraffic(made_up(seed)), begin_s)
    if scenario.prometheus:
        recording = _fetch_recording(scenario)
    else:
        recording = read_recording(Path(scenario.trace) if scenario.trace else BUNDLED)
    warnings = []
    if recording.peak > slots:
        warnings.append(
            f"{recording.name} has up to {recording.peak:g} requests running at once, and --slots is "
            f"{slots}: give the capacity of the pool that was recorded (ready endpoints × the concurrency of "
            "one)"
        )
    is_whole = scenario.whole or scenario.seconds is not None
    if is_whole or begin_s or recording.seconds <= LONG_RECORDING_S:
        return _start_at(
            ChosenTraffic(recording.make_trace(slots=slots, seed=seed), warnings=warnings), begin_s
        )
    cut = recording.cut_busiest(WINDOW_S)
    note = (
        f"{recording.name} is {_format_duration(recording.seconds)} long: its busiest "
        f"{_format_duration(WINDOW_S)} are played, {_format_duration(cut.starts_s)} after its beginning "
        "(--set whole=true plays all of it)"
    )
    return ChosenTraffic(cut.make_trace(slots=slots, seed=seed), [note], warnings)


def _start_at(chosen: ChosenTraffic, begin_s: float) -> ChosenTraffic:
    return replace(chosen, traffic=made_up_traffic.cut_start(chosen.traffic, begin_s)) if begin_s else chosen


def _fetch_recording(source: ScenarioFile) -> Recording:
    from dispatcher.signals.prometheus.history import RUNNING_QUERIES, query_running
    from dispatcher.signals.prometheus.instant_query import QueryError
    from dispatcher.signals.prometheus.session import PrometheusAddress

    last_s = _parse_last(source.last)
    # RUNNING: the usual metrics of model servers, tried one after the other.
    queries = [source.query] if source.query else RUNNING_QUERIES
    address = PrometheusAddress(source.prometheus, token_file=source.token_file)
    try:
        series = query_running(address, queries, time.time(), last_s)
    except QueryError as error:
        hint = "; token_file names a file with a bearer token" if error.status == 401 else ""
        raise TraceError(f"--prometheus {_hide_credentials(source.prometheus)}: {error}{hint}") from None
    if not series:
        query_text = " nor ".join(queries)
        raise TraceError(
            f"--prometheus {_hide_credentials(source.prometheus)}: there is nothing in the last "
            f"{source.last} for "
            f"{query_text}; query names what counts the running requests of your pool"
        )
    return parse_recording("what Prometheus recorded", series)


def _hide_credentials(url: str) -> str:
    """Return the URL without user and password."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _parse_last(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not 60 <= seconds <= MAX_LAST_S:
        raise TraceError(f"--last {text}: give 1m to 31d, such as 3h or 2d")
    return seconds


def _format_duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {left} s" if left else "")
    return f"{minutes // 60} h {minutes % 60} min"
