"""Realtime traffic that is generated or derived from a trace: idle, bursts, steps, cuts, copies, echoes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from dispatcher.lab.standin.model import compute_work_s
from dispatcher.lab.standin.trace import RealtimeRequest, Trace, TraceError, make_trace_from_counts

DEFAULT_SECONDS = 900.0
"""Maximum time between a request and its echo, before or after."""
BURST_EVERY_S, BURST_SIZE, BURST_S = 10.0, 45.0, 1.0
CALM_PER_S = 1.5
CONTEXT, GENERATED = 2000.0, 28.0
"""Tokens of the requests of a coding assistant: long prompts, short answers."""


def parse_steps(text: str) -> list[tuple[float, int]]:
    """Parse steps: `0:0,10:20,30:0` → [(0, 0), (10, 20), (30, 0)], ascending. Raises TraceError."""
    steps = [part.split(":") for part in text.split(",") if part]
    try:
        return sorted((float(at), int(level)) for at, level in steps)
    except ValueError:
        raise TraceError(f"steps: {text!r} is not seconds:level,seconds:level,…") from None


def make_idle_trace(seed: int) -> Trace:
    """Make a trace without requests."""
    return Trace("idle", [], DEFAULT_SECONDS)


def make_burst_trace(seed: int) -> Trace:
    """Make a trace with dozens of requests within one or two seconds, every ten seconds, and few between
    them."""
    draws = random.Random(f"{seed}/bursts")
    times = []
    at = 0.0
    while (at := at + draws.expovariate(CALM_PER_S)) < DEFAULT_SECONDS:
        times.append(at)
    at = 0.0
    while (at := at + draws.expovariate(1 / BURST_EVERY_S)) < DEFAULT_SECONDS:
        size = round(draws.lognormvariate(0, 0.5) * BURST_SIZE)
        times += [at + draws.expovariate(1 / BURST_S) for _ in range(size)]
    arrivals = []
    for at in sorted(times):
        # mu = −σ²/2, so that the factors are 1 on average.
        context = round(CONTEXT * draws.lognormvariate(-0.18, 0.6))
        generated = max(4, round(GENERATED * draws.lognormvariate(-0.32, 0.8)))
        arrivals.append(RealtimeRequest(at, compute_work_s(context, generated), generated))
    return Trace("bursts", arrivals, DEFAULT_SECONDS)


TRACE_MAKERS: Mapping[str, Callable[[int], Trace]] = {"idle": make_idle_trace, "bursts": make_burst_trace}
"""Functions by the names that can be given instead of a file."""


def make_step_trace(levels: Sequence[tuple[float, int]], *, slots: int, seed: int = 0) -> Trace:
    """Make a trace with a constant number of requests from each of the given times on."""
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for at, level in levels:
        points += [(at, points[-1][1]), (at, float(level))]
    end = max(DEFAULT_SECONDS, points[-1][0] + 1.0)
    return make_trace_from_counts("steps", [*points, (end, points[-1][1])], slots=slots, seed=seed)


def cut_start(trace: Trace, from_s: float) -> Trace:
    """Return the rest of the trace from this time on. Raises TraceError if nothing is left."""
    if from_s >= trace.seconds:
        raise TraceError(
            f"{trace.name} ends after {trace.seconds:g} s: there is nothing from {from_s:g} s on"
        )
    arrivals = [
        RealtimeRequest(a.arrives_at - from_s, a.work_s, a.tokens)
        for a in trace.arrivals
        if a.arrives_at >= from_s
    ]
    return Trace(f"{trace.name} from {from_s:g} s", arrivals, trace.seconds - from_s)


def overlay_copies(trace: Trace, count: int) -> Trace:
    """Overlay shifted copies of the trace: the traffic of a larger pool, in which bursts even out."""
    if count == 1:
        return trace
    shift = trace.seconds / count
    arrivals = [
        RealtimeRequest((a.arrives_at + copy * shift) % trace.seconds, a.work_s, a.tokens)
        for copy in range(count)
        for a in trace.arrivals
    ]
    return Trace(f"{count} × {trace.name}", sorted(arrivals, key=lambda a: a.arrives_at), trace.seconds)
