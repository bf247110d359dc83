"""Steps of owners: one function for each Lua script, with its name, on a `QueueState` and its `PoolState`.

The sweep and the writing of results have modules of their own. All times are those of the pool's clock. No
step awaits, so each is atomic. Scripts for a Cluster, for a slow network or for questions about the server
have no counterpart here: push_results, delete_marker, cut_member, check_result_lists, check_permissions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import msgspec

from dispatcher.core.requests.forecast import REPLICAS, LineAhead, Replica, lying
from dispatcher.core.requests.lanes import CLOSED, Lane, awaited_as, rooms
from dispatcher.lab.memory_queue.entries import Entry, Place
from dispatcher.lab.memory_queue.state import Grant, Line, Pool
from dispatcher.ports import (
    Lease,
    Overload,
    Permit,
    Recalled,
    Release,
    Settled,
)
from dispatcher.queue.constants import (
    AHEAD_S,
    AWAITED_MOST,
    CLAIM_BYTES,
    PASSED_MOST,
    RECALL_MOST,
    REPLY_TTL_S,
    SAME_READING_S,
    YOUNG_S,
)

_OPEN = dict.fromkeys(set(Lane) - CLOSED, 1)
"""Room of 1 for each lane that is not closed, to find the request that comes first of all."""


class Caller(msgspec.Struct, frozen=True):
    """The owner that takes a step, and the pool's time of the step."""

    owner: str
    timeout_s: float
    now: float


def begin(pool: Pool) -> float:
    """Begin a step and return its time. Raises if the pool has an outage.

    Shared times in the future are from before a step of the clock, so they are set to now. The limit
    algorithm learns nothing from such a refusal.
    """
    pool.check_up()
    now = pool.clock()
    if pool.permit is not None and pool.permit.read_at > now + AHEAD_S:
        pool.permit = pool.permit.but(read_at=now)
    known = pool.overload
    if known is not None and (overload := _by(known, now)) is not known:
        pool.overload = replace(overload, capacity=False)
    return now


# Leases.


def claim(
    line: Line,
    me: Caller,
    nonce: str,
    permit: Permit,
    *,
    most: int,
    lanes: Mapping[Lane, int],
    units: int,
    probing: bool = False,
) -> tuple[Sequence[Grant], int]:
    """Lease requests. Return the leases, and the number of requests that the next claim could lease."""
    pool, now, lanes = line.pool, me.now, rooms(lanes)
    taken = _claimed_before(line, me.owner, nonce)
    if taken is None:
        pool.beat(me.owner, me.timeout_s, now)
        # An owner that claims has a reachable gateway, so other owners may probe again.
        if not probing and pool.prober == me.owner:
            pool.probe = None
        limit, room = (
            (0, 0) if probing and pool.probe is not None else _room(pool, me, permit, probing=probing)
        )
        taken = _take(line, me, most, lanes, room=room, limit=limit, units=units)
        _remember(line, me, nonce, taken)
        if probing and taken:
            pool.probe, pool.probe_waits = taken[0].entry.id, float("-inf")
    return taken, line.waiting_count - line.passed_over(lanes, taken)


def _room(pool: Pool, me: Caller, permit: Permit, *, probing: bool) -> tuple[int, int]:
    """Return the limit and the part of it that is free."""
    now, limit = me.now, _limit_by(pool, me, permit)
    if limit is None:
        return 0, 0
    free = limit - pool.units - permit.apart
    if not probing:
        return limit, free - (now < pool.probe_waits <= now + pool.lease_s)
    # Without room, the probe reserves the next free unit, which other owners would claim otherwise.
    if free < 1:
        pool.probe_waits = now + min(me.timeout_s or pool.lease_s, pool.lease_s)
    return limit, free


def _limit_by(pool: Pool, me: Caller, permit: Permit) -> int | None:
    """Share a permit. Return the limit in units by which its owner may lease, or `None` if it may lease
    nothing."""
    if pool.pause is not None:
        return None
    now = me.now
    shared = _adopt(pool, permit, now)
    overload = pool.overload
    if overload is not None and (
        now < overload.wait_until(permit.retry_after_max_s) or _read_time(permit, now) <= overload.at
    ):
        return None
    return min(permit.limit - (pool.lost - permit.lost), shared.limit - (pool.lost - shared.lost))


def _read_time(permit: Permit, now: float) -> float:
    """Return the time of the reading of a permit. A time in the future is from before a step of the clock, so
    it counts as older than any other."""
    return permit.read_at if permit.read_at <= now + AHEAD_S else float("-inf")


def _adopt(pool: Pool, permit: Permit, now: float) -> Permit:
    """Make a permit the shared one if its reading is not older. Return the shared one."""
    read_at, known = _read_time(permit, now), pool.permit
    if known is None or read_at >= known.read_at - SAME_READING_S:
        newest = read_at if known is None else max(read_at, known.read_at)
        pool.permit = known = permit if newest == permit.read_at else permit.but(read_at=newest)
    return known


def _take(
    line: Line, me: Caller, most: int, lanes: Mapping[Lane, int], *, room: int, limit: int, units: int
) -> list[Grant]:
    left = dict(lanes)
    taken: list[Grant] = []
    passed: list[Entry] = []
    size = 0
    while room > 0 and len(taken) < most:
        source = line.next(left)
        entry = None if source is None else source.first()
        if source is None or entry is None:
            break
        weighs = entry.units or units
        # No end of a lease makes room for a request that needs more than the limit, so it is passed over. One
        # that needs more than the room ends the claim, because it would starve behind lighter ones.
        if weighs > limit:
            if not entry.units or len(passed) == PASSED_MOST:
                break
            passed.append(source.pop())
            continue
        if weighs > room:
            break
        size += len(entry.member)
        if taken and size > CLAIM_BYTES:
            break
        if entry.lane is not None:
            left[entry.lane] -= 1
        room -= weighs
        taken.append(line.lease(source.pop(), me.owner, me.now, units))
    # Put back only now, so that the loop does not meet them again.
    for entry in passed:
        line.put_back(entry)
    return taken


def hand_over(line: Line, me: Caller, nonce: str, permit: Permit, came: Sequence[Entry]) -> list[Grant]:
    """Lease those of the ready entries that the next claim would lease first."""
    limit, room = _room(line.pool, me, permit, probing=False) if came else (0, 0)
    taken: list[Grant] = []
    size = 0
    while room > 0:
        source = line.next(_OPEN)
        entry = None if source is None else source.first()
        # Stop at the first request that is not ready by this step: a claim would lease it before the others.
        if source is None or entry is None or entry not in came or entry.lane is not None:
            break
        size += len(entry.member)
        if entry.units > min(room, limit) or len(entry.member) > line.largest or size > CLAIM_BYTES:
            break
        room -= entry.units
        taken.append(line.lease(source.pop(), me.owner, me.now, entry.units))
    if taken:
        _remember(line, me, nonce, taken)
    return taken


def _claimed_before(line: Line, owner: str, nonce: str) -> list[Grant] | None:
    known = line.nonces.get((owner, nonce))
    if known is None:
        return None
    grants = (line.pool.grants.get(entry) for entry in known[2])
    held = [each for each in grants if each is not None and each.token in known[1]]
    return [each for each in held if not each.abandoned]


def _remember(line: Line, me: Caller, nonce: str, taken: Sequence[Grant]) -> None:
    nonces = line.nonces
    nonces[me.owner, nonce] = (
        me.now,
        tuple([each.token for each in taken]),
        tuple([each.entry.id for each in taken]),
    )
    # The claim that was just added is not old, so the loop ends.
    while nonces[oldest := next(iter(nonces))][0] < me.now - REPLY_TTL_S:
        del nonces[oldest]


def renew(
    line: Line,
    me: Caller,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> list[int]:
    """Renew leases, and share a permit and an overload. Return the entries of leases that are no longer the
    caller's."""
    pool, now = line.pool, me.now
    pool.beat(me.owner, me.timeout_s, now)
    lost = []
    for lease in leases:
        grant = line.held(lease)
        if grant is None or grant.abandoned:
            lost.append(lease.entry)
            continue
        grant.touched_at = now
        grant.expires_at = now + pool.lease_s
        pool.touched.append((now, lease.entry))
    if permit is not None:
        _adopt(pool, permit, now)
        if overload is not None:
            mine, known = _by(overload, now), pool.overload
            if known is not None:
                newest = mine if mine.at >= known.at else known
                mine = replace(newest, until=max(mine.until, known.until))
            pool.overload = replace(mine, until=mine.wait_until(permit.retry_after_max_s))
    return lost


def _by(overload: Overload, now: float) -> Overload:
    """Return the overload with its times set to now if they are in the future."""
    if overload.at <= now + AHEAD_S:
        return overload
    return replace(overload, at=now, until=now + max(0.0, overload.until - overload.at))


def weigh(line: Line, me: Caller, weights: Sequence[tuple[Lease, int]], permit: Permit) -> list[bool]:
    pool = line.pool
    pool.beat(me.owner, me.timeout_s, me.now)
    free = (_limit_by(pool, me, permit) or 0) - pool.units - permit.apart
    fits = []
    for lease, units in weights:
        grant = line.held(lease)
        if grant is None or grant.abandoned:
            fits.append(False)
            continue
        entry = grant.entry
        # A lighter request always fits and makes room for those after it.
        more = units - entry.units
        if more > 0 and more > free:
            fits.append(False)
            free += entry.units
            pool.end_lease(grant)
            entry.units, entry.deliveries = units, entry.deliveries - 1
            line.move(entry, Place.RETURNED)
        else:
            fits.append(True)
            pool.hold(grant.owner, more)
            entry.units = units
            free -= more
    return fits


def young(pool: Pool, me: Caller) -> int:
    """Return the units of the leases of other owners that were just claimed or renewed."""
    touched = pool.touched
    while touched and touched[0][0] < me.now - YOUNG_S:
        touched.popleft()
    found = {}
    for at, entry in touched:
        grant = pool.grants.get(entry)
        if grant is not None and grant.touched_at == at and grant.owner != me.owner:
            found[entry] = grant.entry.units
    return sum(found.values())


def release(line: Line, now: float, releases: Sequence[Release]) -> list[Settled]:
    said = []
    for release_ in releases:
        grant = line.held(release_.lease)
        if grant is None:
            said.append(Settled.LOST)
            continue
        entry = grant.entry
        entry.attempts += release_.attempt
        entry.refusals += release_.refusal
        entry.deliveries -= release_.undelivered
        entry.last_try = release_.last_try or entry.last_try
        line.pool.end_lease(grant)
        if release_.awaits:
            entry.awaits, entry.cancelled_by = awaited_as(release_.awaits), release_.cancelled_by
            line.move(entry, Place.RETURNED)
        elif release_.delay_s > 0:
            line.move(entry, Place.DELAYED, now + release_.delay_s)
        else:
            line.move(entry, Place.RETURNED)
        said.append(Settled.DONE)
    return said


def recall(line: Line, models: Sequence[str]) -> Recalled:
    names = list(dict.fromkeys(map(awaited_as, models)))
    moved = 0
    while moved < RECALL_MOST and (entry := line.awaiting.best(names)) is not None:
        line.move(entry, Place.RETURNED)
        moved += 1
    return Recalled(moved, sum(line.awaiting.count[name] for name in names))


# Looking.


def awaited(line: Line) -> dict[str, int]:
    """Return the number of waiting requests by model. If there are too many models, each call returns
    others."""
    told = list(line.awaiting.count.items())
    from_ = int(line.pool.unix_now() * 1e6) % len(told) if len(told) > AWAITED_MOST else 0
    return dict((told[from_:] + told[:from_])[:AWAITED_MOST])


def is_cancelled(line: Line, request_id: str, token: str) -> bool:
    pool = line.pool
    markers = (
        pool.value(line.cancels, f"{request_id}:{token}"),
        pool.value(pool.foreign_cancel, request_id),
    )
    return token != "" and token in markers


def outlook(line: Line, me: Caller) -> LineAhead:
    """Return a snapshot in which each score is a span of its own, whatever the rate."""
    pool, now = line.pool, me.now
    owners = {owner for owner, until in pool.beats.items() if now < until} | set(pool.held_by)
    replicas = [
        Replica(
            owner,
            pool.held_by.get(owner, 0),
            None
            if (until := pool.beats.get(owner)) is None
            else round(max(0.0, now - until + me.timeout_s), 3),
        )
        for owner in owners
    ]
    spans, heads = lying(map(itemgetter(0, 1), line.waiting()))
    leased = len(pool.grants)
    return LineAhead(pool.unix_now(), spans, heads, pool.settled, leased, replicas[:REPLICAS], len(owners))
