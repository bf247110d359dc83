"""Reads of single requests and results, a page at a time, so that no call blocks Redis for long."""

from __future__ import annotations

from collections.abc import Sequence

from redis import exceptions as errors

from dispatcher.queue.admin_contract import WAITING_LOCATIONS
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import Argument
from dispatcher.queue.redis.producer import build_active_marker
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES
from dispatcher.queue.redis.steps.find_requests import LOCATION_NAMES, find_requests
from dispatcher.requests.found_request import (
    FoundRequest,
    LookupPage,
    RequestLocation,
    SearchTerms,
    encode_spellings,
)
from dispatcher.requests.request import Rejection, parse_member
from dispatcher.requests.submission import Submission

_PAGE_SIZE = 512
"""Largest number of requests that one call reads."""
_FIRST_PAGE_SIZE = 8
"""Number of requests of the first call. Their sizes are not known yet, and a page of a cursor is read as a
whole."""
_WALK_PARTS = ("entries", "pending", "entries")
"""Parts of a scan. A claim moves a request from "pending" to "entries". So a request that is claimed during
the scan is found when "entries" is scanned again."""
_MAX_RESULTS_PER_READ = 64


async def list_requests(
    backend: Backend, state: str, max_count: int, after: str, *, full_members: bool
) -> LookupPage:
    page = await find_requests(
        backend,
        "rank",
        LOCATION_NAMES[state],
        offset=after or "0",
        max_count=max(1, min(max_count, _PAGE_SIZE)),
        full_members=full_members,
    )
    return LookupPage(page.requests, page.next_offset if page.next_range >= 0 else "", page.examined_count)


async def find_by_id(backend: Backend, request_id: str, after: str) -> LookupPage:
    range_, _, offset = (after or "0:0").partition(":")
    page = await find_requests(
        backend,
        "near",
        request_id,
        range_index=range_,
        offset=offset,
        max_count=_PAGE_SIZE,
        terms=[encode_spellings(request_id)],
    )
    then = f"{page.next_range}:{page.next_offset}" if page.next_range >= 0 else ""
    return LookupPage(page.requests, then, page.examined_count)


async def search_requests(
    backend: Backend, terms: SearchTerms, after: str, *, entries_only: bool, full_members: bool
) -> LookupPage:
    """Return a page of a scan. `after` is the part of the scan, the number of requests to read, and the
    cursor."""
    part, most, cursor = (after or f"0:{_FIRST_PAGE_SIZE}:0").split(":")
    mode, count = _WALK_PARTS[int(part)], int(most)
    while True:
        page = await find_requests(
            backend, mode, offset=cursor, max_count=count, full_members=full_members, terms=terms
        )
        if not page.is_too_large:
            break
        # Ask for fewer requests from the same cursor.
        count = max(1, count // 8)
    # Adjust the next page, so that it has about a megabyte.
    if page.examined_bytes > 2 * MAX_SCRIPT_BYTES:
        count = max(1, count // 4)
    elif page.examined_bytes < MAX_SCRIPT_BYTES // 2:
        count = min(_PAGE_SIZE, count * 4)
    if page.next_range >= 0:
        then = f"{part}:{count}:{page.next_offset}"
    else:
        is_last = entries_only or int(part) == len(_WALK_PARTS) - 1
        then = "" if is_last else f"{int(part) + 1}:{_FIRST_PAGE_SIZE}:0"
    return LookupPage(page.requests, then, page.examined_count)


async def count_ahead(backend: Backend, request: FoundRequest) -> int | None:
    if request.location not in WAITING_LOCATIONS:
        return None
    name: Argument = request.member if request.location is RequestLocation.PENDING else request.entry
    reply = await backend.run_script(
        "count_ahead", {"location": LOCATION_NAMES[request.location], "name": name}
    )
    count: int | None = reply.value
    return count


async def restore_requests(backend: Backend, queue: str, requests: Sequence[FoundRequest]) -> int:
    rows = []
    for each in requests:
        request_id, token, deadline = _build_marker(each)
        rows.append(
            {
                "copy_id": each.make_copy_id(queue),
                "location": LOCATION_NAMES[each.location],
                "score": repr(each.score),
                "member": each.member,
                "deliveries": each.deliveries,
                "attempts": each.attempts,
                "refusals": each.refusals,
                "deaths": each.deaths,
                "units": each.units,
                "time": f"{each.at or 0.0:.6f}",
                "reason": each.reason,
                "request_id": request_id,
                "request_token": token,
                "deadline": deadline,
            }
        )
    reply = await backend.run_script(
        "restore_requests",
        {"copied_ttl_s": CANCEL_TTL_S, "channel": backend.names.wake_channel, "requests": rows},
        keys={"COPIED": backend.names.reply_key("copied")},
        size_bytes=sum(len(each.member) for each in requests),
    )
    added: int = reply.value
    return added


def _build_marker(request: FoundRequest) -> tuple[str, str, int]:
    """Return the active marker of a found request, or an empty one if it cannot be cancelled."""
    parsed = parse_member(request.member)
    if isinstance(parsed, Rejection) or request.location is RequestLocation.DEAD:
        return "", "", 0
    return build_active_marker(
        Submission(request.member, request.score, parsed.id, parsed.token, parsed.deadline)
    )


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
