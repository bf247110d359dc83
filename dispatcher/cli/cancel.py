"""`batch-dispatcher cancel`."""

from __future__ import annotations

from typing import Annotated

import typer

from dispatcher.cli.screen import complain, say
from dispatcher.cli.target import Config, QueueName, QueueUrl, ask, find


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
) -> None:
    """Cancel a request: its result is CANCELLED; in flight its connection is closed.

    Exit code 1: it has ended, is not known, or was submitted without a token.
    """
    target = find(config, queue_url, queue)
    if not ask(target, lambda desk: desk.cancel(request_id)):
        complain(f"{request_id}: not active")
        raise typer.Exit(1)
    say(f"{request_id} is being cancelled")
