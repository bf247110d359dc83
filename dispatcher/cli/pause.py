"""`batch-dispatcher pause` and `resume`: close and open the gate of all replicas by hand."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, ask, find
from dispatcher.cli.terminal import answer, remark, say

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "pause": [
        "batch-dispatcher pause --why 'upgrade of the pool'",
        "batch-dispatcher pause --queue-url redis://127.0.0.1 --pool qwen",
    ],
    "resume": ["batch-dispatcher resume"],
}
By = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Name of the operator. Default: user and host name.")
]


def pause(
    where: QueueOptions,
    why: Annotated[
        str, typer.Option(help="Reason, which is shown when somebody asks why nothing is sent.")
    ] = "",
    by: By = "",
    json_output: Json = False,
) -> None:
    """Stop all dispatchers of the queue from sending new requests, until `resume`. Requests that run go on.

    An invalid configuration will do if it names the queue.
    """
    target = find(where)
    who = who_asks(by)

    async def act(desk: RedisDesk) -> tuple[str, str] | None:
        before = await desk.paused()
        await desk.pause(who, why)
        return before

    before = ask(target, act)
    # The new name and reason replace the old ones, so print those once more.
    if before is not None and before != (who, why):
        remark(
            f"it was paused already{f' by {before[0]}' if before[0] else ''}"
            f"{f': {before[1]}' if before[1] else ''}; that is no longer shown"
        )
    if json_output:
        answer({"queue": target.names.queue, "paused": {"by": who, "why": why}})
    else:
        say(f"{target.names.queue} is paused; go on with: batch-dispatcher resume")


def who_asks(by: str) -> str:
    """Return the name of the operator: the given name, or else user and host name."""
    return by or f"{_user()}@{socket.gethostname()}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose uid has no name
        return str(os.getuid())


def resume(where: QueueOptions, json_output: Json = False) -> None:
    """Let the dispatchers send again."""
    target = find(where)
    ask(target, lambda desk: desk.resume())
    if json_output:
        answer({"queue": target.names.queue, "paused": None})
    else:
        say(f"{target.names.queue}: the dispatchers may send")
