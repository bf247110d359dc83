"""`batch-dispatcher run`: run the dispatcher."""

from __future__ import annotations

import os
import traceback
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Annotated, Any

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
    """Send requests from the queue into the idle capacity of the pool.

    It runs until SIGTERM. After SIGTERM running requests finish, and the others return to the queue; after a
    second SIGTERM all return at once. SIGHUP or a change of the file reloads the configuration. Exit code 1:
    a part cannot start; 2: the configuration is invalid.
    """
    import asyncio

    from dispatcher.queue.embedded import EmbeddedError
    from dispatcher.queue.keys import QueueNameError
    from dispatcher.queue.redis.connect import QueueUrlError
    from dispatcher.service.service import serve
    from dispatcher.settings.load import config_directory, config_name, parse_settings, read_config
    from dispatcher.settings.model import Settings
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

    def make_loop() -> AbstractEventLoop:
        loop = uvloop.new_event_loop()
        loop.set_exception_handler(_report_loop_error)
        return loop

    return make_loop


def _report_loop_error(loop: AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that the event loop caught, unless it is only a TLS connection that the peer has closed.

    uvloop writes to such a connection before it notices that it is closed, and reports the RuntimeError as
    "Fatal error on SSL protocol". The user of the connection gets an error of its own.
    """
    error = context.get("exception")
    if not (isinstance(error, RuntimeError) and _is_raised_by_uvloop(error)):
        loop.default_exception_handler(context)


def _is_raised_by_uvloop(error: RuntimeError) -> bool:
    """Return whether the error comes from uvloop itself, and not from a callback that it called."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("uvloop.")
