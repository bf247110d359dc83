"""`batch-dispatcher cancel --sequence`: cancel a whole sequence.

Without `--sequence`, the verb is that of the kernel, which cancels requests by id or by label.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli import cancel as kernel
from dispatcher.cli.connection import (
    Json,
    Labels,
    QueueOptions,
    QueueTarget,
    find_queue,
    parse_pairs,
    run_with_admin,
)
from dispatcher.cli.terminal import exit_error, print_error, print_lines
from dispatcher.features.sequences.queue import open_sequences

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {"cancel": [*kernel.EXAMPLES["cancel"], "batch-dispatcher cancel --sequence chat-7"]}


def cancel(
    request_ids: kernel.RequestIds = None,
    label: Labels = None,
    sequence: Annotated[
        str, typer.Option("--sequence", metavar="ID", help="All that was submitted of this sequence.")
    ] = "",
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Cancel requests or a sequence, also those that run. The result is CANCELLED.

    Connections in flight are closed. A cancelled sequence ends, together with all requests that were
    submitted for it until now, whether a dispatcher has claimed them or not. Requests that are submitted
    later start it again. Exit code 1 if a request or the sequence has ended, is not known or was submitted
    without a token, if no request has the label, or if the queue is empty.
    """
    labels = parse_pairs("--label", label)
    if [bool(request_ids), bool(labels), bool(sequence)].count(True) != 1:
        raise exit_error("give ids, or --label name=value, or --sequence ID", 2)
    target = find_queue(where)
    if sequence:
        _cancel_sequence(target, sequence, as_json=json_output)
    else:
        kernel.cancel_requests(target, request_ids or (), labels, json_output=json_output)


def _cancel_sequence(target: QueueTarget, sequence: str, *, as_json: bool) -> None:
    async def cancel_at_queue(admin: RedisQueueAdmin) -> int | None:
        state = await open_sequences(admin).get_sequence(sequence)
        if await open_sequences(admin).cancel_sequence(sequence) and state is not None:
            return state.waiting_count + (state.next_entry is not None)
        # Unclaimed requests may still belong to the sequence: the queue learns it when they are claimed.
        counts = await admin.count_requests()
        return 0 if counts.pending or counts.leased or counts.delayed else None

    count = run_with_admin(target, cancel_at_queue)
    if as_json:
        summary = {"sequence": sequence, "cancelled": count is not None, "requests": count or 0}
        typer.echo(json.dumps(summary))
    elif count is None:
        print_error(f"{sequence}: nothing waits in {target.names.queue}")
    else:
        print_lines(
            f"{sequence} is being cancelled, with {count:,} {'request' if count == 1 else 'requests'} so far"
        )
        print_error(
            "its requests that are not claimed yet are cancelled when a dispatcher claims them", fg=None
        )
    if count is None:
        raise typer.Exit(1)
