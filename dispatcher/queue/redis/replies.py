"""Decoding of the replies of scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher.core.requests.forecast import Head, LineAhead, Replica, Span
from dispatcher.core.requests.lanes import lane_of, losses_of
from dispatcher.ports import Dead, Lease, Leases, Overload, Shared
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Reply


def line_of(told: Sequence[Any]) -> LineAhead:
    """Decode the reply of take_snapshot.lua."""
    now, settled, leased, spans, heads, owners, replicas = told
    return LineAhead(
        now=float(now),
        spans=[_span(*spans[at : at + 3]) for at in range(0, len(spans), 3)],
        heads=[_head(*heads[at : at + 2]) for at in range(0, len(heads), 2)],
        settled=settled,
        leased=leased,
        replicas=[_replica(*replicas[at : at + 3]) for at in range(0, len(replicas), 3)],
        owners=owners,
    )


def lease_of(
    entry: int,
    token: bytes,
    member: bytes | int,
    score: bytes,
    deliveries: int,
    attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    last_try: bytes,
) -> Lease:
    """Decode a lease. Its member is empty if the script returned only the size of the member."""
    return Lease(
        entry,
        token.decode(),
        b"" if isinstance(member, int) else member,
        float(score),
        deliveries,
        attempts,
        refusals,
        losses=losses_of(deaths),
        lane=lane_of(deaths),
        units=units,
        last_try=last_try.decode(errors="replace") if last_try else "",
    )


def _span(low: int, high: int, count: int) -> Span:
    return Span(count) if low < 0 else Span(count, low, high)


def _head(deadline: bytes, start: bytes) -> Head:
    return Head(start, None if deadline == b"-1" else float(deadline))


def _replica(owner: bytes, leases: int, silent_s: bytes | None) -> Replica:
    return Replica(
        owner.decode(errors="replace"), leases, None if silent_s is None else round(float(silent_s), 3)
    )


def dead_of(
    entry: int,
    member: bytes,
    score: bytes,
    reason: bytes,
    died_at: bytes,
    deliveries: int,
    attempts: int,
    refusals: int,
    deaths: int,
) -> Dead:
    return Dead(
        entry,
        member,
        float(score),
        reason.decode(errors="replace"),
        float(died_at),
        deliveries,
        attempts,
        refusals,
        losses_of(deaths),
    )


def facts_of(backend: Backend, reply: Reply, facts: Sequence[Any]) -> tuple[Leases, Shared]:
    """Decode the part of the reply that all scripts of owners have in common."""
    now, live, own, young, lost, stray, limit, read_at, *rest = facts
    overload_at, until, capacity, in_flight, prober, paused = rest
    backend.saw(reply, now)
    count = Leases(backend.loop_time(now), live, live - own, young, lost, stray)
    overload = None
    if overload_at is not None:
        at, until_at = backend.loop_time(overload_at), backend.loop_time(until)
        overload = Overload(at, until_at, bool(capacity), in_flight)
    return count, Shared(
        limit,
        0.0 if limit is None else backend.loop_time(read_at),
        overload,
        None if prober is None else prober.decode(),
        bool(paused),
    )
