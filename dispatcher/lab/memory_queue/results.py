"""Steps of settle.lua, find_overdue.lua and settle_unleased.lua: a result is written, and its request ends
with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, Entry, Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.queue.contract import DeadLetter, Settlement, SettleStatus, UnleasedRequest
from dispatcher.requests.result import decode_result, encode_bad_list
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError


def settle(
    queue: QueueState, ends: Sequence[Settlement | DeadLetter], ready_entries: list[Entry] | None = None
) -> list[SettleStatus | None]:
    """Settle leases. Requests that features free with them are added to `ready_entries`. A lease whose result
    cannot be written stays, and does not hold up the others."""
    statuses: list[SettleStatus | None] = []
    stuck, now = None, queue.pool.clock()
    for end in ends:
        try:
            statuses.append(_settle_lease(queue, end, now, [] if ready_entries is None else ready_entries))
        except QueueUnavailableError as error:
            stuck = error
            statuses.append(None)
    if stuck is not None and not any(statuses):  # an error only if nothing at all was settled, as with Redis
        raise stuck
    return statuses


def _settle_lease(
    queue: QueueState, end: Settlement | DeadLetter, now: float, ready_entries: list[Entry]
) -> SettleStatus:
    pool = queue.pool
    dead_letter: DeadLetter | None = None
    match end:
        case DeadLetter():
            dead_letter, settlement = end, end.settlement
        case _:
            settlement = end
    grant = queue.find_lease(settlement.lease)
    if grant is None:
        return SettleStatus.LOST
    status = _write_result(queue, settlement)
    pool.end_lease(grant)
    pool.settled_count += 1
    ready_entries += queue.end_entry(grant.entry, settlement, now)
    if dead_letter is None:
        queue.remove_entry(grant.entry)
    else:
        queue.move_entry(grant.entry, Location.DEAD)
        grant.entry.failed_attempts += dead_letter.is_failed_attempt
        queue.dead[grant.entry.id] = (grant.entry, dead_letter.reason)
    return status


def _write_result(queue: QueueState, settlement: Settlement) -> SettleStatus:
    """Push a result and delete the markers of its request. Raises if the result cannot be written, and
    changes nothing then."""
    pool, default = queue.pool, queue.names.result_list
    name, result = settlement.result_list or default, settlement.result
    status = SettleStatus.DONE
    if result and name != default and (why := queue.find_list_problem(name)) is not None:
        known_id = settlement.request_id or decode_result(result).id
        result = encode_bad_list(known_id, name, why, token=settlement.request_token)
        name, status = default, SettleStatus.BAD_LIST
    if result:
        if name in pool.invalid_lists:
            raise CallRefusedError(f"{name} is not a list: results cannot be delivered")
        pool.result_lists.setdefault(name, deque()).appendleft(result)
    request_id, token = settlement.request_id, settlement.request_token
    if request_id and token:
        queue.cancel_markers.pop(f"{request_id}:{token}", None)
        tokens = queue.active_tokens.get(request_id, {})
        tokens.pop(token, None)
        if not tokens:
            queue.active_tokens.pop(request_id, None)
    return status


def find_overdue(queue: QueueState, max_count: int) -> list[UnleasedRequest]:
    now = queue.pool.unix_now()
    while (deadline := queue.deadlines.first_key()) is not None and deadline <= now:
        entry = queue.deadlines.pop_entry()
        queue.overdue.append((entry.move_count, entry))
    found: list[UnleasedRequest] = []
    # Requests stay here until they are removed, and each is found again only after all others.
    for _ in range(len(queue.overdue)):
        if len(found) == max_count:
            break
        moves, entry = queue.overdue.popleft()
        if entry.move_count == moves:
            queue.overdue.append((moves, entry))
            found.append(
                UnleasedRequest(
                    entry.location_token,
                    entry.member,
                    entry.last_attempt,
                    entry.failed_attempts,
                    entry.refusals,
                    entry.progress,
                )
            )
    return found


def settle_unleased(queue: QueueState, items: Sequence[tuple[UnleasedRequest, Settlement]]) -> int:
    # Keyed by identity, so that an entry that is named twice gets one result.
    there: dict[int, tuple[Entry, Settlement]] = {}
    for item, settlement in items:
        entry_id = int(item.location.partition(":")[0])
        never_claimed = entry_id == NEVER_CLAIMED
        entry = queue.pending.get(item.member) if never_claimed else queue.entries.get(entry_id)
        if entry is not None and entry.location_token == item.location:
            there.setdefault(id(entry), (entry, settlement))
    now = queue.pool.clock()
    for entry, settlement in there.values():
        _write_result(queue, settlement)
        queue.remove_entry(entry)
        queue.end_entry(entry, settlement, now)
    return len(there)
