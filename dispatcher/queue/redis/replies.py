"""Decoding of the replies of scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher.core.requests.forecast import FirstRequest, QueueSnapshot, QueueSpan, Replica
from dispatcher.core.requests.lanes import choose_lane, count_losses
from dispatcher.ports import DeadRequest, Lease, LeaseCounts, Overload, SharedState
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Reply


def decode_queue_snapshot(reply: Sequence[Any]) -> QueueSnapshot:
    """Decode the reply of take_snapshot.lua."""
    now, settled, leased, spans, heads, owners, replicas = reply
    return QueueSnapshot(
        now=float(now),
        spans=[_decode_span(*spans[at : at + 3]) for at in range(0, len(spans), 3)],
        first_requests=[_decode_head(*heads[at : at + 2]) for at in range(0, len(heads), 2)],
        settled_count=settled,
        leased_count=leased,
        replicas=[_decode_replica(*replicas[at : at + 3]) for at in range(0, len(replicas), 3)],
        owner_count=owners,
    )


def decode_lease(
    entry_id: int,
    token: bytes,
    member: bytes | int,
    score: bytes,
    deliveries: int,
    failed_attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    last_attempt: bytes,
) -> Lease:
    """Decode a lease. Its member is empty if the script returned only the size of the member."""
    return Lease(
        entry_id,
        token.decode(),
        b"" if isinstance(member, int) else member,
        float(score),
        deliveries,
        failed_attempts,
        refusals,
        deaths_as_suspect=count_losses(deaths),
        lane=choose_lane(deaths),
        units=units,
        last_attempt=last_attempt.decode(errors="replace") if last_attempt else "",
    )


def _decode_span(low: int, high: int, count: int) -> QueueSpan:
    return QueueSpan(count) if low < 0 else QueueSpan(count, low, high)


def _decode_head(deadline: bytes, start: bytes) -> FirstRequest:
    return FirstRequest(start, None if deadline == b"-1" else float(deadline))


def _decode_replica(owner: bytes, leases: int, silent_s: bytes | None) -> Replica:
    return Replica(
        owner.decode(errors="replace"), leases, None if silent_s is None else round(float(silent_s), 3)
    )


def decode_dead_request(
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


def decode_owner_reply(
    backend: Backend, reply: Reply, facts: Sequence[Any]
) -> tuple[LeaseCounts, SharedState]:
    """Decode the part of the reply that all scripts of owners have in common."""
    now, live, own, young, lost, stray, limit, read_at, *rest = facts
    overload_at, until, capacity, in_flight, prober, paused = rest
    backend.observe_clock(reply, now)
    count = LeaseCounts(backend.to_loop_time(now), live, live - own, young, lost, stray)
    overload = None
    if overload_at is not None:
        at, until_at = backend.to_loop_time(overload_at), backend.to_loop_time(until)
        overload = Overload(at, until_at, bool(capacity), in_flight)
    return count, SharedState(
        limit,
        0.0 if limit is None else backend.to_loop_time(read_at),
        overload,
        None if prober is None else prober.decode(),
        bool(paused),
    )
