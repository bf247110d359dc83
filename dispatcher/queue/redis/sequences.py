"""Calls of sequences: arguments and replies of claim_turns.lua, find_remaining_requests.lua and
sequence_admin.lua."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dispatcher.core.printable import truncate_text
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    SequenceCounters,
    SequenceCounts,
    SequencePage,
    SequenceTerms,
    TurnDecision,
    TurnEnd,
    TurnGranted,
    TurnRejected,
    TurnWaits,
)
from dispatcher.core.sequences.turns import SequenceSnapshot, SequenceStatus, Turn
from dispatcher.ports import ClaimResult, ClaimTurnsResult, Lease, Permit
from dispatcher.queue.constants import CLAIM_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.replies import decode_lease, decode_owner_reply
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Argument, Reply

_GRANTED, _REJECTED = 1, 2
_MAX_REASON_CHARS = 300
_MAX_PAGE = 500
_COUNTERS_START, _COUNTERS_END = 11, 20
"""Positions of the sequence counters in what all sequences share."""

_pack = msgspec.msgpack.Encoder().encode


def encode_turn_end(backend: Backend, end: TurnEnd | None) -> tuple[Argument, Argument]:
    """Encode the end of a turn for settle.lua and settle_unleased.lua."""
    if end is None:
        return "", ""
    turn = end.turn
    index = -1 if turn.index is None else turn.index
    on_error = "" if turn.on_error is None else turn.on_error.value
    flags = turn.id, index, int(turn.last), int(turn.reset), on_error, int(end.has_failed)
    token = None if end.sticky_token is None else _replace_surrogates(end.sticky_token)
    fields = (
        *flags,
        clean_reason(end.cause),
        token,
        int(end.conversation is not None),
        backend.names.get_sequence_owner(turn),
        turn.submitted_at,
    )
    return _pack(fields), end.conversation or b""


def clean_reason(why: str) -> str:
    """Return a reason in the form in which it is stored."""
    return truncate_text(_replace_surrogates(why), _MAX_REASON_CHARS) if why else ""


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, because no server accepts them."""
    return text.encode(errors="replace").decode()


async def claim_turns(
    backend: Backend,
    owner: str,
    lease_s: float,
    turns: Sequence[tuple[Lease, Turn]],
    terms: SequenceTerms,
) -> ClaimTurnsResult:
    rows = [
        (
            lease.entry_id,
            lease.token,
            turn.id,
            -1 if turn.index is None else turn.index,
            int(turn.last),
            int(turn.reset),
            (turn.on_error or terms.on_error).value,
            backend.names.get_sequence_owner(turn),
            turn.submitted_at,
        )
        for lease, turn in turns
    ]
    args: list[Argument] = [owner, lease_s, _pack_terms(terms), _pack(rows)]
    reply = await backend.run_script("claim_turns", args)
    facts, verdicts = reply.value
    return ClaimTurnsResult(
        [_decode_decision(*told) for told in verdicts], *decode_owner_reply(backend, reply, facts)
    )


def _pack_terms(terms: SequenceTerms) -> bytes:
    most = -1 if terms.max_active is None else terms.max_active
    values = [terms.max_idle_s, terms.max_age_s, most, terms.max_waiting, terms.on_error.value, terms.gap_s]
    return _pack([*values, int(terms.refuse_after_end)])


def _decode_granted_turn(index: int, token: bytes, is_first: int, carry: bytes) -> TurnGranted:
    return TurnGranted(index, token.decode(), carry, bool(is_first))


@dataclass(frozen=True, slots=True)
class NextClaimOffer:
    """Offer of an owner to claim the next requests of the sequences of which it settles requests."""

    owner: str
    lease_s: float
    nonce: str
    permit: Permit
    max_member_bytes: int
    """Size of the largest member that is moved."""

    def pack_arguments(self, backend: Backend) -> bytes:
        """Encode the offer for claim_next.lua."""
        permit = self.permit
        by = permit.limit, backend.to_server_time(permit.read_at), permit.lost_units
        own = self.owner, self.lease_s, secrets.token_hex(16), CLAIM_BYTES, self.max_member_bytes
        return _pack((*own, *by, permit.retry_after_max_s, permit.unleased_units))


def decode_next_claim(
    backend: Backend, reply: Reply, handed: Sequence[Any]
) -> tuple[ClaimResult, Sequence[TurnGranted]]:
    """Decode the reply of claim_next.lua."""
    facts, waiting, flat, turns = handed
    leases = [decode_lease(*flat[at : at + 10]) for at in range(0, len(flat), 10)]
    return ClaimResult(leases, *decode_owner_reply(backend, reply, facts), waiting), [
        _decode_granted_turn(*turn) for turn in turns
    ]


def _decode_decision(kind: int, *details: Any) -> TurnDecision:
    if kind == _GRANTED:
        return _decode_granted_turn(*details)
    if kind == _REJECTED:
        code, why = details
        return TurnRejected(ErrorCode(code.decode()), why.decode())
    return TurnWaits()


@dataclass(frozen=True, slots=True)
class RemainingRow:
    """Remaining request of a sequence, which is to be answered."""

    place: str
    member: bytes | int
    """Member, or its size if it needs a call of its own."""
    error_code: ErrorCode
    message: str


async def find_remaining_requests(
    backend: Backend, max_count: int, max_member_bytes: int
) -> list[RemainingRow]:
    found = (
        await backend.run_script(
            "find_remaining_requests", [max(1, max_count), MAX_SCRIPT_BYTES, max_member_bytes]
        )
    ).value
    rows = (found[at : at + 4] for at in range(0, len(found), 4))
    return [
        RemainingRow(place.decode(), member, ErrorCode(code.decode()), why.decode())
        for place, member, code, why in rows
    ]


def decode_sequence_counts(shared: bytes, parked: int, waiting: int) -> SequenceCounts:
    """Decode the counts in what all sequences share (SHARED_FIELDS in sequences.lua). `shared` is empty if
    there is none yet."""
    values = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(values[at]) if at < len(values) else 0 for at in (1, 9, 10))
    return SequenceCounts(active, parked, held, aborted, waiting)


def decode_sequence_counters(shared: bytes) -> SequenceCounters:
    """Decode the sequence counters in what all sequences share."""
    values: list[Any] = msgspec.msgpack.decode(shared) if shared else []
    if len(values) < _COUNTERS_END:  # no sequence yet, or an older version without counters wrote last
        return SequenceCounters()
    return SequenceCounters(*values[_COUNTERS_START:_COUNTERS_END])


# What operators see and decide.


async def list_sequences(
    backend: Backend, max_count: int, after: str, status: SequenceStatus | None
) -> SequencePage:
    args: list[Argument] = ["list", after or "0", max(1, min(max_count, _MAX_PAGE))]
    cursor, rows = (
        await backend.run_script("sequence_admin", [*args, "" if status is None else status.value])
    ).value
    then = cursor.decode()
    return SequencePage([_decode_sequence(*row) for row in rows], "" if then == "0" else then)


async def get_sequence(backend: Backend, sequence_id: str) -> SequenceSnapshot | None:
    row = (await backend.run_script("sequence_admin", ["show", _replace_surrogates(sequence_id)])).value
    return None if row is None else _decode_sequence(*row)


async def abort_sequence(backend: Backend, sequence_id: str, why: str) -> bool:
    """Abort a sequence. Return False if it was aborted before, or has ended."""
    # Dispatchers send their terms with the first sequence. Until then the default terms apply.
    args: list[Argument] = [
        "abort",
        _replace_surrogates(sequence_id),
        clean_reason(why),
        _pack_terms(SequenceTerms()),
    ]
    return bool((await backend.run_script("sequence_admin", args)).value)


async def run_sequence_command(
    backend: Backend, verb: str, sequence_id: str, *arguments: str | float
) -> int | None:
    result: int | None = (
        await backend.run_script("sequence_admin", [verb, _replace_surrogates(sequence_id), *arguments])
    ).value
    return result


def _decode_sequence(
    name: bytes,
    status: bytes,
    next_index: int,
    next_entry: int | None,
    waiting: int,
    run_count: int,
    done: int,
    failed: int,
    born: bytes | None,
    touched: bytes,
    gap: bytes | None,
    has_token: int,
    carried: int,
    cause: bytes,
    waiting_rows: Sequence[int],
) -> SequenceSnapshot:
    return SequenceSnapshot(
        id=name.decode(errors="replace"),
        status=SequenceStatus(status.decode()),
        expected_index=next_index,
        next_entry=next_entry,
        waiting_count=waiting,
        run_count=run_count,
        ended_count=done,
        failed_count=failed,
        began_at=None if born is None else float(born),
        last_active_at=float(touched),
        gap_since=None if gap is None else float(gap),
        has_token=bool(has_token),
        conversation_bytes=carried,
        cause=cause.decode(errors="replace"),
        waiting_requests=list(zip(waiting_rows[::2], waiting_rows[1::2], strict=True)),
    )
