"""Reads of single requests and results, a page at a time, so that no call blocks Redis for long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions as errors

from dispatcher.core.requests.found_request import (
    IN_LINE,
    OF_LANE,
    FoundRequest,
    Looked,
    Whereabouts,
    Words,
    spellings,
)
from dispatcher.core.requests.lanes import Lane
from dispatcher.core.requests.request import Rejection, parse
from dispatcher.core.requests.submission import Submission
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import mark
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument

_PLACES = {
    "P": Whereabouts.PENDING,
    "R": Whereabouts.RETURNED,
    **{str(number): OF_LANE[lane] for number, lane in enumerate(Lane, start=1)},
    "D": Whereabouts.DELAYED,
    "L": Whereabouts.LEASED,
    "X": Whereabouts.DEAD,
}
"""Locations by the names that the scripts use."""
_NAMES = {place: name for name, place in _PLACES.items()}
_PAGE = 512
"""Largest number of requests that one call reads."""
_FIRST_PAGE = 8
"""Number of requests of the first call. Their sizes are not known yet, and a page of a cursor is read as a
whole."""
_WALK = ("entries", "pending", "entries")
"""Parts of a scan. A claim moves a request from "pending" to "entries". So a request that is claimed during
the scan is found when "entries" is scanned again."""
_WHOLE = 2**62
_RESULTS = 64


async def lying(backend: Backend, state: Whereabouts, most: int, after: str, *, whole: bool) -> Looked:
    largest = _WHOLE if whole else SCRIPT_BYTES
    args = ("rank", _NAMES[state], 0, after or 0, max(1, min(most, _PAGE)), SCRIPT_BYTES, largest)
    next_range, rank, looked, _, _, rows = await _look(backend, args)
    return Looked([_found(*row) for row in rows], rank.decode() if next_range >= 0 else "", looked)


async def near(backend: Backend, request_id: str, after: str) -> Looked:
    range_, _, offset = (after or "0:0").partition(":")
    args = ("near", request_id, range_, offset, _PAGE, SCRIPT_BYTES, SCRIPT_BYTES)
    next_range, rank, looked, _, _, rows = await _look(backend, args, [spellings(request_id)])
    then = f"{next_range}:{rank.decode()}" if next_range >= 0 else ""
    return Looked([_found(*row) for row in rows], then, looked)


async def walk(backend: Backend, words: Words, after: str, *, entries_only: bool, whole: bool) -> Looked:
    """Return a page of a scan. `after` is the part of the scan, the number of requests to read, and the
    cursor."""
    part, most, cursor = (after or f"0:{_FIRST_PAGE}:0").split(":")
    how, count = _WALK[int(part)], int(most)
    while True:
        args = (how, "", 0, cursor, count, SCRIPT_BYTES, _WHOLE if whole else SCRIPT_BYTES)
        ended, then, looked, size, again, rows = await _look(backend, args, words)
        if not again:
            break
        # The page has too many bytes for one reply. Ask for fewer requests from the same cursor.
        count = max(1, count // 8)
    # Adjust the next page, so that it has about a megabyte.
    if size > 2 * SCRIPT_BYTES:
        count = max(1, count // 4)
    elif size < SCRIPT_BYTES // 2:
        count = min(_PAGE, count * 4)
    found = [_found(*row) for row in rows]
    if ended >= 0:
        return Looked(found, f"{part}:{count}:{then.decode()}", looked)
    last = entries_only or int(part) == len(_WALK) - 1
    return Looked(found, "" if last else f"{int(part) + 1}:{_FIRST_PAGE}:0", looked)


async def ahead(backend: Backend, found: FoundRequest) -> int | None:
    if found.state not in IN_LINE:
        return None
    name: Argument = found.member if found.state is Whereabouts.PENDING else found.entry
    told: int | None = (await backend.run("ahead", [_NAMES[found.state], name])).value
    return told


async def restore(backend: Backend, queue: str, requests: Sequence[FoundRequest]) -> int:
    args: list[Argument] = [CANCEL_TTL_S, backend.names.wake]
    for each in requests:
        counts = each.deliveries, each.attempts, each.refusals, each.deaths, each.units
        args += (each.name(queue), _NAMES[each.state], repr(each.score), each.member, *counts)
        args += (f"{each.at or 0.0:.6f}", each.reason, *_mark(each))
    size = sum(len(each.member) for each in requests)
    reply = await backend.run("restore", args, [backend.names.reply("copied")], size=size)
    added: int = reply.value
    return added


def _mark(found: FoundRequest) -> tuple[str | int, ...]:
    """Return the active marker of a found request, or an empty one if it cannot be cancelled."""
    read = parse(found.member)
    if isinstance(read, Rejection) or found.state is Whereabouts.DEAD:
        return "", "", 0
    told = mark(Submission(found.member, found.score, read.id, read.token, read.deadline))
    return told or ("", "", 0)


async def is_list(backend: Backend, name: str) -> bool:
    """Return whether the name can be a result list. False if the key has another type."""
    scripts = backend.scripts

    async def read() -> bool:
        try:
            await scripts.client.lrange(name, 0, 0)
        except errors.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return False
            raise
        return True

    return await scripts.attempt(read)


async def results(backend: Backend, name: str, most: int, after: int) -> list[bytes]:
    """Return results of a list. Large results are read one by one, so that a call reads little more than a
    megabyte."""
    scripts = backend.scripts
    found: list[bytes] = []
    size, count = 0, 1

    async def read() -> list[bytes]:
        # Results are pushed on the left, so the oldest one has the index -1.
        last = -1 - after - len(found)
        try:
            page: list[bytes] = await scripts.client.lrange(name, last - count + 1, last)
        except errors.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return []
            raise
        return page

    while len(found) < most and size < SCRIPT_BYTES:
        count = min(count, most - len(found))
        page = await scripts.attempt(read, size=SCRIPT_BYTES)
        if not page:
            break
        found += reversed(page)
        size += sum(map(len, page))
        count = max(1, min(_RESULTS, int((SCRIPT_BYTES - size) * len(found) / (2 * size + 1))))
    return found


async def take(backend: Backend, name: str, result: bytes) -> bool:
    scripts = backend.scripts

    async def remove() -> int:
        gone: int = await scripts.client.lrem(name, -1, result)  # -1: one element, from the oldest on
        return gone

    return bool(await scripts.attempt(remove, size=len(result)))


async def _look(
    backend: Backend, args: Sequence[Argument], words: Words = ()
) -> tuple[int, bytes, int, int, int, Sequence[Any]]:
    flat: list[Argument] = []
    for word in words:
        flat += (len(word), *word)
    next_range, offset, looked, size, again, rows = (await backend.run("look", [*args, *flat])).value
    return next_range, offset, looked, size, again, rows


def _found(
    place: bytes,
    entry: int,
    score: bytes,
    member: bytes,
    deliveries: int,
    attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    owner: bytes,
    at: bytes | None,
    reason: bytes,
    awaits: bytes,
) -> FoundRequest:
    return FoundRequest(
        _PLACES[place.decode()],
        member,
        float(score),
        entry,
        deliveries,
        attempts,
        refusals,
        deaths,
        units,
        owner.decode(errors="replace"),
        None if at is None else float(at),
        reason.decode(errors="replace"),
        awaits.decode(errors="replace"),
    )
