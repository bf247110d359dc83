"""Which queue a verb works on: the one of a configuration file, or of a URL alone."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dispatcher.cli.screen import complain
from dispatcher.queue.embedded import running_url
from dispatcher.queue.keys import Names, QueueNameError
from dispatcher.settings import Settings, load

if TYPE_CHECKING:
    from dispatcher.queue.redis.desk import RedisDesk

T = TypeVar("T")

Config = Annotated[Path | None, typer.Option("--config", "-c", help="The configuration file.")]
QueueUrl = Annotated[str, typer.Option("--queue-url", help="redis://… of the queue, instead of a file.")]
QueueName = Annotated[
    str,
    typer.Option("--queue", help="The queue's name, with --queue-url. Default: that of the pool `default`."),
]

SECONDS_MOST = 10 * 365 * 86_400
"""Ten years."""


def _within(seconds: float | None) -> float | None:
    if seconds is not None and not 1 <= seconds <= SECONDS_MOST:
        raise typer.BadParameter(f"give seconds from now, 1 to {SECONDS_MOST} (ten years)")
    return seconds


Within = Annotated[
    float,
    typer.Option("--deadline", callback=_within, help="Seconds from now until it must be answered."),
]
WithinOrNone = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        callback=_within,
        help="Seconds from now until it must be answered. Default: an hour, for a file a day.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class QueueTarget:
    url: str
    names: Names
    settings: Settings | None = None
    """None where only a URL was given."""


def settings_of(config: Path) -> Settings:
    """The settings of a file; prints what is wrong with it and exits with 2."""
    found = load(config, os.environ)
    if isinstance(found, Settings):
        return found
    for problem in found:
        complain(str(problem))
    raise typer.Exit(2)


def find(config: Path | None, url: str, queue: str) -> QueueTarget:
    """The queue that was meant; else say what to do and exit: with 1 where it is not there now, or with 2."""
    if (config is None) == (not url):
        raise _wrong("give either --config or --queue-url")
    try:
        if config is None:
            name = queue or "batch:{default}:requests"
            return QueueTarget(url, Names(name, f"{name.removesuffix(':requests')}:results"))
        settings = settings_of(config)
        names = Names(settings.queue.name, settings.queue.results, settings.queue.result_lists)
    except QueueNameError as error:
        raise _wrong(str(error)) from error
    if settings.queue.url:
        return QueueTarget(settings.queue.url.reveal(), names, settings)
    embedded = running_url(Path(settings.queue.data_dir))
    if embedded is None:
        what = (
            f"no dispatcher is running on {settings.queue.data_dir} (admin.port {settings.admin.port}): "
            "queue.url is empty, so the queue is only there while one runs: start "
            f"`batch-dispatcher run --config {config}`, or name a Redis in queue.url"
        )
        raise _exit(what, 1)
    return QueueTarget(embedded, names, settings)


def ask(target: QueueTarget, act: Callable[[RedisDesk], Awaitable[T]]) -> T:
    """What the act brings, done at the queue's desk; where that cannot be reached, say so and exit with 1."""
    import asyncio

    from dispatcher.ports import QueueUnavailableError
    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.desk import RedisDesk

    async def at_desk() -> T:
        desk = RedisDesk(connect(target.url), target.names)
        try:
            return await act(desk)
        finally:
            await desk.aclose()

    try:
        return asyncio.run(at_desk())
    except QueueUrlError as error:
        raise _wrong(str(error)) from error
    except QueueUnavailableError as error:
        raise _exit(str(error), 1) from error


def _wrong(what: str) -> typer.Exit:
    return _exit(what, 2)


def _exit(what: str, code: int) -> typer.Exit:
    complain(what)
    return typer.Exit(code)
