"""Steps of owners: one function for each Lua script, with its name, on a `QueueState` and its `PoolState`.

The sweep and the writing of results have modules of their own. All times are those of the pool's clock. No
step awaits, so each is atomic. Scripts for a Cluster, for a slow network or for questions about the server
have no counterpart here: push_results, delete_marker, cut_member, check_result_lists, check_permissions.
Neither have limits of sizes and numbers, such as `queue.max_pending`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import msgspec

from dispatcher.lab.memory_queue.entries import Entry, Location
from dispatcher.lab.memory_queue.state import LeaseRecord, PoolState, QueueState
from dispatcher.queue.constants import (
    CLOCK_STEP_S,
    JUST_LEASED_S,
    MAX_PASSED_OVER,
    REPLY_TTL_S,
    SAME_READING_S,
)
from dispatcher.queue.contract import Lease, Overload, Permit, Release, SettleStatus
from dispatcher.requests.forecast import MAX_REPLICAS_LISTED, QueueSnapshot, Replica, summarize_requests
from dispatcher.requests.lanes import ONE_PER_LANE, Lane, compute_lane_room

"""Room of 1 for each lane that is not closed, to find the request that comes first of all."""


class Caller(msgspec.Struct, frozen=True):
    """The owner that takes a step, and the pool's time of the step."""

    owner: str
    timeout_s: float
    now: float


def begin_step(pool: PoolState) -> float:
    """Begin a step and return its time. Raises if the pool has an outage.

    Shared times in the future are from before a step of the clock, so they are set to now. The limit
    algorithm learns nothing from such a refusal.
    """
    pool.check_available()
    now = pool.clock()
    if pool.shared_permit is not None and pool.shared_permit.read_at > now + CLOCK_STEP_S:
        pool.shared_permit = pool.shared_permit.copy_with(read_at=now)
    known = pool.overload
    if known is not None and (overload := _clamp_to_now(known, now)) is not known:
        pool.overload = replace(overload, is_out_of_capacity=False)
    return now


# Leases.


def claim(
    queue: QueueState,
    caller: Caller,
    nonce: str,
    permit: Permit,
    *,
    max_count: int,
    max_per_lane: Mapping[Lane, int],
    assumed_units: int,
    max_blocked: int,
    is_probe: bool = False,
) -> tuple[Sequence[LeaseRecord], int, int | None]:
    """Lease requests. Return the leases, the number of requests that the next claim could lease, and the
    entry of the first request without room."""
    blocked = None
    pool, now, max_per_lane = queue.pool, caller.now, compute_lane_room(max_per_lane)
    taken = _find_claim(queue, caller.owner, nonce)
    if taken is None:
        pool.record_heartbeat(caller.owner, caller.timeout_s, now)
        # An owner that claims has a reachable gateway, so other owners may probe again.
        if not is_probe and pool.probing_owner == caller.owner:
            pool.probe_entry = None
        limit, room = (
            (0, 0)
            if is_probe and pool.probe_entry is not None
            else _get_limit_and_room(pool, caller, permit, is_probe=is_probe)
        )
        taken, blocked = _lease_first(
            queue,
            caller,
            max_count,
            max_per_lane,
            room=room,
            limit=limit,
            assumed_units=assumed_units,
            max_blocked=max_blocked,
        )
        _remember_claim(queue, caller, nonce, taken)
        if is_probe and taken:
            pool.probe_entry, pool.probe_reserved_until = taken[0].entry.id, float("-inf")
    return taken, queue.waiting_count - queue.count_passed_over(max_per_lane, taken), blocked


def _get_limit_and_room(
    pool: PoolState, caller: Caller, permit: Permit, *, is_probe: bool
) -> tuple[int, int]:
    """Return the limit and the part of it that is free."""
    now, limit = caller.now, _share_and_get_limit(pool, caller, permit)
    if limit is None:
        return 0, 0
    free = limit - pool.leased_units - permit.unleased_units
    if not is_probe:
        return limit, free - (now < pool.probe_reserved_until <= now + pool.lease_s)
    # Without room, the probe reserves the next free unit, which other owners would claim otherwise.
    if free < 1:
        pool.probe_reserved_until = now + min(caller.timeout_s or pool.lease_s, pool.lease_s)
    return limit, free


def _share_and_get_limit(pool: PoolState, caller: Caller, permit: Permit) -> int | None:
    """Share a permit. Return the limit in units for leases of its owner, or `None` if it may lease
    nothing."""
    if pool.pause is not None:
        return None
    now = caller.now
    shared = _update_shared_permit(pool, permit, now)
    overload = pool.overload
    if overload is not None and (
        now < overload.bounded_retry_at(permit.retry_after_max_s)
        or _effective_read_at(permit, now) <= overload.refused_at
    ):
        return None
    return min(
        permit.limit - (pool.lost_units - permit.lost_units),
        shared.limit - (pool.lost_units - shared.lost_units),
    )


def _effective_read_at(permit: Permit, now: float) -> float:
    """Return the time of the reading of a permit. A time in the future is from before a step of the clock, so
    it counts as older than any other."""
    return permit.read_at if permit.read_at <= now + CLOCK_STEP_S else float("-inf")


def _update_shared_permit(pool: PoolState, permit: Permit, now: float) -> Permit:
    """Make a permit the shared one if its reading is not older. Return the shared one."""
    read_at, known = _effective_read_at(permit, now), pool.shared_permit
    if known is None or read_at >= known.read_at - SAME_READING_S:
        newest = read_at if known is None else max(read_at, known.read_at)
        pool.shared_permit = known = permit if newest == permit.read_at else permit.copy_with(read_at=newest)
    return known


def _lease_first(
    queue: QueueState,
    caller: Caller,
    max_count: int,
    max_per_lane: Mapping[Lane, int],
    *,
    room: int,
    limit: int,
    assumed_units: int,
    max_blocked: int,
) -> tuple[list[LeaseRecord], int | None]:
    """Lease the first requests. Return the leases, and the entry of the first request without room."""
    left = dict(max_per_lane)
    taken: list[LeaseRecord] = []
    too_heavy: list[Entry] = []
    blocked: list[Entry] = []
    while room > 0 and len(taken) < max_count:
        source = queue.next_source(left)
        entry = None if source is None else source.peek_entry()
        if source is None or entry is None:
            break
        weighs = entry.units or assumed_units
        # No end of a lease makes room for a request that needs more than the limit, so it is passed over. Of
        # those that need more than the room only a few are, because they would starve behind lighter ones.
        if weighs > limit:
            if not entry.units or len(too_heavy) == MAX_PASSED_OVER:
                break
            too_heavy.append(source.pop_entry())
            continue
        if weighs > room:
            if not entry.units:
                break
            blocked.append(source.pop_entry())
            if len(blocked) > max_blocked:
                break
            continue
        if isinstance(lane := entry.lane, Lane):
            left[lane] -= 1
        room -= weighs
        taken.append(queue.lease_entry(source.pop_entry(), caller.owner, caller.now, assumed_units))
    # Put back only now, so that the loop does not meet them again.
    for entry in (*too_heavy, *blocked):
        queue.put_back(entry)
    return taken, blocked[0].id if blocked else None


def claim_first_of(
    queue: QueueState,
    caller: Caller,
    nonce: str,
    permit: Permit,
    entries: Sequence[Entry],
) -> list[LeaseRecord]:
    """Share the limit of the permit, and lease those of the entries that the next claim would lease first."""
    _, room = _get_limit_and_room(queue.pool, caller, permit, is_probe=False)
    taken: list[LeaseRecord] = []
    while room > 0:
        source = queue.next_source(ONE_PER_LANE)
        entry = None if source is None else source.peek_entry()
        # Stop at the first request that is not one of them: a claim would lease it before the others.
        if source is None or entry is None or entry not in entries or entry.units > room:
            break
        room -= entry.units
        taken.append(queue.lease_entry(source.pop_entry(), caller.owner, caller.now, entry.units))
    if taken:
        _remember_claim(queue, caller, nonce, taken)
    return taken


def _find_claim(queue: QueueState, owner: str, nonce: str) -> list[LeaseRecord] | None:
    known = queue.claims_by_nonce.get((owner, nonce))
    if known is None:
        return None
    grants = (queue.pool.leases.get(entry) for entry in known[2])
    return [each for each in grants if each is not None and each.token in known[1]]


def _remember_claim(queue: QueueState, caller: Caller, nonce: str, taken: Sequence[LeaseRecord]) -> None:
    nonces = queue.claims_by_nonce
    nonces[caller.owner, nonce] = (
        caller.now,
        tuple([each.token for each in taken]),
        tuple([each.entry.id for each in taken]),
    )
    # The claim that was just added is not old, so the loop ends.
    while nonces[oldest := next(iter(nonces))][0] < caller.now - REPLY_TTL_S:
        del nonces[oldest]


def renew(
    queue: QueueState,
    caller: Caller,
    leases: Sequence[Lease] = (),
    permit: Permit | None = None,
    overload: Overload | None = None,
) -> list[int]:
    """Renew leases, and share a permit and an overload. Return the entries of leases that are no longer the
    caller's."""
    pool, now = queue.pool, caller.now
    pool.record_heartbeat(caller.owner, caller.timeout_s, now)
    lost = []
    for lease in leases:
        grant = queue.find_lease(lease)
        if grant is None:
            lost.append(lease.entry_id)
            continue
        grant.touched_at = now
        grant.expires_at = now + pool.lease_s
        pool.touched_entries.append((now, lease.entry_id))
    if permit is not None:
        _update_shared_permit(pool, permit, now)
        if overload is not None:
            newest_overload, known = _clamp_to_now(overload, now), pool.overload
            if known is not None:
                newest = newest_overload if newest_overload.refused_at >= known.refused_at else known
                newest_overload = replace(newest, retry_at=max(newest_overload.retry_at, known.retry_at))
            pool.overload = replace(
                newest_overload, retry_at=newest_overload.bounded_retry_at(permit.retry_after_max_s)
            )
    return lost


def _clamp_to_now(overload: Overload, now: float) -> Overload:
    """Return the overload with its times set to now if they are in the future."""
    if overload.refused_at <= now + CLOCK_STEP_S:
        return overload
    return replace(overload, refused_at=now, retry_at=now + max(0.0, overload.retry_at - overload.refused_at))


def set_lease_units(
    queue: QueueState, caller: Caller, lease_units: Sequence[tuple[Lease, int]], permit: Permit
) -> list[bool]:
    pool = queue.pool
    pool.record_heartbeat(caller.owner, caller.timeout_s, caller.now)
    free = (_share_and_get_limit(pool, caller, permit) or 0) - pool.leased_units - permit.unleased_units
    fits = []
    for lease, units in lease_units:
        grant = queue.find_lease(lease)
        if grant is None:
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
            queue.move_entry(entry, Location.RETURNED)
        else:
            fits.append(True)
            pool.add_owner_units(grant.owner, more)
            entry.units = units
            free -= more
    return fits


def count_just_leased_units(pool: PoolState, caller: Caller) -> int:
    """Return the units of the leases of other owners that were just claimed or renewed."""
    touched = pool.touched_entries
    while touched and touched[0][0] < caller.now - JUST_LEASED_S:
        touched.popleft()
    if pool.leased_units == pool.units_by_owner[caller.owner]:  # there are none, and the loop below is long
        return 0
    found = {}
    for at, entry in touched:
        grant = pool.leases.get(entry)
        if grant is not None and grant.touched_at == at and grant.owner != caller.owner:
            found[entry] = grant.entry.units
    return sum(found.values())


def release(
    queue: QueueState, now: float, releases: Sequence[Release], continued: list[Entry] | None = None
) -> list[SettleStatus]:
    """Return requests to the queue. Those that can be claimed again are added to `continued`."""
    statuses = []
    for release_ in releases:
        grant = queue.find_lease(release_.lease)
        if grant is None:
            statuses.append(SettleStatus.LOST)
            continue
        entry, progress = grant.entry, release_.stored_progress
        if progress:  # attempts count for each slice
            entry.failed_attempts = entry.refusals = 0
        if progress is not None:
            entry.progress = progress
        entry.failed_attempts += release_.is_failed_attempt
        entry.refusals += release_.is_refusal
        entry.deliveries -= release_.is_undelivered
        entry.last_attempt = release_.last_attempt or entry.last_attempt
        queue.pool.end_lease(grant)
        if release_.new_score is not None:
            entry.score = release_.new_score
        if release_.extra is not None:
            queue.hold_entry(entry, release_)
            queue.move_entry(entry, Location.RETURNED)
        elif release_.delay_s > 0:
            queue.move_entry(entry, Location.DELAYED, now + release_.delay_s)
        else:
            queue.move_entry(entry, Location.RETURNED)
            if continued is not None and release_.can_be_claimed_again and entry.lane is Lane.STARTED:
                continued.append(entry)
        statuses.append(SettleStatus.DONE)
    return statuses


# Looking.


def is_cancelled(queue: QueueState, request_id: str, token: str) -> bool:
    return token != "" and queue.pool.read_expiring(queue.cancel_markers, f"{request_id}:{token}") == token


def take_snapshot(queue: QueueState, caller: Caller) -> QueueSnapshot:
    """Return a snapshot in which each score is a span of its own, whatever the rate."""
    pool, now = queue.pool, caller.now
    owners = {owner for owner, until in pool.heartbeats.items() if now < until} | set(pool.units_by_owner)
    replicas = [
        Replica(
            owner,
            pool.units_by_owner.get(owner, 0),
            None
            if (until := pool.heartbeats.get(owner)) is None
            else round(max(0.0, now - until + caller.timeout_s), 3),
        )
        for owner in owners
    ]
    spans, heads = summarize_requests(map(itemgetter(0, 1), queue.iterate_waiting()))
    leased = len(pool.leases)
    return QueueSnapshot(
        pool.unix_now(), spans, heads, pool.settled_count, leased, replicas[:MAX_REPLICAS_LISTED], len(owners)
    )
