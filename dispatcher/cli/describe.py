"""`batch-dispatcher describe`: one request, wherever it is stored."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, find_queue, run_with_admin
from dispatcher.cli.dead import find_dead_by_number
from dispatcher.cli.find_requests import (
    MAX_SEARCHED,
    check_being_cancelled,
    describe_gate,
    exclude_dead,
    explain_cancelling,
    explain_obstacle,
    explain_wait,
    find_by_id,
    find_results,
    list_details,
    request_as_json,
    result_as_json,
)
from dispatcher.cli.terminal import print_error, print_json, print_lines
from dispatcher.requests.found_request import FoundRequest, RequestLocation
from dispatcher.requests.request import parse_member
from dispatcher.requests.result import decode_result

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.request import Rejection, Request

EXAMPLES = {"describe": ["batch-dispatcher describe r-1", "batch-dispatcher describe r-1 --json"]}
AllOption = Annotated[bool, typer.Option("--all", help="Read all requests, no matter how many there are.")]
RequestId = Annotated[
    str, typer.Argument(metavar="ID", help="The request's id, or the entry number of a dead request.")
]


def describe(
    request_id: RequestId,
    where: QueueOptions,
    json_output: Json = False,
    everything: AllOption = False,
    full: Annotated[
        bool, typer.Option("--full", help="Show the text of a dead request, too. It may hold secrets.")
    ] = False,
) -> None:
    """Describe one request: its state, its attempts, and why it is not sent yet.

    If the request was answered, the command says so. A request that was submitted by the client of this
    project is found at once. To find another one, up to 200,000 requests are read, or all of them with --all.

    Exit code 1 if the request is not in the part of the queue that was read, and no result has its id.
    """
    target = find_queue(where)
    max_searched = math.inf if everything else MAX_SEARCHED
    description = run_with_admin(
        target, lambda desk: _describe_request(target, desk, request_id, max_searched, full=full)
    )
    if json_output:
        print_json({name: value for name, value in description.items() if name != "lines"})
    else:
        for number, lines in enumerate(description["lines"]):
            print_lines(*([""] if number else []), *lines)
    if not description["requests"] and not description["results"]:
        if not json_output:
            searched = f"{description['searched']:,} requests searched"
            if not description["searched_all"]:
                searched += ", and there are more: --all searches all"
            print_error(
                f"{request_id}: not in {target.names.queue} ({searched}), and "
                "no result under its id; one that went to a list of its producer's is not looked for"
            )
        raise typer.Exit(1)


async def _describe_request(
    target: QueueTarget, admin: RedisQueueAdmin, request_id: str, max_searched: float, *, full: bool
) -> dict[str, Any]:
    encoded_results = await find_results(admin, request_id)
    found_requests, searched = await find_by_id(admin, request_id, max_searched)
    if not found_requests and not encoded_results:
        found_requests = await _find_dead(admin, request_id)
    alive_requests = exclude_dead(found_requests)
    if not alive_requests:  # the request may have ended after the results were read: read them again
        encoded_results = await find_results(admin, request_id, encoded_results)
    gate = await describe_gate(target, admin) if found_requests else ""
    now, requests, lines = time.time(), [], []
    for (found_request, parsed), cancelled in zip(
        found_requests, await check_being_cancelled(admin, found_requests), strict=True
    ):
        ahead = await admin.count_ahead(found_request)
        explanation = explain_wait(
            found_request, parsed, ahead, gate, now, await explain_obstacle(admin, found_request, parsed)
        )
        explanation = explain_cancelling(found_request, explanation) if cancelled else explanation
        fields = request_as_json(found_request, parsed, ahead, is_being_cancelled=cancelled)
        rows = list_details(found_request, parsed, ahead, explanation, is_being_cancelled=cancelled)
        if full:
            fields["member"] = await _read_dead_member(admin, found_request)
            rows += [("text", fields["member"])] if fields["member"] else []
        requests.append({**fields, "why": explanation})
        lines.append([request_id, *(f"  {name:<17} {value}" for name, value in rows)])
    results = [decode_result(encoded) for encoded in encoded_results]
    # A request that is in the queue again keeps its earlier result.
    how, which = ("was answered before", "that") if alive_requests else ("answered", "the")
    for result in results:
        status = (
            f"status {result.status_code}" if result.status_code is not None else "no answer of the gateway"
        )
        slices = f", generated in {result.slices:,} slices" if (result.slices or 1) > 1 else ""
        error = (
            f", {result.error_code}: {result.error_message or ''}".rstrip(": ") if result.error_code else ""
        )
        part = "; a part of the answer was generated" if result.partial else ""
        lines.append(
            [
                f"{request_id}: {how}, {status}{slices}{error}{part}",
                f"  {which} result lies ready: batch-dispatcher result {request_id}",
            ]
        )
    return {
        "id": request_id,
        "queue": target.names.queue,
        "requests": requests,
        "results": [result_as_json(result) for result in results],
        "searched": searched,
        "searched_all": bool(found_requests) or searched < max_searched,
        "lines": lines,
    }


async def _find_dead(admin: RedisQueueAdmin, number: str) -> list[tuple[FoundRequest, Request | Rejection]]:
    """Return the dead request with this entry number. The list is empty if there is none."""
    if (dead_request := await find_dead_by_number(admin, number)) is None:
        return []
    found_request = FoundRequest(
        RequestLocation.DEAD,
        dead_request.member,
        dead_request.score,
        entry=dead_request.entry_id,
        deliveries=dead_request.deliveries,
        attempts=dead_request.failed_attempts,
        refusals=dead_request.refusals,
        at=dead_request.died_at,
        reason=dead_request.reason,
    )
    return [(found_request, parse_member(dead_request.member))]


async def _read_dead_member(admin: RedisQueueAdmin, found_request: FoundRequest) -> str | None:
    """Return the whole text of a dead request, because the text may have caused the failure. `None` for other
    requests."""
    if found_request.location is not RequestLocation.DEAD:
        return None
    dead_request = await find_dead_by_number(admin, str(found_request.entry))
    return None if dead_request is None else dead_request.member.decode(errors="replace")
