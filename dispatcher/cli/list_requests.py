"""`batch-dispatcher list` and `peek`: the requests of a queue by state, and the next ones to be sent."""

from __future__ import annotations

import heapq
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.connection import Json, Labels, QueueOptions, find_queue, parse_pairs, run_with_admin
from dispatcher.cli.find_requests import (
    check_being_cancelled,
    describe_gate,
    explain_no_dispatcher,
    find_matching,
    format_attempts,
    format_deadline,
    format_note,
    match_labels,
    request_as_json,
)
from dispatcher.cli.terminal import format_table, print_error, print_json, print_lines, print_warning
from dispatcher.core.requests.found_request import (
    LOCATION_BY_LANE,
    QUEUED_LOCATIONS,
    FoundRequest,
    RequestLocation,
)
from dispatcher.core.requests.lanes import CLOSED_LANES
from dispatcher.core.requests.request import parse_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatcher.core.requests.request import Rejection, Request
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {
    "list": [
        "batch-dispatcher list",
        "batch-dispatcher list --state running",
        "batch-dispatcher list --label job=a",
    ],
    "peek": ["batch-dispatcher peek", "batch-dispatcher peek -n 50 --json"],
}


_CLAIMABLE = tuple(
    place for place in QUEUED_LOCATIONS if place not in {LOCATION_BY_LANE[lane] for lane in CLOSED_LANES}
)
"""States in which a request can be claimed. Requests that wait for their turn or model cannot."""


class ListedState(StrEnum):
    """State of the requests to list, in the words of `status`."""

    PENDING = "pending"
    RUNNING = "running"
    DELAYED = "delayed"
    DEAD = "dead"

    @property
    def states(self) -> tuple[RequestLocation, ...]:
        match self:
            case ListedState.PENDING:
                return QUEUED_LOCATIONS
            case ListedState.RUNNING:
                return (RequestLocation.LEASED,)
            case ListedState.DELAYED:
                return (RequestLocation.DELAYED,)
            case ListedState.DEAD:
                return (RequestLocation.DEAD,)


StateOption = Annotated[
    ListedState | None,
    typer.Option(
        "--state", metavar="STATE", help="pending, running, delayed or dead; default: all but the dead."
    ),
]
MaxCount = Annotated[int, typer.Option("--most", "-n", metavar="N", min=1, help="Most requests per state.")]


def list(  # noqa: A001 - the verb's name
    state: StateOption = None,
    label: Labels = None,
    max_count: MaxCount = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """List requests that run, that are in the queue, that wait for a retry, or that are dead.

    Dead requests are listed only with --state dead. With --label all requests are read, and the list has no
    order.
    """
    labels = parse_pairs("--label", label)
    target = find_queue(where)
    states = [ListedState.RUNNING, ListedState.PENDING, ListedState.DELAYED] if state is None else [state]

    async def read_requests(admin: RedisQueueAdmin) -> tuple[Any, int]:
        if labels:
            return await _find_labelled(admin, labels, states, max_count)
        counts = await admin.count_requests()
        counts_by_state = {
            ListedState.PENDING: counts.pending,
            ListedState.RUNNING: counts.leased,
            ListedState.DELAYED: counts.delayed,
            ListedState.DEAD: counts.dead,
        }
        found_requests = [
            found_request
            for listed_state in states
            for found_request in await _read_first(admin, listed_state.states, max_count)
        ]
        return found_requests, sum(counts_by_state[listed_state] for listed_state in states)

    async def read_rows(admin: RedisQueueAdmin) -> tuple[Any, int, str]:
        found_requests, total = await read_requests(admin)
        return (
            await _add_cancel_marks(admin, found_requests),
            total,
            "" if found_requests else await explain_no_dispatcher(admin),
        )

    rows, total, no_dispatcher = run_with_admin(target, read_rows)
    if json_output:
        print_json(
            [
                request_as_json(found_request, read_requests, is_being_cancelled=cancelled)
                for found_request, read_requests, cancelled in rows
            ]
        )
        return
    now = time.time()
    if rows:
        print_lines(
            *format_table(
                ["ID", "STATE", "DEADLINE", "ATTEMPTS", "NOTE"], [_format_row(now, *row) for row in rows]
            )
        )
    else:
        print_error(f"{target.names.queue}: none", fg=None)
        if no_dispatcher:  # an empty list is misleading if the name of the pool is wrong
            print_warning(no_dispatcher)
    if len(rows) < total:
        print_error(f"{len(rows):,} of {total:,}; --most shows more", fg=None)


async def _add_cancel_marks(
    admin: RedisQueueAdmin, found_requests: Sequence[FoundRequest]
) -> Sequence[tuple[FoundRequest, Request | Rejection, bool]]:
    """Return each request with its parsed content and true if it is being cancelled."""
    rows = [(found_request, parse_member(found_request.member)) for found_request in found_requests]
    are_cancelled = await check_being_cancelled(admin, rows)
    return [(*row, is_cancelled) for row, is_cancelled in zip(rows, are_cancelled, strict=True)]


def _format_row(
    now: float, found_request: FoundRequest, parsed: Request | Rejection, is_being_cancelled: bool
) -> Sequence[str]:
    return [
        parsed.id or "(unreadable)",
        str(found_request.location),
        format_deadline(parsed, now),
        format_attempts(found_request),
        format_note(found_request, now, parsed.sequence, is_being_cancelled=is_being_cancelled),
    ]


async def _read_first(
    admin: RedisQueueAdmin, states: Sequence[RequestLocation], max_count: int
) -> Sequence[FoundRequest]:
    """Return the first requests in these states, in queue order if there are several states."""
    parts = []
    for state in states:
        part: Any = []
        after = ""
        # Each state is read as if it had all the rows; merging takes the first ones.
        while len(part) < max_count:
            page = await admin.list_requests(state, max_count - len(part), after)
            part += page.requests
            if not (after := page.after):
                break
        parts.append(part)
    if len(parts) == 1:
        return parts[0][:max_count]  # type: ignore[no-any-return]
    # All states of the queue are sorted by score, and the score determines the rank.
    merged: Any = heapq.merge(*parts, key=lambda one: one.rank)
    return [one for _, one in zip(range(max_count), merged, strict=False)]


async def _find_labelled(
    admin: RedisQueueAdmin,
    labels: Sequence[tuple[str, str]],
    listed_states: Sequence[ListedState],
    max_count: int,
) -> tuple[Any, int]:
    selected_states = {state for listed_state in listed_states for state in listed_state.states}
    found_requests: Any = []
    total = 0
    async for found_request, _ in find_matching(admin, *match_labels(labels)):
        if found_request.location in selected_states:
            total += 1  # goes on counting behind the limit, to say how many there are
            if len(found_requests) < max_count:
                found_requests.append(found_request)
    return found_requests, total


def peek(max_count: MaxCount = 10, *, where: QueueOptions, json_output: Json = False) -> None:
    """Show the next requests, in order, and what holds them back."""
    target = find_queue(where)

    async def read_next(admin: RedisQueueAdmin) -> tuple[Any, int, str]:
        rows = await _add_cancel_marks(admin, await _read_first(admin, _CLAIMABLE, max_count))
        return rows, (await admin.count_requests()).pending, await describe_gate(target, admin)

    rows, total, gate = run_with_admin(target, read_next)
    if json_output:
        json_rows = [
            request_as_json(found_request, parsed, position, is_being_cancelled=cancelled)
            for position, (found_request, parsed, cancelled) in enumerate(rows)
        ]
        print_json({"gate": gate, "pending": total, "next": json_rows})
        return
    now = time.time()
    print_lines(f"{total:,} wait; the gate: {gate}")
    if rows:
        lines = [[str(position), *_format_next_row(now, *row)] for position, row in enumerate(rows, start=1)]
        print_lines(*format_table(["POSITION", "ID", "PRIORITY", "DEADLINE", "NOTE"], lines))


def _format_next_row(
    now: float, found_request: FoundRequest, parsed: Request | Rejection, is_being_cancelled: bool
) -> Sequence[str]:
    priority = request_as_json(found_request, parsed)["priority"]
    return [
        parsed.id or "(unreadable)",
        "-" if priority is None else str(priority),
        format_deadline(parsed, now),
        format_note(found_request, now, parsed.sequence, is_being_cancelled=is_being_cancelled),
    ]
