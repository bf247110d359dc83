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

from dispatcher.cli.terminal import exit_error, print_error, print_warning
from dispatcher.common.duration import parse_duration
from dispatcher.queue.embedded import running_url
from dispatcher.queue.keys import QueueNameError, QueueNames, parse_default_pool

# The settings and the client of Redis take long to import, which completion and --help do not need: they are
# imported only when they are used.
if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.settings.model import AdminSettings, Settings
    from dispatcher.settings.yaml_source import Problem

T = TypeVar("T")

CONFIG = "BATCH_DISPATCHER_CONFIG"
QUEUE_URL = "BATCH_DISPATCHER_QUEUE_URL"
POOL_NAME = "BATCH_DISPATCHER_POOL"

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
        help=f"Pool of the queue. Default: ${POOL_NAME}, or the pool of the configuration, or else "
        "`default`.",
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

MAX_QUEUES_SHOWN = 8
MAX_DEADLINE_S = 10 * 365 * 86_400
"""Longest deadline in seconds: ten years."""


def _parse_deadline(written: str | float) -> float:
    """Return the seconds of a duration from the command line. Raises BadParameter if it is invalid.

    Typer also passes the default value here, which is a number.
    """
    try:
        seconds = parse_duration(str(written))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 1 <= seconds <= MAX_DEADLINE_S:
        raise typer.BadParameter(f"{written!r}: give at least 1s and at most 3650d (ten years)")
    return seconds


Deadline = Annotated[
    float,
    typer.Option(
        "--deadline",
        parser=_parse_deadline,
        metavar="TIME",
        show_default="1h",
        help="Time from now until the request must be answered: 90s, 30m, 1h30m, 8h, 1d.",
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="NAME=VALUE", help="A label (internal.labels); may be repeated."),
]
DeadlineOrNone = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        parser=_parse_deadline,
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
    names: QueueNames
    settings: Settings | None = None
    """Settings, or `None` if only a URL was given or the configuration has problems."""
    admin: AdminSettings | None = None
    """Admin settings of the dispatcher, or `None` if only a URL was given."""
    is_guessed: bool = False
    """True if the name of the queue is a default, because only a URL was given."""


@dataclass(frozen=True, slots=True)
class QueueLocation:
    """Location of queue and dispatcher, as far as it is known."""

    names: QueueNames | None
    """Names of the queue, or `None` if the configuration cannot be read."""
    url: str = ""
    """URL of the queue. Empty if the queue is embedded, in `data_dir`."""
    data_dir: Path | None = None
    admin: AdminSettings | None = None
    """Admin settings, or `None` if only a URL was given, which does not locate a dispatcher."""
    settings: Settings | None = None
    problems: tuple[Problem, ...] = ()
    """Problems of the configuration. The valid parts of it are used all the same."""
    is_guessed: bool = False
    """True if the name of the queue is a default, because only a URL was given."""

    def find_queue_url(self) -> str | None:
        """Return the URL of the queue. `None` if the queue is embedded and its dispatcher does not run."""
        return self.url or (running_url(self.data_dir) if self.data_dir else None)

    @property
    def unavailable_reason(self) -> str:
        """Message that says why an embedded queue is not available."""
        port = self.admin.port if self.admin else 0
        return (
            f"no dispatcher is running on {self.data_dir} (admin.port {port}): queue.url is empty, so the "
            "queue is only there while one runs: start it with `batch-dispatcher run`, or name a Redis in "
            "queue.url"
        )


def find_config_path(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the configuration file, or `None` for a configuration from the environment alone.

    Exits with 2 if there is no configuration.
    """
    from dispatcher.settings.yaml_source import ENV_PREFIX

    if given is not None:
        return given
    if path_in_environ := environ.get(CONFIG):
        return Path(path_in_environ)
    for path in list_default_paths(environ):
        if path.is_file():
            return path
    if any(name.startswith(ENV_PREFIX) for name in environ):
        return None
    raise exit_error(
        f"no configuration: there is no {' and no '.join(map(str, list_default_paths(environ)))}. Give "
        "--config FILE or "
        f"--queue-url URL, set ${CONFIG}, or write one: batch-dispatcher init",
        2,
    )


def list_default_paths(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths where a configuration file is looked for if none is named."""
    home = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path("config.yaml"), Path(home).expanduser() / "batch-dispatcher" / "config.yaml"


def locate_queue(config: Path | None, url: str, queue: str, pool: str = "") -> QueueLocation:
    """Return the location that options, environment or configuration name, even if it has problems.

    Exits with 2 if nothing is named.
    """
    from dispatcher.settings.load import load_client_settings
    from dispatcher.settings.model import AdminSettings, Settings

    environ = os.environ
    # The environment counts only if no option names a file or a URL.
    if config is None and not url:
        config = Path(environ[CONFIG]) if environ.get(CONFIG) else None
        url = environ.get(QUEUE_URL, "")
    pool = pool or environ.get(POOL_NAME, "")
    try:
        if url and config is None:
            # A URL alone is enough: no file is looked for, not even ./config.yaml.
            return QueueLocation(_make_names(queue, pool or "default"), url, is_guessed=not (queue or pool))
        path = find_config_path(config, environ)
        settings, problems = load_client_settings(path, environ)
        if settings is None:
            # The file cannot be read at all. URL and name are enough for the queue, without it.
            names = _make_names(queue, pool) if url and (queue or pool) else None
            return QueueLocation(names, url, admin=AdminSettings(), problems=tuple(problems))
        queue_settings = settings.queue
        names = QueueNames(queue_settings.name, queue_settings.results, queue_settings.result_lists)
        # Another pool than that of the configuration has other keys than queue.name and queue.results.
        if queue or pool not in ("", settings.pool.name):
            names = _make_names(queue, pool) or names
    except QueueNameError as error:
        raise exit_error(str(error), 2) from error
    return QueueLocation(
        names,
        url or queue_settings.url.reveal(),
        Path(queue_settings.data_dir).absolute(),
        settings.admin,
        settings if isinstance(settings, Settings) else None,
        tuple(problems),
    )


def _make_names(queue: str, pool: str) -> QueueNames | None:
    if not queue and not pool:
        return None
    # The braces are the hash tag of Redis Cluster: all keys of a pool share a slot.
    pool_prefix = f"batch:{{{pool or 'default'}}}"
    name = queue or f"{pool_prefix}:requests"
    # A queue named by --queue has its results beside it, if its name ends as usual; else those of the pool.
    base = name.removesuffix(":requests")
    return QueueNames(name, f"{base if base != name else pool_prefix}:results")


def print_config_problems(location: QueueLocation) -> None:
    """Print the problems of a configuration whose valid parts are used all the same."""
    print_warning(*(f"{problem} (used as far as it goes)" for problem in location.problems))


def find_queue(where: QueueOptions) -> QueueTarget:
    """Return the queue that the options select.

    Otherwise, prints what to do and exits: with 1 if the queue is not available now, else with 2.
    """
    location = locate_queue(where.config, where.queue_url, where.queue, where.pool)
    if location.names is None:
        print_error(*map(str, location.problems), "the queue is not known: name it by --queue-url and --pool")
        raise typer.Exit(2)
    print_config_problems(location)
    url = location.find_queue_url()
    if url is None:
        raise exit_error(location.unavailable_reason)
    return QueueTarget(url, location.names, location.settings, location.admin, location.is_guessed)


def parse_pairs(option: str, given: list[str] | None) -> list[tuple[str, str]]:
    """Return the name=value pairs of an option. Exits with 2 if one of them is invalid."""
    pairs = [pair.partition("=") for pair in given or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise exit_error(f"{option}: give name=value", 2)
    return [(name, value) for name, _, value in pairs]


def run_with_admin(target: QueueTarget, action: Callable[[RedisQueueAdmin], Awaitable[T]]) -> T:
    """Run an action with the admin interface of the queue, and return its result.

    Prints the error and exits with 1 if the queue cannot be reached, or with 2 if its URL is invalid.
    """
    import asyncio

    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.submission import QueueUnavailableError

    async def run_action() -> T:
        admin = RedisQueueAdmin(connect(target.url), target.names)
        try:
            if target.is_guessed:
                await suggest_other_queues(admin)
            return await action(admin)
        finally:
            await admin.aclose()

    try:
        return asyncio.run(run_action())
    except QueueUrlError as error:
        raise exit_error(str(error), 2) from error
    except QueueUnavailableError as error:
        raise exit_error(str(error)) from error


async def suggest_other_queues(admin: RedisQueueAdmin) -> None:
    """Print which other queues exist if the default queue does not exist."""
    from dispatcher.queue.redis.server_report import MAX_SCANNED_KEYS, find_other_queues
    from dispatcher.requests.submission import QueueUnavailableError

    try:
        survey = await find_other_queues(admin)
    except QueueUnavailableError:
        # The action itself reports that Redis cannot be reached. A user without the right to scan keys gets
        # no suggestion.
        return
    if survey is None or not survey[0]:
        return
    queues, is_complete = survey
    pools = [parse_default_pool(queue) for queue in queues]
    options = [
        f"--queue {queue}" if pool is None else f"--pool {pool}"
        for queue, pool in zip(queues, pools, strict=True)
    ]
    shown_options = ", ".join(options[:MAX_QUEUES_SHOWN])
    more = f", and {len(options) - MAX_QUEUES_SHOWN} more" if len(options) > MAX_QUEUES_SHOWN else ""
    bound = "" if is_complete else f" (of {MAX_SCANNED_KEYS:,} keys; there are more)"
    print_warning(
        f"{admin.names.queue} is not there, but others are: name yours by {shown_options}{more}{bound}"
    )
