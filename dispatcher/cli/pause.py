"""`batch-dispatcher pause` and `resume`: close and open the gate of all replicas by hand."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, find_queue, run_with_admin
from dispatcher.cli.terminal import print_json, print_lines, print_note
from dispatcher.limit.health import describe_pause

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {
    "pause": [
        "batch-dispatcher pause --why 'upgrade of the pool'",
        "batch-dispatcher pause --queue-url redis://127.0.0.1 --pool qwen",
    ],
    "resume": ["batch-dispatcher resume"],
}
OperatorName = Annotated[
    str, typer.Option("--by", metavar="NAME", help="Name of the operator. Default: user and host name.")
]


def pause(
    where: QueueOptions,
    why: Annotated[
        str, typer.Option(help="Reason, which is shown when somebody asks why nothing is sent.")
    ] = "",
    operator: OperatorName = "",
    json_output: Json = False,
) -> None:
    """Stop all dispatchers of the queue from sending new requests, until `resume`.

    Requests that run go on. An invalid configuration will do if it names the queue.
    """
    target = find_queue(where)
    operator_name = get_operator_name(operator)

    async def pause_queue(admin: RedisQueueAdmin) -> tuple[str, str] | None:
        before = await admin.read_pause()
        await admin.pause(operator_name, why)
        return before

    before = run_with_admin(target, pause_queue)
    # The new name and reason replace the old ones, so print those once more.
    if before is not None and before != (operator_name, why):
        print_note(f"{describe_pause(*before)}; from now on, the new name and reason are shown")
    if json_output:
        print_json({"queue": target.names.queue, "paused": {"by": operator_name, "why": why}})
    else:
        print_lines(f"{target.names.queue} is paused; go on with: batch-dispatcher resume")


def get_operator_name(given_name: str) -> str:
    """Return the name of the operator: the given name, or else user and host name."""
    return given_name or f"{_get_user_name()}@{socket.gethostname()}"


def _get_user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose uid has no name
        return str(os.getuid())


def resume(where: QueueOptions, json_output: Json = False) -> None:
    """Let the dispatchers send again."""
    target = find_queue(where)
    run_with_admin(target, lambda desk: desk.resume())
    if json_output:
        print_json({"queue": target.names.queue, "paused": None})
    else:
        print_lines(f"{target.names.queue}: the dispatchers may send")
