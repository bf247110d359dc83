"""Realtime traffic for `simulate`: from a file, from Prometheus, or synthetic."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dispatcher.core.duration import seconds_of
from dispatcher.lab.standin import shapes
from dispatcher.lab.standin.trace import BUNDLED, Recording, Trace, TraceError, read, recorded

WINDOW_S = 900.0
"""Length of the part of a long recording that is played: the busiest one, where batch work hurts most.
"""
LONG_S = 1.5 * WINDOW_S
"""Length from which a recording is cut to its busiest part."""
LAST_MOST_S = 31 * 86_400.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """Source of a recording: a file, or a Prometheus with its queries."""

    trace: Path | None = None
    prometheus: str = ""
    last: str = "3h"
    queries: Sequence[str] = ()
    token_file: str = ""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Traffic to play, with notes and warnings for the user."""

    traffic: Trace
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def choose(where: Recorded, steps: str | None, *, slots: int, seed: int, whole: bool, begin: float) -> Chosen:
    """Return the traffic that the options select. Raises TraceError."""
    if steps is not None:
        if where.trace is not None or where.prometheus:
            raise TraceError("--steps stands in place of a trace: give one of them")
        return _from(Chosen(shapes.steps(shapes.parse_steps(steps), slots=slots, seed=seed)), begin)
    if where.trace is not None and where.prometheus:
        raise TraceError("--trace and --prometheus: give one of them")
    made_up = shapes.MADE_UP.get(str(where.trace))
    if made_up is not None:
        return _from(Chosen(made_up(seed)), begin)
    recording = _asked(where) if where.prometheus else read(where.trace or BUNDLED)
    warnings = []
    if recording.peak > slots:
        warnings.append(
            f"{recording.name} has up to {recording.peak:g} requests running at once, and --slots is "
            f"{slots}: give the capacity of the pool that was recorded (ready endpoints × the concurrency of "
            "one)"
        )
    if whole or begin or recording.seconds <= LONG_S:
        return _from(Chosen(recording.traffic(slots=slots, seed=seed), warnings=warnings), begin)
    cut = recording.busiest(WINDOW_S)
    note = (
        f"{recording.name} is {_duration(recording.seconds)} long: its busiest {_duration(WINDOW_S)} are "
        f"played, {_duration(cut.begins_s)} after its beginning (--all plays the whole)"
    )
    return Chosen(cut.traffic(slots=slots, seed=seed), [note], warnings)


def _from(chosen: Chosen, begin: float) -> Chosen:
    return replace(chosen, traffic=shapes.begun_at(chosen.traffic, begin)) if begin else chosen


def _asked(where: Recorded) -> Recording:
    from dispatcher.signals.prometheus.history import RUNNING, running
    from dispatcher.signals.prometheus.instant_query import QueryError
    from dispatcher.signals.prometheus.session import PrometheusAddress

    last_s = _seconds(where.last)
    # RUNNING: the usual metrics of model servers, tried one after the other.
    queries = where.queries or RUNNING
    address = PrometheusAddress(where.prometheus, token_file=where.token_file)
    try:
        series = running(address, queries, time.time(), last_s)
    except QueryError as error:
        hint = "; --token-file names a file with a bearer token" if "HTTP 401" in str(error) else ""
        raise TraceError(f"--prometheus {_shown(where.prometheus)}: {error}{hint}") from None
    if not series:
        asked = " nor ".join(queries)
        raise TraceError(
            f"--prometheus {_shown(where.prometheus)}: there is nothing in the last {where.last} for "
            f"{asked}; --query names what counts the running requests of your pool"
        )
    return recorded("what Prometheus recorded", series)


def _shown(url: str) -> str:
    """Return the URL without user and password."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _seconds(text: str) -> float:
    try:
        seconds = seconds_of(text)
    except ValueError:
        seconds = 0.0
    if not 60 <= seconds <= LAST_MOST_S:
        raise TraceError(f"--last {text}: give 1m to 31d, such as 3h or 2d")
    return seconds


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min" + (f" {left} s" if left else "")
    return f"{minutes // 60} h {minutes % 60} min"
