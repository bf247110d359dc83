"""`batch-dispatcher result` and `results`: the result of one request, and the contents of a result list."""

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

from dispatcher.cli.connection import Json, QueueOptions, QueueTarget, ask, find
from dispatcher.cli.describe import Id
from dispatcher.cli.find_requests import (
    again,
    ahead_of_it,
    alive,
    answers,
    answers_anywhere,
    by_id,
    gate_of,
    shown_result,
    under_way,
    unserved,
)
from dispatcher.cli.terminal import complain, fail, remark, say, table, warn
from dispatcher.core.duration import seconds_of, told
from dispatcher.core.printable import plain
from dispatcher.core.requests.found_request import spellings
from dispatcher.core.requests.request import parse
from dispatcher.core.requests.result import PoppedResult, decode_result

if TYPE_CHECKING:
    from dispatcher.core.requests.found_request import FoundRequest
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "result": ["batch-dispatcher result r-1", "batch-dispatcher result r-1 --wait 30s"],
    "results": ["batch-dispatcher results", "batch-dispatcher results --take --most 1000 > results.jsonl"],
}
SENTENCE_AFTER_S = 2.0
"""Time after which the reason for the wait is printed."""
_LOOK_S, _LOOK_MOST_S = 0.02, 0.25
_AGAIN_S = 5.0
"""Time between two searches of all result lists, which cost more than a read of the list of the id."""
FORGOTTEN_S = 300.0
"""Time after which a sentence counts as new again if it did not hold meanwhile."""
_FIGURES = re.compile(r"\d[\d.,]*")


class WaitingSentences:
    """Decides which sentences about a waiting request are new to the person who waits.

    A retried request goes through the same few states, each with its own sentence, and the numbers in the
    sentence change all the time. A sentence that differs only in its numbers is not new.
    """

    def __init__(self) -> None:
        self._held_at: dict[str, float] = {}

    def is_new(self, sentence: str, now: float) -> bool:
        """Return true if a sentence that holds now must be printed."""
        kind = _FIGURES.sub("#", sentence)
        before = self._held_at.get(kind)
        self._held_at[kind] = now
        return before is None or now - before > FORGOTTEN_S


def result(
    request_id: Id,
    within: Annotated[str, typer.Argument(metavar="[30s]", help="With --wait: longest time to wait.")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the result is there.")] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Print the result of a request, from the list of its id or from the default list of the queue.

    The result is not removed: results are kept for queue.result_ttl_s. If the request is in the queue again,
    --wait waits for its next result. Exit code 1: the result is an error, or there is none.
    """
    if within and not wait:
        raise fail("give a time only with --wait", 2)
    try:
        seconds = seconds_of(within) if within else None
    except ValueError as error:
        # `result 30s --wait r-1`: the optional value of --wait is an argument, so it must follow the id.
        hint = f"; the id goes first: result {within} --wait {request_id}" if _is_span(request_id) else ""
        raise fail(f"{error}{hint}", 2) from error
    target = find(where)
    try:
        found, why = ask(target, lambda desk: _result(target, desk, request_id, wait, seconds))
    except KeyboardInterrupt:
        raise still_queued(request_id) from None
    if found is None:
        raise fail(why)
    if why:
        warn(why)
    print_result(found, json_output=json_output)


def _is_span(text: str) -> bool:
    try:
        seconds_of(text)
    except ValueError:
        return False
    return True


class _EndedElsewhereError(Exception):
    """Raised if a request has left the queue and no new result is found."""


async def _result(
    target: QueueTarget, desk: RedisDesk, request_id: str, wait: bool, within_s: float | None
) -> tuple[PoppedResult | None, str]:
    """Return the result of a request and a note on it, or `None` and the reason why there is none.

    The search is repeated while the request moves: a request that was in the queue a moment ago may have
    ended.
    """
    before = await answers_anywhere(desk, request_id)
    if before:
        there, looked_at = await again(desk, request_id, before), 0
    else:
        there, looked_at = await by_id(desk, request_id)
    none = f"{request_id}: no result under its id, and it is not in {target.names.queue}"
    if not there:  # the request may have ended after the results were read: read them again
        if found := await answers_anywhere(desk, request_id, before):
            return decode_result(found[-1]), ""
        return None, f"{none} ({looked_at:,} requests looked at)"
    states = ", ".join(dict.fromkeys(str(one.state) for one, _ in there))
    lists = {read.results for _, read in there} - {"", desk.names.answers(request_id)}
    elsewhere = f"its result goes to {min(lists)}: see results --list {min(lists)}" if lists else ""
    if before and not wait:
        then = elsewhere or f"result {request_id} --wait waits for the next, describe {request_id} says why"
        said = f"of before: {request_id} is in the queue again, it is {states}; {then}"
        return decode_result(before[-1]), said
    if elsewhere:
        return None, f"{request_id} is {states}; {elsewhere}"
    if not wait:
        yet = "has no result yet, it" if alive(there) else "has no result under its id (any more), and"
        return None, f"{request_id} {yet} is {states}: describe {request_id} says why"
    # The result is expected in the list of the id, which is cheap to poll. Now and then check everything: the
    # result may be in the default list, or somebody else may have taken it.
    again_at = time.monotonic() + _AGAIN_S

    async def look() -> PoppedResult | None:
        nonlocal again_at
        came = _newer(await answers(desk, request_id), before)
        if not came and time.monotonic() >= again_at:
            # Look for the request first, then for results: in the reverse order, a request that ends in
            # between would seem to have no result.
            gone = not alive((await by_id(desk, request_id))[0])
            came = _newer(await answers_anywhere(desk, request_id), before)
            if gone and not came:
                raise _EndedElsewhereError
            again_at = time.monotonic() + _AGAIN_S
        return decode_result(came[-1]) if came else None

    try:
        came = await awaited(target, desk, request_id, look, within_s)
    except _EndedElsewhereError:
        ended = f"{request_id} has ended, and there is no"
        if before:
            return None, f"{ended} other result than that of before: somebody else took it"
        return None, f"{ended} result under its id: somebody else took it"
    which = "other result" if before else "result"
    return came, "" if came is not None else f"{request_id}: no {which} within {told(within_s or 0.0)}"


def _newer(came: Sequence[bytes], before: Sequence[bytes]) -> Sequence[bytes]:
    """Return the results that are new. Results are counted, because two of them may be equal."""
    left = Counter(before)
    newer = []
    for one in came:
        if left[one]:
            left[one] -= 1
        else:
            newer.append(one)
    return newer


async def progress(target: QueueTarget, desk: RedisDesk, request_id: str) -> str:
    """Return what a request waits for.

    This is its own state if it runs or waits for a retry, or else the state of the gate. If only the queue
    can be asked, it is the position in the queue.
    """
    there, sure = await _glimpse(desk, request_id)
    if there is not None and (own := under_way(there)):
        return own
    if target.admin is not None or await desk.paused() is not None:
        return await gate_of(target, desk)
    if nobody := await unserved(desk):
        return nobody
    if there is None:
        return "not in line" if sure else "in line, behind many of the same deadline"
    ahead = await desk.ahead(there)
    return f"{there.state}" + ("" if ahead is None else f", {ahead_of_it(ahead)}")


async def _glimpse(desk: RedisDesk, request_id: str) -> tuple[FoundRequest | None, bool]:
    """Return a request, or `None` if it was not found, and true if all candidates were read.

    Called every second, so it reads no more than one page of each index.
    """
    # Pending first: a request that is claimed between both reads is then found twice and not missed.
    line = await desk.near(request_id)
    claimed = await desk.search([spellings(request_id)], entries_only=True)
    there = [one for one in (*claimed.found, *line.found) if parse(one.member).id == request_id]
    return there[0] if there else None, not line.after


async def awaited(
    target: QueueTarget,
    desk: RedisDesk,
    request_id: str,
    look: Callable[[], Awaitable[PoppedResult | None]],
    within_s: float | None,
) -> PoppedResult | None:
    """Poll until there is a result, and return it. Return `None` after the timeout.

    Meanwhile, changes of what the request waits for are printed on standard error.
    """
    started = time.monotonic()
    pause_s, sentences = _LOOK_S, WaitingSentences()
    next_sentence = started + SENTENCE_AFTER_S
    while True:
        if (found := await look()) is not None:
            return found
        now = time.monotonic()
        if now >= next_sentence:
            sentence = await progress(target, desk, request_id)
            if sentences.is_new(sentence, now):
                remark(f"waiting: {sentence}")
            next_sentence = now + 1.0
        if within_s is not None and now - started >= within_s:
            return None
        await asyncio.sleep(
            pause_s if within_s is None else min(pause_s, max(0.001, started + within_s - now))
        )
        # Short requests are answered within milliseconds; long ones need not be polled that often.
        pause_s = min(_LOOK_MOST_S, pause_s * 1.3)


def still_queued(request_id: str) -> typer.Exit:
    """Print how to go on with a request after Ctrl-C, and return the exit with status 130."""
    remark(
        f"{request_id} is still queued: batch-dispatcher result {request_id} --wait, or cancel {request_id}"
    )
    return typer.Exit(130)


def print_result(found: PoppedResult, *, json_output: bool) -> None:
    """Print the payload of a result, or the whole result as JSON. Exits with 1 if the result is an error."""
    whole = {**shown_result(found), "request_token": found.request_token}
    text = json.dumps(whole) if json_output else found.payload
    # A program gets the exact bytes. On a terminal, control characters are escaped.
    typer.echo(plain(text, keep="\n\t") if sys.stdout.isatty() else text)
    if found.status_code is None or found.status_code >= 400 or found.error_code is not None:
        why = found.error_code or f"status {found.status_code}"
        complain(f"{found.id}: {why}: {found.error_message or ''}".rstrip(": "), fg=None)
        raise typer.Exit(1)


def results(
    name: Annotated[
        str, typer.Option("--list", help="Name of the list. Default: the default list of the queue.")
    ] = "",
    most: Annotated[int, typer.Option(metavar="N", min=1, help="Most results to show.")] = 100,
    take: Annotated[bool, typer.Option("--take", help="Print results in full, and remove them.")] = False,
    *,
    where: QueueOptions,
    json_output: Json = False,
) -> None:
    """Show a result list, the oldest result first: as a table, or as JSON lines with --json or --take.

    With --take each result is removed after it was printed: a consumer that dies loses no result, and two
    consumers that run at once may both print the same one.
    """
    target = find(where)

    async def act(desk: RedisDesk) -> int:
        where, count = name or target.names.results, 0
        rows: list[list[str]] = []
        # With --take the results that were printed are gone, so the next page begins at 0 again.
        while count < most and (page := await desk.read_results(where, most - count, 0 if take else count)):
            count += len(page)
            for one in page:
                if json_output or take:
                    typer.echo(_line(one))
                else:
                    rows.append(_row(one))
            sys.stdout.flush()  # before anything is removed
            for one in page if take else ():
                await desk.take_result(where, one)
        if rows:
            say(*table(["ID", "STATUS", "ERROR", "BYTES", "PAYLOAD"], rows))
        if not count and not await desk.is_list(where):
            raise fail(f"{where} is no list: no results lie there")
        if not count:
            complain(f"{where} is empty", fg=None)
        return count

    ask(target, act)


def _line(one: bytes) -> str:
    """Return one line of JSON. Anything that is not a result is shown as unreadable."""
    try:
        return json.dumps(shown_result(decode_result(one)))
    except ValueError:
        return json.dumps({"unreadable": one.decode(errors="replace")})


def _row(one: bytes) -> list[str]:
    try:
        read = decode_result(one)
    except ValueError:
        return ["(unreadable)", "-", "-", f"{len(one):,}", one[:200].decode(errors="replace")]
    status = "-" if read.status_code is None else str(read.status_code)
    return [read.id, status, read.error_code or "-", f"{len(one):,}", read.payload[:200]]
