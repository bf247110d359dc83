"""`batch-dispatcher dead requeue|purge`: what becomes of requests in the dead-letter set.

`list --state dead` lists them, and `describe` shows one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Deadline, Json, QueueOptions, QueueTarget, find_queue, run_with_admin
from dispatcher.cli.list_requests import AgeFilter, ReasonFilter, parse_dead_filter
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines
from dispatcher.requests.request import parse_member

if TYPE_CHECKING:
    from dispatcher.queue.admin_contract import DeadRequest
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {
    "dead requeue": [
        "batch-dispatcher dead requeue r-1 r-2",
        "batch-dispatcher dead requeue --all --deadline 1d",
    ],
    "dead purge": ["batch-dispatcher dead purge --older 7d --yes"],
}
dead = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Dead requests: put them back into the queue, or delete them.",
)

DeadNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...", help="Ids of requests, or the entry numbers that `list --state dead --json` shows."
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="All dead requests.")]
_PAGE_SIZE = 500
"""Number of dead requests that are read with one call."""
_MAX_NAMES_SHOWN = 5
"""Number of names in a message about requests that are not dead."""
_MAX_NUMBER_DIGITS = 16
"""Most digits of an entry number. Longer numbers are taken for ids."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """Filter for dead requests. Empty fields match all requests."""

    names: frozenset[str] = frozenset()
    """Numbers of dead requests, or ids. A name is an id if no dead request has that number."""
    is_wanted: Callable[[str, float], bool] | None = None
    """Filter of reason and time of death. `None` if there is none."""

    async def select_dead(self, admin: RedisQueueAdmin) -> AsyncIterator[DeadRequest]:
        numbered = {
            name: dead_request
            for name in self.names
            if (dead_request := await find_dead_by_number(admin, name)) is not None
        }
        ids = self.names - numbered.keys()
        entries = {dead_request.entry_id for dead_request in numbered.values()}
        if numbered and not ids:  # numbers alone are found by direct lookups, without reading all requests
            for dead_request in numbered.values():
                if self._matches_filters(dead_request):
                    yield dead_request
            return
        after = 0
        while page := await admin.list_dead(_PAGE_SIZE, after):
            for dead_request in page:
                is_named = (
                    not self.names
                    or dead_request.entry_id in entries
                    or parse_member(dead_request.member).id in ids
                )
                if is_named and self._matches_filters(dead_request):
                    yield dead_request
            after = page[-1].entry_id

    def find_missing_names(self, selected: Mapping[int, str | None]) -> frozenset[str]:
        """Return the names that match none of the selected requests, which are given as ids by number."""
        return self.names - {name for number, id_ in selected.items() for name in (str(number), id_)}

    def explain_missing(self, selected: Mapping[int, str | None]) -> str:
        """Return a message about requests that were named and are not dead. Empty if all were found."""
        if missing := sorted(self.find_missing_names(selected)):
            more = ", …" if len(missing) > _MAX_NAMES_SHOWN else ""
            return f"not among the dead: {', '.join(missing[:_MAX_NAMES_SHOWN])}{more}"
        if selected:
            return ""
        return "no dead request fits" if self.is_wanted else "no dead"

    def _matches_filters(self, dead_request: DeadRequest) -> bool:
        return self.is_wanted is None or self.is_wanted(dead_request.reason, dead_request.died_at)


async def find_dead_by_number(admin: RedisQueueAdmin, name: str) -> DeadRequest | None:
    """Return the dead request with this entry number, or `None` if there is none."""
    if not name.isdecimal() or len(name) > _MAX_NUMBER_DIGITS:
        return None
    # The list begins behind the given number.
    page = await admin.list_dead(1, int(name) - 1)
    return page[0] if page and page[0].entry_id == int(name) else None


@dead.command()
def requeue(
    which: DeadNames = None,
    everything: AllOption = False,
    reason: ReasonFilter = "",
    older: AgeFilter = "",
    deadline: Deadline = 3600.0,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Put dead requests back into the queue with a new deadline.

    Each of them already has an error result and may get a second result. If the result list belongs to a
    client that has ended, the result is stored where `result ID` finds it. Exit code 1: some requests could
    not be requeued (an unreadable one stays dead), or no request matches.
    """
    selection = _make_selection(which, reason, older, everything=everything)
    target = find_queue(where)

    async def requeue_selected(admin: RedisQueueAdmin) -> tuple[int, dict[int, str | None], int]:
        selected, redirected = {}, 0
        async for dead_request in selection.select_dead(admin):
            parsed = parse_member(dead_request.member)
            selected[dead_request.entry_id] = parsed.id
            # Nobody reads the own list of a client any more; the queue stores the result by id instead.
            redirected += admin.names.is_anonymous_client_list(parsed.results)
        return await admin.requeue_dead(list(selected), int(time.time() + deadline)), selected, redirected

    requeued_count, selected, redirected = run_with_admin(target, requeue_selected)
    asked_count = len(selected) + len(selection.find_missing_names(selected))
    if json_output:
        print_json({"requeued": requeued_count, "asked": asked_count, "results_by_id": redirected})
    elif requeued_count:
        print_lines(f"{requeued_count} of {asked_count} are pending again; a second result may come for each")
        if redirected:
            print_lines(
                f"the clients of {redirected} have ended: `batch-dispatcher result ID` finds what comes "
                "of them"
            )
    if not json_output:
        refused_count = len(selected) - requeued_count
        _print_shortfall(
            target,
            selection.explain_missing(selected),
            refused_count,
            "not accepted: unreadable, or not dead any more",
        )
    if requeued_count < asked_count or not (asked_count or everything):
        raise typer.Exit(1)


@dead.command()
def purge(
    which: DeadNames = None,
    everything: AllOption = False,
    reason: ReasonFilter = "",
    older: AgeFilter = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Delete dead requests for good. Their results stay.

    The command asks first; without a terminal it demands --yes. Exit code 1: a named request is not dead, no
    request matches, or the answer was no.
    """
    selection = _make_selection(which, reason, older, everything=everything)
    target = find_queue(where)

    async def find_selected(admin: RedisQueueAdmin) -> dict[int, str | None]:
        return {
            dead_request.entry_id: parse_member(dead_request.member).id
            async for dead_request in selection.select_dead(admin)
        }

    async def purge_selected(admin: RedisQueueAdmin) -> tuple[int, int]:
        purged_count = await admin.purge_dead(list(selected)) if selected else 0
        return purged_count, (await admin.count_requests()).dead

    # Two steps: the question says how many requests will be deleted, and only those are deleted.
    selected = run_with_admin(target, find_selected)
    if selected and not yes:
        _confirm_purge(f"Forget {len(selected):,} dead requests of {target.names.queue} for good?")
    purged_count, dead_count = run_with_admin(target, purge_selected)
    asked_count = len(selected) + len(selection.find_missing_names(selected))
    if json_output:
        print_json({"purged": purged_count, "asked": asked_count, "dead": dead_count})
    else:
        rest = f"{dead_count:,} dead left" if dead_count else "no dead left"
        if purged_count:
            print_lines(f"{purged_count:,} forgotten, {rest}")
        missing = selection.explain_missing(selected)
        missing = f"{missing}; {rest}" if missing and dead_count and not purged_count else missing
        gone = "gone before: requeued or purged meanwhile, or the call was made twice"
        _print_shortfall(target, missing, len(selected) - purged_count, gone)
    # With --all an empty dead-letter set is a success.
    if purged_count < max(1, asked_count) and not everything:
        raise typer.Exit(1)


def _print_shortfall(target: QueueTarget, missing: str, other_count: int, why: str) -> None:
    """Print why fewer requests were changed than were selected."""
    shortfall = f"{other_count:,} {'was' if other_count == 1 else 'were'} {why}" if other_count else ""
    print_error(*(f"{target.names.queue}: {each}" for each in (missing, shortfall) if each), fg=None)


def _confirm_purge(question: str) -> None:
    if not sys.stdin.isatty():
        raise exit_error("this cannot be undone: give --yes", 2)
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def _make_selection(which: list[str] | None, reason: str, older: str, *, everything: bool) -> _Selection:
    """Return the selection that the options describe. Exits with 2 if they are contradictory."""
    if [bool(which), bool(reason or older), everything].count(True) != 1:
        raise exit_error("give ids or numbers, or --reason or --older, or --all", 2)
    return _Selection(frozenset(which or ()), parse_dead_filter(reason, older))
