"""`batch-dispatcher result`: the result of one request, or the contents of a result list."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, find_queue, run_with_admin
from dispatcher.cli.find_requests import (
    describe_gate,
    describe_progress,
    exclude_dead,
    explain_no_dispatcher,
    find_alive_again,
    find_by_id,
    find_results,
    format_ahead,
    read_results_by_id,
    result_as_json,
)
from dispatcher.cli.terminal import (
    exit_error,
    format_table,
    print_error,
    print_lines,
    print_note,
    print_warning,
)
from dispatcher.common.duration import format_duration, parse_duration
from dispatcher.common.printable import escape_unprintable
from dispatcher.requests.found_request import encode_spellings
from dispatcher.requests.request import parse_member
from dispatcher.requests.result import decode_result
from dispatcher.wire_format import PoppedResult

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.found_request import FoundRequest

EXAMPLES = {
    "result": [
        "batch-dispatcher result r-1",
        "batch-dispatcher result r-1 --wait 30s",
        "batch-dispatcher result --all --take --most 1000 > results.jsonl",
    ]
}
SENTENCE_AFTER_S = 2.0
"""Time after which the reason for the wait is printed."""
_MIN_POLL_S, _MAX_POLL_S = 0.02, 0.25
_SEARCH_INTERVAL_S = 5.0
"""Time between two searches of all result lists, which cost more than a read of the list of the id."""
REPEAT_AFTER_S = 300.0
"""Time after which a sentence counts as new again if it did not hold meanwhile."""
_NUMBERS = re.compile(r"\d[\d.,]*")


class WaitingSentences:
    """Decides which sentences about a waiting request are new to the person who waits.

    A retried request goes through the same few states, each with its own sentence, and the numbers in the
    sentence change all the time. A sentence that differs only in its numbers is not new.
    """

    def __init__(self) -> None:
        self._last_held_at: dict[str, float] = {}

    def is_new(self, sentence: str, now: float) -> bool:
        """Return true if a sentence that holds now must be printed."""
        kind = _NUMBERS.sub("#", sentence)
        before = self._last_held_at.get(kind)
        self._last_held_at[kind] = now
        return before is None or now - before > REPEAT_AFTER_S


def result(
    request_id: Annotated[str, typer.Argument(metavar="[ID]", help="The request's id.")] = "",
    within: Annotated[str, typer.Argument(metavar="[30s]", help="With --wait: longest time to wait.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the result is there.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Instead of one result: the default list of the queue.")
    ] = False,
    list_name: Annotated[
        str, typer.Option("--list", metavar="KEY", help="Instead of one result: this result list.")
    ] = "",
    max_count: Annotated[
        int, typer.Option("--most", "-n", metavar="N", min=1, help="Most results of a list to show.")
    ] = 100,
    take: Annotated[
        bool, typer.Option("--take", help="Print the results of a list in full, and remove them.")
    ] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Print the result of a request, or the results in a list.

    The result of a request comes from the list of its id, or from the default list, and is not removed:
    results are kept for queue.result_ttl_s. If the request is in the queue again, --wait waits for its next
    result. Exit code 1: the result is an error, or there is none.

    A list is shown as a table, the oldest result first, or as JSON lines with --json or --take. With --take
    each result is removed after it was printed: a consumer that dies loses no result, and two consumers that
    run at once may both print the same one.
    """
    if [bool(request_id), everything, bool(list_name)].count(True) != 1:
        raise exit_error("give the id of a request, or --all, or --list KEY", 2)
    if not request_id:
        if wait:
            raise exit_error("--wait waits for one request: give its id", 2)
        _show_list(find_queue(where), list_name, max_count, take=take, as_json=json_output or take)
        return
    if take:
        raise exit_error("--take: give it with --all or --list; the result of a single request is kept", 2)
    if within and not wait:
        raise exit_error("give a time only with --wait", 2)
    try:
        seconds = parse_duration(within) if within else None
    except ValueError as error:
        # `result 30s --wait r-1`: the optional value of --wait is an argument, so it must follow the id.
        hint = f"; the id goes first: result {within} --wait {request_id}" if _is_duration(request_id) else ""
        raise exit_error(f"{error}{hint}", 2) from error
    target = find_queue(where)
    try:
        popped_result, why = run_with_admin(
            target, lambda desk: _find_result(target, desk, request_id, wait, seconds)
        )
    except KeyboardInterrupt:
        raise exit_still_queued(request_id) from None
    if popped_result is None:
        raise exit_error(why)
    if why:
        print_warning(why)
    print_result(popped_result, json_output=json_output)


def _is_duration(text: str) -> bool:
    try:
        parse_duration(text)
    except ValueError:
        return False
    return True


class _EndedElsewhereError(Exception):
    """Raised if a request has left the queue and no new result is found."""


async def _find_result(
    target: QueueTarget, admin: RedisQueueAdmin, request_id: str, wait: bool, within_s: float | None
) -> tuple[PoppedResult | None, str]:
    """Return the result of a request and a note on it, or `None` and the reason why there is none.

    The search is repeated while the request moves: a request that was in the queue a moment ago may have
    ended.
    """
    earlier_results = await find_results(admin, request_id)
    if earlier_results:
        rows, searched = await find_alive_again(admin, request_id, earlier_results), 0
    else:
        rows, searched = await find_by_id(admin, request_id)
    none = f"{request_id}: no result under its id, and it is not in {target.names.queue}"
    if not rows:  # the request may have ended after the results were read: read them again
        if found := await find_results(admin, request_id, earlier_results):
            return decode_result(found[-1]), ""
        return None, f"{none} ({searched:,} requests looked at)"
    states = ", ".join(dict.fromkeys(str(found_request.location) for found_request, _ in rows))
    lists = {parsed.results for _, parsed in rows} - {"", admin.names.result_list_for_id(request_id)}
    elsewhere = f"its result goes to {min(lists)}: see result --list {min(lists)}" if lists else ""
    if earlier_results and not wait:
        then = elsewhere or f"result {request_id} --wait waits for the next, describe {request_id} says why"
        note = f"of before: {request_id} is in the queue again, it is {states}; {then}"
        return decode_result(earlier_results[-1]), note
    if elsewhere:
        return None, f"{request_id} is {states}; {elsewhere}"
    if not wait:
        yet = "has no result yet, it" if exclude_dead(rows) else "has no result under its id (any more), and"
        return None, f"{request_id} {yet} is {states}: describe {request_id} says why"
    # The result is expected in the list of the id, which is cheap to poll. Now and then check everything: the
    # result may be in the default list, or somebody else may have taken it.
    next_search_at = time.monotonic() + _SEARCH_INTERVAL_S

    async def read_new_result() -> PoppedResult | None:
        nonlocal next_search_at
        new_results = _exclude_earlier(await read_results_by_id(admin, request_id), earlier_results)
        if not new_results and time.monotonic() >= next_search_at:
            # Look for the request first, then for results: in the reverse order, a request that ends in
            # between would seem to have no result.
            is_gone = not exclude_dead((await find_by_id(admin, request_id))[0])
            new_results = _exclude_earlier(await find_results(admin, request_id), earlier_results)
            if is_gone and not new_results:
                raise _EndedElsewhereError
            next_search_at = time.monotonic() + _SEARCH_INTERVAL_S
        return decode_result(new_results[-1]) if new_results else None

    try:
        popped_result = await wait_for_result(target, admin, request_id, read_new_result, within_s)
    except _EndedElsewhereError:
        ended = f"{request_id} has ended, and there is no"
        if earlier_results:
            return None, f"{ended} other result than that of before: somebody else took it"
        return None, f"{ended} result under its id: somebody else took it"
    which = "other result" if earlier_results else "result"
    return (
        popped_result,
        ""
        if popped_result is not None
        else f"{request_id}: no {which} within {format_duration(within_s or 0.0)}",
    )


def _exclude_earlier(encoded_results: Sequence[bytes], earlier_results: Sequence[bytes]) -> Sequence[bytes]:
    """Return the results that are new. Results are counted, because two of them may be equal."""
    left = Counter(earlier_results)
    newer = []
    for encoded in encoded_results:
        if left[encoded]:
            left[encoded] -= 1
        else:
            newer.append(encoded)
    return newer


async def describe_wait(target: QueueTarget, admin: RedisQueueAdmin, request_id: str) -> str:
    """Return what a request waits for.

    This is its own state if it runs or waits for a retry, or else the state of the gate. If only the queue
    can be asked, it is the position in the queue.
    """
    found_request, is_certain = await _find_quickly(admin, request_id)
    if found_request is not None and (progress_text := describe_progress(found_request)):
        return progress_text
    if target.admin is not None or await admin.read_pause() is not None:
        return await describe_gate(target, admin)
    if no_dispatcher := await explain_no_dispatcher(admin):
        return no_dispatcher
    if found_request is None:
        return "not in the queue" if is_certain else "in the queue, behind many of the same deadline"
    ahead = await admin.count_ahead(found_request)
    return f"{found_request.location}" + ("" if ahead is None else f", {format_ahead(ahead)}")


async def _find_quickly(admin: RedisQueueAdmin, request_id: str) -> tuple[FoundRequest | None, bool]:
    """Return a request, or `None` if it was not found, and true if all candidates were read.

    Called every second, so it reads no more than one page of each index.
    """
    # Pending first: a request that is claimed between both reads is then found twice and not missed.
    pending_page = await admin.find_by_id(request_id)
    claimed_page = await admin.search_requests([encode_spellings(request_id)], entries_only=True)
    matches = [
        found_request
        for found_request in (*claimed_page.requests, *pending_page.requests)
        if parse_member(found_request.member).id == request_id
    ]
    return matches[0] if matches else None, not pending_page.after


async def wait_for_result(
    target: QueueTarget,
    admin: RedisQueueAdmin,
    request_id: str,
    read_result: Callable[[], Awaitable[PoppedResult | None]],
    within_s: float | None,
) -> PoppedResult | None:
    """Poll until there is a result, and return it. Return `None` after the timeout.

    Meanwhile, changes of what the request waits for are printed on standard error.
    """
    started = time.monotonic()
    pause_s, sentences = _MIN_POLL_S, WaitingSentences()
    next_sentence = started + SENTENCE_AFTER_S
    while True:
        if (popped_result := await read_result()) is not None:
            return popped_result
        now = time.monotonic()
        if now >= next_sentence:
            sentence = await describe_wait(target, admin, request_id)
            if sentences.is_new(sentence, now):
                print_note(f"waiting: {sentence}")
            next_sentence = now + 1.0
        if within_s is not None and now - started >= within_s:
            return None
        await asyncio.sleep(
            pause_s if within_s is None else min(pause_s, max(0.001, started + within_s - now))
        )
        # Short requests are answered within milliseconds; long ones need not be polled that often.
        pause_s = min(_MAX_POLL_S, pause_s * 1.3)


def exit_still_queued(request_id: str) -> typer.Exit:
    """Print how to go on with a request after Ctrl-C, and return the exit with status 130."""
    print_note(
        f"{request_id} is still queued: batch-dispatcher result {request_id} --wait, or cancel {request_id}"
    )
    return typer.Exit(130)


def print_result(popped_result: PoppedResult, *, json_output: bool) -> None:
    """Print the payload of a result, or the whole result as JSON. Exits with 1 if the result is an error."""
    fields = {**result_as_json(popped_result), "request_token": popped_result.request_token}
    text = json.dumps(fields) if json_output else popped_result.payload
    # A program gets the exact bytes. On a terminal, control characters are escaped.
    typer.echo(escape_unprintable(text, keep="\n\t") if sys.stdout.isatty() else text)
    if (
        popped_result.status_code is None
        or popped_result.status_code >= 400
        or popped_result.error_code is not None
    ):
        why = popped_result.error_code or f"status {popped_result.status_code}"
        error = f"{popped_result.id}: {why}: {popped_result.error_message or ''}".rstrip(": ")
        part = "; the printed answer is what was generated until then" if popped_result.partial else ""
        print_error(f"{error}{part}", fg=None)
        raise typer.Exit(1)


def _show_list(target: QueueTarget, name: str, max_count: int, *, take: bool, as_json: bool) -> None:
    """Print the oldest results of a list, and remove them if `take`."""
    name = name or target.names.result_list

    async def print_results(admin: RedisQueueAdmin) -> None:
        count = 0
        rows: list[list[str]] = []
        # With --take the results that were printed are gone, so the next page begins at 0 again.
        while count < max_count and (
            page := await admin.read_results(name, max_count - count, 0 if take else count)
        ):
            count += len(page)
            for encoded in page:
                if as_json:
                    typer.echo(_format_json_line(encoded))
                else:
                    rows.append(_format_row(encoded))
            sys.stdout.flush()  # before anything is removed
            for encoded in page if take else ():
                await admin.take_result(name, encoded)
        if rows:
            print_lines(*format_table(["ID", "STATUS", "ERROR", "BYTES", "PAYLOAD"], rows))
        if not count and not await admin.is_list(name):
            raise exit_error(f"{name} is no result list")
        if not count:
            print_error(f"{name} is empty", fg=None)

    run_with_admin(target, print_results)


def _format_json_line(encoded: bytes) -> str:
    """Return one line of JSON. Anything that is not a result is shown as unreadable."""
    try:
        return json.dumps(result_as_json(decode_result(encoded)))
    except ValueError:
        return json.dumps({"unreadable": encoded.decode(errors="replace")})


def _format_row(encoded: bytes) -> list[str]:
    try:
        popped_result = decode_result(encoded)
    except ValueError:
        return ["(unreadable)", "-", "-", f"{len(encoded):,}", encoded[:200].decode(errors="replace")]
    status = "-" if popped_result.status_code is None else str(popped_result.status_code)
    return [
        popped_result.id,
        status,
        popped_result.error_code or "-",
        f"{len(encoded):,}",
        popped_result.payload[:200],
    ]
