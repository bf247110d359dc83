"""Search for requests in the queue, and descriptions of what was found, as text and as JSON.

Used by all verbs that take ids or labels of requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dispatcher.cli.admin_client import address_of, running
from dispatcher.core.duration import told, until
from dispatcher.core.requests.found_request import (
    IN_LINE,
    FoundRequest,
    Looked,
    Whereabouts,
    Words,
    spellings,
)
from dispatcher.core.requests.oversize import bytes_before_cut
from dispatcher.core.requests.request import Rejection, Request, parse
from dispatcher.core.requests.result import PoppedResult, decode_result
from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP
from dispatcher.core.sequences.turns import SequenceStatus, Turn

if TYPE_CHECKING:
    from dispatcher.cli.connection import QueueTarget
    from dispatcher.queue.redis.queue_admin import RedisDesk

LOOKED_MOST = 200_000
"""Largest number of requests that are read to find an id without an index: about one second of Redis time."""
RESULTS_MOST = 20_000
"""Largest number of results of the shared list that are searched for one id."""
_PAGE = 500
_NOT_SENT = "not sent, for "
"""Beginning of the reason that a dispatcher records for a request that waits for its model."""
_HINDERED = {
    SequenceStatus.HELD: "held until an operator releases or aborts it",
    SequenceStatus.PARKED: "parked: it begins when one of the sequences.max_active that are alive has ended",
}
Read = Request | Rejection


async def each(look: Callable[[str], Any]) -> AsyncIterator[Looked]:
    """Yield all pages of a paged read, in order."""
    after = ""
    while True:
        page: Looked = await look(after)
        yield page
        if not (after := page.after):  # empty: this was the last page
            return


async def matching(
    desk: RedisDesk, words: Words, fits: Callable[[Read], bool]
) -> AsyncIterator[tuple[FoundRequest, Read]]:
    """Yield all requests in the queue for which `is_match` is true, each once.

    `words` lets Redis skip requests that cannot match, so that they are not transferred.
    """
    entries: set[int] = set()
    async for page in each(lambda after: desk.search(words, after)):
        for found in page.found:
            if found.entry not in entries and fits(read := parse(found.member)):
                # A walk may return a request twice. Entry 0 means that it was never claimed.
                entries |= {found.entry} - {0}
                yield found, read


async def by_id(
    desk: RedisDesk, request_id: str, most: float = math.inf
) -> tuple[list[tuple[FoundRequest, Read]], int]:
    """Return all requests in the queue with the id, and the number of requests that were read to find them.

    A request that is leased, or that was submitted by the client of this project, is found at little cost,
    and ends the search. Any other request is searched for in the whole queue, until `max_searched` requests
    have been read.
    """
    words, looked_at = [spellings(request_id)], 0
    # From cheap to expensive: the index of ids, the requests that were claimed once, then all requests.
    looks = (
        lambda after: desk.near(request_id, after),
        lambda after: desk.search(words, after, entries_only=True),
        lambda after: desk.search(words, after),
    )
    for number, look in enumerate(looks):
        if number and looked_at >= most:  # the first search is always made: it costs little
            break
        found: dict[int | bytes, tuple[FoundRequest, Read]] = {}
        async for page in each(look):
            looked_at += page.looked_at
            for one in page.found:
                if (read := parse(one.member)).id == request_id:
                    if one.entry:  # it was claimed after it had been read as pending: keep only this one
                        found.pop(one.member, None)
                    found[one.entry or one.member] = one, read
            if number and looked_at >= most:
                break
        if found:
            return list(found.values()), looked_at
    return [], looked_at


async def answers(desk: RedisDesk, request_id: str) -> list[bytes]:
    """Return the results in the result list of an id, the oldest first."""
    # Anybody who knows the id can write to this list, so check the id of each result.
    found = await desk.read_results(desk.names.answers(request_id), 100)
    return [result for result in found if _id_of(result) == request_id]


async def answers_anywhere(desk: RedisDesk, request_id: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return the results of a request from the list of its id, or else from the default list of the queue.

    `known_results` are results of an earlier search, which are returned if the list of the id is empty now.
    Only the oldest MAX_RESULTS_SEARCHED results of the default list are searched.
    """
    if found := await answers(desk, request_id) or [*known]:
        return found
    words, at = spellings(request_id), 0
    while at < RESULTS_MOST and (page := await desk.read_results(desk.names.results, _PAGE, at)):
        at += len(page)
        found += [
            result
            for result in page
            # Search the bytes first: decoding thousands of results takes longer.
            if any(word in result for word in words) and _id_of(result) == request_id
        ]
    return found


async def again(
    desk: RedisDesk, request_id: str, results: Sequence[bytes]
) -> list[tuple[FoundRequest, Read]]:
    """Return the requests with the id that are in the queue although they have results, except for dead ones.

    Such requests were requeued from the dead-letter set or submitted again, and the results are older.
    Requests with a token are found at little cost. For others, up to MAX_RESULTS_SEARCHED requests are read.
    """
    marked = all(decode_result(result).request_token for result in results)
    there, _ = await by_id(desk, request_id, 0 if marked else RESULTS_MOST)
    return alive(there)


def alive(there: Sequence[tuple[FoundRequest, Read]]) -> list[tuple[FoundRequest, Read]]:
    return [(found, read) for found, read in there if found.state is not Whereabouts.DEAD]


def _id_of(result: bytes) -> str:
    try:
        return decode_result(result).id
    except ValueError:
        return ""


async def being_cancelled(desk: RedisDesk, rows: Sequence[tuple[FoundRequest, Read]]) -> Sequence[bool]:
    """Return for each request whether it is marked as cancelled and no dispatcher has acted on it yet.

    All markers are read with one call.
    """
    # A dead request cannot be cancelled. An empty id keeps its place in the answer.
    return await desk.being_cancelled(
        [("", "") if found.state is Whereabouts.DEAD else (read.id or "", read.token) for found, read in rows]
    )


def shown(
    found: FoundRequest, read: Read, ahead: int | None = None, *, cancelled: bool = False
) -> dict[str, Any]:
    """Return the JSON fields of a request. All fields are always there; null means that there is no value."""
    request = read if isinstance(read, Request) else None
    band = found.score // PRIORITY_STEP
    return {
        "id": read.id,
        "state": str(found.state),
        "place": None if ahead is None else ahead + 1,
        "entry": found.entry or None,
        # Beyond 64 bits many JSON readers lose digits or fail.
        "score": found.score if abs(found.score) < 2**63 else str(found.score),
        "priority": int(band) if band in PRIORITIES else None,
        "deadline": None if request is None else request.deadline,
        "created": (request.created or None) if request else None,
        "deliveries": found.deliveries,
        "attempts": found.attempts,
        "refusals": found.refusals,
        "deaths": found.deaths,
        "owner": found.owner or None,
        "due_at": found.at if found.state is Whereabouts.DELAYED else None,
        "leased_until": found.at if found.state is Whereabouts.LEASED else None,
        "died_at": found.at if found.state is Whereabouts.DEAD else None,
        "reason": (found.reason or None) if found.state is Whereabouts.DEAD else None,
        "last_try": last_try_of(found) or None,
        "endpoint": (request.endpoint or None) if request else None,
        "results": read.results or None,
        "labels": dict(request.labels) if request else {},
        "sequence": None if read.sequence is None else read.sequence.id,
        "awaits": found.awaits or None,
        "cancellable": bool(read.token) and found.state is not Whereabouts.DEAD,
        "being_cancelled": cancelled,
        "bytes": size_of(found),
        "problem": read.message if isinstance(read, Rejection) else None,
    }


def last_try_of(found: FoundRequest) -> str:
    """Return the outcome of the last attempt. Empty if there was none, or if the request is dead."""
    return "" if found.state is Whereabouts.DEAD else found.reason


def size_of(found: FoundRequest) -> int:
    return bytes_before_cut(found.member) or len(found.member)


def shown_result(result: PoppedResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "status_code": result.status_code,
        "error_code": result.error_code,
        "error_message": result.error_message,
        "payload": result.payload,
        "payload_note": result.payload_note,
        "model_version": result.model_version,
    }


async def unserved(desk: RedisDesk) -> str:
    """Return a sentence that says that no dispatcher works on the queue.

    Empty if one does, as far as Redis knows.
    """
    from dispatcher.queue.redis.producer import UNSERVED_AFTER_S

    last_s = await desk.unserved_s()
    if last_s is not None and last_s < UNSERVED_AFTER_S:
        return ""
    since = "ever has" if last_s is None else f"has for {told(last_s)}"
    # A dispatcher with --observe writes nothing to Redis, so it does not count here.
    ask = "is the pool's name right, does one run (without --observe)?"
    return f"no dispatcher works on {desk.names.queue}, none {since}: {ask}"


async def gate_of(target: QueueTarget, desk: RedisDesk) -> str:
    """Return one sentence about the gate: what holds back all requests, or what the dispatcher does."""
    # A pause is stored in the queue and holds whether a dispatcher answers or not.
    if (paused := await desk.paused()) is not None:
        by, why = paused
        return f"paused{f' by {by}' if by else ''}{f': {why}' if why else ''}"
    if (address := address_of(target.admin)) is None:
        unknown = "not known: only a configuration says where a dispatcher can be asked"
        return await unserved(desk) or unknown
    told_, problem = await running(address)
    if told_ is None:
        return f"no dispatcher answers: {problem}"
    if told_.get("pool") and told_.get("queue") != target.names.queue:
        return f"the dispatcher that answers works on another queue, {told_.get('queue')}"
    return sentence_of(told_)


def sentence_of(gate: Mapping[str, Any]) -> str:
    """Return the reason and the explanation of the gate of a dispatcher.

    The explanation may begin with the reason, which is then not repeated.
    """
    reason, explanation = str(gate.get("reason")), str(gate.get("explanation"))
    if explanation.startswith(reason):
        return explanation
    because = explanation.removeprefix(f"Nothing is sent: {reason}, ")
    return f"{reason}: {explanation}" if because == explanation else f"{reason}, nothing is sent: {because}"


def under_way(found: FoundRequest) -> str:
    """Return what happens to a request now.

    Empty if the request is in the queue, where only the gate holds it.
    """
    before = f", after {tries_of(found)}" if found.attempts or found.refusals else ""
    # For a request that waits for its model and was never sent, `_explain_missing_model` says the same.
    if (last := last_try_of(found)) and (before or found.state is not Whereabouts.AWAITING):
        before += f", the last: {last}" if before else f", the last try: {last}"
    match found.state:
        case Whereabouts.LEASED:
            return f"a dispatcher has sent it, the answer is not there yet{before}"
        case Whereabouts.DELAYED:
            return f"its next try, due {until(found.at or 0.0, time.time())}{before}"
        case Whereabouts.AWAITING:
            return f"{_missed(found)}{before}"
        case _:
            return ""


def _missed(found: FoundRequest) -> str:
    """Return why the model that a request waits for is not available.

    This is the reason that a dispatcher recorded, or else that the model is not served.
    """
    said = last_try_of(found)
    because = said.removeprefix(_NOT_SENT)
    return f"its model {found.awaits!r} is not served" if because == said else because


async def turn_of(desk: RedisDesk, found: FoundRequest, read: Read) -> str:
    """Return what a request waits for before its turn in its sequence.

    Empty if it does not wait for a turn.
    """
    if found.state is not Whereabouts.SEQUENCED or read.sequence is None:
        return ""
    of = f"its turn in the sequence {read.sequence.id}"
    if (seen := await desk.sequence(read.sequence.id)) is None:
        return of
    # Only the first waiting requests of a sequence are listed.
    index = next((index for index, entry in seen.line if entry == found.entry), None)
    told_ = of if index is None else f"{of}, where it has index {index}"
    if seen.status in (SequenceStatus.HELD, SequenceStatus.PARKED):
        return f"{told_}; that is {_HINDERED[seen.status]}" + (f": {seen.cause}" if seen.cause else "")
    if seen.head is not None:
        ids = await desk.ids_of([seen.head])
        return f"{told_}, behind {ids.get(seen.head, f'entry {seen.head}')}, which has it now"
    if seen.gap_since is not None:
        return f"{told_}; index {seen.next} is missing for {told(time.time() - seen.gap_since)}"
    return told_


def why(found: FoundRequest, read: Read, ahead: int | None, gate: str, now: float, turn: str = "") -> str:
    """Return in one sentence why a request is not answered yet. `turn`: result of `describe_turn`."""
    if found.state is Whereabouts.DEAD:
        return f"it was set aside: {found.reason}"
    # Before the states below: a request past its deadline is not sent any more, whatever it waits for.
    if isinstance(read, Request) and read.deadline <= now and found.state is not Whereabouts.LEASED:
        return f"its deadline has passed: a dispatcher ends it as DEADLINE_EXCEEDED; the gate: {gate}"
    if found.state is Whereabouts.LEASED:
        runs_out = until(found.at or now, now)
        return f"it is with {found.owner}, whose lease runs out {runs_out} unless it is renewed"
    if found.state is Whereabouts.DELAYED:
        return f"it waits for its next try, which is due {until(found.at or now, now)}; the gate: {gate}"
    if turn:
        return f"it waits for {turn}; the gate: {gate}"
    if found.state is Whereabouts.AWAITING:
        return f"it waits, for {_missed(found)}; the gate: {gate}"
    others = ahead_of_it(ahead)
    # A suspect runs apart from other suspects, because it may be what ended the dispatchers.
    apart = (
        f"{found.deaths} dispatchers died holding it, so it runs apart from others like it; "
        if found.state is Whereabouts.SUSPECT
        else ""
    )
    return f"{apart}{others}; the gate: {gate}"


def ahead_of_it(ahead: int | None) -> str:
    return "it is next in line" if not ahead else f"{ahead:,} {'go' if ahead > 1 else 'goes'} before it"


def time_of(at: float) -> str:
    """Format Unix seconds as UTC. A time beyond the calendar is formatted as a number."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at:g}"


def deadline_of(read: Read, now: float) -> str:
    return until(read.deadline, now) if isinstance(read, Request) else "-"


def why_not_cancelled(found: FoundRequest, because: str) -> str:
    """Return why a request that is being cancelled is still there. `because`: result of `explain_wait`."""
    then = "" if found.state is Whereabouts.LEASED else ", and answered CANCELLED when it is claimed"
    return f"it is being cancelled{then}; {because}"


def note_of(found: FoundRequest, now: float, sequence: Turn | None = None, *, cancelled: bool = False) -> str:
    """Return the note on a request in a table."""
    if cancelled:
        return ", ".join(filter(None, ("is being cancelled", note_of(found, now, sequence))))
    match found.state:
        case Whereabouts.LEASED:
            return f"at {found.owner}"
        case Whereabouts.DELAYED:
            return f"due {until(found.at or now, now)}"
        case Whereabouts.DEAD:
            return found.reason
        case Whereabouts.SUSPECT:
            return f"{found.deaths} owners died holding it"
        case Whereabouts.SEQUENCED:
            return "waits for its turn" + ("" if sequence is None else f" in {sequence.id}")
        case Whereabouts.AWAITING:
            return f"waits for its model {found.awaits!r}"
        case _:
            return "was given back" if found.state is Whereabouts.RETURNED else ""


def tries_of(found: FoundRequest) -> str:
    parts = [(found.attempts, "failed"), (found.refusals, "refused")]
    said = [f"{count} {word}" for count, word in parts if count]
    return ", ".join(said) or ("-" if not found.deliveries else f"sent {found.deliveries} ×")


def details(
    found: FoundRequest, read: Read, ahead: int | None, sentence: str, *, cancelled: bool = False
) -> list[tuple[str, str]]:
    """Return name and value of each line that describes a request."""
    now = time.time()
    rows = [("state", str(found.state))]
    if found.state in IN_LINE and ahead is not None:
        rows.append(("place in line", f"{ahead + 1:,}"))
    if found.entry:
        rows.append(("entry", str(found.entry)))
    rows.append(("tries", tries_of(found)))
    rows += [("last try", last)] if (last := last_try_of(found)) else []
    if isinstance(read, Request):
        rows.append(("deadline", f"{time_of(read.deadline)}, {until(read.deadline, now)}"))
        if read.created:
            rows.append(("submitted", f"{time_of(read.created)}, {told(now - read.created)} ago"))
        rows += [("sequence", read.sequence.id)] if read.sequence else []
        rows += [("endpoint", read.endpoint)] if read.endpoint else []
        rows += [("labels", ", ".join(f"{k}={v}" for k, v in read.labels.items()))] if read.labels else []
    else:
        rows.append(("cannot be read", read.message))
    rows.append(("result goes to", read.results or "the queue's default list"))
    if cancelled:
        rows.append(("being cancelled", "yes"))
    else:
        rows.append(("can be cancelled", "yes" if read.token else "no: it carries no token"))
    if found.state is Whereabouts.DEAD and found.at is not None:
        rows.append(("died", f"{time_of(found.at)}, {until(found.at, now)}"))
    rows.append(("bytes", f"{size_of(found):,}"))
    return [*rows, ("why", sentence)]


def labelled(labels: Sequence[tuple[str, str]]) -> tuple[Words, Callable[[Read], bool]]:
    """Return the words and the filter of a search for requests with all of these labels.

    The words exclude most other requests in Redis; only the filter is exact.
    """
    # An empty value has no bytes to search for.
    words = [spellings(text) for pair in labels for text in pair if text]

    def fits(read: Read) -> bool:
        has = read.labels if isinstance(read, Request) else {}
        return all(has.get(name) == value for name, value in labels)

    return words, fits
