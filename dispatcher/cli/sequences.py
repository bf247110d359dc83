"""`batch-dispatcher sequences list|show|release|abort|forget`: state of sequences, and decisions on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispatcher.cli.connection import Json, QueueOptions, ask, find
from dispatcher.cli.find_requests import time_of
from dispatcher.cli.terminal import answer, complain, fail, say, table
from dispatcher.core.duration import told
from dispatcher.core.sequences.turns import SequenceSeen, SequenceStatus

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "sequences list": ["batch-dispatcher sequences list --status held"],
    "sequences show": ["batch-dispatcher sequences show chat-7"],
    "sequences release": ["batch-dispatcher sequences release chat-7"],
    "sequences abort": ["batch-dispatcher sequences abort chat-7 --why 'wrong model'"],
    "sequences forget": ["batch-dispatcher sequences forget chat-7"],
}
sequences = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Sequences: requests that run in order, one at a time."
)

Id = Annotated[str, typer.Argument(metavar="ID", help="The sequence's id.")]
Status = Literal["open", "parked", "held", "aborted", "ended"]
_PAGE = 500


@sequences.command("list")
def list_(
    status: Annotated[Status | None, typer.Option(help="Only sequences with this status.")] = None,
    most: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most sequences to show.")
    ] = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """List sequences, in no order: status, next index, number of waiting requests, and problems."""
    target = find(where)
    wanted = None if status is None else SequenceStatus(status)
    found, more = ask(target, lambda desk: _first(desk, wanted, most))
    if json_output:
        answer([_shown(one) for one in found])
        return
    now = time.time()
    if found:
        rows = [_row(one, now) for one in found]
        say(*table(["ID", "STATUS", "NEXT", "WAITING", "DONE", "FAILED", "NOTE"], rows))
    else:
        complain(f"{target.names.queue}: no sequence{'' if status is None else f' is {status}'}", fg=None)
    if more:
        complain(f"{len(found):,}, and there are more; --most shows them", fg=None)


@sequences.command()
def show(sequence_id: Id, where: QueueOptions, json_output: Json = False) -> None:
    """Show one sequence: its running request, its waiting requests, and why it is held or has ended.

    Exit code 1: the sequence is not known. A sequence is known once a dispatcher has claimed a request of it.
    """
    target = find(where)

    async def act(desk: RedisDesk) -> tuple[SequenceSeen | None, dict[int, str]]:
        seen = await desk.sequence(sequence_id)
        entries = [] if seen is None else [entry for _, entry in seen.line]
        entries += [] if seen is None or seen.head is None else [seen.head]
        return seen, await desk.ids_of(entries)

    seen, ids = ask(target, act)
    if seen is None:
        raise fail(f"{sequence_id}: no sequence of {target.names.queue} that is known (any more)")
    if json_output:
        line = [{"index": at, "entry": entry, "id": ids.get(entry)} for at, entry in seen.line]
        answer({**_shown(seen), "head_id": ids.get(seen.head or 0), "line": line})
        return
    say(seen.id, *(f"  {name:<11} {value}" for name, value in _details(seen, ids, time.time())))


@sequences.command()
def release(sequence_id: Id, where: QueueOptions, json_output: Json = False) -> None:
    """Let a held sequence go on with the request after the failed one.

    Exit code 1: the sequence is not held.
    """
    target = find(where)
    done = ask(target, lambda desk: desk.release_sequence(sequence_id))
    _say_decided(sequence_id, "released", "goes on", "is not held", done=done, as_json=json_output)


@sequences.command()
def abort(
    sequence_id: Id,
    why: Annotated[
        str, typer.Option(help="Reason, in the results of the waiting requests.")
    ] = "aborted by an operator",
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Abort a sequence: its waiting and later requests get SEQUENCE_ABORTED; a running one goes on.

    `cancel --sequence ID` stops the running request, too, and lets the sequence start again. Exit code 1 if
    the sequence is aborted already, or has ended.
    """
    if not why.strip():
        raise fail("--why: say something, or leave it out", 2)
    target = find(where)
    done = ask(target, lambda desk: desk.abort_sequence(sequence_id, why))
    _say_decided(sequence_id, "aborted", "is aborted", "is over already", done=done, as_json=json_output)


@sequences.command()
def forget(sequence_id: Id, where: QueueOptions, json_output: Json = False) -> None:
    """Forget a sequence without running or waiting requests, so that its id can start again.

    Use it after the sequence was aborted or has ended. Exit code 1: the sequence is not known, or a request
    of it runs or waits.
    """
    target = find(where)

    async def act(desk: RedisDesk) -> tuple[bool | None, SequenceSeen | None]:
        done = await desk.forget_sequence(sequence_id)
        # False: requests of it run or wait. None: it is not known.
        return done, await desk.sequence(sequence_id) if done is False else None

    done, seen = ask(target, act)
    why = None if done else _why_not(seen, sequence_id, known=done is not None)
    if json_output:
        answer({"id": sequence_id, "forgotten": bool(done), "why": why})
    elif done:
        say(f"{sequence_id} is forgotten")
    else:
        complain(f"{sequence_id} {why}")
    if not done:
        raise typer.Exit(1)


def _why_not(seen: SequenceSeen | None, sequence_id: str, *, known: bool) -> str:
    """Return why a sequence was not forgotten."""
    if not known:
        return "is not known (any more)"
    there, what_to_do = "something of it runs or waits", f"`cancel --sequence {sequence_id}` ends that"
    if seen is not None:
        there = " and ".join([*(["one runs"] if seen.head else []), *_waiting(seen)]) or there
        if seen.status in (SequenceStatus.ABORTED, SequenceStatus.ENDED):
            what_to_do = "it can be when that has ended"
    return f"is not forgotten: {there}; {what_to_do}"


def _waiting(seen: SequenceSeen) -> list[str]:
    return [f"{seen.waiting:,} {'waits' if seen.waiting == 1 else 'wait'}"] if seen.waiting else []


async def _first(
    desk: RedisDesk, status: SequenceStatus | None, most: int
) -> tuple[Sequence[SequenceSeen], bool]:
    """Return up to `max_count` sequences, each once, and true if there are more."""
    found: dict[str, SequenceSeen] = {}
    after = ""
    while True:
        page = await desk.sequences(_PAGE, after, status)
        # By id, because the walk may return a sequence twice.
        found |= {one.id: one for one in page.found}
        after = page.after
        if len(found) > most or not after:  # one more than asked for shows that there are more
            return list(found.values())[:most], len(found) > most


def _say_decided(
    sequence_id: str, field: str, what: str, what_not: str, *, done: bool, as_json: bool
) -> None:
    if as_json:
        answer({"id": sequence_id, field: done})
    elif done:
        say(f"{sequence_id} {what}")
    else:
        complain(f"{sequence_id} {what_not}")
    if not done:
        raise typer.Exit(1)


def _shown(one: SequenceSeen) -> dict[str, Any]:
    return {
        "id": one.id,
        "status": str(one.status),
        "next": one.next,
        "head": one.head,
        "waiting": one.waiting,
        "lives": one.lives,
        "done": one.done,
        "failed": one.failed,
        "began_at": one.began_at,
        "touched_at": one.touched_at,
        "gap_since": one.gap_since,
        "sticky": one.has_token,
        "carry_bytes": one.carry_bytes,
        "cause": one.cause or None,
    }


def _row(one: SequenceSeen, now: float) -> Sequence[str]:
    numbers = (one.next, one.waiting, one.done, one.failed)
    return [one.id, str(one.status), *(f"{number:,}" for number in numbers), _note(one, now)]


def _note(one: SequenceSeen, now: float) -> str:
    """Return what a sequence waits for, or why it has ended."""
    if one.cause:
        return one.cause
    if one.gap_since is not None:
        return f"index {one.next} is missing for {told(now - one.gap_since)}"
    if one.status is SequenceStatus.PARKED:
        return "begins when another sequence has ended"
    return "one is at work or in line" if one.head is not None else ""


def _details(one: SequenceSeen, ids: dict[int, str], now: float) -> list[tuple[str, str]]:
    rows = [("status", str(one.status))]
    if one.head is not None:
        rows.append(("at work", f"{ids.get(one.head, '(unknown)')}, entry {one.head}"))
    rows.append(("next", f"index {one.next}"))
    rows.append(("waiting", f"{one.waiting:,}"))
    rows += [("", f"{index}: {ids.get(entry, '(unknown)')}, entry {entry}") for index, entry in one.line]
    hidden = one.waiting - len(one.line)
    rows += [("", f"and {hidden:,} more")] if one.line and hidden > 0 else []
    if one.lives > 1:
        rows.append(("begins anew", f"{one.lives - 1} times, by resets that wait"))
    rows.append(("done", f"{one.done:,}, {one.failed:,} of them failed"))
    if one.began_at is not None:
        rows.append(("began", f"{time_of(one.began_at)}, {told(now - one.began_at)} ago"))
    rows.append(("last active", f"{time_of(one.touched_at)}, {told(now - one.touched_at)} ago"))
    if one.carry_bytes:
        rows.append(("carries", f"{one.carry_bytes:,} bytes"))
    if one.has_token:
        rows.append(("server", "the same one for each request"))
    return [*rows, ("note", note)] if (note := _note(one, now)) else rows
