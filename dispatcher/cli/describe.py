"""`batch-dispatcher describe`: one request, wherever it is stored."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, ask, find
from dispatcher.cli.find_requests import (
    LOOKED_MOST,
    alive,
    answers_anywhere,
    being_cancelled,
    by_id,
    details,
    gate_of,
    shown,
    shown_result,
    turn_of,
    why,
    why_not_cancelled,
)
from dispatcher.cli.terminal import answer, complain, say
from dispatcher.core.requests.result import decode_result

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {"describe": ["batch-dispatcher describe r-1", "batch-dispatcher describe r-1 --json"]}
All = Annotated[bool, typer.Option("--all", help="Read all requests, no matter how many there are.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The request's id.")]


def describe(request_id: Id, where: QueueOptions, json_output: Json = False, everything: All = False) -> None:
    """Describe one request: its state, its place in the queue, its attempts, and why it is not sent yet.

    If the request was answered, the command says so. A request that was submitted by the client of this
    project is found at once. To find another one, up to 200,000 requests are read, or all of them with --all.

    Exit code 1 if the request is not in the part of the queue that was read, and no result has its id.
    """
    target = find(where)
    most = math.inf if everything else LOOKED_MOST
    told = ask(target, lambda desk: _look(target, desk, request_id, most))
    if json_output:
        answer({name: value for name, value in told.items() if name != "lines"})
    else:
        for at, lines in enumerate(told["lines"]):
            say(*([""] if at else []), *lines)
    if not told["requests"] and not told["results"]:
        if not json_output:
            seen = f"{told['looked_at']:,} requests looked at"
            if not told["looked_at_all"]:
                seen += ", and there are more: --all looks at all"
            complain(
                f"{request_id}: not in {target.names.queue} ({seen}), and "
                "no result under its id; one that went to a list of its producer's is not looked for"
            )
        raise typer.Exit(1)


async def _look(target: QueueTarget, desk: RedisDesk, request_id: str, most: float) -> dict[str, Any]:
    came = await answers_anywhere(desk, request_id)
    found, looked_at = await by_id(desk, request_id, most)
    again = alive(found)
    if not again:  # the request may have ended after the results were read: read them again
        came = await answers_anywhere(desk, request_id, came)
    gate = await gate_of(target, desk) if found else ""
    now, requests, lines = time.time(), [], []
    for (one, read), cancelled in zip(found, await being_cancelled(desk, found), strict=True):
        ahead = await desk.ahead(one)
        sentence = why(one, read, ahead, gate, now, await turn_of(desk, one, read))
        sentence = why_not_cancelled(one, sentence) if cancelled else sentence
        requests.append({**shown(one, read, ahead, cancelled=cancelled), "why": sentence})
        rows = details(one, read, ahead, sentence, cancelled=cancelled)
        lines.append([request_id, *(f"  {name:<17} {value}" for name, value in rows)])
    results = [decode_result(each) for each in came]
    # A request that is in the queue again keeps its earlier result.
    how, ready = ("was answered before", "that") if again else ("answered", "the")
    for result in results:
        status = (
            f"status {result.status_code}" if result.status_code is not None else "no answer of the gateway"
        )
        error = f", {result.error_code}: {result.error_message or ''}" if result.error_code else ""
        lines.append(
            [
                f"{request_id}: {how}, {status}{error}".rstrip(": "),
                f"  {ready} result lies ready: batch-dispatcher result {request_id}",
            ]
        )
    return {
        "id": request_id,
        "queue": target.names.queue,
        "requests": requests,
        "results": [shown_result(result) for result in results],
        "looked_at": looked_at,
        "looked_at_all": bool(found) or looked_at < most,
        "lines": lines,
    }
