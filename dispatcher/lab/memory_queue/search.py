"""Reads of single requests in memory. One page has all requests that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dispatcher.core.requests.found_request import (
    IN_LINE,
    OF_LANE,
    FoundRequest,
    Looked,
    Whereabouts,
    Words,
    spellings,
)
from dispatcher.core.requests.request import Request, parse
from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, Entry, Place
from dispatcher.lab.memory_queue.state import Line


def lying(line: Line, state: Whereabouts, most: int, after: str) -> Looked:
    there = sorted((each for each in _all(line) if each.state is state), key=lambda each: _order(each))
    first = int(after or 0)
    page = there[first : first + most]
    return Looked(page, str(first + most) if first + most < len(there) else "", len(page))


def search(line: Line, words: Words, *, entries_only: bool) -> Looked:
    everything = [each for each in _all(line) if each.entry or not entries_only]
    found = [each for each in everything if all(any(one in each.member for one in word) for word in words)]
    return Looked(found, "", len(everything))


def near(line: Line, request_id: str) -> Looked:
    if line.active.get(request_id):
        return search(line, [spellings(request_id)], entries_only=False)
    told = search(line, [spellings(request_id)], entries_only=True)
    return Looked([each for each in told.found if each.state is Whereabouts.LEASED], "", told.looked_at)


def ahead(line: Line, found: FoundRequest) -> int | None:
    waiting = [each for each in _all(line) if each.state in IN_LINE]
    mine = next((each for each in waiting if _same(each, found)), None)
    if mine is None:
        return None
    return sum(
        _order(each) < _order(mine) if each.state is mine.state else each.score < mine.score
        for each in waiting
    )


def restore(line: Line, queue: str, requests: Sequence[FoundRequest]) -> int:
    pool, added = line.pool, 0
    for each in requests:
        if (name := each.name(queue)) in line.copied:
            continue
        line.copied.add(name)
        added += 1
        read = parse(each.member)
        if isinstance(read, Request) and read.token and each.state is not Whereabouts.DEAD:
            tokens = line.active.setdefault(read.id, {})
            tokens[read.token] = max(read.deadline, pool.unix_now() + 1)
        if each.state is Whereabouts.PENDING:
            line.add(each.member, each.score)
            continue
        entry = Entry(each.member, each.score)
        entry.id, entry.units, entry.deaths = pool.new_id(), each.units, each.deaths
        entry.deliveries, entry.attempts, entry.refusals = each.deliveries, each.attempts, each.refusals
        entry.last_try = "" if each.state is Whereabouts.DEAD else each.reason
        line.entries[entry.id] = entry
        if each.state is Whereabouts.DEAD:
            line.move(entry, Place.DEAD)
            line.dead[entry.id] = (entry, each.reason, each.at or 0.0)
        elif each.state is Whereabouts.DELAYED:
            line.move(entry, Place.DELAYED, (each.at or 0.0) - pool.unix_origin)
        else:
            line.move(entry, Place.RETURNED)
    pool.wake()
    return added


def results(line: Line, name: str, most: int, after: int) -> list[bytes]:
    return list(reversed(line.pool.lists.get(name, ())))[after : after + most]


def take(line: Line, name: str, result: bytes) -> bool:
    there = line.pool.lists.get(name)
    if there is None or result not in there:
        return False
    # The oldest result is the last one of the list, and `remove` takes the first one.
    there.reverse()
    there.remove(result)
    there.reverse()
    return True


def _same(one: FoundRequest, other: FoundRequest) -> bool:
    if one.state is not other.state:
        return False
    return one.entry == other.entry if other.entry else one.member == other.member


def _order(one: FoundRequest) -> tuple[float, bytes, int]:
    if one.state in (Whereabouts.DELAYED, Whereabouts.LEASED):
        return one.at or 0.0, b"", one.entry
    if one.state is Whereabouts.DEAD:
        return one.entry, b"", 0
    return one.score, one.member, one.entry


def _all(line: Line) -> Iterator[FoundRequest]:
    pool = line.pool
    due = {item[5].id: item[0] for item in line.delayed.heap if item[5].moves == item[4]}
    for entry in (*line.pending.values(), *line.entries.values()):
        state, at, owner, reason = _state(entry), None, "", entry.last_try
        if entry.place is Place.DELAYED:
            at = due[entry.id] + pool.unix_origin
        elif entry.place is Place.LEASED:
            grant = pool.grants[entry.id]
            at, owner = grant.expires_at + pool.unix_origin, grant.owner
        elif entry.place is Place.DEAD:
            _, reason, at = line.dead[entry.id]
        counts = entry.deliveries, entry.attempts, entry.refusals, entry.deaths, entry.units or 1
        number = 0 if entry.id == NEVER_CLAIMED else entry.id
        yield FoundRequest(state, entry.member, entry.score, number, *counts, owner, at, reason, entry.awaits)


def _state(entry: Entry) -> Whereabouts:
    if entry.place is Place.RETURNED and entry.lane is not None:
        return OF_LANE[entry.lane]
    return Whereabouts(entry.place.value)
