"""`batch-dispatcher status` and `explain`: what waits, what runs, and why not more runs.

If queue or dispatcher does not answer, the reason is shown with the state of the other one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dispatcher.cli import render
from dispatcher.cli.admin_client import (
    AdminAddress,
    StatusProblem,
    StatusProblemKind,
    fetch_status,
    find_readiness_problem,
    parse_admin_address,
)
from dispatcher.cli.connection import (
    Json,
    QueueLocation,
    QueueOptions,
    locate_queue,
    print_config_problems,
    suggest_other_queues,
)
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines
from dispatcher.core.duration import parse_duration

AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url",
        metavar="URL",
        help="Dispatcher to ask, http://host:port. Default: from the configuration, on this machine.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class DispatcherOptions(QueueOptions):
    """Options that select the queue and the dispatcher of a verb."""

    admin_url: AdminUrl = ""


Overview = dict[str, Any]
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
    """Show the queue, and the gate, readings, rate and replicas of the dispatcher that answers.

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
        print_json(overview)
    else:
        print_lines(*_format_lines(overview, location))
        _print_queue_problem(overview)
    if overview["queue_problem"]:
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
        print_json({"explanation": explanation, **overview})
    else:
        if overview["dispatcher"] or not overview["queue_problem"]:
            print_lines(explanation)
        _print_queue_problem(overview)
    if overview["queue_problem"]:
        raise typer.Exit(1)


async def fetch_overview(
    location: QueueLocation, address: AdminAddress | None, *, suggests_queues: bool = False
) -> Overview:
    """Return the state of queue and dispatcher. Each is asked even if the other does not answer.

    `suggests_queues`: print the names of other queues if the default queue does not exist.
    """
    no_address = StatusProblem(
        StatusProblemKind.NO_ADDRESS, "neither --config nor --admin-url says where to ask"
    )
    # At once, so that one that does not answer does not delay the other.
    queue, (dispatcher, problem) = await asyncio.gather(
        _fetch_queue(location, suggests_queues=suggests_queues),
        fetch_status(address) if address else _return_value((None, no_address)),
    )
    return {
        "queue": location.names.queue if location.names else None,
        **queue,
        "dispatcher": dispatcher,
        "dispatcher_problem": str(problem) if problem else None,
        "dispatcher_problem_kind": problem.kind if problem else None,
        "config_problems": [str(each) for each in location.problems],
    }


# gather() needs a coroutine, even if there is no dispatcher to ask.
async def _return_value(value: tuple[None, StatusProblem]) -> tuple[None, StatusProblem]:
    return value


async def _fetch_queue(location: QueueLocation, *, suggests_queues: bool) -> Overview:
    overview: Overview = {**dict.fromkeys(render.COUNT_NAMES), "paused": None, "queue_problem": None}
    url = location.find_queue_url()
    if location.names is None:
        return {**overview, "queue_problem": "the configuration does not tell which queue it is"}
    if url is None:
        return {**overview, "queue_problem": location.unavailable_reason}
    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

    try:
        admin = RedisQueueAdmin(connect(url), location.names)
    except QueueUrlError as error:
        raise exit_error(str(error), 2) from error
    try:
        counts, paused = await admin.count_requests(), await admin.read_pause()
        if suggests_queues and location.is_guessed:
            await suggest_other_queues(admin)
    except QueueUnavailableError as error:
        return {**overview, "queue_problem": str(error)}
    finally:
        await admin.aclose()
    pause = None if paused is None else {"by": paused[0], "why": paused[1]}
    return overview | {name: getattr(counts, name) for name in render.COUNT_NAMES} | {"paused": pause}


def locate_targets(where: DispatcherOptions) -> tuple[QueueLocation, AdminAddress | None]:
    """Return the location of the queue and the address of the dispatcher.

    Exits with 2 if nothing is named.
    """
    location = locate_queue(where.config, where.queue_url, where.queue, where.pool)
    try:
        return location, parse_admin_address(location.admin, where.admin_url)
    except ValueError as error:
        raise exit_error(f"--admin-url: {error}", 2) from error


def _format_lines(overview: Overview, location: QueueLocation) -> list[str]:
    if (
        overview["queue_problem"]
        and not overview["dispatcher"]
        and (location.admin is None or not location.find_queue_url())
    ):
        return []  # the problem of the queue, printed separately, says everything
    return render.format_status(overview)


def _print_queue_problem(overview: Overview) -> None:
    if problem := overview["queue_problem"]:
        print_error(
            f"{overview['queue']}: {problem}" if overview["queue"] and overview["dispatcher"] else problem
        )


def _watch_status(location: QueueLocation, address: AdminAddress | None, *, json_output: bool) -> None:
    """Show the status repeatedly: in place on a terminal, otherwise a line with the time every second."""
    if sys.stdout.isatty() and not json_output:
        from dispatcher.cli.live_screen import show_live_page

        def render_now() -> list[str]:
            overview = asyncio.run(fetch_overview(location, address))
            problem = [overview["queue_problem"]] if overview["queue_problem"] else []
            return [
                f"{time.strftime('%H:%M:%S')}  (Ctrl-C ends it)",
                "",
                *render.format_status(overview),
                *problem,
            ]

        show_live_page(lambda _: render_now(), INTERVAL_S)
        return
    print_repeatedly(location, address, json_output=json_output)


def print_repeatedly(location: QueueLocation, address: AdminAddress | None, *, json_output: bool) -> None:
    """Print a line every second, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            overview = asyncio.run(fetch_overview(location, address))
            if json_output:
                print_json({"at": round(time.time(), 3), **overview})
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
    dispatcher_status, problem = await fetch_status(address)
    if dispatcher_status is None:
        return str(problem)
    # Another dispatcher may listen on that port.
    if location.names and dispatcher_status["queue"] != location.names.queue:
        return f"the dispatcher that answers works on another queue, {dispatcher_status['queue']}"
    return None
