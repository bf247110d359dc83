"""`batch-dispatcher status`, `explain` and `top`: what waits, what runs, and why not more runs.

If queue or dispatcher does not answer, the reason is shown with the state of the other one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from dispatcher.cli import render
from dispatcher.cli.admin_client import AdminAddress, StatusProblem, fetch_status, find_readiness_problem
from dispatcher.cli.connection import Json, QueueLocation, print_config_problems
from dispatcher.cli.overview import DispatcherOptions, Overview, fetch_overview, locate_targets
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines
from dispatcher.common.duration import parse_duration

INTERVAL_S = 1.0

EXAMPLES = {
    "status": [
        "batch-dispatcher status",
        "batch-dispatcher status --watch",
        "batch-dispatcher status --wait 30s    # in a script: until a dispatcher is ready",
        "batch-dispatcher status --json",
        "batch-dispatcher status --queue-url redis://127.0.0.1 --pool qwen",
    ],
    "explain": ["batch-dispatcher explain", "batch-dispatcher explain --admin-url http://10.0.0.7:8080"],
    "top": ["batch-dispatcher top", "batch-dispatcher top --admin-url http://10.0.0.7:8080"],
}


def status(
    where: DispatcherOptions,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat every second, until Ctrl-C.")] = False,
    wait: Annotated[
        str,
        typer.Option(
            "--wait",
            metavar="TIME",
            help="Print nothing; exit with 0 once a dispatcher is ready, or with 1 after this time.",
            show_default=False,
        ),
    ] = "",
    json_output: Json = False,
) -> None:
    """Show the queue, and the gate, readings, rate and replicas of a dispatcher.

    If the queue or the dispatcher does not answer, the command says so and shows the other one. Exit code 1:
    the queue cannot be reached. An embedded queue can be reached only while its dispatcher runs.
    """
    try:
        wait_s = parse_duration(wait) if wait else None
    except ValueError as error:
        raise exit_error(f"--wait: {error}", 2) from error
    location, address = locate_targets(where)
    if wait_s is not None:  # 0 is a valid time: one attempt
        _wait_until_ready(location, address, wait_s)
        return
    print_config_problems(location)
    if watch:
        _watch_status(location, address, json_output=json_output)
        return
    overview = asyncio.run(fetch_overview(location, address, suggests_queues=True))
    if json_output:
        print_json(overview.to_dict())
    else:
        print_lines(*_format_lines(overview, location))
        _print_queue_problem(overview)
    if overview.queue_problem:
        raise typer.Exit(1)


def explain(where: DispatcherOptions, json_output: Json = False) -> None:
    """Explain in one paragraph why the dispatcher sends as much as it does.

    If no dispatcher answers, the paragraph is about the queue alone, and if the queue cannot be reached,
    about the dispatcher alone. Exit code 1: the queue cannot be reached.
    """
    location, address = locate_targets(where)
    print_config_problems(location)
    overview = asyncio.run(fetch_overview(location, address, suggests_queues=True))
    explanation = render.format_explanation(overview)
    if json_output:
        print_json({"explanation": explanation, **overview.to_dict()})
    else:
        if overview.dispatcher or not overview.queue_problem:
            print_lines(explanation)
        _print_queue_problem(overview)
    if overview.queue_problem:
        raise typer.Exit(1)


def top(where: DispatcherOptions, json_output: Json = False) -> None:
    """Watch the pool live: how its capacity is used, and how fast requests end.

    q or Ctrl-C ends it. Without a terminal it prints one line per second, like `status --watch`.
    """
    location, address = locate_targets(where)
    print_config_problems(location)
    if json_output or not sys.stdout.isatty():
        _print_repeatedly(location, address, json_output=json_output)
        return
    from dispatcher.cli.live_screen import show_live_page

    def draw_page(width: int) -> Sequence[str]:
        overview = asyncio.run(fetch_overview(location, address))
        return render.format_page(overview, width, time.strftime("%H:%M:%S"))

    show_live_page(draw_page, INTERVAL_S)


def _format_lines(overview: Overview, location: QueueLocation) -> list[str]:
    if (
        overview.queue_problem
        and not overview.dispatcher
        and (location.admin is None or not location.find_queue_url())
    ):
        return []  # the problem of the queue, printed separately, says everything
    return render.format_status(overview)


def _print_queue_problem(overview: Overview) -> None:
    if problem := overview.queue_problem:
        print_error(f"{overview.queue}: {problem}" if overview.queue and overview.dispatcher else problem)


def _watch_status(location: QueueLocation, address: AdminAddress | None, *, json_output: bool) -> None:
    """Show the status repeatedly: in place on a terminal, otherwise a line with the time every second."""
    if sys.stdout.isatty() and not json_output:
        from dispatcher.cli.live_screen import show_live_page

        def render_now() -> list[str]:
            overview = asyncio.run(fetch_overview(location, address))
            problem = [overview.queue_problem] if overview.queue_problem else []
            title = f"{time.strftime('%H:%M:%S')}  (Ctrl-C ends it)"
            return [title, "", *render.format_status(overview), *problem]

        show_live_page(lambda _: render_now(), INTERVAL_S)
        return
    _print_repeatedly(location, address, json_output=json_output)


def _print_repeatedly(location: QueueLocation, address: AdminAddress | None, *, json_output: bool) -> None:
    """Print a line every second, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            overview = asyncio.run(fetch_overview(location, address))
            if json_output:
                print_json({"at": round(time.time(), 3), **overview.to_dict()})
            else:
                print_lines(f"{time.strftime('%H:%M:%S')}  {render.format_log_line(overview)}")
            time.sleep(INTERVAL_S)


def _wait_until_ready(location: QueueLocation, address: AdminAddress | None, timeout_s: float) -> None:
    if address is None:
        raise exit_error("--wait: neither --config nor --admin-url says where a dispatcher is", 2)
    give_up_at = time.monotonic() + timeout_s
    while True:
        problem = asyncio.run(_find_readiness_problem(location, address))
        if problem is None:
            return
        if time.monotonic() >= give_up_at:
            raise exit_error(f"not ready after {timeout_s:g} s: {problem}")
        time.sleep(min(0.2, max(0.0, give_up_at - time.monotonic())))


async def _find_readiness_problem(location: QueueLocation, address: AdminAddress) -> str | None:
    if (readiness_problem := await find_readiness_problem(address)) is not None:
        return readiness_problem
    dispatcher = await fetch_status(address)
    if isinstance(dispatcher, StatusProblem):
        return str(dispatcher)
    # Another dispatcher may listen on that port.
    if location.names and dispatcher.process.queue != location.names.queue:
        return render.format_other_queue(dispatcher)
    return None
