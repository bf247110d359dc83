"""Queue and dispatcher of a verb, named by options, by the environment, or by a file in a usual place.

    --config FILE, else $BATCH_DISPATCHER_CONFIG, else ./config.yaml,
    else $XDG_CONFIG_HOME/batch-dispatcher/config.yaml, else the settings in the environment alone

--queue-url (or $BATCH_DISPATCHER_QUEUE_URL) names a queue by itself: no configuration file is looked for
then.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dispatcher.cli.terminal import complain, fail, warn
from dispatcher.core.duration import seconds_of
from dispatcher.queue.embedded import running_url
from dispatcher.queue.keys import Names, QueueNameError, usual_pool_of
from dispatcher.settings import AdminSettings, Problem, Settings, load, load_client
from dispatcher.settings.yaml_source import PREFIX

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk

T = TypeVar("T")

CONFIG = "BATCH_DISPATCHER_CONFIG"
QUEUE_URL = "BATCH_DISPATCHER_QUEUE_URL"
POOL = "BATCH_DISPATCHER_POOL"

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help=f"The configuration file. Default: ${CONFIG}, ./config.yaml, config.yaml in "
        "~/.config/batch-dispatcher, or the environment alone.",
        show_default=False,
    ),
]
QueueUrl = Annotated[
    str,
    typer.Option(
        "--queue-url",
        metavar="URL",
        help=f"URL of the queue (redis://…), instead of a file. Default: ${QUEUE_URL}.",
        show_default=False,
    ),
]
PoolName = Annotated[
    str,
    typer.Option(
        "--pool",
        metavar="NAME",
        help=f"Pool of the queue. Default: ${POOL}, or the pool of the configuration, or else `default`.",
        show_default=False,
    ),
]
QueueName = Annotated[
    str,
    typer.Option(
        "--queue",
        metavar="KEY",
        help="Key of the queue, if it is not the usual one of its pool.",
        show_default=False,
    ),
]

OTHERS_SHOWN = 8
SECONDS_MOST = 10 * 365 * 86_400
"""Longest deadline in seconds: ten years."""


def _within(written: str | float) -> float:
    """Return the seconds of a duration from the command line. Raises BadParameter if it is invalid.

    Typer also passes the default value here, which is a number.
    """
    try:
        seconds = seconds_of(str(written))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 1 <= seconds <= SECONDS_MOST:
        raise typer.BadParameter(f"{written!r}: give at least 1s and at most 3650d (ten years)")
    return seconds


Within = Annotated[
    float,
    typer.Option(
        "--deadline",
        parser=_within,
        metavar="TIME",
        show_default="1h",
        help="Time from now until the request must be answered: 90s, 30m, 1h30m, 8h, 1d.",
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="A label (internal.labels); may be repeated."),
]
WithinOrNone = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        parser=_within,
        metavar="TIME",
        help="Time from now until the request must be answered: 90s, 30m, 8h, 2d. "
        "Default: an hour; for a file, a day.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Options that select the queue of a verb (see options.py)."""

    config: Config = None
    queue_url: QueueUrl = ""
    queue: QueueName = ""
    pool: PoolName = ""


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """URL and names of a queue that a verb works on."""

    url: str
    names: Names
    settings: Settings | None = None
    """Settings, or `None` if only a URL was given or the configuration has problems."""
    admin: AdminSettings | None = None
    """Admin settings of the dispatcher, or `None` if only a URL was given."""
    guessed: bool = False
    """True if the name of the queue is a default, because only a URL was given."""


@dataclass(frozen=True, slots=True)
class Located:
    """Location of queue and dispatcher, as far as it is known."""

    names: Names | None
    """Names of the queue, or `None` if the configuration cannot be read."""
    url: str = ""
    """URL of the queue. Empty if the queue is embedded, in `data_dir`."""
    data_dir: Path | None = None
    admin: AdminSettings | None = None
    """Admin settings, or `None` if only a URL was given, which does not locate a dispatcher."""
    settings: Settings | None = None
    problems: tuple[Problem, ...] = ()
    """Problems of the configuration. The valid parts of it are used all the same."""
    guessed: bool = False
    """True if the name of the queue is a default, because only a URL was given."""

    def queue_url(self) -> str | None:
        """Return the URL of the queue. `None` if the queue is embedded and its dispatcher does not run."""
        return self.url or (running_url(self.data_dir) if self.data_dir else None)

    @property
    def absent(self) -> str:
        """Message that says why an embedded queue is not available."""
        port = self.admin.port if self.admin else 0
        return (
            f"no dispatcher is running on {self.data_dir} (admin.port {port}): queue.url is empty, so the "
            "queue is only there while one runs: start it with `batch-dispatcher run`, or name a Redis in "
            "queue.url"
        )


def config_path(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the configuration file, or `None` for a configuration from the environment alone.

    Exits with 2 if there is no configuration.
    """
    if given is not None:
        return given
    if named := environ.get(CONFIG):
        return Path(named)
    for path in habits(environ):
        if path.is_file():
            return path
    if any(name.startswith(PREFIX) for name in environ):
        return None
    raise fail(
        f"no configuration: there is no {' and no '.join(map(str, habits(environ)))}. Give --config FILE or "
        f"--queue-url URL, set ${CONFIG}, or write one: batch-dispatcher init",
        2,
    )


def habits(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths where a configuration file is looked for if none is named."""
    home = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path("config.yaml"), Path(home).expanduser() / "batch-dispatcher" / "config.yaml"


def settings_of(config: Path | None) -> Settings:
    """Return the settings of a file, or of the environment alone.

    Prints the problems and exits with 2 if they are invalid.
    """
    found = load(config, os.environ)
    if isinstance(found, Settings):
        return found
    complain(*map(str, found))
    raise typer.Exit(2)


def locate(config: Path | None, url: str, queue: str, pool: str = "") -> Located:
    """Return the location that options, environment or configuration name, even if it has problems.

    Exits with 2 if nothing is named.
    """
    environ = os.environ
    # The environment counts only if no option names a file or a URL.
    if config is None and not url:
        config = Path(environ[CONFIG]) if environ.get(CONFIG) else None
        url = environ.get(QUEUE_URL, "")
    pool = pool or environ.get(POOL, "")
    try:
        if url and config is None:
            # A URL alone is enough: no file is looked for, not even ./config.yaml.
            return Located(_names(queue, pool or "default"), url, guessed=not (queue or pool))
        path = config_path(config, environ)
        found, problems = load_client(path, environ)
        if found is None:
            # The file cannot be read at all. URL and name are enough for the queue, without it.
            names = _names(queue, pool) if url and (queue or pool) else None
            return Located(names, url, admin=AdminSettings(), problems=tuple(problems))
        given = found.queue
        names = Names(given.name, given.results, given.result_lists)
        # Another pool than that of the configuration has other keys than queue.name and queue.results.
        if queue or pool not in ("", found.pool.name):
            names = _names(queue, pool) or names
    except QueueNameError as error:
        raise fail(str(error), 2) from error
    return Located(
        names,
        url or given.url.reveal(),
        Path(given.data_dir).absolute(),
        found.admin,
        found if isinstance(found, Settings) else None,
        tuple(problems),
    )


def _names(queue: str, pool: str) -> Names | None:
    if not queue and not pool:
        return None
    # The braces are the hash tag of Redis Cluster: all keys of a pool share a slot.
    of_pool = f"batch:{{{pool or 'default'}}}"
    name = queue or f"{of_pool}:requests"
    # A queue named by --queue has its results beside it, if its name ends as usual; else those of the pool.
    beside = name.removesuffix(":requests")
    return Names(name, f"{beside if beside != name else of_pool}:results")


def warn_of(place: Located) -> None:
    """Print the problems of a configuration whose valid parts are used all the same."""
    warn(*(f"{problem} (used as far as it goes)" for problem in place.problems))


def find(where: QueueOptions) -> QueueTarget:
    """Return the queue that the options select.

    Otherwise, prints what to do and exits: with 1 if the queue is not available now, else with 2.
    """
    place = locate(where.config, where.queue_url, where.queue, where.pool)
    if place.names is None:
        complain(*map(str, place.problems), "the queue is not known: name it by --queue-url and --pool")
        raise typer.Exit(2)
    warn_of(place)
    found = place.queue_url()
    if found is None:
        raise fail(place.absent)
    return QueueTarget(found, place.names, place.settings, place.admin, place.guessed)


def pairs_of(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """Return the name=value pairs of an option. Exits with 2 if one of them is invalid."""
    pairs = [pair.partition("=") for pair in given or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise fail(f"{option}: give name=value", 2)
    return [(name, value) for name, _, value in pairs]


def ask(target: QueueTarget, act: Callable[[RedisDesk], Awaitable[T]]) -> T:
    """Run an action with the admin interface of the queue, and return its result.

    Prints the error and exits with 1 if the queue cannot be reached, or with 2 if its URL is invalid.
    """
    # The client of Redis is slow to import: it is loaded only when the queue is used.
    import asyncio

    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.queue_admin import RedisDesk

    async def at_desk() -> T:
        desk = RedisDesk(connect(target.url), target.names)
        try:
            if target.guessed:
                await warn_of_others(desk)
            return await act(desk)
        finally:
            await desk.aclose()

    try:
        return asyncio.run(at_desk())
    except QueueUrlError as error:
        raise fail(str(error), 2) from error
    except QueueUnavailableError as error:
        raise fail(str(error)) from error


async def warn_of_others(desk: RedisDesk) -> None:
    """Print which other queues exist if the default queue does not exist."""
    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.redis.survey import KEYS_LOOKED_AT, other_queues

    try:
        found = await other_queues(desk)
    except QueueUnavailableError:
        # The action itself reports that Redis cannot be reached. A user without the right to scan keys gets
        # no suggestion.
        return
    if found is None or not found[0]:
        return
    queues, all_of_them = found
    pools = [usual_pool_of(each) for each in queues]
    told = [
        f"--queue {each}" if pool is None else f"--pool {pool}"
        for each, pool in zip(queues, pools, strict=True)
    ]
    some = ", ".join(told[:OTHERS_SHOWN])
    more = f", and {len(told) - OTHERS_SHOWN} more" if len(told) > OTHERS_SHOWN else ""
    bound = "" if all_of_them else f" (of {KEYS_LOOKED_AT:,} keys; there are more)"
    warn(f"{desk.names.queue} is not there, but others are: name yours by {some}{more}{bound}")
