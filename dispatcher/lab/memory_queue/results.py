"""Steps of settle.lua, find_overdue.lua and settle_unleased.lua: a result is written, and its request ends
with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dispatcher.core.requests.result import decode_result, misdirected
from dispatcher.lab.memory_queue import sequences
from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, Entry, Place
from dispatcher.lab.memory_queue.state import Line
from dispatcher.ports import (
    CallRefusedError,
    Expired,
    QueueUnavailableError,
    Settled,
    Settlement,
)


def settle(
    line: Line, ends: Sequence[tuple[Settlement, str | None]], came: list[Entry] | None = None
) -> list[Settled | None]:
    """Settle leases, each with the reason for which its request is dead, or `None`. Requests whose turn has
    come are added to `ready_entries`. A lease whose result cannot be written stays, and does not hold up the
    others."""
    said: list[Settled | None] = []
    stuck, now = None, line.pool.clock()
    for settlement, why in ends:
        try:
            said.append(_settle(line, settlement, why, now, [] if came is None else came))
        except QueueUnavailableError as error:
            stuck = error
            said.append(None)
    if stuck is not None and not any(said):  # an error only if nothing at all was settled, as with Redis
        raise stuck
    return said


def _settle(line: Line, settlement: Settlement, bury: str | None, now: float, came: list[Entry]) -> Settled:
    pool = line.pool
    grant = line.held(settlement.lease)
    if grant is None:
        return Settled.LOST
    said = _write(line, settlement)
    pool.end_lease(grant)
    pool.settled += 1
    came += sequences.end_turn(line, grant.entry, settlement.turn, now)
    if bury is None:
        line.forget(grant.entry)
    else:
        line.move(grant.entry, Place.DEAD)
        line.dead[grant.entry.id] = (grant.entry, bury, pool.unix_now())
        # A dict keeps the order of insertion, so its first entry died first.
        while len(line.dead) > line.dead_max:
            line.forget(next(iter(line.dead.values()))[0])
            line.dead_dropped += 1
    return said


def _write(line: Line, settlement: Settlement) -> Settled:
    """Push a result and delete the markers of its request. Raises if the result cannot be written, and
    changes nothing then."""
    pool, default = line.pool, line.names.results
    name, result = settlement.results or default, settlement.result
    said = Settled.DONE
    if result and name != default and (why := line.refused_list(name)) is not None:
        told = settlement.request_id or decode_result(result).id
        result = misdirected(told, name, why, token=settlement.request_token)
        name, said = default, Settled.BAD_LIST
    if result:
        if name in pool.not_lists:
            raise CallRefusedError(f"{name} is no list: results have no place to go")
        pool.lists.setdefault(name, deque()).appendleft(result)
    request_id, token = settlement.request_id, settlement.request_token
    if request_id and token:
        for keys in (pool.foreign_active, pool.foreign_cancel):
            if pool.value(keys, request_id) == token:
                del keys[request_id]
        line.cancels.pop(f"{request_id}:{token}", None)
        tokens = line.active.get(request_id, {})
        tokens.pop(token, None)
        if not tokens:
            line.active.pop(request_id, None)
    return said


def overdue(line: Line, most: int) -> list[Expired]:
    now = line.pool.unix_now()
    while (deadline := line.deadlines.key()) is not None and deadline <= now:
        entry = line.deadlines.pop()
        line.overdue.append((entry.moves, entry))
    found: list[Expired] = []
    # Requests stay here until they are removed, and each is found again only after all others.
    for _ in range(len(line.overdue)):
        if len(found) == most:
            break
        moves, entry = line.overdue.popleft()
        if entry.moves == moves:
            line.overdue.append((moves, entry))
            if len(entry.member) > line.largest:
                continue
            found.append(Expired(entry.where, entry.member, entry.last_try, entry.attempts, entry.refusals))
    return found


def expire(line: Line, items: Sequence[tuple[Expired, Settlement]]) -> int:
    # Keyed by identity, so that an entry that is named twice gets one result.
    there: dict[int, tuple[Entry, Settlement]] = {}
    for item, settlement in items:
        entry_id = int(item.place.partition(":")[0])
        never_claimed = entry_id == NEVER_CLAIMED
        entry = line.pending.get(item.member) if never_claimed else line.entries.get(entry_id)
        if entry is not None and entry.where == item.place:
            there.setdefault(id(entry), (entry, settlement))
    now = line.pool.clock()
    for entry, settlement in there.values():
        _write(line, settlement)
        line.forget(entry)
        sequences.end_turn(line, entry, settlement.turn, now)
    return len(there)
