"""`batch-dispatcher run`: run the dispatcher."""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Annotated

import typer

from dispatcher.cli.connection import Config, find_config_path
from dispatcher.cli.terminal import exit_error, print_error

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
        bool,
        typer.Option("--observe", help="Observe only: decide, show and export everything; claim no request."),
    ] = False,
) -> None:
    """Send requests from the queue into the free capacity of the pool, until SIGTERM.

    After SIGTERM running requests finish, and the others return to the queue; after a second SIGTERM all
    return at once. SIGHUP or a change of the file reloads the configuration. Exit code 1: a part cannot
    start; 2: the configuration is invalid.
    """
    import asyncio

    from dispatcher.app.service import serve
    from dispatcher.queue.embedded import EmbeddedError
    from dispatcher.queue.keys import QueueNameError
    from dispatcher.queue.redis.connect import QueueUrlError
    from dispatcher.settings import Settings
    from dispatcher.settings.load import config_directory, config_name, parse_settings, read_config
    from dispatcher.settings.yaml_source import Problem

    path = find_config_path(config)
    # The text is kept: a reload compares the file with it.
    text = read_config(path)
    if isinstance(text, Problem):
        raise exit_error(str(text), 2)
    settings = parse_settings(text, os.environ, name=config_name(path), directory=config_directory(path))
    if not isinstance(settings, Settings):
        print_error(*map(str, settings))
        raise typer.Exit(2)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, text, path, os.environ, observe=observe))
    except (EmbeddedError, QueueNameError, QueueUrlError, OSError) as error:
        raise exit_error(f"cannot start: {error}") from error


def _loop_factory() -> Callable[[], AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # uvloop is not available on this platform: use the loop of asyncio
        return None
    return uvloop.new_event_loop
