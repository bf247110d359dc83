"""`batch-dispatcher streams show|forget`: state of named streams of the Python client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, find_queue, run_with_admin
from dispatcher.cli.terminal import exit_error, format_table, print_error, print_json, print_lines
from dispatcher.common.duration import format_time_until

if TYPE_CHECKING:
    from dispatcher.features.named_streams.state import StreamRequest, StreamStatus
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {
    "streams show": [
        "batch-dispatcher streams show nightly",
        "batch-dispatcher streams show nightly --consumed",
    ],
    "streams forget": ["batch-dispatcher streams forget nightly"],
}
streams = typer.Typer(add_completion=False, no_args_is_help=True, help="Named streams of the Python client.")

StreamName = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.")]


@streams.command()
def show(
    name: StreamName,
    consumed: Annotated[bool, typer.Option("--consumed", help="List the consumed requests instead.")] = False,
    max_count: Annotated[
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
    _check_stream_name(name)
    target = find_queue(where)
    status, requests = run_with_admin(
        target, lambda desk: _read_stream(desk, name, max_count, consumed=consumed)
    )
    if not (status.unconsumed or status.consumed or status.kept):
        raise exit_error(f"{target.names.queue} has no stream of the name {name}")
    if json_output:
        listed = [
            {"id": stream_request.id, "state": str(stream_request.state), "deadline": stream_request.deadline}
            for stream_request in requests
        ]
        counts = {"unconsumed": status.unconsumed, "consumed": status.consumed, "kept": status.kept}
        print_json({"name": name, **counts, "requests": listed})
        return
    print_lines(
        f"{name}: {status.unconsumed:,} submitted and not consumed, {status.kept:,} results kept, "
        f"{status.consumed:,} consumed"
    )
    if requests:
        rows = [
            [stream_request.id, str(stream_request.state), _format_due(stream_request)]
            for stream_request in requests
        ]
        print_lines(*format_table(["ID", "STATE", "DEADLINE"], rows))
    total = status.consumed if consumed else status.unconsumed
    if len(requests) < total:
        print_error(f"{len(requests):,} of {total:,}; --most shows more", fg=None)


@streams.command()
def forget(name: StreamName, where: QueueOptions, json_output: Json = False) -> None:
    """Reset a stream: cancel its pending requests, and remove its results and all its records.

    Exit code 1: the stream is not known, or a program runs it.
    """
    _check_stream_name(name)
    target = find_queue(where)

    async def forget_at_queue(admin: RedisQueueAdmin) -> bool:
        from dispatcher.client import BatchClient, NameInUseError

        status, _ = await _read_stream(admin, name, 1, consumed=False)
        if not (status.unconsumed or status.consumed or status.kept):
            return False
        # retry_for=0: fail instead of waiting until the queue is back.
        async with BatchClient(
            target.url, queue=target.names.queue, results=target.names.result_list, retry_for=0
        ) as client:
            try:
                await client.forget_stream(name)
            except NameInUseError as error:
                raise exit_error(f"{name} is not forgotten: {error}") from error
        return True

    if not run_with_admin(target, forget_at_queue):
        raise exit_error(f"{target.names.queue} has no stream of the name {name}")
    if json_output:
        print_json({"name": name, "forgotten": True})
    else:
        print_lines(f"{name} is forgotten")


def _check_stream_name(name: str) -> None:
    """Exit with 2 if the name is invalid for a stream."""
    from dispatcher.client.mailbox import check_name

    try:
        check_name(name)
    except ValueError as error:
        raise exit_error(str(error), 2) from error


async def _read_stream(
    admin: RedisQueueAdmin, name: str, max_count: int, *, consumed: bool
) -> tuple[StreamStatus, list[StreamRequest]]:
    """Return the newest counts and up to `max_count` requests, each once."""
    from dispatcher.features.named_streams.redis_streams import read_stream_status

    requests_by_id: dict[str, StreamRequest] = {}
    after = ""
    while True:
        page = await read_stream_status(admin.backend, name, after, consumed=consumed)
        # By id, because the walk may return a request twice.
        requests_by_id |= {each.id: each for each in page.requests}
        if len(requests_by_id) >= max_count or not (after := page.after):
            return page, list(requests_by_id.values())[:max_count]


def _format_due(request: StreamRequest) -> str:
    return "-" if request.deadline is None else format_time_until(request.deadline, time.time())
