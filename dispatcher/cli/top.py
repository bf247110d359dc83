"""`batch-dispatcher top`: live view of a pool that realtime and batch work share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from dispatcher.cli import bar, render
from dispatcher.cli.connection import Json, print_config_problems
from dispatcher.cli.status import DispatcherOptions, fetch_overview, locate_targets, print_repeatedly

EXAMPLES = {"top": ["batch-dispatcher top", "batch-dispatcher top --admin-url http://10.0.0.7:8080"]}
INTERVAL_S = 1.0
BAR_MIN_WIDTH = 10


def top(where: DispatcherOptions, json_output: Json = False) -> None:
    """Watch the pool live: how its capacity is used, what waits, and how fast requests are done.

    q or Ctrl-C ends it. Without a terminal it prints one line per second, like `status --watch`.
    """
    location, address = locate_targets(where)
    print_config_problems(location)
    if json_output or not sys.stdout.isatty():
        print_repeatedly(location, address, json_output=json_output)
        return
    from dispatcher.cli.live_screen import show_live_page

    def draw_page(width: int) -> Sequence[str]:
        return format_page(asyncio.run(fetch_overview(location, address)), width, time.strftime("%H:%M:%S"))

    show_live_page(draw_page, INTERVAL_S)


def format_page(overview: dict[str, Any], width: int, clock: str) -> list[str]:
    """Return the rows of the page for the state of queue and dispatcher."""
    status = overview["dispatcher"]
    title = f"pool {status['pool']}" if status else str(overview["queue"])
    quit_hint = "q ends"
    title_and_clock = f"{title}  {clock}"
    page = [f"{title_and_clock}{quit_hint:>{max(len(quit_hint) + 2, width - len(title_and_clock))}}", ""]
    problem = [overview["queue_problem"]] if overview["queue_problem"] else []
    if not status:
        return [*page, *render.format_status(overview), *problem]
    page += [*render.format_health(overview), f"{status['reason']}: {status['explanation']}", *problem, ""]
    page += [*_format_pool(status, width), ""]
    counts = [f"{name} {overview[name]}" for name in render.COUNT_NAMES if overview[name] is not None]
    page.append(f"{overview['queue'] or status['queue']}: {'  '.join(counts)}")
    if overview["queue"] not in (None, status["queue"]):
        page.append(f"the dispatcher that answers works on another queue, {status['queue']}")
    return [*page, *render.format_summary(status)]


def _format_pool(status: dict[str, Any], width: int) -> list[str]:
    capacity, share, realtime = (status.get(name) for name in ("max_sys", "reserve", "realtime"))
    # 0 is a value; only a missing one is unknown.
    if capacity is None or realtime is None:
        return ["The pool's capacity is not known."]
    amounts = {
        "realtime": realtime,
        "waiting": status.get("realtime_waiting") or 0.0,
        "batch": float(status.get("in_flight") or 0),
        "reserve": capacity * (share or 0.0),
        "capacity": capacity,
    }
    return [
        bar.draw_pool(**amounts, width=max(BAR_MIN_WIDTH, width)),
        bar.format_legend(**amounts),
        f"capacity {capacity:.4g}; batch limit {status.get('limit')}",
    ]
