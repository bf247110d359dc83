"""`batch-dispatcher streams show|forget`: state of named streams of the Python client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, ask, find
from dispatcher.cli.terminal import answer, complain, fail, say, table
from dispatcher.core.duration import until

if TYPE_CHECKING:
    from dispatcher.core.requests.named_stream import StreamRequest, StreamStatus
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "streams show": [
        "batch-dispatcher streams show nightly",
        "batch-dispatcher streams show nightly --consumed",
    ],
    "streams forget": ["batch-dispatcher streams forget nightly"],
}
streams = typer.Typer(add_completion=False, no_args_is_help=True, help="Named streams of the Python client.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.")]


@streams.command()
def show(
    name: Name,
    consumed: Annotated[bool, typer.Option("--consumed", help="List the consumed requests instead.")] = False,
    most: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most requests to show.")
    ] = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Show how many requests a stream has submitted, and list those that are not consumed, in no order.

    A request is `pending` while it is in the queue or runs, and `answered` when its result waits for the
    program. Exit code 1: the stream is not known (any more).
    """
    _check(name)
    target = find(where)
    status, requests = ask(target, lambda desk: _read(desk, name, most, consumed=consumed))
    if not (status.unconsumed or status.consumed or status.kept):
        raise fail(f"{name}: nothing is noted of a stream of this name in {target.names.queue}")
    if json_output:
        listed = [{"id": each.id, "state": str(each.state), "deadline": each.deadline} for each in requests]
        counts = {"unconsumed": status.unconsumed, "consumed": status.consumed, "kept": status.kept}
        answer({"name": name, **counts, "requests": listed})
        return
    say(
        f"{name}: {status.unconsumed:,} submitted and not consumed, {status.kept:,} results kept, "
        f"{status.consumed:,} consumed"
    )
    if requests:
        rows = [[each.id, str(each.state), _due(each)] for each in requests]
        say(*table(["ID", "STATE", "DEADLINE"], rows))
    total = status.consumed if consumed else status.unconsumed
    if len(requests) < total:
        complain(f"{len(requests):,} of {total:,}; --most shows more", fg=None)


@streams.command()
def forget(name: Name, where: QueueOptions, json_output: Json = False) -> None:
    """Reset a stream: cancel its pending requests, and remove its results and all its records.

    Exit code 1: the stream is not known, or a program runs it.
    """
    _check(name)
    target = find(where)

    async def act(desk: RedisDesk) -> bool:
        from dispatcher.client import BatchClient, NameInUseError

        status, _ = await _read(desk, name, 1, consumed=False)
        if not (status.unconsumed or status.consumed or status.kept):
            return False
        # retry_for=0: fail instead of waiting until the queue is back.
        async with BatchClient(
            target.url, queue=target.names.queue, results=target.names.results, retry_for=0
        ) as client:
            try:
                await client.forget_stream(name)
            except NameInUseError as error:
                raise fail(f"{name} is not forgotten: {error}") from error
        return True

    if not ask(target, act):
        raise fail(f"{name}: nothing is noted of a stream of this name in {target.names.queue}")
    if json_output:
        answer({"name": name, "forgotten": True})
    else:
        say(f"{name} is forgotten")


def _check(name: str) -> None:
    """Exit with 2 if the name is invalid for a stream."""
    from dispatcher.client.mailbox import check_name

    try:
        check_name(name)
    except ValueError as error:
        raise fail(str(error), 2) from error


async def _read(
    desk: RedisDesk, name: str, most: int, *, consumed: bool
) -> tuple[StreamStatus, list[StreamRequest]]:
    """Return the newest counts and up to `max_count` requests, each once."""
    from dispatcher.queue.redis.streams import status

    found: dict[str, StreamRequest] = {}
    after = ""
    while True:
        page = await status(desk.backend, name, after, consumed=consumed)
        # By id, because the walk may return a request twice.
        found |= {each.id: each for each in page.requests}
        if len(found) >= most or not (after := page.after):
            return page, list(found.values())[:most]


def _due(one: StreamRequest) -> str:
    return "-" if one.deadline is None else until(one.deadline, time.time())
