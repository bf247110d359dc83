"""Steps of producers and operators: one function for each Lua script, with its name."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.lab.memory_queue.entries import Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.queue.constants import CANCEL_TTL_S
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
