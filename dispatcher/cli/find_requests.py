"""Search for requests in the queue, and descriptions of what was found, as text and as JSON.

Used by all verbs that take ids or labels of requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dispatcher.cli.admin_client import StatusProblem, fetch_status, parse_admin_address
from dispatcher.cli.request_notes import ParsedRequest, RequestNotes
from dispatcher.common.duration import format_duration, format_time_until
from dispatcher.features import import_modules
from dispatcher.limit.health import describe_pause
from dispatcher.queue.admin_contract import WAITING_LOCATIONS
from dispatcher.requests.found_request import (
    FoundRequest,
    LookupPage,
    RequestLocation,
    SearchTerms,
    encode_spellings,
)
from dispatcher.requests.oversize import parse_cut_size
from dispatcher.requests.request import Rejection, Request, parse_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.score import PRIORITIES, PRIORITY_STEP
from dispatcher.wire_format import ONE_CALL, PoppedResult

if TYPE_CHECKING:
    from dispatcher.cli.connection import QueueTarget
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

MAX_SEARCHED = 200_000
"""Largest number of requests that are read to find an id without an index: about one second of Redis time."""
MAX_RESULTS_SEARCHED = 20_000
"""Largest number of results of the shared list that are searched for one id."""
_PAGE_SIZE = 500
FEATURE_NOTES: tuple[RequestNotes, ...] = tuple(
    module.NOTES for module in import_modules("request_notes").values()
)
"""Notes of all features, in their order."""


async def iterate_pages(read_page: Callable[[str], Any]) -> AsyncIterator[LookupPage]:
    """Yield all pages of a paged read, in order."""
    after = ""
    while True:
        page: LookupPage = await read_page(after)
        yield page
        if not (after := page.after):  # empty: this was the last page
            return


async def find_matching(
    admin: RedisQueueAdmin, words: SearchTerms, is_match: Callable[[ParsedRequest], bool]
) -> AsyncIterator[tuple[FoundRequest, ParsedRequest]]:
    """Yield all requests in the queue for which `is_match` is true, each once.

    `words` lets Redis skip requests that cannot match, so that they are not transferred.
    """
    entries: set[int] = set()
    async for page in iterate_pages(lambda after: admin.search_requests(words, after)):
        for found_request in page.requests:
            if found_request.entry not in entries and is_match(parsed := parse_member(found_request.member)):
                # A walk may return a request twice. Entry 0 means that it was never claimed.
                entries |= {found_request.entry} - {0}
                yield found_request, parsed


async def find_by_id(
    admin: RedisQueueAdmin, request_id: str, max_searched: float = math.inf
) -> tuple[list[tuple[FoundRequest, ParsedRequest]], int]:
    """Return all requests in the queue with the id, and the number of requests that were read to find them.

    A request that is leased, or that was submitted by the client of this project, is found at little cost,
    and ends the search. Any other request is searched for in the whole queue, until `max_searched` requests
    have been read.
    """
    words, searched = [encode_spellings(request_id)], 0
    # From cheap to expensive: the index of ids, the requests that were claimed once, then all requests.
    page_readers = (
        lambda after: admin.find_by_id(request_id, after),
        lambda after: admin.search_requests(words, after, entries_only=True),
        lambda after: admin.search_requests(words, after),
    )
    for number, read_page in enumerate(page_readers):
        if number and searched >= max_searched:  # the first search is always made: it costs little
            break
        found: dict[int | bytes, tuple[FoundRequest, ParsedRequest]] = {}
        async for page in iterate_pages(read_page):
            searched += page.examined_count
            for found_request in page.requests:
                if (parsed := parse_member(found_request.member)).id == request_id:
                    if (
                        found_request.entry
                    ):  # it was claimed after it had been read as pending: keep only this one
                        found.pop(found_request.member, None)
                    found[found_request.entry or found_request.member] = found_request, parsed
            if number and searched >= max_searched:
                break
        if found:
            return list(found.values()), searched
    return [], searched


async def read_results_by_id(admin: RedisQueueAdmin, request_id: str) -> list[bytes]:
    """Return the results in the result list of an id, the oldest first."""
    # Anybody who knows the id can write to this list, so check the id of each result.
    results = await admin.read_results(admin.names.result_list_for_id(request_id), 100)
    return [result for result in results if _parse_result_id(result) == request_id]


async def find_results(
    admin: RedisQueueAdmin, request_id: str, known_results: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the results of a request from the list of its id, or else from the default list of the queue.

    `known_results` are results of an earlier search, which are returned if the list of the id is empty now.
    Only the oldest MAX_RESULTS_SEARCHED results of the default list are searched.
    """
    if results := await read_results_by_id(admin, request_id) or [*known_results]:
        return results
    words, position = encode_spellings(request_id), 0
    while position < MAX_RESULTS_SEARCHED and (
        page := await admin.read_results(admin.names.result_list, _PAGE_SIZE, position)
    ):
        position += len(page)
        results += [
            result
            for result in page
            # Search the bytes first: decoding thousands of results takes longer.
            if any(word in result for word in words) and _parse_result_id(result) == request_id
        ]
    return results


async def find_alive_again(
    admin: RedisQueueAdmin, request_id: str, results: Sequence[bytes]
) -> list[tuple[FoundRequest, ParsedRequest]]:
    """Return the requests with the id that are in the queue although they have results, except for dead ones.

    Such requests were requeued from the dead-letter set or submitted again, and the results are older.
    Requests with a token are found at little cost. For others, up to MAX_RESULTS_SEARCHED requests are read.
    """
    have_tokens = all(decode_result(result).request_token for result in results)
    rows, _ = await find_by_id(admin, request_id, 0 if have_tokens else MAX_RESULTS_SEARCHED)
    return exclude_dead(rows)


def exclude_dead(
    rows: Sequence[tuple[FoundRequest, ParsedRequest]],
) -> list[tuple[FoundRequest, ParsedRequest]]:
    return [
        (found_request, parsed)
        for found_request, parsed in rows
        if found_request.location is not RequestLocation.DEAD
    ]


def _parse_result_id(result: bytes) -> str:
    try:
        return decode_result(result).id
    except ValueError:
        return ""


async def check_being_cancelled(
    admin: RedisQueueAdmin, rows: Sequence[tuple[FoundRequest, ParsedRequest]]
) -> Sequence[bool]:
    """Return for each request whether it is marked as cancelled and no dispatcher has acted on it yet.

    All markers are read with one call.
    """
    # A dead request cannot be cancelled. An empty id keeps its place in the answer.
    return await admin.check_cancelled(
        [
            ("", "") if found_request.location is RequestLocation.DEAD else (parsed.id or "", parsed.token)
            for found_request, parsed in rows
        ]
    )


def request_as_json(
    found_request: FoundRequest,
    parsed: ParsedRequest,
    ahead: int | None = None,
    *,
    is_being_cancelled: bool = False,
) -> dict[str, Any]:
    """Return the JSON fields of a request. All fields are always there; null means that there is no value."""
    request = parsed if isinstance(parsed, Request) else None
    band = found_request.score // PRIORITY_STEP
    return {
        "id": parsed.id,
        "state": str(found_request.location),
        "queue_position": None if ahead is None else ahead + 1,
        "entry": found_request.entry or None,
        # Beyond 64 bits many JSON readers lose digits or fail.
        "score": found_request.score if abs(found_request.score) < 2**63 else str(found_request.score),
        "priority": int(band) if band in PRIORITIES else None,
        "deadline": None if request is None else request.deadline,
        "created": (request.created or None) if request else None,
        "deliveries": found_request.deliveries,
        "failed_attempts": found_request.attempts,
        "refusals": found_request.refusals,
        "deaths": found_request.deaths,
        "owner": found_request.owner or None,
        "due_at": found_request.at if found_request.location is RequestLocation.DELAYED else None,
        "leased_until": found_request.at if found_request.location is RequestLocation.LEASED else None,
        "died_at": found_request.at if found_request.location is RequestLocation.DEAD else None,
        "reason": (found_request.reason or None) if found_request.location is RequestLocation.DEAD else None,
        "last_attempt": last_attempt_outcome(found_request) or None,
        "path": (request.endpoint or None) if request else None,
        "result_list": parsed.results or None,
        "labels": dict(request.labels) if request else {},
        **{
            name: value
            for notes in FEATURE_NOTES
            for name, value in notes.get_json_fields(found_request, parsed).items()
        },
        "cancellable": bool(parsed.token) and found_request.location is not RequestLocation.DEAD,
        "being_cancelled": is_being_cancelled,
        "bytes": count_member_bytes(found_request),
        "problem": parsed.message if isinstance(parsed, Rejection) else None,
    }


def last_attempt_outcome(found_request: FoundRequest) -> str:
    """Return the outcome of the last attempt. Empty if there was none, or if the request is dead."""
    return "" if found_request.location is RequestLocation.DEAD else found_request.reason


def count_member_bytes(found_request: FoundRequest) -> int:
    return parse_cut_size(found_request.member) or len(found_request.member)


def result_as_json(result: PoppedResult) -> dict[str, Any]:
    return {
        "id": result.id,
        "status_code": result.status_code,
        "error_code": result.error_code,
        "error_message": result.error_message,
        "payload": result.payload,
        "payload_note": result.payload_note,
        "model_version": result.model_version,
        "slices": result.slices or 1,
        "cached_tokens": result.cached_tokens or 0,
        "partial": bool(result.partial),
    }


async def explain_no_dispatcher(admin: RedisQueueAdmin) -> str:
    """Return a sentence that says that no dispatcher works on the queue.

    Empty if one does, as far as Redis knows.
    """
    from dispatcher.queue.redis.producer import NOT_SERVED_AFTER_S

    last_s = await admin.get_sweep_age_s()
    if last_s is not None and last_s < NOT_SERVED_AFTER_S:
        return ""
    since = "ever has" if last_s is None else f"has for {format_duration(last_s)}"
    # A dispatcher with --observe writes nothing to Redis, so it does not count here.
    ask = "is the pool's name right, does one run (without --observe)?"
    return f"no dispatcher works on {admin.names.queue}, none {since}: {ask}"


async def describe_gate(target: QueueTarget, admin: RedisQueueAdmin) -> str:
    """Return one sentence about the gate: what holds back all requests, or what the dispatcher does."""
    from dispatcher.cli import render  # takes tens of milliseconds, which most verbs save

    # A pause is stored in the queue and holds whether a dispatcher answers or not.
    if (pause := await admin.read_pause()) is not None:
        return describe_pause(*pause)
    if (address := parse_admin_address(target.admin)) is None:
        unknown = "not known: only a configuration says where a dispatcher can be asked"
        return await explain_no_dispatcher(admin) or unknown
    status = await fetch_status(address)
    if isinstance(status, StatusProblem):
        return render.format_no_answer(status)
    if status.process.queue != target.names.queue:
        return render.format_other_queue(status)
    return render.format_gate(status)


def describe_progress(found_request: FoundRequest) -> str:
    """Return what happens to a request now.

    Empty if the request is in the queue, where only the gate holds it.
    """
    has_attempts = found_request.attempts or found_request.refusals
    attempts = f", after {format_attempts(found_request)}" if has_attempts else ""
    for notes in FEATURE_NOTES:
        if progress := notes.describe_progress(found_request):
            return f"{progress}{attempts}"
    if last := last_attempt_outcome(found_request):
        attempts += f", the last{'' if has_attempts else ' attempt'}: {last}"
    match found_request.location:
        case RequestLocation.LEASED:
            return f"a dispatcher has sent it, the answer is not there yet{attempts}"
        case RequestLocation.DELAYED:
            due = format_time_until(found_request.at or 0.0, time.time())
            return f"its next attempt, due {due}{attempts}"
        case RequestLocation.STARTED:
            return f"its next slice: a part of its answer was generated{attempts}"
        case _:
            return ""


async def explain_obstacle(admin: RedisQueueAdmin, found_request: FoundRequest, parsed: ParsedRequest) -> str:
    """Return the first clause of a sentence that says what a request waits for in a feature.

    Empty if it waits for nothing but the gate.
    """
    for notes in FEATURE_NOTES:
        if clause := await notes.explain_obstacle(admin, found_request, parsed):
            return clause
    return ""


def explain_wait(
    found_request: FoundRequest,
    parsed: ParsedRequest,
    ahead: int | None,
    gate: str,
    now: float,
    obstacle: str = "",
) -> str:
    """Return in one sentence why a request is not answered yet. `obstacle`: result of `explain_obstacle`."""
    if found_request.location is RequestLocation.DEAD:
        return f"it was set aside: {found_request.reason}"
    # Before the states below: a request past its deadline is not sent any more, whatever it waits for.
    if (
        isinstance(parsed, Request)
        and parsed.deadline <= now
        and found_request.location is not RequestLocation.LEASED
    ):
        return f"its deadline has passed: a dispatcher ends it as DEADLINE_EXCEEDED; the gate: {gate}"
    if found_request.location is RequestLocation.LEASED:
        lease_end = format_time_until(found_request.at or now, now)
        return f"it is with {found_request.owner}, whose lease runs out {lease_end} unless it is renewed"
    if found_request.location is RequestLocation.DELAYED:
        return (
            "it waits for its next attempt, which is due "
            f"{format_time_until(found_request.at or now, now)}; the gate: {gate}"
        )
    if obstacle:
        return f"{obstacle}; the gate: {gate}"
    position = format_ahead(ahead)
    # A suspect runs apart from other suspects, because it may be what ended the dispatchers.
    suspect_note = (
        f"{found_request.deaths} dispatchers died holding it, so it runs apart from others like it; "
        if found_request.location is RequestLocation.SUSPECT
        else ""
    )
    started_note = (
        "a part of its answer was generated, so it goes before all others of its priority; "
        if found_request.location is RequestLocation.STARTED
        else ""
    )
    return f"{suspect_note}{started_note}{position}; the gate: {gate}"


def format_ahead(ahead: int | None) -> str:
    return "it is next in the queue" if not ahead else f"{ahead:,} {'go' if ahead > 1 else 'goes'} before it"


def format_time(unix_s: float) -> str:
    """Format Unix seconds as UTC. A time beyond the calendar is formatted as a number."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{unix_s:g}"


def format_deadline(parsed: ParsedRequest, now: float) -> str:
    return format_time_until(parsed.deadline, now) if isinstance(parsed, Request) else "-"


def explain_cancelling(found_request: FoundRequest, because: str) -> str:
    """Return why a request that is being cancelled is still there. `because`: result of `explain_wait`."""
    then = (
        ""
        if found_request.location is RequestLocation.LEASED
        else ", and answered CANCELLED when it is claimed"
    )
    return f"it is being cancelled{then}; {because}"


def format_note(
    found_request: FoundRequest, parsed: ParsedRequest, now: float, *, is_being_cancelled: bool = False
) -> str:
    """Return the note on a request in a table."""
    if is_being_cancelled:
        return ", ".join(filter(None, ("is being cancelled", format_note(found_request, parsed, now))))
    for notes in FEATURE_NOTES:
        if note := notes.format_note(found_request, parsed):
            return note
    match found_request.location:
        case RequestLocation.LEASED:
            return f"at {found_request.owner}"
        case RequestLocation.DELAYED:
            return f"due {format_time_until(found_request.at or now, now)}"
        case RequestLocation.DEAD:
            died = "" if found_request.at is None else f"died {format_time_until(found_request.at, now)}: "
            return f"{died}{found_request.reason}"
        case RequestLocation.SUSPECT:
            return f"{found_request.deaths} owners died holding it"
        case RequestLocation.STARTED:
            return "was started, waits for its next slice"
        case _:
            return "was given back" if found_request.location is RequestLocation.RETURNED else ""


def format_attempts(found_request: FoundRequest) -> str:
    parts = [(found_request.attempts, "failed"), (found_request.refusals, "refused")]
    texts = [f"{count} {word}" for count, word in parts if count]
    return ", ".join(texts) or ("-" if not found_request.deliveries else f"sent {found_request.deliveries} ×")


def list_details(
    found_request: FoundRequest,
    parsed: ParsedRequest,
    ahead: int | None,
    explanation: str,
    *,
    is_being_cancelled: bool = False,
) -> list[tuple[str, str]]:
    """Return name and value of each line that describes a request."""
    now = time.time()
    rows = [("state", str(found_request.location))]
    if found_request.location in WAITING_LOCATIONS and ahead is not None:
        rows.append(("queue position", f"{ahead + 1:,}"))
    if found_request.entry:
        rows.append(("entry", str(found_request.entry)))
    rows.append(("attempts", format_attempts(found_request)))
    rows += [("last attempt", last)] if (last := last_attempt_outcome(found_request)) else []
    if isinstance(parsed, Request):
        rows.append(
            ("deadline", f"{format_time(parsed.deadline)}, {format_time_until(parsed.deadline, now)}")
        )
        if parsed.created:
            rows.append(
                ("submitted", f"{format_time(parsed.created)}, {format_duration(now - parsed.created)} ago")
            )
        rows += [row for notes in FEATURE_NOTES for row in notes.list_details(parsed)]
        rows += [("path", parsed.endpoint)] if parsed.endpoint else []
        rows += [("labels", ", ".join(f"{k}={v}" for k, v in parsed.labels.items()))] if parsed.labels else []
        if parsed.metadata.items() >= ONE_CALL.items():
            rows.append(("slicing", "off: it is sent in one call"))
    else:
        rows.append(("cannot be read", parsed.message))
    rows.append(("result goes to", parsed.results or "the queue's default list"))
    if is_being_cancelled:
        rows.append(("being cancelled", "yes"))
    else:
        rows.append(("can be cancelled", "yes" if parsed.token else "no: it carries no token"))
    if found_request.location is RequestLocation.DEAD and found_request.at is not None:
        rows.append(("died", f"{format_time(found_request.at)}, {format_time_until(found_request.at, now)}"))
    rows.append(("bytes", f"{count_member_bytes(found_request):,}"))
    return [*rows, ("why", explanation)]


def match_labels(labels: Sequence[tuple[str, str]]) -> tuple[SearchTerms, Callable[[ParsedRequest], bool]]:
    """Return the words and the filter of a search for requests with all of these labels.

    The words exclude most other requests in Redis; only the filter is exact.
    """
    # An empty value has no bytes to search for.
    words = [encode_spellings(text) for pair in labels for text in pair if text]

    def has_labels(parsed: ParsedRequest) -> bool:
        request_labels = parsed.labels if isinstance(parsed, Request) else {}
        return all(request_labels.get(name) == value for name, value in labels)

    return words, has_labels
