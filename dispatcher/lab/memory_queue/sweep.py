"""Step of sweep.lua on a `QueueState` and its `PoolState`: leases are taken back, and due requests return to
the queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection

from dispatcher.lab.memory_queue import sequences
from dispatcher.lab.memory_queue.entries import Place
from dispatcher.lab.memory_queue.state import Grant, Line, Pool
from dispatcher.lab.memory_queue.steps import Caller, is_cancelled
from dispatcher.queue.constants import AHEAD_S, GAP_S


def sweep(line: Line, me: Caller, gone: Collection[str]) -> tuple[int, int, float | None, int, int]:
    """Sweep the queue. Return the number of reclaimed leases, the number of delayed requests that were due,
    the time when the next one is due, the number of turns in sequences that have come, and the number of
    cancelled requests that waited for their model."""
    pool, now = line.pool, me.now
    if pool.tick is not None:
        gap_s = now - pool.tick
        if gap_s < -AHEAD_S:
            _stepped_back(pool, me, gap_s)
        # After a gap between sweeps, living owners first get time to renew and to send a heartbeat.
        if gap_s > pool.lease_s / 3:
            pool.quiet_until = now + pool.lease_s / 3
        if gap_s > (min(me.timeout_s / 2, GAP_S) if me.timeout_s > 0 else GAP_S):
            longest_s = min(max(pool.beats.values(), default=0.0) - pool.tick, pool.lease_s)
            quiet_s = max(longest_s, me.timeout_s)
            pool.beats_quiet_until = max(pool.beats_quiet_until, now + quiet_s)
    if line.tick is not None and now - line.tick < -AHEAD_S:
        line.delayed.shift(now - line.tick)
        line.sequences.step_back(now - line.tick)
    pool.tick = line.tick = now
    pool.beat(me.owner, me.timeout_s, now)
    # The leases of silent owners and late leases are orphaned: their requests may still run. Those of owners
    # that are proven to have ended are not.
    before = pool.lost
    reclaimed = _reclaim_of(line, _silent(pool, now)) if now >= pool.beats_quiet_until else 0
    reclaimed += _reclaim_late(line, now) if now >= pool.quiet_until else 0
    pool.stray += pool.lost - before
    reclaimed += _reclaim_of(line, gone)
    due = 0
    while (due_at := line.delayed.key()) is not None and due_at <= now:
        line.move(line.delayed.pop(), Place.RETURNED)
        due += 1
    line.deadlines.tidy(sum(line.count.values()))
    turns = sequences.sweep(line)
    revoked = [entry for entry in line.awaiting if is_cancelled(line, *entry.cancelled_by)]
    for entry in revoked:
        line.move(entry, Place.RETURNED)
    return reclaimed, due, due_at, turns, len(revoked)


def _stepped_back(pool: Pool, me: Caller, by: float) -> None:
    """Let the times of the pool follow its clock, which has stepped back, except for those that were written
    since."""
    now = me.now
    for grant in pool.grants.values():
        # An earlier time may have been written since the step.
        if grant.expires_at > now + pool.lease_s:
            grant.expires_at += by
            grant.touched_at += by
            heapq.heappush(pool.expiries, (grant.expires_at, grant.entry.id))
    pool.touched = deque(each for each in pool.touched if each[0] <= now)
    pool.beats = {owner: until + by for owner, until in pool.beats.items()}
    pool.quiet_until += by
    pool.beats_quiet_until = max(pool.beats_quiet_until + by, now + me.timeout_s)


def _silent(pool: Pool, now: float) -> list[str]:
    """Return the owners that are silent. Silent owners without leases are forgotten."""
    silent = [owner for owner, until in pool.beats.items() if until <= now]
    for owner in silent:
        if not pool.held_by[owner]:
            del pool.beats[owner]
    return [owner for owner in silent if owner in pool.beats]


def _reclaim(line: Line, grant: Grant) -> None:
    line.pool.lost += line.pool.end_lease(grant)
    grant.entry.deaths += 1
    line.move(grant.entry, Place.RETURNED)


def _abandon(pool: Pool, grant: Grant) -> None:
    """Let a lease of a queue that is no longer swept count nothing. The next sweep of its queue returns the
    request."""
    pool.hold(grant.owner, -grant.entry.units)
    pool.lost += grant.entry.units
    grant.abandoned = True
    if pool.probe == grant.entry.id:
        pool.probe = None


def _reclaim_of(line: Line, owners: Collection[str]) -> int:
    pool = line.pool
    theirs = [grant for grant in pool.grants.values() if grant.owner in owners] if owners else []
    doomed = [grant for grant in theirs if grant.entry.id in line.entries]
    for grant in doomed:
        _reclaim(line, grant)
    for owner in owners:
        if not pool.held_by[owner]:  # otherwise, sweeps of other queues still need to find the owner
            pool.beats.pop(owner, None)
    return len(doomed)


def _reclaim_late(line: Line, now: float) -> int:
    pool = line.pool
    reclaimed = 0
    elsewhere = []
    while pool.expiries and pool.expiries[0][0] <= now:
        _, entry_id = heapq.heappop(pool.expiries)
        grant = pool.grants.get(entry_id)
        if grant is None:
            continue
        if grant.expires_at > now:  # renewed since it was pushed
            heapq.heappush(pool.expiries, (grant.expires_at, entry_id))
        elif entry_id in line.entries:
            _reclaim(line, grant)
            reclaimed += 1
        else:
            # The sweeps of its own queue would have taken it back by now, if there were any.
            if not grant.abandoned and now >= max(grant.expires_at, pool.quiet_until) + pool.lease_s:
                _abandon(pool, grant)
            elsewhere.append((grant.expires_at, entry_id))
    for late in elsewhere:
        heapq.heappush(pool.expiries, late)
    return reclaimed
