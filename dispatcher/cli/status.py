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
from dispatcher.cli.admin_client import AdminAddress, address_of, ready, running
from dispatcher.cli.connection import Json, Located, QueueOptions, locate, warn_of, warn_of_others
from dispatcher.cli.terminal import answer, complain, fail, say
from dispatcher.core.duration import seconds_of

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


Told = dict[str, Any]
EACH_S = 1.0

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
        waiting_s = seconds_of(wait) if wait else None
    except ValueError as error:
        raise fail(f"--wait: {error}", 2) from error
    place, address = meant(where)
    if waiting_s is not None:  # 0 is a valid time: one attempt
        _wait(place, address, waiting_s)
        return
    warn_of(place)
    if watch:
        _watch(place, address, json_output=json_output)
        return
    shown = asyncio.run(look(place, address, guides=True))
    if json_output:
        answer(shown)
    else:
        say(*_lines(shown, place))
        _complain_of_queue(shown)
    if shown["queue_problem"]:
        raise typer.Exit(1)


def explain(where: DispatcherOptions, json_output: Json = False) -> None:
    """Explain in one paragraph why the dispatcher sends as much as it does.

    If no dispatcher answers, the paragraph is about the queue alone, and if the queue cannot be reached,
    about the dispatcher alone. Exit code 1: the queue cannot be reached.
    """
    place, address = meant(where)
    warn_of(place)
    shown = asyncio.run(look(place, address, guides=True))
    told = render.paragraph(shown)
    if json_output:
        answer({"explanation": told, **shown})
    else:
        if shown["dispatcher"] or not shown["queue_problem"]:
            say(told)
        _complain_of_queue(shown)
    if shown["queue_problem"]:
        raise typer.Exit(1)


async def look(place: Located, address: AdminAddress | None, *, guides: bool = False) -> Told:
    """Return the state of queue and dispatcher. Each is asked even if the other does not answer.

    `suggests_queues`: print the names of other queues if the default queue does not exist.
    """
    unknown = None, "neither --config nor --admin-url says where to ask"
    # At once, so that one that does not answer does not delay the other.
    queue, (dispatcher, problem) = await asyncio.gather(
        _queue(place, guides=guides), running(address) if address else _known(unknown)
    )
    return {
        "queue": place.names.queue if place.names else None,
        **queue,
        "dispatcher": dispatcher,
        "dispatcher_problem": problem,
        "config_problems": [str(each) for each in place.problems],
    }


# gather() needs a coroutine, even if there is no dispatcher to ask.
async def _known(value: tuple[None, str]) -> tuple[None, str]:
    return value


async def _queue(place: Located, *, guides: bool) -> Told:
    told: Told = {**dict.fromkeys(render.COUNTS), "paused": None, "queue_problem": None}
    url = place.queue_url()
    if place.names is None:
        return {**told, "queue_problem": "the configuration does not tell which queue it is"}
    if url is None:
        return {**told, "queue_problem": place.absent}
    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.queue_admin import RedisDesk

    try:
        desk = RedisDesk(connect(url), place.names)
    except QueueUrlError as error:
        raise fail(str(error), 2) from error
    try:
        counts, paused = await desk.counts(), await desk.paused()
        if guides and place.guessed:
            await warn_of_others(desk)
    except QueueUnavailableError as error:
        return {**told, "queue_problem": str(error)}
    finally:
        await desk.aclose()
    switch = None if paused is None else {"by": paused[0], "why": paused[1]}
    return told | {name: getattr(counts, name) for name in render.COUNTS} | {"paused": switch}


def meant(where: DispatcherOptions) -> tuple[Located, AdminAddress | None]:
    """Return the location of the queue and the address of the dispatcher.

    Exits with 2 if nothing is named.
    """
    place = locate(where.config, where.queue_url, where.queue, where.pool)
    try:
        return place, address_of(place.admin, where.admin_url)
    except ValueError as error:
        raise fail(f"--admin-url: {error}", 2) from error


def _lines(shown: Told, place: Located) -> list[str]:
    if shown["queue_problem"] and not shown["dispatcher"] and (place.admin is None or not place.queue_url()):
        return []  # the problem of the queue, printed separately, says everything
    return render.lines(shown)


def _complain_of_queue(shown: Told) -> None:
    if problem := shown["queue_problem"]:
        complain(f"{shown['queue']}: {problem}" if shown["queue"] and shown["dispatcher"] else problem)


def _watch(place: Located, address: AdminAddress | None, *, json_output: bool) -> None:
    """Show the status repeatedly: in place on a terminal, otherwise a line with the time every second."""
    if sys.stdout.isatty() and not json_output:
        from dispatcher.cli.live_screen import refresh

        def now() -> list[str]:
            shown = asyncio.run(look(place, address))
            problem = [shown["queue_problem"]] if shown["queue_problem"] else []
            return [f"{time.strftime('%H:%M:%S')}  (Ctrl-C ends it)", "", *render.lines(shown), *problem]

        refresh(lambda _: now(), EACH_S)
        return
    repeat(place, address, json_output=json_output)


def repeat(place: Located, address: AdminAddress | None, *, json_output: bool) -> None:
    """Print a line every second, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            shown = asyncio.run(look(place, address))
            if json_output:
                answer({"at": round(time.time(), 3), **shown})
            else:
                say(f"{time.strftime('%H:%M:%S')}  {render.line(shown)}")
            time.sleep(EACH_S)


def _wait(place: Located, address: AdminAddress | None, for_s: float) -> None:
    if address is None:
        raise fail("--wait: neither --config nor --admin-url says where a dispatcher is", 2)
    until = time.monotonic() + for_s
    while True:
        why = asyncio.run(_not_ready(place, address))
        if why is None:
            return
        if time.monotonic() >= until:
            raise fail(f"not ready after {for_s:g} s: {why}")
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


async def _not_ready(place: Located, address: AdminAddress) -> str | None:
    if (why := await ready(address)) is not None:
        return why
    found, problem = await running(address)
    if found is None:
        return problem
    # Another dispatcher may listen on that port.
    if place.names and found["queue"] != place.names.queue:
        return f"the dispatcher that answers works on another queue, {found['queue']}"
    return None
