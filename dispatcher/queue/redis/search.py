"""Reads of single requests and results, a page at a time, so that no call blocks Redis for long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions as errors

from dispatcher.core.requests.found_request import (
    LOCATION_BY_LANE,
    QUEUED_LOCATIONS,
    FoundRequest,
    LookupPage,
    RequestLocation,
    SearchTerms,
    encode_spellings,
)
from dispatcher.core.requests.lanes import Lane
from dispatcher.core.requests.request import Rejection, parse_member
from dispatcher.core.requests.submission import Submission
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import build_active_marker
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Argument

_LOCATIONS = {
    "P": RequestLocation.PENDING,
    "R": RequestLocation.RETURNED,
    **{str(number): LOCATION_BY_LANE[lane] for number, lane in enumerate(Lane, start=1)},
    "D": RequestLocation.DELAYED,
    "L": RequestLocation.LEASED,
    "X": RequestLocation.DEAD,
}
"""Locations by the names that the scripts use."""
_LOCATION_NAMES = {place: name for name, place in _LOCATIONS.items()}
_PAGE_SIZE = 512
"""Largest number of requests that one call reads."""
_FIRST_PAGE_SIZE = 8
"""Number of requests of the first call. Their sizes are not known yet, and a page of a cursor is read as a
whole."""
_WALK_PARTS = ("entries", "pending", "entries")
"""Parts of a scan. A claim moves a request from "pending" to "entries". So a request that is claimed during
the scan is found when "entries" is scanned again."""
_NO_LIMIT = 2**62
_MAX_RESULTS_PER_READ = 64


async def list_requests(
    backend: Backend, state: RequestLocation, max_count: int, after: str, *, full_members: bool
) -> LookupPage:
    largest = _NO_LIMIT if full_members else MAX_SCRIPT_BYTES
    args = (
        "rank",
        _LOCATION_NAMES[state],
        0,
        after or 0,
        max(1, min(max_count, _PAGE_SIZE)),
        MAX_SCRIPT_BYTES,
        largest,
    )
    next_range, rank, looked, _, _, rows = await _run_find_requests(backend, args)
    return LookupPage(
        [_decode_found_request(*row) for row in rows], rank.decode() if next_range >= 0 else "", looked
    )


async def find_by_id(backend: Backend, request_id: str, after: str) -> LookupPage:
    range_, _, offset = (after or "0:0").partition(":")
    args = ("near", request_id, range_, offset, _PAGE_SIZE, MAX_SCRIPT_BYTES, MAX_SCRIPT_BYTES)
    next_range, rank, looked, _, _, rows = await _run_find_requests(
        backend, args, [encode_spellings(request_id)]
    )
    then = f"{next_range}:{rank.decode()}" if next_range >= 0 else ""
    return LookupPage([_decode_found_request(*row) for row in rows], then, looked)


async def search_requests(
    backend: Backend, terms: SearchTerms, after: str, *, entries_only: bool, full_members: bool
) -> LookupPage:
    """Return a page of a scan. `after` is the part of the scan, the number of requests to read, and the
    cursor."""
    part, most, cursor = (after or f"0:{_FIRST_PAGE_SIZE}:0").split(":")
    how, count = _WALK_PARTS[int(part)], int(most)
    while True:
        args = (how, "", 0, cursor, count, MAX_SCRIPT_BYTES, _NO_LIMIT if full_members else MAX_SCRIPT_BYTES)
        ended, then, looked, size, is_too_large, rows = await _run_find_requests(backend, args, terms)
        if not is_too_large:
            break
        # The page has too many bytes for one reply. Ask for fewer requests from the same cursor.
        count = max(1, count // 8)
    # Adjust the next page, so that it has about a megabyte.
    if size > 2 * MAX_SCRIPT_BYTES:
        count = max(1, count // 4)
    elif size < MAX_SCRIPT_BYTES // 2:
        count = min(_PAGE_SIZE, count * 4)
    found = [_decode_found_request(*row) for row in rows]
    if ended >= 0:
        return LookupPage(found, f"{part}:{count}:{then.decode()}", looked)
    last = entries_only or int(part) == len(_WALK_PARTS) - 1
    return LookupPage(found, "" if last else f"{int(part) + 1}:{_FIRST_PAGE_SIZE}:0", looked)


async def count_ahead(backend: Backend, request: FoundRequest) -> int | None:
    if request.location not in QUEUED_LOCATIONS:
        return None
    name: Argument = request.member if request.location is RequestLocation.PENDING else request.entry
    count: int | None = (
        await backend.run_script("count_ahead", [_LOCATION_NAMES[request.location], name])
    ).value
    return count


async def restore_requests(backend: Backend, queue: str, requests: Sequence[FoundRequest]) -> int:
    args: list[Argument] = [CANCEL_TTL_S, backend.names.wake_channel]
    for each in requests:
        counts = each.deliveries, each.attempts, each.refusals, each.deaths, each.units
        args += (
            each.make_copy_id(queue),
            _LOCATION_NAMES[each.location],
            repr(each.score),
            each.member,
            *counts,
        )
        args += (f"{each.at or 0.0:.6f}", each.reason, *_build_marker(each))
    size = sum(len(each.member) for each in requests)
    reply = await backend.run_script(
        "restore_requests", args, [backend.names.reply_key("copied")], size_bytes=size
    )
    added: int = reply.value
    return added


def _build_marker(request: FoundRequest) -> tuple[str | int, ...]:
    """Return the active marker of a found request, or an empty one if it cannot be cancelled."""
    parsed = parse_member(request.member)
    if isinstance(parsed, Rejection) or request.location is RequestLocation.DEAD:
        return "", "", 0
    marker = build_active_marker(
        Submission(request.member, request.score, parsed.id, parsed.token, parsed.deadline)
    )
    return marker or ("", "", 0)


async def is_list(backend: Backend, name: str) -> bool:
    """Return whether the name can be a result list. False if the key has another type."""
    scripts = backend.scripts

    async def read_first() -> bool:
        try:
            await scripts.client.lrange(name, 0, 0)
        except errors.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return False
            raise
        return True

    return await scripts.call_with_retries(read_first)


async def read_results(backend: Backend, name: str, max_count: int, after: int) -> list[bytes]:
    """Return results of a list. Large results are read one by one, so that a call reads little more than a
    megabyte."""
    scripts = backend.scripts
    found: list[bytes] = []
    size, count = 0, 1

    async def read_page() -> list[bytes]:
        # Results are pushed on the left, so the oldest one has the index -1.
        last = -1 - after - len(found)
        try:
            page: list[bytes] = await scripts.client.lrange(name, last - count + 1, last)
        except errors.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return []
            raise
        return page

    while len(found) < max_count and size < MAX_SCRIPT_BYTES:
        count = min(count, max_count - len(found))
        page = await scripts.call_with_retries(read_page, size_bytes=MAX_SCRIPT_BYTES)
        if not page:
            break
        found += reversed(page)
        size += sum(map(len, page))
        count = max(
            1, min(_MAX_RESULTS_PER_READ, int((MAX_SCRIPT_BYTES - size) * len(found) / (2 * size + 1)))
        )
    return found


async def take_result(backend: Backend, name: str, result: bytes) -> bool:
    scripts = backend.scripts

    async def remove_result() -> int:
        gone: int = await scripts.client.lrem(name, -1, result)  # -1: one element, from the oldest on
        return gone

    return bool(await scripts.call_with_retries(remove_result, size_bytes=len(result)))


async def _run_find_requests(
    backend: Backend, args: Sequence[Argument], terms: SearchTerms = ()
) -> tuple[int, bytes, int, int, int, Sequence[Any]]:
    flat: list[Argument] = []
    for word in terms:
        flat += (len(word), *word)
    next_range, offset, looked, size, again, rows = (
        await backend.run_script("find_requests", [*args, *flat])
    ).value
    return next_range, offset, looked, size, again, rows


def _decode_found_request(
    location: bytes,
    entry_id: int,
    score: bytes,
    member: bytes,
    deliveries: int,
    failed_attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    owner: bytes,
    at: bytes | None,
    reason: bytes,
    missing_model: bytes,
) -> FoundRequest:
    return FoundRequest(
        _LOCATIONS[location.decode()],
        member,
        float(score),
        entry_id,
        deliveries,
        failed_attempts,
        refusals,
        deaths,
        units,
        owner.decode(errors="replace"),
        None if at is None else float(at),
        reason.decode(errors="replace"),
        missing_model.decode(errors="replace"),
    )
