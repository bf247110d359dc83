"""`batch-dispatcher cancel`: cancel requests by id or by label, or a whole sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, Labels, QueueOptions, QueueTarget, ask, find, pairs_of
from dispatcher.cli.find_requests import by_id, labelled, matching, unserved
from dispatcher.cli.terminal import complain, fail, say, warn
from dispatcher.core.requests.found_request import Whereabouts

if TYPE_CHECKING:
    from dispatcher.core.requests.found_request import FoundRequest
    from dispatcher.core.requests.request import Rejection, Request
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "cancel": [
        "batch-dispatcher cancel r-1 r-2",
        "batch-dispatcher cancel --label job=nightly",
        "batch-dispatcher cancel --sequence chat-7",
    ]
}
_CANCELLED = "cancelled"
_GONE = "neither in line nor running: it has ended, or the id is of another queue"


def cancel(
    request_ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID...", help="The requests' ids.")
    ] = None,
    label: Labels = None,
    sequence: Annotated[
        str, typer.Option("--sequence", metavar="ID", help="All that was submitted of this sequence.")
    ] = "",
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Cancel requests or a sequence. The result is CANCELLED; connections in flight are closed.

    A cancelled sequence ends, together with all requests that were submitted for it until now, whether a
    dispatcher has claimed them or not. Requests that are submitted later start it again. Exit code 1 if a
    request or the sequence has ended, is not known or was submitted without a token, if no request has the
    label, or if the queue is empty.
    """
    labels = pairs_of("--label", label)
    if [bool(request_ids), bool(labels), bool(sequence)].count(True) != 1:
        raise fail("give ids, or --label name=value, or --sequence ID", 2)
    target = find(where)
    if sequence:
        _cancel_sequence(target, sequence, as_json=json_output)
        return

    async def act(desk: RedisDesk) -> tuple[dict[str, str], str]:
        return await _cancel(desk, request_ids or (), labels), await unserved(desk)

    told, nobody = ask(target, act)
    done = [each for each, what in told.items() if what == _CANCELLED]
    if json_output:
        typer.echo(
            json.dumps(
                {"cancelled": done, "not_cancelled": {k: v for k, v in told.items() if v != _CANCELLED}}
            )
        )
    elif labels and not told:
        complain(f"no request in {target.names.queue} has {' and '.join(label or ())}")
    elif labels:
        say(f"{len(done)} {'is' if len(done) == 1 else 'are'} being cancelled")
    else:
        say(*(f"{each} is being cancelled" for each in done))
    if not json_output:
        complain(*(f"{each}: {what}" for each, what in told.items() if what != _CANCELLED))
    # The cancel marker is only acted on by a dispatcher; without one the requests stay where they are.
    if done and nobody:
        warn(f"their results come when a dispatcher works on the queue: {nobody}")
    if len(done) < len(told) or not done:
        raise typer.Exit(1)


async def _cancel(
    desk: RedisDesk, request_ids: Sequence[str], labels: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Cancel requests. Return for each id `cancelled`, or why the request was not cancelled."""
    if not labels:
        # dict.fromkeys: an id that was given twice is cancelled once, in the order given.
        return {each: await _by_id(desk, each) for each in dict.fromkeys(request_ids)}
    told = {}
    async for found, read in matching(desk, *labelled(labels)):
        if found.state is not Whereabouts.DEAD and read.id:
            told[read.id] = await _found(desk, found, read)
    return told


def _cancel_sequence(target: QueueTarget, sequence: str, *, as_json: bool) -> None:
    async def act(desk: RedisDesk) -> int | None:
        seen = await desk.sequence(sequence)
        if await desk.cancel_sequence(sequence) and seen is not None:
            return seen.waiting + (seen.head is not None)
        # Unclaimed requests may still belong to the sequence: the queue learns it when they are claimed.
        counts = await desk.counts()
        return 0 if counts.pending or counts.leased or counts.delayed else None

    count = ask(target, act)
    if as_json:
        told = {"sequence": sequence, "cancelled": count is not None, "requests": count or 0}
        typer.echo(json.dumps(told))
    elif count is None:
        complain(f"{sequence}: nothing waits in {target.names.queue}")
    else:
        say(f"{sequence} is being cancelled, with {count:,} {'request' if count == 1 else 'requests'} so far")
        complain("what of it waits to be claimed is cancelled as well, when a dispatcher claims it", fg=None)
    if count is None:
        raise typer.Exit(1)


async def _by_id(desk: RedisDesk, request_id: str) -> str:
    """Cancel a request. Return `cancelled`, or why it was not cancelled."""
    if await desk.cancel(request_id):
        return _CANCELLED
    # No request is marked as active under this id: search the queue, and cancel by the token of what is
    # found.
    there = [each for each in (await by_id(desk, request_id))[0] if each[0].state is not Whereabouts.DEAD]
    told = [await _found(desk, *each) for each in there]
    return next((what for what in told if what != _CANCELLED), _CANCELLED) if told else _GONE


async def _found(desk: RedisDesk, found: FoundRequest, read: Request | Rejection) -> str:
    """Cancel a request that was found in the queue, no matter which client submitted it."""
    if not read.token:
        return f"is {found.state}, and carries no token: it cannot be cancelled"
    return _CANCELLED if await desk.cancel(read.id or "", read.token, found=True) else _GONE
