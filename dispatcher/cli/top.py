"""`batch-dispatcher top`: live view of a pool that realtime and batch work share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from dispatcher.cli import bar, render
from dispatcher.cli.connection import Json, warn_of
from dispatcher.cli.status import DispatcherOptions, look, meant, repeat

EXAMPLES = {"top": ["batch-dispatcher top", "batch-dispatcher top --admin-url http://10.0.0.7:8080"]}
EACH_S = 1.0
BAR_LEAST = 10


def top(where: DispatcherOptions, json_output: Json = False) -> None:
    """Watch the pool live: how its capacity is used, what waits, and how fast requests are done.

    q or Ctrl-C ends it. Without a terminal it prints one line per second, like `status --watch`.
    """
    place, address = meant(where)
    warn_of(place)
    if json_output or not sys.stdout.isatty():
        repeat(place, address, json_output=json_output)
        return
    from dispatcher.cli.live_screen import refresh

    def draw(width: int) -> Sequence[str]:
        return rows(asyncio.run(look(place, address)), width, time.strftime("%H:%M:%S"))

    refresh(draw, EACH_S)


def rows(shown: dict[str, Any], width: int, clock: str) -> list[str]:
    """Return the rows of the page for the state of queue and dispatcher."""
    gate = shown["dispatcher"]
    title = f"pool {gate['pool']}" if gate else str(shown["queue"])
    ends = "q ends"
    head = f"{title}  {clock}"
    told = [f"{head}{ends:>{max(len(ends) + 2, width - len(head))}}", ""]
    problem = [shown["queue_problem"]] if shown["queue_problem"] else []
    if not gate:
        return [*told, *render.lines(shown), *problem]
    told += [*render.health(shown), f"{gate['reason']}: {gate['explanation']}", *problem, ""]
    told += [*_pool(gate, width), ""]
    counts = [f"{name} {shown[name]}" for name in render.COUNTS if shown[name] is not None]
    told.append(f"{shown['queue'] or gate['queue']}: {'  '.join(counts)}")
    if shown["queue"] not in (None, gate["queue"]):
        told.append(f"the dispatcher that answers works on another queue, {gate['queue']}")
    return [*told, *render.glance(gate)]


def _pool(gate: dict[str, Any], width: int) -> list[str]:
    capacity, share, realtime = (gate.get(name) for name in ("max_sys", "reserve", "realtime"))
    # 0 is a value; only a missing one is unknown.
    if capacity is None or realtime is None:
        return ["The pool's capacity is not known."]
    amounts = {
        "realtime": realtime,
        "waiting": gate.get("realtime_waiting") or 0.0,
        "ours": float(gate.get("in_flight") or 0),
        "reserve": capacity * (share or 0.0),
        "capacity": capacity,
    }
    return [
        bar.pool(**amounts, width=max(BAR_LEAST, width)),
        bar.legend(**amounts),
        f"capacity {capacity:.4g}; limit of ours {gate.get('limit')}",
    ]
