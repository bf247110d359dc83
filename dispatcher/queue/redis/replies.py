"""What the scripts reply, as the values that stand for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher.core.outlook import Head, Line, Replica, Span
from dispatcher.ports import Lease
from dispatcher.queue.constants import SUSPECT_DEATHS


def leases_of(flat: Sequence[Any]) -> list[Lease]:
    """Of a claim, without the member where only its size was told."""
    return [_lease(*flat[at : at + 8]) for at in range(0, len(flat), 8)]


def untold_bytes(flat: Sequence[Any]) -> int:
    """How many bytes the one member of a claim has where that is all that was told of it; else 0."""
    return flat[2] if flat and isinstance(flat[2], int) else 0


def line_of(told: Sequence[Any]) -> Line:
    """Of an outlook."""
    now, settled, leased, spans, heads, owners, replicas = told
    return Line(
        now=float(now),
        spans=[_span(*spans[at : at + 3]) for at in range(0, len(spans), 3)],
        heads=[_head(*heads[at : at + 2]) for at in range(0, len(heads), 2)],
        settled=settled,
        leased=leased,
        replicas=[_replica(*replicas[at : at + 3]) for at in range(0, len(replicas), 3)],
        owners=owners,
    )


def _lease(
    entry: int,
    token: bytes,
    member: bytes | int,
    score: bytes,
    deliveries: int,
    attempts: int,
    refusals: int,
    deaths: int,
) -> Lease:
    return Lease(
        entry,
        token.decode(),
        b"" if isinstance(member, int) else member,
        float(score),
        deliveries,
        attempts,
        refusals,
        losses=max(0, deaths - SUSPECT_DEATHS),
        suspect=deaths >= SUSPECT_DEATHS,
    )


def _span(low: int, high: int, count: int) -> Span:
    return Span(count) if low < 0 else Span(count, low, high)


def _head(deadline: bytes, start: bytes) -> Head:
    return Head(start, None if deadline == b"-1" else float(deadline))


def _replica(owner: bytes, leases: int, silent_s: bytes | None) -> Replica:
    return Replica(
        owner.decode(errors="replace"), leases, None if silent_s is None else round(float(silent_s), 3)
    )
