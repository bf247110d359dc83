"""`batch-dispatcher sequences show|release|abort|forget`: state of sequences, and decisions on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, find_queue, run_with_admin
from dispatcher.cli.find_requests import format_time
from dispatcher.cli.terminal import exit_error, format_table, print_error, print_json, print_lines
from dispatcher.common.duration import format_duration
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.turns import SequenceSnapshot, SequenceStatus

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

EXAMPLES = {
    "sequences show": [
        "batch-dispatcher sequences show --status held",
        "batch-dispatcher sequences show chat-7",
    ],
    "sequences release": ["batch-dispatcher sequences release chat-7"],
    "sequences abort": ["batch-dispatcher sequences abort chat-7 --why 'wrong model'"],
    "sequences forget": ["batch-dispatcher sequences forget chat-7"],
}
sequences = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Sequences: requests that run in order, one at a time."
)

SequenceId = Annotated[str, typer.Argument(metavar="ID", help="The sequence's id.")]
StatusName = Literal["open", "parked", "held", "aborted", "ended"]
_PAGE_SIZE = 500


@sequences.command()
def show(
    sequence_id: Annotated[
        str, typer.Argument(metavar="[ID]", help="The sequence's id. Default: all sequences.")
    ] = "",
    status: Annotated[StatusName | None, typer.Option(help="Only sequences with this status.")] = None,
    max_count: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most sequences to show.")
    ] = 50,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Show all sequences in a table, in no order, or one in detail.

    The table has their status, next index, number of waiting requests, and problems. For one sequence, its
    running and its waiting requests are shown, and why it is held or has ended. Exit code 1: the sequence is
    not known. A sequence is known once a dispatcher has claimed a request of it.
    """
    if not sequence_id:
        _show_all(find_queue(where), status, max_count, as_json=json_output)
        return
    if status is not None:
        raise exit_error("--status: give it without the id of a sequence", 2)
    target = find_queue(where)

    async def read_sequence(admin: RedisQueueAdmin) -> tuple[SequenceSnapshot | None, dict[int, str]]:
        sequence = await open_sequences(admin).get_sequence(sequence_id)
        entries = [] if sequence is None else [entry for _, entry in sequence.waiting_requests]
        entries += [] if sequence is None or sequence.next_entry is None else [sequence.next_entry]
        return sequence, await open_sequences(admin).read_request_ids(entries)

    sequence, ids = run_with_admin(target, read_sequence)
    if sequence is None:
        raise exit_error(f"{sequence_id}: no sequence of {target.names.queue} that is known (any more)")
    if json_output:
        waiting = [
            {"index": at, "entry": entry, "id": ids.get(entry)} for at, entry in sequence.waiting_requests
        ]
        print_json(
            {
                **_sequence_as_json(sequence),
                "current_id": ids.get(sequence.next_entry or 0),
                "waiting_requests": waiting,
            }
        )
        return
    print_lines(
        sequence.id, *(f"  {name:<11} {value}" for name, value in _list_details(sequence, ids, time.time()))
    )


def _show_all(target: QueueTarget, status: StatusName | None, max_count: int, *, as_json: bool) -> None:
    wanted_status = None if status is None else SequenceStatus(status)
    found_sequences, has_more = run_with_admin(
        target, lambda desk: _read_first(desk, wanted_status, max_count)
    )
    if as_json:
        print_json([_sequence_as_json(sequence) for sequence in found_sequences])
        return
    now = time.time()
    if found_sequences:
        rows = [_format_row(sequence, now) for sequence in found_sequences]
        print_lines(*format_table(["ID", "STATUS", "NEXT", "WAITING", "DONE", "FAILED", "NOTE"], rows))
    else:
        print_error(f"{target.names.queue}: no sequence{'' if status is None else f' is {status}'}", fg=None)
    if has_more:
        print_error(f"{len(found_sequences):,}, and there are more; --most shows them", fg=None)


@sequences.command()
def release(sequence_id: SequenceId, where: QueueOptions, json_output: Json = False) -> None:
    """Let a held sequence go on with the request after the failed one.

    Exit code 1: the sequence is not held.
    """
    target = find_queue(where)
    is_released = run_with_admin(target, lambda desk: open_sequences(desk).release_sequence(sequence_id))
    _print_decision(
        sequence_id, "released", "goes on", "is not held", is_done=is_released, as_json=json_output
    )


@sequences.command()
def abort(
    sequence_id: SequenceId,
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
        raise exit_error("--why: say something, or leave it out", 2)
    target = find_queue(where)
    is_aborted = run_with_admin(target, lambda desk: open_sequences(desk).abort_sequence(sequence_id, why))
    _print_decision(
        sequence_id, "aborted", "is aborted", "is over already", is_done=is_aborted, as_json=json_output
    )


@sequences.command()
def forget(sequence_id: SequenceId, where: QueueOptions, json_output: Json = False) -> None:
    """Forget a sequence without running or waiting requests, so that its id can start again.

    Use it after the sequence was aborted or has ended. Exit code 1: the sequence is not known, or a request
    of it runs or waits.
    """
    target = find_queue(where)

    async def forget_at_queue(admin: RedisQueueAdmin) -> tuple[bool | None, SequenceSnapshot | None]:
        calls = open_sequences(admin)
        is_forgotten = await calls.forget_sequence(sequence_id)
        # False: requests of it run or wait. None: it is not known.
        return is_forgotten, await open_sequences(admin).get_sequence(
            sequence_id
        ) if is_forgotten is False else None

    is_forgotten, sequence = run_with_admin(target, forget_at_queue)
    why = (
        None
        if is_forgotten
        else _explain_not_forgotten(sequence, sequence_id, is_known=is_forgotten is not None)
    )
    if json_output:
        print_json({"id": sequence_id, "forgotten": bool(is_forgotten), "why": why})
    elif is_forgotten:
        print_lines(f"{sequence_id} is forgotten")
    else:
        print_error(f"{sequence_id} {why}")
    if not is_forgotten:
        raise typer.Exit(1)


def _explain_not_forgotten(sequence: SequenceSnapshot | None, sequence_id: str, *, is_known: bool) -> str:
    """Return why a sequence was not forgotten."""
    if not is_known:
        return "is not known (any more)"
    remaining, what_to_do = "something of it runs or waits", f"`cancel --sequence {sequence_id}` ends that"
    if sequence is not None:
        remaining = (
            " and ".join([*(["one runs"] if sequence.next_entry else []), *_format_waiting(sequence)])
            or remaining
        )
        if sequence.status in (SequenceStatus.ABORTED, SequenceStatus.ENDED):
            what_to_do = "it can be when that has ended"
    return f"is not forgotten: {remaining}; {what_to_do}"


def _format_waiting(sequence: SequenceSnapshot) -> list[str]:
    return (
        [f"{sequence.waiting_count:,} {'waits' if sequence.waiting_count == 1 else 'wait'}"]
        if sequence.waiting_count
        else []
    )


async def _read_first(
    admin: RedisQueueAdmin, status: SequenceStatus | None, max_count: int
) -> tuple[Sequence[SequenceSnapshot], bool]:
    """Return up to `max_count` sequences, each once, and true if there are more."""
    found_sequences: dict[str, SequenceSnapshot] = {}
    after = ""
    while True:
        page = await open_sequences(admin).list_sequences(_PAGE_SIZE, after, status)
        # By id, because the walk may return a sequence twice.
        found_sequences |= {sequence.id: sequence for sequence in page.sequences}
        after = page.after
        if len(found_sequences) > max_count or not after:  # one more than asked for shows that there are more
            return list(found_sequences.values())[:max_count], len(found_sequences) > max_count


def _print_decision(
    sequence_id: str, field: str, done_text: str, not_done_text: str, *, is_done: bool, as_json: bool
) -> None:
    if as_json:
        print_json({"id": sequence_id, field: is_done})
    elif is_done:
        print_lines(f"{sequence_id} {done_text}")
    else:
        print_error(f"{sequence_id} {not_done_text}")
    if not is_done:
        raise typer.Exit(1)


def _sequence_as_json(sequence: SequenceSnapshot) -> dict[str, Any]:
    return {
        "id": sequence.id,
        "status": str(sequence.status),
        "next_index": sequence.expected_index,
        "current_entry": sequence.next_entry,
        "waiting": sequence.waiting_count,
        "runs": sequence.run_count,
        "done": sequence.ended_count,
        "failed": sequence.failed_count,
        "began_at": sequence.began_at,
        "last_active_at": sequence.last_active_at,
        "gap_since": sequence.gap_since,
        "sticky": sequence.has_token,
        "carry_bytes": sequence.conversation_bytes,
        "cause": sequence.cause or None,
        "match": sequence.override or None,
    }


def _format_row(sequence: SequenceSnapshot, now: float) -> Sequence[str]:
    numbers = (sequence.expected_index, sequence.waiting_count, sequence.ended_count, sequence.failed_count)
    return [
        sequence.id,
        str(sequence.status),
        *(f"{number:,}" for number in numbers),
        _format_note(sequence, now),
    ]


def _format_note(sequence: SequenceSnapshot, now: float) -> str:
    """Return what a sequence waits for, or why it has ended."""
    if sequence.cause:
        return sequence.cause
    if sequence.gap_since is not None:
        return f"index {sequence.expected_index} is missing for {format_duration(now - sequence.gap_since)}"
    if sequence.status is SequenceStatus.PARKED:
        return "begins when another sequence has ended"
    return "one is running or in the queue" if sequence.next_entry is not None else ""


def _list_details(sequence: SequenceSnapshot, ids: dict[int, str], now: float) -> list[tuple[str, str]]:
    rows = [("status", str(sequence.status))]
    if sequence.next_entry is not None:
        rows.append(("at work", f"{ids.get(sequence.next_entry, '(unknown)')}, entry {sequence.next_entry}"))
    rows.append(("next", f"index {sequence.expected_index}"))
    rows.append(("waiting", f"{sequence.waiting_count:,}"))
    rows += [
        ("", f"{index}: {ids.get(entry, '(unknown)')}, entry {entry}")
        for index, entry in sequence.waiting_requests
    ]
    hidden = sequence.waiting_count - len(sequence.waiting_requests)
    rows += [("", f"and {hidden:,} more")] if sequence.waiting_requests and hidden > 0 else []
    if sequence.run_count > 1:
        rows.append(("begins anew", f"{sequence.run_count - 1} times, by resets that wait"))
    rows.append(("done", f"{sequence.ended_count:,}, {sequence.failed_count:,} of them failed"))
    if sequence.began_at is not None:
        rows.append(
            ("began", f"{format_time(sequence.began_at)}, {format_duration(now - sequence.began_at)} ago")
        )
    rows.append(
        (
            "last active",
            f"{format_time(sequence.last_active_at)}, {format_duration(now - sequence.last_active_at)} ago",
        )
    )
    if sequence.override:
        rows.append(("settings", f"those of {sequence.override} in sequences.models"))
    if sequence.conversation_bytes:
        rows.append(("carries", f"{sequence.conversation_bytes:,} bytes"))
    if sequence.has_token:
        rows.append(("server", "the same one for each request"))
    return [*rows, ("note", note)] if (note := _format_note(sequence, now)) else rows
