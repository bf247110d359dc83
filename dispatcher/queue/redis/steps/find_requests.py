"""Read a page of requests where they are stored: find_requests.lua."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.queue.keys import CLOSED_LANES, LANE_LETTERS
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES
from dispatcher.requests.found_request import LOCATION_BY_LANE, FoundRequest, RequestLocation, SearchTerms

_LOCATIONS: dict[str, str] = {
    "P": RequestLocation.PENDING,
    "R": RequestLocation.RETURNED,
    **{letter: LOCATION_BY_LANE[lane] for lane, letter in LANE_LETTERS.items()},
    **{letter: lane for lane, letter in CLOSED_LANES.items()},
    "D": RequestLocation.DELAYED,
    "L": RequestLocation.LEASED,
    "X": RequestLocation.DEAD,
}
"""Locations by the names that the scripts use."""
LOCATION_NAMES = {place: name for name, place in _LOCATIONS.items()}
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Page of a search for requests."""

    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: str
    examined_count: int
    examined_bytes: int
    is_too_large: bool
    """True if the page has too many bytes for one reply, so that fewer requests must be asked for."""
    requests: Sequence[FoundRequest]


async def find_requests(
    backend: Backend,
    mode: str,
    target: str = "",
    *,
    range_index: str = "0",
    offset: str,
    max_count: int,
    full_members: bool = False,
    terms: SearchTerms = (),
) -> FoundPage:
    reply = await backend.run_script(
        "find_requests",
        {
            "mode": mode,
            "target": target,
            "range": range_index,
            "offset": offset,
            "max_count": max_count,
            "max_bytes": MAX_SCRIPT_BYTES,
            "max_member_bytes": _NO_LIMIT if full_members else MAX_SCRIPT_BYTES,
            "spellings": [
                {"term": number, "text": text} for number, term in enumerate(terms, 1) for text in term
            ],
        },
    )
    next_range, next_offset, examined_count, examined_bytes, is_too_large, rows = reply.value
    found = [_decode_found_request(*row) for row in rows]
    return FoundPage(
        next_range, next_offset.decode(), examined_count, examined_bytes, bool(is_too_large), found
    )


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
