"""`batch-dispatcher pause` and `resume`: the operator's own hand on the gate, for all replicas at once."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated

import typer

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
    who = by or f"{getpass.getuser()}@{socket.gethostname()}"
    ask(target, lambda desk: desk.pause(who, why))
    typer.echo(f"{target.names.queue} is paused")


def resume(config: Config = None, queue_url: QueueUrl = "", queue: QueueName = "") -> None:
    """Let the dispatchers send again."""
    target = find(config, queue_url, queue)
    ask(target, lambda desk: desk.resume())
    typer.echo(f"{target.names.queue}: the dispatchers may send")
