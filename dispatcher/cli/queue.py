"""`batch-dispatcher queue copy`: copy a queue from one Redis to another, or out of the embedded one."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Config, Json, PoolName, QueueName, QueueTarget, ask, locate
from dispatcher.cli.find_requests import each
from dispatcher.cli.terminal import answer, complain, fail, say
from dispatcher.core.requests.found_request import IN_LINE, Whereabouts
from dispatcher.queue.embedded import running_url

if TYPE_CHECKING:
    from dispatcher.queue.keys import Names
    from dispatcher.queue.redis.queue_admin import RedisDesk

queue = typer.Typer(add_completion=False, no_args_is_help=True, help="The queue as a whole.")

EXAMPLES = {
    "queue copy": [
        "batch-dispatcher queue copy --from embedded --to redis://redis:6379",
        "batch-dispatcher queue copy --from redis://old --to redis://new --pool qwen",
    ]
}
EMBEDDED = "embedded"
_PLACES = (Whereabouts.DEAD, Whereabouts.DELAYED, *reversed(IN_LINE))
_PAGE = 256
_TELL_EACH = 10_000


# With a callback, Typer keeps `queue` a group even though it has only one verb.
@queue.callback()
def _family() -> None:
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
    url, names = _source(source, config, queue_name, pool)
    if url.rstrip("/") == to.rstrip("/"):
        raise fail("--from and --to are the same", 2)
    found = ask(QueueTarget(url, names), lambda desk: copy_requests(desk, QueueTarget(to, names), live=live))
    if found is None:
        raise fail(
            f"{names.queue} is not paused there: batch-dispatcher pause first "
            "(or --live: what runs meanwhile may be done twice)"
        )
    counts, added, leased = found
    if json_output:
        told = {str(place): counts[place] for place in _PLACES}
        answer({"queue": names.queue, "copied": added, "read": told, "left_leased": leased})
        return
    read = ", ".join(f"{counts[place]:,} {place}" for place in _PLACES if counts[place]) or "nothing"
    say(f"{names.queue}: read {read}; {added:,} of them were new at {_shown(to)}")
    if leased:
        complain(f"{leased:,} are leased and were left: copy again when they have ended", fg=None)


def _source(source: str, config: Config, queue_name: str, pool: str) -> tuple[str, Names]:
    """Return the URL of the source and the names of the queue."""
    place = locate(config, "" if source == EMBEDDED else source, queue_name, pool)
    if place.names is None:
        raise fail("the queue is not known: name it by --pool or --queue", 2)
    if source != EMBEDDED:
        return source, place.names
    url = running_url(place.data_dir) if place.data_dir else None
    if url is None:
        raise fail(
            f"no dispatcher is running on {place.data_dir}: an embedded queue is only there while one runs; "
            "start it, and pause it"
        )
    return url, place.names


async def copy_requests(
    source: RedisDesk, target: QueueTarget, *, live: bool
) -> tuple[Counter[Whereabouts], int, int] | None:
    """Copy requests. Return the numbers read by state, the number of new ones, and the number of leased ones.

    Return `None`, without copying, if the source is not paused.

    The source is read twice. The first pass reads each state by rank, which keeps the order of dead requests.
    A request that expires meanwhile shifts the ranks behind it, so some may be missed: the second pass is a
    walk that misses none.
    """
    from dispatcher.queue.redis.connect import connect
    from dispatcher.queue.redis.queue_admin import RedisDesk

    counts: Counter[Whereabouts] = Counter()
    added = 0
    destination = RedisDesk(connect(target.url), target.names)
    try:
        if await destination.is_where(source):
            # Two different URLs may lead to one server, where requests that were claimed once would be
            # doubled.
            raise fail("--from and --to are the same Redis: all that was tried once would be there twice", 2)
        if not live and await source.paused() is None:
            return None
        # Without the secret, clients could not go on with the sequences that they began.
        await destination.take_over_secret(source)
        for place in _PLACES:
            async for page in each(lambda after: source.lying(place, _PAGE, after, whole=True)):  # noqa: B023
                added += await destination.restore(target.names.queue, page.found)
                before = counts.total()
                counts[place] += len(page.found)
                if sys.stderr.isatty() and before // _TELL_EACH < counts.total() // _TELL_EACH:
                    complain(f"{counts.total():,} read", fg=None)
        async for page in each(lambda after: source.search((), after, whole=True)):
            # Requests of the first pass are not taken over again, so `new` counts those that it missed.
            for place in _PLACES:
                missed = [one for one in page.found if one.state is place]
                new = await destination.restore(target.names.queue, missed) if missed else 0
                counts[place] += new
                added += new
        return counts, added, (await source.counts()).leased
    finally:
        await destination.aclose()


def _shown(url: str) -> str:
    """Return the URL without user and password."""
    return url.rpartition("@")[2] if "@" in url else url
