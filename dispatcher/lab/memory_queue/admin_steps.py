"""Steps of producers and operators: one function for each Lua script, with its name."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dispatcher.core.requests.submission import QueueFullError
from dispatcher.lab.memory_queue.entries import Entry, Place
from dispatcher.lab.memory_queue.state import Line
from dispatcher.ports import Dead, Submission
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.requeue import accept_anew


def submit(line: Line, submissions: Sequence[Submission]) -> int:
    pool = line.pool
    now = pool.unix_now()
    there = line.waiting_count + line.count[Place.DELAYED]
    if 0 < line.max_pending < there + len(submissions):
        raise QueueFullError(f"{there} requests wait, and queue.max_pending is {line.max_pending}")
    new = 0
    for each in submissions:
        if each.request_id and each.request_token and each.deadline:
            tokens = line.active.setdefault(each.request_id, {})
            tokens[each.request_token] = max(each.deadline, now + 1)
        new += line.add(each.member, each.score)
    pool.wake()
    return new


def cancel(line: Line, request_id: str, request_token: str, *, found: bool = False) -> bool:
    pool = line.pool
    now = pool.unix_now()
    tokens = dict(line.active.get(request_id, {}))
    if (theirs := pool.value(pool.foreign_active, request_id)) is not None:
        tokens.setdefault(theirs, now + CANCEL_TTL_S)
    if found:  # the caller has seen the request, so it can be cancelled without an active marker
        tokens.setdefault(request_token, now + CANCEL_TTL_S)
    asked = {
        f"{request_id}:{token}": (token, until)
        for token, until in tokens.items()
        if request_token in ("", token) and until > now
    }
    line.cancels |= asked
    if asked:
        pool.wake()
    return bool(asked)


def peek(line: Line, most: int) -> list[tuple[float, bytes]]:
    return [(score, member) for score, member, _ in heapq.nsmallest(most, line.open())]


def dead_after(line: Line, entry: int, most: int) -> list[Dead]:
    ids = heapq.nsmallest(most, (each for each in line.dead if each > entry))
    return [_dead(*line.dead[each]) for each in ids]


def dead_newest(line: Line, most: int) -> list[Dead]:
    return [_dead(*line.dead[each]) for each in heapq.nlargest(most, line.dead)]


def purge(line: Line, entries: Sequence[int] | None) -> int:
    doomed = [entry for entry in (line.dead if entries is None else entries) if entry in line.dead]
    for entry in doomed:
        line.forget(line.dead[entry][0])
    return len(doomed)


def requeue(line: Line, entry_id: int, deadline: int) -> int:
    if entry_id not in line.dead:
        return 0
    entry = line.dead[entry_id][0]
    again = accept_anew(line.names, entry.member, entry.score, deadline)
    if again is None:
        return 0
    line.forget(entry)
    submit(line, [again])
    return 1


def _dead(entry: Entry, reason: str, died_at: float) -> Dead:
    counts = entry.deliveries, entry.attempts, entry.refusals, entry.losses
    return Dead(entry.id, entry.member, entry.score, reason, died_at, *counts)
