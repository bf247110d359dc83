"""Steps of producers and operators: one function for each Lua script, with its name."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dispatcher.lab.memory_queue.entries import Entry, Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.requeue import build_resubmission
from dispatcher.requests.submission import QueueFullError, Submission


def submit(queue: QueueState, submissions: Sequence[Submission]) -> int:
    pool = queue.pool
    now = pool.unix_now()
    there = queue.waiting_count + queue.count_by_location[Location.DELAYED]
    if 0 < queue.max_pending < there + len(submissions):
        raise QueueFullError(f"{there} requests wait, and queue.max_pending is {queue.max_pending}")
    new = 0
    for each in submissions:
        _mark_active(queue, each, now)
        new += queue.add_member(each.member, each.score)
    pool.wake_dispatchers()
    return new


def _mark_active(queue: QueueState, submission: Submission, now: float) -> None:
    if submission.request_id and submission.request_token and submission.deadline:
        tokens = queue.active_tokens.setdefault(submission.request_id, {})
        tokens[submission.request_token] = max(submission.deadline, now + 1)


def cancel_request(
    queue: QueueState, request_id: str, request_token: str, *, is_token_known: bool = False
) -> bool:
    pool = queue.pool
    now = pool.unix_now()
    tokens = dict(queue.active_tokens.get(request_id, {}))
    if is_token_known:  # the caller has seen the request, so it can be cancelled without an active marker
        tokens.setdefault(request_token, now + CANCEL_TTL_S)
    asked = {
        f"{request_id}:{token}": (token, until)
        for token, until in tokens.items()
        if request_token in ("", token) and until > now
    }
    queue.cancel_markers |= asked
    if asked:
        pool.wake_dispatchers()
    return bool(asked)


def list_dead(queue: QueueState, max_count: int) -> list[DeadRequest]:
    return [_to_dead_request(*queue.dead[each]) for each in heapq.nsmallest(max_count, queue.dead)]


def purge_dead(queue: QueueState, entry_ids: Sequence[int] | None) -> int:
    purged = [entry for entry in (queue.dead if entry_ids is None else entry_ids) if entry in queue.dead]
    for entry in purged:
        queue.remove_entry(queue.dead[entry][0])
    return len(purged)


def requeue_dead(queue: QueueState, entry_id: int, deadline: int) -> int:
    if entry_id not in queue.dead:
        return 0
    entry = queue.dead[entry_id][0]
    resubmission = build_resubmission(queue.names, entry.member, entry.score, deadline)
    if resubmission is None:
        return 0
    queue.remove_entry(entry)
    if not entry.progress:
        submit(queue, [resubmission])
        return 1
    # It enters the queue as a new entry, because a pending request has no place for progress.
    started = Entry(resubmission.member, resubmission.score)
    started.id, started.progress = queue.pool.next_entry_id(), entry.progress
    queue.entries[started.id] = started
    queue.move_entry(started, Location.RETURNED)
    _mark_active(queue, resubmission, queue.pool.unix_now())
    queue.pool.wake_dispatchers()
    return 1


def _to_dead_request(entry: Entry, reason: str, died_at: float) -> DeadRequest:
    counts = entry.deliveries, entry.failed_attempts, entry.refusals, entry.deaths_as_suspect
    return DeadRequest(entry.id, entry.member, entry.score, reason, died_at, *counts)
