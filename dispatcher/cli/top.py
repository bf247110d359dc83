"""`batch-dispatcher top`: live view of a pool that realtime and batch work share."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from dispatcher.cli import render
from dispatcher.cli.connection import Json, print_config_problems
from dispatcher.cli.overview import DispatcherOptions, fetch_overview, locate_targets
from dispatcher.cli.status import print_repeatedly

EXAMPLES = {"top": ["batch-dispatcher top", "batch-dispatcher top --admin-url http://10.0.0.7:8080"]}
INTERVAL_S = 1.0


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
        overview = asyncio.run(fetch_overview(location, address))
        return render.format_page(overview, width, time.strftime("%H:%M:%S"))

    show_live_page(draw_page, INTERVAL_S)
