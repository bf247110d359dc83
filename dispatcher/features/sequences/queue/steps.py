"""Calls of sequences: claim_turns.lua, find_remaining_requests.lua and sequence_admin.lua."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.features.sequences.decisions import (
    SequencePage,
    SequenceTerms,
    TurnDecision,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.features.sequences.queue.turn_end import clean_reason, describe_turn, replace_surrogates
from dispatcher.features.sequences.turns import SequenceSnapshot, SequenceStatus, Turn
from dispatcher.queue.contract import Lease, LeaseCounts, SharedState
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Reply
from dispatcher.queue.redis.steps.common import decode_owner_reply, split_rows
from dispatcher.wire_format import ErrorCode

_GRANTED, _REJECTED = 1, 2
_MAX_PAGE = 500


@dataclass(frozen=True, slots=True)
class ClaimTurnsResult:
    """Reply to `SequenceCalls.claim_turns`."""

    decisions: Sequence[TurnDecision]
    """Decisions in the order of the leases."""
    lease_counts: LeaseCounts
    shared: SharedState


async def claim_turns(
    backend: Backend,
    owner: str,
    lease_s: float,
    turns: Sequence[tuple[Lease, Turn]],
    terms: SequenceTerms,
) -> ClaimTurnsResult:
    rows = [
        {
            **describe_turn(backend.names, turn),
            "entry_id": lease.entry_id,
            "lease_token": lease.token,
            "on_error": (turn.on_error or terms.on_error).value,
        }
        for lease, turn in turns
    ]
    reply = await backend.run_script(
        "claim_turns", {"owner": owner, "lease_s": lease_s, "terms": _describe_terms(terms), "turns": rows}
    )
    owner_reply, decisions = reply.value
    return ClaimTurnsResult(
        [_decode_decision(*decision) for decision in decisions],
        *decode_owner_reply(backend, reply, owner_reply),
    )


def _describe_terms(terms: SequenceTerms) -> dict[str, Any]:
    """Return the terms for `set_terms` in sequences.lua."""
    return {
        "max_idle_s": terms.max_idle_s,
        "max_age_s": terms.max_age_s,
        "max_active": -1 if terms.max_active is None else terms.max_active,
        "max_waiting": terms.max_waiting,
        "on_error": terms.on_error.value,
        "gap_s": terms.gap_s,
        "refuses": int(terms.refuse_after_end),
        "overrides": [
            [
                each.match,
                -1.0 if each.max_idle_s is None else each.max_idle_s,
                -1 if each.max_active is None else each.max_active,
            ]
            for each in terms.overrides
        ],
    }


def _decode_decision(kind: int, *details: Any) -> TurnDecision:
    if kind == _GRANTED:
        return decode_granted_turn(*details)
    if kind == _REJECTED:
        code, why = details
        return TurnRejected(ErrorCode(code.decode()), why.decode())
    return TurnWaits()


def decode_granted_turn(index: int, token: bytes, is_first: int, conversation: bytes) -> TurnGranted:
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


async def find_remaining_requests(
    backend: Backend, max_count: int, max_member_bytes: int
) -> list[RemainingRow]:
    reply = await backend.run_script(
        "find_remaining_requests",
        {"max_count": max(1, max_count), "max_bytes": MAX_SCRIPT_BYTES, "max_member_bytes": max_member_bytes},
    )
    return [
        RemainingRow(place.decode(), member, ErrorCode(code.decode()), why.decode(), progress)
        for place, member, code, why, progress in split_rows(reply.value, 5)
    ]


# What operators see and decide.


async def list_sequences(
    backend: Backend, max_count: int, after: str, status: SequenceStatus | None
) -> SequencePage:
    reply = await _run_sequence_admin(
        backend,
        "list",
        cursor=after or "0",
        max_count=max(1, min(max_count, _MAX_PAGE)),
        status="" if status is None else status.value,
    )
    cursor, rows = reply.value
    return SequencePage([_decode_sequence(*row) for row in rows], "" if cursor == b"0" else cursor.decode())


async def get_sequence(backend: Backend, sequence_id: str) -> SequenceSnapshot | None:
    row = (await _run_sequence_admin(backend, "show", sequence_id)).value
    return None if row is None else _decode_sequence(*row)


async def abort_sequence(backend: Backend, sequence_id: str, why: str) -> bool:
    """Abort a sequence. Return False if it was aborted before, or has ended."""
    # Dispatchers send their terms with the first sequence. Until then the default terms apply.
    reply = await _run_sequence_admin(
        backend,
        "abort",
        sequence_id,
        why=clean_reason(why),
        default_terms=_describe_terms(SequenceTerms()),
    )
    return bool(reply.value)


async def release_sequence(backend: Backend, sequence_id: str) -> bool:
    """Let a sequence go on. Return False if it is not held."""
    return bool((await _run_sequence_admin(backend, "release", sequence_id)).value)


async def cancel_sequence(
    backend: Backend, sequence_id: str, cancelled_at: float | None, keep_s: float
) -> int | None:
    """Cancel a sequence. Return the entry of its next request, or 0 if it has none. `None` if the sequence
    has ended or is not known."""
    reply = await _run_sequence_admin(
        backend, "cancel", sequence_id, cancelled_at=cancelled_at, keep_s=keep_s
    )
    next_entry: int | None = reply.value
    return next_entry


async def forget_sequence(backend: Backend, sequence_id: str) -> bool | None:
    """Forget a sequence. Return False if a request of it runs or waits; `None` if it is not known."""
    result = (await _run_sequence_admin(backend, "forget", sequence_id)).value
    return None if result is None else bool(result)


_NO_ARGUMENTS = dict.fromkeys(
    ("cursor", "max_count", "status", "why", "default_terms", "cancelled_at", "keep_s")
)


async def _run_sequence_admin(
    backend: Backend, command: str, sequence_id: str = "", **arguments: Any
) -> Reply:
    """Run sequence_admin.lua with the arguments of one command."""
    return await backend.run_script(
        "sequence_admin",
        {"command": command, "id": replace_surrogates(sequence_id), **_NO_ARGUMENTS, **arguments},
    )


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
