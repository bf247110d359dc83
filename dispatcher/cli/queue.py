"""`batch-dispatcher queue copy`: copy a queue from one Redis to another, or out of the embedded one."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import (
    Config,
    Json,
    PoolName,
    QueueName,
    QueueTarget,
    locate_queue,
    run_with_admin,
)
from dispatcher.cli.find_requests import iterate_pages
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines
from dispatcher.queue.admin_contract import WAITING_LOCATIONS
from dispatcher.queue.embedded import running_url
from dispatcher.requests.found_request import RequestLocation

if TYPE_CHECKING:
    from dispatcher.queue.keys import QueueNames
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

queue = typer.Typer(add_completion=False, no_args_is_help=True, help="The queue as a whole.")

EXAMPLES = {
    "queue copy": [
        "batch-dispatcher queue copy --from embedded --to redis://redis:6379",
        "batch-dispatcher queue copy --from redis://old --to redis://new --pool qwen",
    ]
}
EMBEDDED = "embedded"
_STATES = (RequestLocation.DEAD, RequestLocation.DELAYED, *reversed(WAITING_LOCATIONS))
_PAGE_SIZE = 256
_REPORT_EVERY = 10_000


# With a callback, Typer keeps `queue` a group even though it has only one verb.
@queue.callback()
def _define_family() -> None:
    """The queue as a whole."""


@queue.command()
def copy(
    source: Annotated[str, typer.Option("--from", metavar="URL|embedded", help="Redis of the requests.")],
    to: Annotated[str, typer.Option("--to", metavar="URL", help="Redis to copy them to.")],
    live: Annotated[bool, typer.Option("--live", help="Copy although the source is not paused.")] = False,
    config: Config = None,
    queue_name: QueueName = "",
    pool: PoolName = "",
    json_output: Json = False,
) -> None:
    """Copy pending, delayed and dead requests into the queue of the same name in another Redis.

    Pause the source first: requests that are sent while they are copied may be done twice. Leased requests
    are not copied. When they have ended, or after an interruption, copy again: within a week each request is
    taken over only once. Results are not copied, and nothing is removed from the source. Exit code 1: the
    source is not paused, or one of the servers cannot be reached.
    """
    url, names = _resolve_source(source, config, queue_name, pool)
    if url.rstrip("/") == to.rstrip("/"):
        raise exit_error("--from and --to are the same", 2)
    outcome = run_with_admin(
        QueueTarget(url, names), lambda desk: copy_requests(desk, QueueTarget(to, names), live=live)
    )
    if outcome is None:
        raise exit_error(
            f"{names.queue} is not paused there: batch-dispatcher pause first "
            "(or --live: what runs meanwhile may be done twice)"
        )
    counts, added, leased = outcome
    if json_output:
        found_counts = {str(state): counts[state] for state in _STATES}
        print_json({"queue": names.queue, "copied": added, "found": found_counts, "left_leased": leased})
        return
    read = ", ".join(f"{counts[state]:,} {state}" for state in _STATES if counts[state]) or "nothing"
    print_lines(f"{names.queue}: read {read}; {added:,} of them were new at {_hide_password(to)}")
    if leased:
        print_error(f"{leased:,} are leased and were left: copy again when they have ended", fg=None)


def _resolve_source(source: str, config: Config, queue_name: str, pool: str) -> tuple[str, QueueNames]:
    """Return the URL of the source and the names of the queue."""
    location = locate_queue(config, "" if source == EMBEDDED else source, queue_name, pool)
    if location.names is None:
        raise exit_error("the queue is not known: name it by --pool or --queue", 2)
    if source != EMBEDDED:
        return source, location.names
    url = running_url(location.data_dir) if location.data_dir else None
    if url is None:
        raise exit_error(
            f"no dispatcher is running on {location.data_dir}: an embedded queue is only there while one "
            "runs; start it, and pause it"
        )
    return url, location.names


async def copy_requests(
    source: RedisQueueAdmin, target: QueueTarget, *, live: bool
) -> tuple[Counter[str], int, int] | None:
    """Copy requests. Return the numbers read by state, the number of new ones, and the number of leased ones.

    Return `None`, without copying, if the source is not paused.

    The source is read twice. The first pass reads each state by rank, which keeps the order of dead requests.
    A request that expires meanwhile shifts the ranks behind it, so some may be missed: the second pass is a
    walk that misses none.
    """
    from dispatcher.queue.redis.connect import connect
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

    counts: Counter[str] = Counter()
    added = 0
    destination = RedisQueueAdmin(connect(target.url), target.names)
    try:
        if await destination.is_on_same_server(source):
            # Two different URLs may lead to one server, where requests that were claimed once would be
            # doubled.
            raise exit_error(
                "--from and --to are the same Redis: all that was tried once would be there twice", 2
            )
        if not live and await source.read_pause() is None:
            return None
        # First, so that clients can go on at the other Redis with what they began.
        await destination.copy_texts(source)
        for state in _STATES:
            list_page = partial(source.list_requests, state, _PAGE_SIZE, full_members=True)
            async for page in iterate_pages(list_page):
                added += await destination.restore_requests(target.names.queue, page.requests)
                before = counts.total()
                counts[state] += len(page.requests)
                if sys.stderr.isatty() and before // _REPORT_EVERY < counts.total() // _REPORT_EVERY:
                    print_error(f"{counts.total():,} read", fg=None)
        async for page in iterate_pages(lambda after: source.search_requests((), after, full_members=True)):
            # Requests of the first pass are not taken over again, so `new` counts those that it missed.
            for state in _STATES:
                missed = [found_request for found_request in page.requests if found_request.location == state]
                new = await destination.restore_requests(target.names.queue, missed) if missed else 0
                counts[state] += new
                added += new
        return counts, added, (await source.count_requests()).leased
    finally:
        await destination.aclose()


def _hide_password(url: str) -> str:
    """Return the URL without user and password."""
    return url.rpartition("@")[2] if "@" in url else url
