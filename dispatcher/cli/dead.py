"""`batch-dispatcher dead list|show|requeue|purge`: requests in the dead-letter set."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, Within, ask, find
from dispatcher.cli.terminal import answer, complain, fail, say, table
from dispatcher.core.duration import seconds_of
from dispatcher.core.requests.request import parse

if TYPE_CHECKING:
    from dispatcher.ports import Dead
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "dead list": ["batch-dispatcher dead list --reason 'out of memory'"],
    "dead show": ["batch-dispatcher dead show r-1"],
    "dead requeue": [
        "batch-dispatcher dead requeue r-1 r-2",
        "batch-dispatcher dead requeue --all --deadline 1d",
    ],
    "dead purge": ["batch-dispatcher dead purge --older 7d --yes"],
}
dead = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Dead requests: requests in the dead-letter set, and why they are there.",
)

Which = Annotated[
    str, typer.Argument(metavar="ID", help="The request's id, or the number that `dead list` shows.")
]
Several = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Ids of requests, or the numbers that `dead list` shows."),
]
Everything = Annotated[bool, typer.Option("--all", help="All dead requests.")]
Because = Annotated[str, typer.Option("--reason", help="Only requests whose reason contains this text.")]
Older = Annotated[
    str, typer.Option("--older", help="Only requests that died longer ago than this: 30m, 2h, 7d.")
]
_PAGE = 500
"""Number of dead requests that are read with one call."""
_NAMED_MOST = 5
"""Number of names in a message about requests that are not dead."""
_DIGITS_MOST = 16
"""Most digits of an entry number. Longer numbers are taken for ids."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """Filter for dead requests. Empty fields match all requests."""

    names: frozenset[str] = frozenset()
    """Numbers of dead requests, or ids. A name is an id if no dead request has that number."""
    reason: str = ""
    older_s: float = 0.0

    async def of(self, desk: RedisDesk, after: int = 0) -> AsyncIterator[Dead]:
        numbered = {name: one for name in self.names if (one := await _numbered(desk, name)) is not None}
        ids = self.names - numbered.keys()
        entries = {one.entry for one in numbered.values()}
        if numbered and not ids:  # numbers alone are found by direct lookups, without reading all requests
            for one in numbered.values():
                if self._fits(one):
                    yield one
            return
        while found := await desk.dead_list(_PAGE, after):
            for one in found:
                named = not self.names or one.entry in entries or parse(one.member).id in ids
                if named and self._fits(one):
                    yield one
            after = found[-1].entry

    def missed(self, found: Mapping[int, str | None]) -> frozenset[str]:
        """Return the names that match none of the selected requests, which are given as ids by number."""
        return self.names - {name for number, id_ in found.items() for name in (str(number), id_)}

    def without(self, found: Mapping[int, str | None]) -> str:
        """Return a message about requests that were named and are not dead. Empty if all were found."""
        if missed := sorted(self.missed(found)):
            more = ", …" if len(missed) > _NAMED_MOST else ""
            return f"not among the dead: {', '.join(missed[:_NAMED_MOST])}{more}"
        if found:
            return ""
        return "no dead request fits" if self.reason or self.older_s else "no dead"

    def _fits(self, one: Dead) -> bool:
        # An empty reason is contained in all reasons, and an age of 0 is reached by all requests.
        return self.reason.lower() in one.reason.lower() and one.died_at <= time.time() - self.older_s


async def _numbered(desk: RedisDesk, name: str) -> Dead | None:
    """Return the dead request with this entry number, or `None` if there is none."""
    if not name.isdecimal() or len(name) > _DIGITS_MOST:
        return None
    # The list begins behind the given number.
    found = await desk.dead_list(1, int(name) - 1)
    return found[0] if found and found[0].entry == int(name) else None


@dead.command("list")
def list_(
    reason: Because = "",
    older: Older = "",
    most: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most requests to show.")
    ] = 100,
    after: Annotated[int, typer.Option(help="Only requests with a higher number.")] = 0,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """List dead requests: number, time, id and reason."""
    choice = _choice(None, reason, older)
    target = find(where)

    async def act(desk: RedisDesk) -> tuple[list[Dead], int]:
        found: list[Dead] = []
        async for one in choice.of(desk, after):
            found.append(one)
            if len(found) == most:
                break
        return found, (await desk.counts()).dead

    found, count = ask(target, act)
    shown = [_shown(one) for one in found]
    if json_output:
        answer(shown)
    elif shown:
        rows = [
            [str(one["entry"]), one["died_at"], one["id"] or "(unreadable)", one["reason"]] for one in shown
        ]
        say(*table(["NUMBER", "DIED", "ID", "REASON"], rows))
    else:
        complain(
            f"{target.names.queue}: none of {count} dead" if count else f"{target.names.queue}: no dead",
            fg=None,
        )
    if not json_output and len(found) == most and count > most:
        complain(f"{most:,} of {count:,}; --most or --after {found[-1].entry} shows more", fg=None)


@dead.command()
def show(which: Which, where: QueueOptions, json_output: Json = False) -> None:
    """Show one dead request in full as JSON, with the results that are stored under its id.

    With --json it is printed on one line. Exit code 1: the request is not dead.
    """
    from dispatcher.cli.find_requests import answers_anywhere, shown_result
    from dispatcher.core.requests.result import decode_result

    async def act(desk: RedisDesk) -> dict[str, Any] | None:
        async for one in _Selection(frozenset({which})).of(desk):
            told = {**_shown(one), "member": one.member.decode(errors="replace")}
            results = await answers_anywhere(desk, told["id"]) if told["id"] else []
            return {**told, "results": [shown_result(decode_result(each)) for each in results]}
        return None

    found = ask(find(where), act)
    if found is None:
        raise fail(f"{which}: not among the dead")
    answer(found, indent=None if json_output else 2)


@dead.command()
def requeue(
    which: Several = None,
    everything: Everything = False,
    reason: Because = "",
    older: Older = "",
    deadline: Within = 3600.0,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Put dead requests back into the queue with a new deadline.

    Each of them already has an error result and may get a second result. If the result list belongs to a
    client that has ended, the result is stored where `result ID` finds it. Exit code 1: some requests could
    not be requeued (an unreadable one stays dead), or no request matches.
    """
    choice = _choice(which, reason, older, everything=everything)
    target = find(where)

    async def act(desk: RedisDesk) -> tuple[int, dict[int, str | None], int]:
        named, moved = {}, 0
        async for one in choice.of(desk):
            read = parse(one.member)
            named[one.entry] = read.id
            # Nobody reads the own list of a client any more; the queue stores the result by id instead.
            moved += desk.names.is_clients_own(read.results)
        return await desk.dead_requeue(list(named), int(time.time() + deadline)), named, moved

    done, named, moved = ask(target, act)
    asked = len(named) + len(choice.missed(named))
    if json_output:
        answer({"requeued": done, "asked": asked, "results_by_id": moved})
    elif done:
        say(f"{done} of {asked} are pending again; a second result may come for each")
        if moved:
            say(f"the clients of {moved} have ended: `batch-dispatcher result ID` finds what comes of them")
    if not json_output:
        refused = len(named) - done
        _say_less(target, choice.without(named), refused, "not accepted: unreadable, or not dead any more")
    if done < asked or not (asked or everything):
        raise typer.Exit(1)


@dead.command()
def purge(
    which: Several = None,
    everything: Everything = False,
    reason: Because = "",
    older: Older = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Delete dead requests for good. Their results stay.

    The command asks first; without a terminal it demands --yes. Exit code 1: a named request is not dead, no
    request matches, or the answer was no.
    """
    choice = _choice(which, reason, older, everything=everything)
    target = find(where)

    async def meant(desk: RedisDesk) -> dict[int, str | None]:
        return {one.entry: parse(one.member).id async for one in choice.of(desk)}

    async def act(desk: RedisDesk) -> tuple[int, int]:
        done = await desk.dead_purge(list(named)) if named else 0
        return done, (await desk.counts()).dead

    # Two steps: the question says how many requests will be deleted, and only those are deleted.
    named = ask(target, meant)
    if named and not yes:
        _confirm(f"Forget {len(named):,} dead requests of {target.names.queue} for good?")
    done, left = ask(target, act)
    asked = len(named) + len(choice.missed(named))
    if json_output:
        answer({"purged": done, "asked": asked, "dead": left})
    else:
        rest = f"{left:,} dead left" if left else "no dead left"
        if done:
            say(f"{done:,} forgotten, {rest}")
        missing = choice.without(named)
        missing = f"{missing}; {rest}" if missing and left and not done else missing
        gone = "gone before: requeued or purged meanwhile, or the call was made twice"
        _say_less(target, missing, len(named) - done, gone)
    # With --all an empty dead-letter set is a success.
    if done < max(1, asked) and not everything:
        raise typer.Exit(1)


def _say_less(target: QueueTarget, missing: str, others: int, why: str) -> None:
    """Print why fewer requests were changed than were selected."""
    less = f"{others:,} {'was' if others == 1 else 'were'} {why}" if others else ""
    complain(*(f"{target.names.queue}: {each}" for each in (missing, less) if each), fg=None)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise fail("this cannot be undone: give --yes", 2)
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def _shown(one: Dead) -> dict[str, Any]:
    return {
        "entry": one.entry,
        "id": parse(one.member).id,
        "reason": one.reason,
        "died_at": datetime.fromtimestamp(one.died_at, UTC).isoformat(timespec="seconds"),
        "deliveries": one.deliveries,
        "attempts": one.attempts,
        "refusals": one.refusals,
    }


def _choice(
    which: list[str] | None, reason: str, older: str, *, everything: bool | None = None
) -> _Selection:
    """Return the selection that the options describe. Exits with 2 if they are contradictory.

    `everything`: value of --all, or `None` if the verb does not require a selection.
    """
    chosen = [bool(which), bool(reason or older), bool(everything)]
    if everything is not None and (sum(chosen) != 1):
        raise fail("give ids or numbers, or --reason or --older, or --all", 2)
    try:
        return _Selection(frozenset(which or ()), reason, seconds_of(older) if older else 0.0)
    except ValueError as error:
        complain(f"--older: {error}")
        raise typer.Exit(2) from error
