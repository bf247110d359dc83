"""Reads of single requests in memory. One page has all requests that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dispatcher.lab.memory_queue.entries import NEVER_CLAIMED, Entry, Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.requests.found_request import (
    LOCATION_BY_LANE,
    QUEUED_LOCATIONS,
    FoundRequest,
    LookupPage,
    RequestLocation,
    SearchTerms,
    encode_spellings,
)
from dispatcher.requests.request import Request, parse_member


def list_requests(queue: QueueState, state: RequestLocation, max_count: int, after: str) -> LookupPage:
    there = sorted(
        (each for each in _iterate_requests(queue) if each.location is state),
        key=lambda each: _sort_key(each),
    )
    first = int(after or 0)
    page = there[first : first + max_count]
    return LookupPage(page, str(first + max_count) if first + max_count < len(there) else "", len(page))


def search_requests(queue: QueueState, terms: SearchTerms, *, entries_only: bool) -> LookupPage:
    everything = [each for each in _iterate_requests(queue) if each.entry or not entries_only]
    found = [each for each in everything if all(any(one in each.member for one in word) for word in terms)]
    return LookupPage(found, "", len(everything))


def find_by_id(queue: QueueState, request_id: str) -> LookupPage:
    if queue.active_tokens.get(request_id):
        return search_requests(queue, [encode_spellings(request_id)], entries_only=False)
    page = search_requests(queue, [encode_spellings(request_id)], entries_only=True)
    return LookupPage(
        [each for each in page.requests if each.location is RequestLocation.LEASED], "", page.examined_count
    )


def count_ahead(queue: QueueState, request: FoundRequest) -> int | None:
    waiting = [each for each in _iterate_requests(queue) if each.location in QUEUED_LOCATIONS]
    mine = next((each for each in waiting if _is_same_request(each, request)), None)
    if mine is None:
        return None
    return sum(
        _sort_key(each) < _sort_key(mine) if each.location is mine.location else each.rank < mine.rank
        for each in waiting
    )


def restore_requests(target: QueueState, queue: str, requests: Sequence[FoundRequest]) -> int:
    pool, added = target.pool, 0
    for each in requests:
        if (name := each.make_copy_id(queue)) in target.restored_names:
            continue
        target.restored_names.add(name)
        added += 1
        parsed = parse_member(each.member)
        if isinstance(parsed, Request) and parsed.token and each.location is not RequestLocation.DEAD:
            tokens = target.active_tokens.setdefault(parsed.id, {})
            tokens[parsed.token] = max(parsed.deadline, pool.unix_now() + 1)
        if each.location is RequestLocation.PENDING:
            target.add_member(each.member, each.score)
            continue
        entry = Entry(each.member, each.score)
        entry.id, entry.units, entry.deaths = pool.next_entry_id(), each.units, each.deaths
        entry.deliveries, entry.failed_attempts, entry.refusals = (
            each.deliveries,
            each.attempts,
            each.refusals,
        )
        entry.last_attempt = "" if each.location is RequestLocation.DEAD else each.reason
        target.entries[entry.id] = entry
        if each.location is RequestLocation.DEAD:
            target.move_entry(entry, Location.DEAD)
            target.dead[entry.id] = (entry, each.reason, each.at or 0.0)
        elif each.location is RequestLocation.DELAYED:
            target.move_entry(entry, Location.DELAYED, (each.at or 0.0) - pool.unix_origin)
        else:
            target.move_entry(entry, Location.RETURNED)
    pool.wake_dispatchers()
    return added


def read_results(queue: QueueState, name: str, max_count: int, after: int) -> list[bytes]:
    return list(reversed(queue.pool.result_lists.get(name, ())))[after : after + max_count]


def take_result(queue: QueueState, name: str, result: bytes) -> bool:
    there = queue.pool.result_lists.get(name)
    if there is None or result not in there:
        return False
    # The oldest result is the last one of the list, and `remove` takes the first one.
    there.reverse()
    there.remove(result)
    there.reverse()
    return True


def _is_same_request(first: FoundRequest, second: FoundRequest) -> bool:
    if first.location is not second.location:
        return False
    return first.entry == second.entry if second.entry else first.member == second.member


def _sort_key(request: FoundRequest) -> tuple[float, bytes, int]:
    if request.location in (RequestLocation.DELAYED, RequestLocation.LEASED):
        return request.at or 0.0, b"", request.entry
    if request.location is RequestLocation.DEAD:
        return request.entry, b"", 0
    return request.score, request.member, request.entry


def _iterate_requests(queue: QueueState) -> Iterator[FoundRequest]:
    pool = queue.pool
    due = {item[5].id: item[0] for item in queue.delayed.heap if item[5].move_count == item[4]}
    for entry in (*queue.pending.values(), *queue.entries.values()):
        state, at, owner, reason = _get_state(entry), None, "", entry.last_attempt
        if entry.location is Location.DELAYED:
            at = due[entry.id] + pool.unix_origin
        elif entry.location is Location.LEASED:
            grant = pool.leases[entry.id]
            at, owner = grant.expires_at + pool.unix_origin, grant.owner
        elif entry.location is Location.DEAD:
            _, reason, at = queue.dead[entry.id]
        counts = entry.deliveries, entry.failed_attempts, entry.refusals, entry.deaths, entry.units or 1
        number = 0 if entry.id == NEVER_CLAIMED else entry.id
        yield FoundRequest(
            state, entry.member, entry.score, number, *counts, owner, at, reason, entry.missing_model
        )


def _get_state(entry: Entry) -> RequestLocation:
    if entry.location is Location.RETURNED and entry.lane is not None:
        return LOCATION_BY_LANE[entry.lane]
    return RequestLocation(entry.location.value)
