"""Step of sweep.lua on a `QueueState` and its `PoolState`: leases are taken back, and due requests return to
the queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection

from dispatcher.lab.memory_queue.entries import Location
from dispatcher.lab.memory_queue.state import LeaseRecord, PoolState, QueueState
from dispatcher.lab.memory_queue.steps import Caller
from dispatcher.queue.constants import CLOCK_STEP_S, SWEEP_GAP_S


def sweep(queue: QueueState, caller: Caller) -> tuple[int, int, float | None, int]:
    """Sweep the queue. Return the number of reclaimed leases, the number of delayed requests that were due,
    the time when the next one is due, the number of turns in sequences that have come, and the number of
    cancelled requests that waited for their model."""
    pool, now = queue.pool, caller.now
    if pool.swept_at is not None:
        gap_s = now - pool.swept_at
        if gap_s < -CLOCK_STEP_S:
            _follow_clock_step(pool, caller, gap_s)
            queue.shift_times(gap_s)
        # After a gap between sweeps, living owners first get time to renew and to send a heartbeat.
        if gap_s > pool.lease_s / 3:
            pool.no_expiry_until = now + pool.lease_s / 3
        if gap_s > (min(caller.timeout_s / 2, SWEEP_GAP_S) if caller.timeout_s > 0 else SWEEP_GAP_S):
            longest_s = min(max(pool.heartbeats.values(), default=0.0) - pool.swept_at, pool.lease_s)
            quiet_s = max(longest_s, caller.timeout_s)
            pool.no_silence_until = max(pool.no_silence_until, now + quiet_s)
    pool.swept_at = now
    pool.record_heartbeat(caller.owner, caller.timeout_s, now)
    # The leases of silent owners and late leases are orphaned: their requests may still run.
    before = pool.lost_units
    reclaimed = (
        reclaim_from_owners(queue, _find_silent_owners(pool, now)) if now >= pool.no_silence_until else 0
    )
    reclaimed += _reclaim_expired(queue, now) if now >= pool.no_expiry_until else 0
    pool.orphaned_units += pool.lost_units - before
    due = 0
    while (due_at := queue.delayed.first_key()) is not None and due_at <= now:
        queue.move_entry(queue.delayed.pop_entry(), Location.RETURNED)
        due += 1
    queue.deadlines.drop_stale(sum(queue.count_by_location.values()))
    return reclaimed, due, due_at, queue.free_entries()


def _follow_clock_step(pool: PoolState, caller: Caller, delta_s: float) -> None:
    """Let the times of the pool follow its clock, which has stepped back, except for those that were written
    since."""
    now = caller.now
    for grant in pool.leases.values():
        # An earlier time may have been written since the step.
        if grant.expires_at > now + pool.lease_s:
            grant.expires_at += delta_s
            grant.touched_at += delta_s
            heapq.heappush(pool.expiries, (grant.expires_at, grant.entry.id))
    pool.touched_entries = deque(each for each in pool.touched_entries if each[0] <= now)
    pool.heartbeats = {owner: until + delta_s for owner, until in pool.heartbeats.items()}
    pool.no_expiry_until += delta_s
    pool.no_silence_until = max(pool.no_silence_until + delta_s, now + caller.timeout_s)


def _find_silent_owners(pool: PoolState, now: float) -> list[str]:
    """Return the owners that are silent. Silent owners without leases are forgotten."""
    silent = [owner for owner, until in pool.heartbeats.items() if until <= now]
    for owner in silent:
        if not pool.units_by_owner[owner]:
            del pool.heartbeats[owner]
    return [owner for owner in silent if owner in pool.heartbeats]


def _reclaim_lease(queue: QueueState, lease: LeaseRecord) -> None:
    queue.pool.lost_units += queue.pool.end_lease(lease)
    lease.entry.deaths += 1
    queue.move_entry(lease.entry, Location.RETURNED)


def reclaim_from_owners(queue: QueueState, owners: Collection[str]) -> int:
    pool = queue.pool
    reclaimed = [grant for grant in pool.leases.values() if grant.owner in owners] if owners else []
    for grant in reclaimed:
        _reclaim_lease(queue, grant)
    for owner in owners:
        pool.heartbeats.pop(owner, None)
    return len(reclaimed)


def _reclaim_expired(queue: QueueState, now: float) -> int:
    pool = queue.pool
    reclaimed = 0
    while pool.expiries and pool.expiries[0][0] <= now:
        _, entry_id = heapq.heappop(pool.expiries)
        grant = pool.leases.get(entry_id)
        if grant is None:
            continue
        if grant.expires_at > now:  # renewed since it was pushed
            heapq.heappush(pool.expiries, (grant.expires_at, entry_id))
        else:
            _reclaim_lease(queue, grant)
            reclaimed += 1
    return reclaimed
