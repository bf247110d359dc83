"""Replies of scripts, decoded into named fields. The header of each script says what it returns.

Replies to producers and consumers are decoded in producer.py and streams.py, so that a program which only
submits loads little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dispatcher.core.requests.forecast import FirstRequest, QueueSnapshot, QueueSpan, Replica
from dispatcher.core.requests.found_request import LOCATION_BY_LANE, FoundRequest, RequestLocation
from dispatcher.core.requests.lanes import Lane, choose_lane, count_losses
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    OverrideCounts,
    SequenceCounters,
    SequenceCounts,
    SequencePage,
    TurnDecision,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.core.sequences.turns import SequenceSnapshot, SequenceStatus
from dispatcher.core.value import Value
from dispatcher.ports import (
    ClaimResult,
    ClaimTurnsResult,
    DeadRequest,
    Lease,
    LeaseCounts,
    LeaseUnitsResult,
    Overload,
    QueueCounts,
    RenewResult,
    SettleStatus,
    SharedState,
)
from dispatcher.queue.constants import LOST
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Reply

_GRANTED, _REJECTED = 1, 2
_COUNTERS = slice(11, 20)
"""Position of the sequence counters in what all sequences share (SHARED_FIELDS in sequences.lua)."""
_OVERRIDE_COUNTS = 21
"""Position of the counts of overrides there."""

LOCATIONS = {
    "P": RequestLocation.PENDING,
    "R": RequestLocation.RETURNED,
    **{str(number): LOCATION_BY_LANE[lane] for number, lane in enumerate(Lane, start=1)},
    "D": RequestLocation.DELAYED,
    "L": RequestLocation.LEASED,
    "X": RequestLocation.DEAD,
}
"""Locations by the names that the scripts use."""


def _split_rows(values: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield the rows of a flat list."""
    return (values[at : at + width] for at in range(0, len(values), width))


# Leases.


@dataclass(frozen=True, slots=True)
class ClaimReply:
    claim_result: ClaimResult
    large_member_bytes: int
    """Size of the member if it is too large to be part of the reply, which then has one lease.
    Otherwise 0."""
    large_progress_bytes: int
    """The same for the progress of the request."""


def decode_claim(backend: Backend, reply: Reply) -> ClaimReply:
    owner_reply, waiting_count, rows = reply.value
    large_member_bytes = rows[2] if rows and isinstance(rows[2], int) else 0
    large_progress_bytes = rows[10] if rows and isinstance(rows[10], int) else 0
    claim_result = ClaimResult(
        _decode_leases(rows), *_decode_owner_reply(backend, reply, owner_reply), waiting_count
    )
    return ClaimReply(claim_result, large_member_bytes, large_progress_bytes)


def _decode_leases(rows: Sequence[Any]) -> list[Lease]:
    return [_decode_lease(*row) for row in _split_rows(rows, 11)]


def _decode_lease(
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
    progress: bytes | int,
) -> Lease:
    """Decode a lease. Its member is empty if the script returned only the size of the member, and so is its
    progress."""
    return Lease(
        entry_id,
        token.decode(),
        b"" if isinstance(member, int) else member,
        float(score),
        deliveries,
        failed_attempts,
        refusals,
        deaths_as_suspect=count_losses(deaths),
        lane=choose_lane(deaths, has_progress=bool(progress)),
        units=units,
        last_attempt=last_attempt.decode(errors="replace") if last_attempt else "",
        progress=b"" if isinstance(progress, int) else progress,
    )


def _decode_owner_reply(
    backend: Backend, reply: Reply, values: Sequence[Any]
) -> tuple[LeaseCounts, SharedState]:
    """Decode the part of the reply that all scripts of owners have in common (`build_owner_reply`)."""
    now, live, own, just_leased, lost, orphaned, limit, read_at, *rest = values
    overload_at, retry_at, is_out_of_capacity, in_flight, prober, paused = rest
    backend.observe_clock(reply, now)
    counts = LeaseCounts(backend.to_loop_time(now), live, live - own, just_leased, lost, orphaned)
    overload = None
    if overload_at is not None:
        overload = Overload(
            backend.to_loop_time(overload_at),
            backend.to_loop_time(retry_at),
            bool(is_out_of_capacity),
            in_flight,
        )
    return counts, SharedState(
        limit,
        0.0 if limit is None else backend.to_loop_time(read_at),
        overload,
        None if prober is None else prober.decode(),
        bool(paused),
    )


def decode_renew(backend: Backend, reply: Reply) -> RenewResult:
    owner_reply, lost_entry_ids = reply.value
    return RenewResult(lost_entry_ids, *_decode_owner_reply(backend, reply, owner_reply))


def decode_lease_units(backend: Backend, reply: Reply) -> LeaseUnitsResult:
    owner_reply, fits = reply.value
    return LeaseUnitsResult([bool(each) for each in fits], *_decode_owner_reply(backend, reply, owner_reply))


class ReleaseReply(Value, frozen=True):
    statuses: list[SettleStatus]
    claim_result: ClaimResult | None = None
    """Requests that were claimed again, with neither member nor progress. `None` if nothing was offered, if
    none can be claimed again, or if the reply was lost."""


def decode_release(backend: Backend, reply: Reply) -> ReleaseReply:
    now, claimed, *values = reply.value
    backend.observe_clock(reply, now)
    statuses = [SettleStatus.LOST if value == LOST else SettleStatus.DONE for value in values]
    if not isinstance(claimed, list):  # no offer, or the reply of a repeated call, which has only a number
        return ReleaseReply(statuses)
    owner_reply, waiting_count, rows = claimed
    owner_facts = _decode_owner_reply(backend, reply, owner_reply)
    return ReleaseReply(statuses, ClaimResult(_decode_leases(rows), *owner_facts, waiting_count))


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
    turn_count: int
    """Number of requests of sequences whose turn has come."""
    cancelled_count: int
    """Number of cancelled requests that waited for their model."""


def decode_sweep(backend: Backend, reply: Reply) -> SweepReply:
    now, reclaimed, due, next_due, has_more, lost_units, owners, turns, cancelled = reply.value
    backend.observe_clock(reply, now)
    return SweepReply(
        reclaimed,
        due,
        None if next_due is None else backend.to_loop_time(next_due),
        bool(has_more),
        lost_units,
        [owner.decode(errors="replace") for owner in owners],
        turns,
        cancelled,
    )


# Results.


@dataclass(frozen=True, slots=True)
class SettleReply:
    statuses: Sequence[int]
    dropped_dead_count: int
    """Number of dead requests that were dropped for `dead_max`."""
    claim_result: ClaimResult | None = None
    """Claimed next requests. `None` if nothing was offered, or if the reply was lost."""
    granted_turns: Sequence[TurnGranted] = ()
    """Granted turns of these requests."""


def decode_settle(backend: Backend, reply: Reply) -> SettleReply:
    now, dropped, claimed, *statuses = reply.value
    backend.observe_clock(reply, now)
    if not isinstance(claimed, list):  # no offer, or the reply of a repeated call, which has only a number
        return SettleReply(statuses, dropped)
    owner_reply, waiting_count, rows, turns = claimed
    return SettleReply(
        statuses,
        dropped,
        ClaimResult(_decode_leases(rows), *_decode_owner_reply(backend, reply, owner_reply), waiting_count),
        [_decode_granted_turn(*turn) for turn in turns],
    )


@dataclass(frozen=True, slots=True)
class OverdueReply:
    until: bytes
    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: int
    rows: Sequence[tuple[int, bytes, bytes, bytes, int, int, bytes]]
    """Range, location, member, last attempt, failed attempts, refusals and progress of each request."""
    large_request_bytes: int
    """Size of the first member with its progress if they need a call of their own, and then the only row has
    none of both. Otherwise 0."""


def decode_overdue(reply: Reply) -> OverdueReply:
    until, next_range, next_offset, *rows = reply.value
    size = rows[0][2] if rows and isinstance(rows[0][2], int) else 0
    return OverdueReply(until, next_range, next_offset, rows, size)


# Counts and lookups.


def decode_counts(backend: Backend, reply: Reply) -> QueueCounts:
    now, pending, leased, delayed, dead, units, shared, parked, *lanes = reply.value
    waiting, awaiting_model, started = lanes
    backend.observe_clock(reply, now)
    values = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(values[at]) for at in (1, 9, 10)) if values else (0, 0, 0)
    counts = SequenceCounts(active, parked, held, aborted, waiting, _decode_override_counts(values))
    counters = SequenceCounters(*values[_COUNTERS])
    return QueueCounts(pending, leased, delayed, dead, units, counts, counters, awaiting_model, started)


def _decode_override_counts(shared: Sequence[Any]) -> tuple[OverrideCounts, ...]:
    """Return the counts of overrides from what all sequences share."""
    by_name = shared[_OVERRIDE_COUNTS] if len(shared) > _OVERRIDE_COUNTS else None
    if not by_name:  # an empty table of Lua is an empty array here
        return ()
    return tuple(
        OverrideCounts(name, int(active), int(parked)) for name, (active, parked) in sorted(by_name.items())
    )


def decode_queue_snapshot(backend: Backend, reply: Reply) -> QueueSnapshot:
    now, settled, leased, spans, first_requests, owner_count, replicas = reply.value
    backend.observe_clock(reply, now)
    return QueueSnapshot(
        now=float(now),
        spans=[_decode_span(*row) for row in _split_rows(spans, 3)],
        first_requests=[_decode_first_request(*row) for row in _split_rows(first_requests, 2)],
        settled_count=settled,
        leased_count=leased,
        replicas=[_decode_replica(*row) for row in _split_rows(replicas, 3)],
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


def decode_next_requests(reply: Reply) -> list[tuple[float, bytes]]:
    return [(float(score), member) for score, member in _split_rows(reply.value, 2)]


def decode_dead_requests(reply: Reply) -> list[DeadRequest]:
    return [_decode_dead_request(*row) for row in _split_rows(reply.value, 9)]


def _decode_dead_request(
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


def decode_waiting_by_model(reply: Reply) -> dict[str, int]:
    return {model.decode(): int(count) for model, count in _split_rows(reply.value, 2)}


@dataclass(frozen=True, slots=True)
class FoundPage:
    """Page of a search for requests."""

    next_range: int
    """Range at which to go on. -1 at the end."""
    next_offset: str
    examined_count: int
    examined_bytes: int
    is_too_large: bool
    """True if the page has too many bytes for one reply, so that fewer requests must be asked for."""
    requests: Sequence[FoundRequest]


def decode_found_page(reply: Reply) -> FoundPage:
    next_range, next_offset, examined_count, examined_bytes, is_too_large, rows = reply.value
    found = [_decode_found_request(*row) for row in rows]
    return FoundPage(
        next_range, next_offset.decode(), examined_count, examined_bytes, bool(is_too_large), found
    )


def _decode_found_request(
    location: bytes,
    entry_id: int,
    score: bytes,
    member: bytes,
    deliveries: int,
    failed_attempts: int,
    refusals: int,
    deaths: int,
    units: int,
    owner: bytes,
    at: bytes | None,
    reason: bytes,
    missing_model: bytes,
) -> FoundRequest:
    return FoundRequest(
        LOCATIONS[location.decode()],
        member,
        float(score),
        entry_id,
        deliveries,
        failed_attempts,
        refusals,
        deaths,
        units,
        owner.decode(errors="replace"),
        None if at is None else float(at),
        reason.decode(errors="replace"),
        missing_model.decode(errors="replace"),
    )


# Sequences.


def decode_claim_turns(backend: Backend, reply: Reply) -> ClaimTurnsResult:
    owner_reply, decisions = reply.value
    return ClaimTurnsResult(
        [_decode_decision(*decision) for decision in decisions],
        *_decode_owner_reply(backend, reply, owner_reply),
    )


def _decode_decision(kind: int, *details: Any) -> TurnDecision:
    if kind == _GRANTED:
        return _decode_granted_turn(*details)
    if kind == _REJECTED:
        code, why = details
        return TurnRejected(ErrorCode(code.decode()), why.decode())
    return TurnWaits()


def _decode_granted_turn(index: int, token: bytes, is_first: int, conversation: bytes) -> TurnGranted:
    return TurnGranted(index, token.decode(), conversation, bool(is_first))


@dataclass(frozen=True, slots=True)
class RemainingRow:
    """Remaining request of a sequence, which is to be answered."""

    place: str
    member: bytes | int
    """Member, or its size if it needs a call of its own."""
    error_code: ErrorCode
    message: str
    progress: bytes | int
    """Progress of the request, or its size if it needs a call of its own."""


def decode_remaining_requests(reply: Reply) -> list[RemainingRow]:
    return [
        RemainingRow(place.decode(), member, ErrorCode(code.decode()), why.decode(), progress)
        for place, member, code, why, progress in _split_rows(reply.value, 5)
    ]


def decode_sequence_page(reply: Reply) -> SequencePage:
    cursor, rows = reply.value
    return SequencePage([_decode_sequence(*row) for row in rows], "" if cursor == b"0" else cursor.decode())


def decode_sequence(reply: Reply) -> SequenceSnapshot | None:
    return None if reply.value is None else _decode_sequence(*reply.value)


def _decode_sequence(
    name: bytes,
    status: bytes,
    expected_index: int,
    next_entry: int | None,
    waiting_count: int,
    run_count: int,
    ended_count: int,
    failed_count: int,
    began_at: bytes | None,
    last_active_at: bytes,
    gap_since: bytes | None,
    has_token: int,
    conversation_bytes: int,
    cause: bytes,
    waiting_rows: Sequence[int],
    override: bytes,
) -> SequenceSnapshot:
    return SequenceSnapshot(
        id=name.decode(errors="replace"),
        status=SequenceStatus(status.decode()),
        expected_index=expected_index,
        next_entry=next_entry,
        waiting_count=waiting_count,
        run_count=run_count,
        ended_count=ended_count,
        failed_count=failed_count,
        began_at=None if began_at is None else float(began_at),
        last_active_at=float(last_active_at),
        gap_since=None if gap_since is None else float(gap_since),
        has_token=bool(has_token),
        conversation_bytes=conversation_bytes,
        cause=cause.decode(errors="replace"),
        override=override.decode(errors="replace"),
        waiting_requests=list(zip(waiting_rows[::2], waiting_rows[1::2], strict=True)),
    )


# The model registry.


@dataclass(frozen=True, slots=True)
class RegistryReply:
    """Model registry as it is stored: JSON lists of names, and for some the time (Unix seconds) when an
    operator set them."""

    warm_markers: Sequence[bytes]
    models_in_use: Sequence[bytes]
    labels: Sequence[tuple[bytes, float]]
    drains: Sequence[tuple[bytes, float]]
    problems: Sequence[str]
    """Keys that another program has taken."""
    warm_up_locks: Sequence[bytes]


def decode_model_registry(reply: Reply) -> RegistryReply:
    warm_markers, models_in_use, labels, drains, problems, warm_up_locks = reply.value
    return RegistryReply(
        warm_markers,
        models_in_use,
        [(entry, float(at)) for entry, at in _split_rows(labels, 2)],
        [(entry, float(at)) for entry, at in _split_rows(drains, 2)],
        [problem.decode(errors="replace") for problem in problems],
        warm_up_locks,
    )
