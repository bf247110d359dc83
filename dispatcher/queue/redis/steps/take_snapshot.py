"""Take a snapshot of the queue for the forecast: take_snapshot.lua."""

from __future__ import annotations

from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import split_rows
from dispatcher.requests.forecast import MAX_REPLICAS_LISTED, FirstRequest, QueueSnapshot, QueueSpan, Replica

_MAX_SPAN_SPLITS = 200
"""Largest number of spans that one snapshot splits."""
_HEAD_BYTES = 4096


async def take_snapshot(
    backend: Backend, timeout_s: float, rate: float | None, service_s: float
) -> QueueSnapshot:
    reply = await backend.run_script(
        "take_snapshot",
        {
            "owner_timeout_s": timeout_s,
            "rate": rate or 0.0,
            "service_s": service_s,
            "max_splits": _MAX_SPAN_SPLITS,
            "head_bytes": _HEAD_BYTES,
            "max_owners": MAX_REPLICAS_LISTED,
        },
    )
    now, settled, leased, spans, first_requests, owner_count, replicas = reply.value
    backend.observe_clock(reply, now)
    return QueueSnapshot(
        now=float(now),
        spans=[_decode_span(*row) for row in split_rows(spans, 3)],
        first_requests=[_decode_first_request(*row) for row in split_rows(first_requests, 2)],
        settled_count=settled,
        leased_count=leased,
        replicas=[_decode_replica(*row) for row in split_rows(replicas, 3)],
        owner_count=owner_count,
    )


def _decode_span(low: int, high: int, count: int) -> QueueSpan:
    return QueueSpan(count) if low < 0 else QueueSpan(count, low, high)


def _decode_first_request(deadline: bytes, start: bytes) -> FirstRequest:
    return FirstRequest(start, None if deadline == b"-1" else float(deadline))


def _decode_replica(owner: bytes, leases: int, silent_s: bytes | None) -> Replica:
    return Replica(
        owner.decode(errors="replace"), leases, None if silent_s is None else round(float(silent_s), 3)
    )
