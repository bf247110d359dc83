"""`batch-dispatcher pause` and `resume`: the operator's own hand on the gate, for all replicas at once."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Annotated

import typer

from dispatcher.cli.screen import say
from dispatcher.cli.target import Config, QueueName, QueueUrl, ask, find


def pause(
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    why: Annotated[str, typer.Option(help="Shown to everybody who asks why nothing is sent.")] = "",
    by: Annotated[str, typer.Option(help="Default: you, on this machine.")] = "",
) -> None:
    """Have all dispatchers of the queue send nothing new until `resume`. What runs goes on."""
    target = find(config, queue_url, queue)
    who = by or f"{_user()}@{socket.gethostname()}"
    ask(target, lambda desk: desk.pause(who, why))
    say(f"{target.names.queue} is paused")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose uid has no name
        return str(os.getuid())


def resume(config: Config = None, queue_url: QueueUrl = "", queue: QueueName = "") -> None:
    """Let the dispatchers send again."""
    target = find(config, queue_url, queue)
    ask(target, lambda desk: desk.resume())
    say(f"{target.names.queue}: the dispatchers may send")
