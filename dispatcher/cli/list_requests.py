"""`batch-dispatcher list`: the requests of a queue by state, or the next ones to be sent."""

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
    iterate_pages,
    match_labels,
    request_as_json,
)
from dispatcher.cli.terminal import (
    exit_error,
    format_table,
    print_error,
    print_json,
    print_lines,
    print_warning,
)
from dispatcher.common.duration import parse_duration
from dispatcher.queue.admin_contract import WAITING_LOCATIONS
from dispatcher.requests.found_request import (
    CLAIMABLE_LOCATIONS,
    FoundRequest,
    RequestLocation,
)
from dispatcher.requests.request import parse_member

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatcher.cli.connection import QueueTarget
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.request import Rejection, Request

    _Row = tuple[FoundRequest, Request | Rejection, bool]
    """A request, its parsed content, and true if it is being cancelled."""

EXAMPLES = {
    "list": [
        "batch-dispatcher list",
        "batch-dispatcher list --next -n 10",
        "batch-dispatcher list --state running",
        "batch-dispatcher list --state dead --reason 'out of memory'",
        "batch-dispatcher list --label job=a",
    ]
}


class ListedState(StrEnum):
    """State of the requests to list, in the words of `status`."""

    PENDING = "pending"
    RUNNING = "running"
    DELAYED = "delayed"
    DEAD = "dead"

    @property
    def states(self) -> tuple[str, ...]:
        match self:
            case ListedState.PENDING:
                return WAITING_LOCATIONS
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
ReasonFilter = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Only dead requests whose reason contains this text.")
]
AgeFilter = Annotated[
    str,
    typer.Option(
        "--older", metavar="TIME", help="Only dead requests that died longer ago than this: 30m, 2h, 7d."
    ),
]


def list(  # noqa: A001 - the verb's name
    state: StateOption = None,
    label: Labels = None,
    reason: ReasonFilter = "",
    older: AgeFilter = "",
    next_first: Annotated[
        bool,
        typer.Option("--next", help="Only requests that can be sent, in order, and what holds them back."),
    ] = False,
    max_count: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most requests per state.")
    ] = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """List requests that run, wait or are dead, or the ones that are sent next.

    Without options: requests that run, that are in the queue, and that wait for a retry. Dead requests are
    listed only with --state dead, or with --reason or --older; `dead requeue` and `dead purge` take the same
    two. With --label, --reason or --older all requests are read, and with --label the list has no order.
    """
    labels = parse_pairs("--label", label)
    is_dead_wanted = parse_dead_filter(reason, older)
    if next_first and (state or labels or is_dead_wanted):
        raise exit_error("--next: give it without --state, --label, --reason and --older", 2)
    if is_dead_wanted and (labels or state not in (None, ListedState.DEAD)):
        raise exit_error(
            "--reason and --older are for dead requests: give no --label and no other --state", 2
        )
    target = find_queue(where)
    if next_first:
        _list_next(target, max_count, as_json=json_output)
        return
    states = [ListedState.RUNNING, ListedState.PENDING, ListedState.DELAYED] if state is None else [state]

    async def read_requests(admin: RedisQueueAdmin) -> tuple[Sequence[FoundRequest], int]:
        if labels:
            return await _find_labelled(admin, labels, states, max_count)
        if is_dead_wanted:
            return await _find_dead(admin, is_dead_wanted, max_count)
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

    async def read_rows(admin: RedisQueueAdmin) -> tuple[Sequence[_Row], int, str]:
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
                request_as_json(found_request, parsed, is_being_cancelled=cancelled)
                for found_request, parsed, cancelled in rows
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


def parse_dead_filter(reason: str, older: str) -> Callable[[str, float], bool] | None:
    """Return a filter of the reason and the time of death of a request. `None` if both options are empty.

    Exits with 2 if the age is invalid.
    """
    if not reason and not older:
        return None
    try:
        min_age_s = parse_duration(older) if older else 0.0
    except ValueError as error:
        raise exit_error(f"--older: {error}", 2) from error
    return lambda why, died_at: reason.lower() in why.lower() and died_at <= time.time() - min_age_s


async def _add_cancel_marks(admin: RedisQueueAdmin, found_requests: Sequence[FoundRequest]) -> Sequence[_Row]:
    rows = [(found_request, parse_member(found_request.member)) for found_request in found_requests]
    are_cancelled = await check_being_cancelled(admin, rows)
    return [(*row, is_cancelled) for row, is_cancelled in zip(rows, are_cancelled, strict=True)]


def _format_row(
    now: float, found_request: FoundRequest, parsed: Request | Rejection, is_being_cancelled: bool
) -> Sequence[str]:
    return [
        _format_id(found_request, parsed),
        str(found_request.location),
        format_deadline(parsed, now),
        format_attempts(found_request),
        format_note(found_request, parsed, now, is_being_cancelled=is_being_cancelled),
    ]


def _format_id(found_request: FoundRequest, parsed: Request | Rejection) -> str:
    # Verbs for dead requests take the entry number of a request that has no id.
    return parsed.id or (f"(unreadable: {found_request.entry})" if found_request.entry else "(unreadable)")


async def _read_first(
    admin: RedisQueueAdmin, states: Sequence[str], max_count: int
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
) -> tuple[Sequence[FoundRequest], int]:
    selected_states = {state for listed_state in listed_states for state in listed_state.states}
    found_requests: Any = []
    total = 0
    async for found_request, _ in find_matching(admin, *match_labels(labels)):
        if found_request.location in selected_states:
            total += 1  # goes on counting behind the limit, to say how many there are
            if len(found_requests) < max_count:
                found_requests.append(found_request)
    return found_requests, total


async def _find_dead(
    admin: RedisQueueAdmin, is_wanted: Callable[[str, float], bool], max_count: int
) -> tuple[Sequence[FoundRequest], int]:
    found_requests: Any = []
    total = 0
    async for page in iterate_pages(lambda after: admin.list_requests(RequestLocation.DEAD, 500, after)):
        for found_request in page.requests:
            if is_wanted(found_request.reason, found_request.at or 0.0):
                total += 1
                if len(found_requests) < max_count:
                    found_requests.append(found_request)
    return found_requests, total


def _list_next(target: QueueTarget, max_count: int, *, as_json: bool) -> None:
    """Show the next requests, in order, and what holds them back."""

    async def read_next(admin: RedisQueueAdmin) -> tuple[Sequence[_Row], int, str]:
        rows = await _add_cancel_marks(admin, await _read_first(admin, CLAIMABLE_LOCATIONS, max_count))
        return rows, (await admin.count_requests()).pending, await describe_gate(target, admin)

    rows, total, gate = run_with_admin(target, read_next)
    if as_json:
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
        _format_id(found_request, parsed),
        "-" if priority is None else str(priority),
        format_deadline(parsed, now),
        format_note(found_request, parsed, now, is_being_cancelled=is_being_cancelled),
    ]
