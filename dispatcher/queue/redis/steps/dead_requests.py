"""Dead requests: dead_requests.lua lists and deletes them, and requeue_dead.lua submits one again."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.queue.admin_contract import DeadRequest
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.producer import build_active_marker
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Reply
from dispatcher.queue.redis.steps.common import split_rows
from dispatcher.requests.lanes import count_losses
from dispatcher.requests.submission import Submission


async def list_dead_after(backend: Backend, entry_id: int, max_count: int) -> list[DeadRequest]:
    reply = await _run_dead_requests(backend, "list", after=entry_id, max_count=max_count)
    return _decode_dead_requests(reply)


async def list_newest_dead(backend: Backend, max_count: int) -> list[DeadRequest]:
    return _decode_dead_requests(await _run_dead_requests(backend, "newest", max_count=max_count))


async def purge_dead(backend: Backend, entry_ids: Sequence[int]) -> int:
    """Delete dead requests. Return how many there were."""
    purged_count: int = (await _run_dead_requests(backend, "purge", purged=entry_ids)).value
    return purged_count


async def _run_dead_requests(
    backend: Backend, action: str, *, after: int = 0, max_count: int = 0, purged: Sequence[int] = ()
) -> Reply:
    return await backend.run_script(
        "dead_requests",
        {
            "action": action,
            "after": after,
            "max_count": max_count,
            "max_bytes": MAX_SCRIPT_BYTES,
            "purged": purged,
        },
    )


async def requeue_dead(backend: Backend, entry_id: int, resubmission: Submission) -> int:
    request_id, request_token, deadline = build_active_marker(resubmission)
    reply = await backend.run_script(
        "requeue_dead",
        {
            "entry_id": entry_id,
            "score": repr(resubmission.score),
            "member": resubmission.member,
            "channel": backend.names.wake_channel,
            "request_id": request_id,
            "request_token": request_token,
            "deadline": deadline,
        },
    )
    done: int = reply.value
    return done


def _decode_dead_requests(reply: Reply) -> list[DeadRequest]:
    return [_decode_dead_request(*row) for row in split_rows(reply.value, 9)]


def _decode_dead_request(
    entry_id: int,
    member: bytes,
    score: bytes,
    reason: bytes,
    died_at: bytes,
    deliveries: int,
    failed_attempts: int,
    refusals: int,
    deaths: int,
) -> DeadRequest:
    return DeadRequest(
        entry_id,
        member,
        float(score),
        reason.decode(errors="replace"),
        float(died_at),
        deliveries,
        failed_attempts,
        refusals,
        count_losses(deaths),
    )
