"""`batch-dispatcher list` and `peek`: the requests of a queue by state, and the next ones to be sent."""

from __future__ import annotations

import heapq
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.connection import Json, Labels, QueueOptions, ask, find, pairs_of
from dispatcher.cli.find_requests import (
    being_cancelled,
    deadline_of,
    gate_of,
    labelled,
    matching,
    note_of,
    shown,
    tries_of,
    unserved,
)
from dispatcher.cli.terminal import answer, complain, say, table, warn
from dispatcher.core.requests.found_request import IN_LINE, OF_LANE, FoundRequest, Whereabouts
from dispatcher.core.requests.lanes import CLOSED
from dispatcher.core.requests.request import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatcher.core.requests.request import Rejection, Request
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "list": [
        "batch-dispatcher list",
        "batch-dispatcher list --state running",
        "batch-dispatcher list --label job=a",
    ],
    "peek": ["batch-dispatcher peek", "batch-dispatcher peek -n 50 --json"],
}


_GO = tuple(place for place in IN_LINE if place not in {OF_LANE[lane] for lane in CLOSED})
"""States in which a request can be claimed. Requests that wait for their turn or model cannot."""


class Shown(StrEnum):
    """State of the requests to list, in the words of `status`."""

    PENDING = "pending"
    RUNNING = "running"
    DELAYED = "delayed"
    DEAD = "dead"

    @property
    def places(self) -> tuple[Whereabouts, ...]:
        match self:
            case Shown.PENDING:
                return IN_LINE
            case Shown.RUNNING:
                return (Whereabouts.LEASED,)
            case Shown.DELAYED:
                return (Whereabouts.DELAYED,)
            case Shown.DEAD:
                return (Whereabouts.DEAD,)


State = Annotated[
    Shown | None,
    typer.Option(
        "--state", metavar="STATE", help="pending, running, delayed or dead; default: all but the dead."
    ),
]
Most = Annotated[int, typer.Option("--most", "-n", metavar="N", min=1, help="Most requests per state.")]


def list(  # noqa: A001 - the verb's name
    state: State = None,
    label: Labels = None,
    most: Most = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """List requests that run, that are in the queue, that wait for a retry, or that are dead.

    Dead requests are listed only with --state dead. With --label all requests are read, and the list has no
    order.
    """
    labels = pairs_of("--label", label)
    target = find(where)
    states = [Shown.RUNNING, Shown.PENDING, Shown.DELAYED] if state is None else [state]

    async def read(desk: RedisDesk) -> tuple[Any, int]:
        if labels:
            return await _labelled(desk, labels, states, most)
        counts = await desk.counts()
        of = {
            Shown.PENDING: counts.pending,
            Shown.RUNNING: counts.leased,
            Shown.DELAYED: counts.delayed,
            Shown.DEAD: counts.dead,
        }
        found = [each for one in states for each in await _first(desk, one.places, most)]
        return found, sum(of[one] for one in states)

    async def act(desk: RedisDesk) -> tuple[Any, int, str]:
        found, total = await read(desk)
        return await _with_marks(desk, found), total, "" if found else await unserved(desk)

    rows, total, nobody = ask(target, act)
    if json_output:
        answer([shown(one, read, cancelled=cancelled) for one, read, cancelled in rows])
        return
    now = time.time()
    if rows:
        say(*table(["ID", "STATE", "DEADLINE", "TRIES", "NOTE"], [_row(now, *row) for row in rows]))
    else:
        complain(f"{target.names.queue}: none", fg=None)
        if nobody:  # an empty list is misleading if the name of the pool is wrong
            warn(nobody)
    if len(rows) < total:
        complain(f"{len(rows):,} of {total:,}; --most shows more", fg=None)


async def _with_marks(
    desk: RedisDesk, found: Sequence[FoundRequest]
) -> Sequence[tuple[FoundRequest, Request | Rejection, bool]]:
    """Return each request with its parsed content and true if it is being cancelled."""
    rows = [(one, parse(one.member)) for one in found]
    marked = await being_cancelled(desk, rows)
    return [(*row, cancelled) for row, cancelled in zip(rows, marked, strict=True)]


def _row(now: float, one: FoundRequest, read: Request | Rejection, cancelled: bool) -> Sequence[str]:
    return [
        read.id or "(unreadable)",
        str(one.state),
        deadline_of(read, now),
        tries_of(one),
        note_of(one, now, read.sequence, cancelled=cancelled),
    ]


async def _first(desk: RedisDesk, places: Sequence[Whereabouts], most: int) -> Sequence[FoundRequest]:
    """Return the first requests in these states, in queue order if there are several states."""
    parts = []
    for place in places:
        part: Any = []
        after = ""
        # Each state is read as if it had all the rows; merging takes the first ones.
        while len(part) < most:
            page = await desk.lying(place, most - len(part), after)
            part += page.found
            if not (after := page.after):
                break
        parts.append(part)
    if len(parts) == 1:
        return parts[0][:most]  # type: ignore[no-any-return]
    # All states of the queue are sorted by score.
    merged: Any = heapq.merge(*parts, key=lambda one: one.score)
    return [one for _, one in zip(range(most), merged, strict=False)]


async def _labelled(
    desk: RedisDesk, labels: Sequence[tuple[str, str]], states: Sequence[Shown], most: int
) -> tuple[Any, int]:
    wanted = {place for state in states for place in state.places}
    found: Any = []
    total = 0
    async for one, _ in matching(desk, *labelled(labels)):
        if one.state in wanted:
            total += 1  # goes on counting behind the limit, to say how many there are
            if len(found) < most:
                found.append(one)
    return found, total


def peek(most: Most = 10, *, where: QueueOptions, json_output: Json = False) -> None:
    """Show the next requests, in order, and what holds them back."""
    target = find(where)

    async def act(desk: RedisDesk) -> tuple[Any, int, str]:
        rows = await _with_marks(desk, await _first(desk, _GO, most))
        return rows, (await desk.counts()).pending, await gate_of(target, desk)

    rows, total, gate = ask(target, act)
    if json_output:
        told = [shown(one, read, at, cancelled=cancelled) for at, (one, read, cancelled) in enumerate(rows)]
        answer({"gate": gate, "pending": total, "next": told})
        return
    now = time.time()
    say(f"{total:,} wait; the gate: {gate}")
    if rows:
        lines = [[str(at), *_next(now, *row)] for at, row in enumerate(rows, start=1)]
        say(*table(["PLACE", "ID", "PRIORITY", "DEADLINE", "NOTE"], lines))


def _next(now: float, one: FoundRequest, read: Request | Rejection, cancelled: bool) -> Sequence[str]:
    priority = shown(one, read)["priority"]
    return [
        read.id or "(unreadable)",
        "-" if priority is None else str(priority),
        deadline_of(read, now),
        note_of(one, now, read.sequence, cancelled=cancelled),
    ]
