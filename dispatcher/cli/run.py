"""`batch-dispatcher run`: the dispatcher itself."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Annotated

import typer

from dispatcher.cli.connection import Config, config_path
from dispatcher.cli.terminal import complain, fail

EXAMPLES = {
    "run": [
        "batch-dispatcher run",
        "batch-dispatcher run --observe        # decide, show and export everything; send nothing",
        "batch-dispatcher run --config /etc/qwen.yaml",
    ]
}


def run(
    config: Config = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Decide, show and export everything; claim nothing.")
    ] = False,
) -> None:
    """Fill the pool's slack from the queue, until SIGTERM.

    SIGTERM lets running requests finish and gives the rest back; a second one gives all back at once. SIGHUP
    or a change of the file reloads the configuration. Exit code 1: a part cannot start; 2: the configuration
    is wrong.
    """
    import asyncio

    from dispatcher.app.service import serve
    from dispatcher.queue.embedded import EmbeddedError
    from dispatcher.queue.keys import QueueNameError
    from dispatcher.queue.redis.connect import QueueUrlError
    from dispatcher.settings import Settings
    from dispatcher.settings.load import directory_of, name_of, parse, read
    from dispatcher.settings.yaml_source import Problem

    path = config_path(config)
    text = read(path)
    if isinstance(text, Problem):
        raise fail(str(text), 2)
    found = parse(text, os.environ, name=name_of(path), directory=directory_of(path))
    if not isinstance(found, Settings):
        complain(*map(str, found))
        raise typer.Exit(2)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(found, text, path, os.environ, observe=observe))
    except (EmbeddedError, QueueNameError, QueueUrlError, OSError) as error:
        raise fail(f"cannot start: {error}") from error


def _loop_factory() -> Callable[[], AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for this platform
        return None
    return uvloop.new_event_loop
