"""Take back leases, and return what is due to the queue: sweep.lua."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import OwnerTerms, decode_by_feature


@dataclass(frozen=True, slots=True)
class SweepReply:
    reclaimed_count: int
    due_count: int
    next_due_at: float | None
    has_more: bool
    """True if there are more leases to take back, or more requests to return."""
    lost_units: int
    lease_owners: Sequence[str]
    """Owners that hold leases."""
    freed_count: int
    """Number of requests that features have freed."""


async def sweep(
    backend: Backend,
    owner_terms: OwnerTerms,
    max_count: int,
    ended_owners: Sequence[str],
    *,
    max_pending: int,
) -> SweepReply:
    """Sweep the queue. `ended_owners` are proven to have ended."""
    reply = await backend.run_script(
        "sweep",
        {
            "max_count": max_count,
            "foreign": backend.can_reach_foreign_markers,
            "max_pending": max_pending,
            "ended_owners": ended_owners,
            **owner_terms.to_arguments(),
        },
    )
    now, reclaimed, due, next_due, has_more, lost_units, owners, by_feature = reply.value
    backend.observe_clock(reply, now)
    return SweepReply(
        reclaimed,
        due,
        None if next_due is None else backend.to_loop_time(next_due),
        bool(has_more),
        lost_units,
        [owner.decode(errors="replace") for owner in owners],
        sum(decode_by_feature(by_feature).values()),
    )
