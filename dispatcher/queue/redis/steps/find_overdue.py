"""Find requests past their deadline: find_overdue.lua."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.overdue import ScoreWalk
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES


@dataclass(frozen=True, slots=True)
class OverdueReply:
    until: bytes
    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: int
    rows: Sequence[tuple[int, bytes, bytes, bytes, int, int, bytes]]
    """Range, location, member, last attempt, failed attempts, refusals and progress of each request."""
    large_request_bytes: int
    """Size of the first member with its progress if they need a call of their own. Then there are no rows.
    Otherwise 0."""


async def find_overdue(
    backend: Backend,
    walk: ScoreWalk,
    max_count: int,
    *,
    max_member_bytes: int,
    large_request_bytes: int = 0,
) -> OverdueReply:
    """Run one call of a search. `large_request_bytes` is the size of the first member with its progress if
    they are to be returned alone."""
    reply = await backend.run_script(
        "find_overdue",
        {
            "after": walk.after,
            "until_at": walk.until,
            "range": walk.range_index,
            "offset": walk.offset,
            "max_count": max_count,
            "max_bytes": large_request_bytes or MAX_SCRIPT_BYTES,
            "max_member_bytes": max_member_bytes,
        },
        size_bytes=large_request_bytes,
    )
    until, next_range, next_offset, *rows = reply.value
    size = rows[0][2] if rows and isinstance(rows[0][2], int) else 0
    # In place of the row of such a member there is only its size.
    return OverdueReply(until, next_range, next_offset, () if size else rows, size)
