"""`batch-dispatcher cancel`: cancel requests by id or by label."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import (
    Json,
    Labels,
    QueueOptions,
    QueueTarget,
    find_queue,
    parse_pairs,
    run_with_admin,
)
from dispatcher.cli.find_requests import explain_no_dispatcher, find_by_id, find_matching, match_labels
from dispatcher.cli.terminal import exit_error, print_error, print_lines, print_warning
from dispatcher.requests.found_request import RequestLocation

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.found_request import FoundRequest
    from dispatcher.requests.request import Rejection, Request

EXAMPLES = {
    "cancel": [
        "batch-dispatcher cancel r-1 r-2",
        "batch-dispatcher cancel --label job=nightly",
    ]
}
RequestIds = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The requests' ids.")]
_CANCELLED = "cancelled"
_NOT_FOUND = "neither in the queue nor running: it has ended, or the id is of another queue"


def cancel(
    request_ids: RequestIds = None,
    label: Labels = None,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Cancel requests, also those that run. The result is CANCELLED.

    Connections in flight are closed. Exit code 1 if a request has ended, is not known or was submitted
    without a token, if no request has the label, or if the queue is empty.
    """
    labels = parse_pairs("--label", label)
    if bool(request_ids) == bool(labels):
        raise exit_error("give ids, or --label name=value", 2)
    cancel_requests(find_queue(where), request_ids or (), labels, json_output=json_output)


def cancel_requests(
    target: QueueTarget, request_ids: Sequence[str], labels: Sequence[tuple[str, str]], *, json_output: bool
) -> None:
    """Cancel requests by their ids, or by labels if there are any. Exits with 1 if some are not cancelled."""

    async def cancel_at_queue(admin: RedisQueueAdmin) -> tuple[dict[str, str], str]:
        return await _cancel_requests(admin, request_ids, labels), await explain_no_dispatcher(admin)

    outcomes, no_dispatcher = run_with_admin(target, cancel_at_queue)
    cancelled_ids = [request_id for request_id, outcome in outcomes.items() if outcome == _CANCELLED]
    if json_output:
        typer.echo(
            json.dumps(
                {
                    "cancelled": cancelled_ids,
                    "not_cancelled": {k: v for k, v in outcomes.items() if v != _CANCELLED},
                }
            )
        )
    elif labels and not outcomes:
        print_error(f"no request in {target.names.queue} has {' and '.join(map('='.join, labels))}")
    elif labels:
        print_lines(f"{len(cancelled_ids)} {'is' if len(cancelled_ids) == 1 else 'are'} being cancelled")
    else:
        print_lines(*(f"{request_id} is being cancelled" for request_id in cancelled_ids))
    if not json_output:
        print_error(
            *(f"{request_id}: {outcome}" for request_id, outcome in outcomes.items() if outcome != _CANCELLED)
        )
    # The cancel marker is only acted on by a dispatcher; without one the requests stay where they are.
    if cancelled_ids and no_dispatcher:
        print_warning(f"their results come when a dispatcher works on the queue: {no_dispatcher}")
    if len(cancelled_ids) < len(outcomes) or not cancelled_ids:
        raise typer.Exit(1)


async def _cancel_requests(
    admin: RedisQueueAdmin, request_ids: Sequence[str], labels: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Cancel requests. Return for each id `cancelled`, or why the request was not cancelled."""
    if not labels:
        # dict.fromkeys: an id that was given twice is cancelled once, in the order given.
        return {each: await _cancel_by_id(admin, each) for each in dict.fromkeys(request_ids)}
    outcomes = {}
    async for found_request, parsed in find_matching(admin, *match_labels(labels)):
        if found_request.location is not RequestLocation.DEAD and parsed.id:
            outcomes[parsed.id] = await _cancel_found(admin, found_request, parsed)
    return outcomes


async def _cancel_by_id(admin: RedisQueueAdmin, request_id: str) -> str:
    """Cancel a request. Return `cancelled`, or why it was not cancelled."""
    if await admin.cancel_request(request_id):
        return _CANCELLED
    # No request is marked as active under this id: search the queue, and cancel by the token of what is
    # found.
    cancellable = [
        each
        for each in (await find_by_id(admin, request_id))[0]
        if each[0].location is not RequestLocation.DEAD
    ]
    outcomes = [await _cancel_found(admin, *each) for each in cancellable]
    return (
        next((outcome for outcome in outcomes if outcome != _CANCELLED), _CANCELLED)
        if outcomes
        else _NOT_FOUND
    )


async def _cancel_found(
    admin: RedisQueueAdmin, found_request: FoundRequest, parsed: Request | Rejection
) -> str:
    """Cancel a request that was found in the queue, no matter which client submitted it."""
    if not parsed.token:
        return f"is {found_request.location}, and carries no token: it cannot be cancelled"
    return (
        _CANCELLED
        if await admin.cancel_request(parsed.id or "", parsed.token, is_token_known=True)
        else _NOT_FOUND
    )
