"""Calls of sequences: claim_turns.lua, find_remaining_requests.lua and sequence_admin.lua, and the arguments
of settle.lua that are about sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.core.printable import truncate_text
from dispatcher.core.sequences.decisions import SequencePage, SequenceTerms, TurnEnd
from dispatcher.core.sequences.turns import SequenceSnapshot, SequenceStatus, Turn
from dispatcher.ports import ClaimTurnsResult, Lease
from dispatcher.queue.redis import replies
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, Reply

_MAX_REASON_CHARS = 300
_MAX_PAGE = 500


class TurnEndArguments(msgspec.Struct):
    """End of a turn for settle.lua and settle_unleased.lua (`end_turn` in sequences.lua)."""

    id: str
    index: int | None
    last: int
    reset: bool
    on_error: str
    failed: int
    cause: str
    sticky_token: str | None
    has_conversation: bool
    owner: str
    submitted_at: float
    override: str


def describe_turn_end(backend: Backend, end: TurnEnd) -> TurnEndArguments:
    turn = end.turn
    return TurnEndArguments(
        id=turn.id,
        index=turn.index,
        last=int(turn.last),
        reset=turn.reset,
        on_error="" if turn.on_error is None else turn.on_error.value,
        failed=int(end.has_failed),
        cause=clean_reason(end.cause),
        sticky_token=None if end.sticky_token is None else _replace_surrogates(end.sticky_token),
        has_conversation=end.conversation is not None,
        owner=backend.names.get_sequence_owner(turn),
        submitted_at=turn.submitted_at,
        override=turn.override,
    )


def clean_reason(why: str) -> str:
    """Return a reason in the form in which it is stored."""
    return truncate_text(_replace_surrogates(why), _MAX_REASON_CHARS) if why else ""


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, because no server accepts them."""
    return text.encode(errors="replace").decode()


class _LeasedTurn(msgspec.Struct):
    """Turn of a leased request for claim_turns.lua."""

    entry_id: int
    lease_token: str
    id: str
    index: int | None
    last: int
    reset: bool
    on_error: str
    owner: str
    submitted_at: float
    override: str


async def claim_turns(
    backend: Backend,
    owner: str,
    lease_s: float,
    turns: Sequence[tuple[Lease, Turn]],
    terms: SequenceTerms,
) -> ClaimTurnsResult:
    rows = [
        _LeasedTurn(
            entry_id=lease.entry_id,
            lease_token=lease.token,
            id=turn.id,
            index=turn.index,
            last=int(turn.last),
            reset=turn.reset,
            on_error=(turn.on_error or terms.on_error).value,
            owner=backend.names.get_sequence_owner(turn),
            submitted_at=turn.submitted_at,
            override=turn.override,
        )
        for lease, turn in turns
    ]
    reply = await backend.run_script(
        "claim_turns", {"owner": owner, "lease_s": lease_s, "terms": _describe_terms(terms), "turns": rows}
    )
    return replies.decode_claim_turns(backend, reply)


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


async def find_remaining_requests(
    backend: Backend, max_count: int, max_member_bytes: int
) -> list[replies.RemainingRow]:
    reply = await backend.run_script(
        "find_remaining_requests",
        {"max_count": max(1, max_count), "max_bytes": MAX_SCRIPT_BYTES, "max_member_bytes": max_member_bytes},
    )
    return replies.decode_remaining_requests(reply)


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
    return replies.decode_sequence_page(reply)


async def get_sequence(backend: Backend, sequence_id: str) -> SequenceSnapshot | None:
    return replies.decode_sequence(await _run_sequence_admin(backend, "show", sequence_id))


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
        {"command": command, "id": _replace_surrogates(sequence_id), **_NO_ARGUMENTS, **arguments},
    )
