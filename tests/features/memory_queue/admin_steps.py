"""Steps of producers and operators: one function for each Lua script, with its name."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.requests.submission import Submission


def submit(queue: QueueState, submissions: Sequence[Submission]) -> int:
    now, new = queue.pool.unix_now(), 0
    for each in submissions:
        if each.request_id and each.request_token and each.deadline:
            tokens = queue.active_tokens.setdefault(each.request_id, {})
            tokens[each.request_token] = max(each.deadline, now + 1)
        new += queue.add_member(each.member, each.score)
    queue.pool.wake_dispatchers()
    return new


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
