"""Calls of sequences: arguments and replies of claim_turns.lua, find_remaining_requests.lua and
sequence_admin.lua."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dispatcher.core.printable import shortened
from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.decisions import (
    Barred,
    Goes,
    SequenceCounts,
    SequenceNews,
    SequencePage,
    SequenceTerms,
    TurnEnd,
    Verdict,
    Waits,
)
from dispatcher.core.sequences.turns import SequenceSeen, SequenceStatus, Turn
from dispatcher.ports import Claimed, Lease, LinedUp, Permit
from dispatcher.queue.constants import CLAIM_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.replies import facts_of, lease_of
from dispatcher.queue.redis.scripts import SCRIPT_BYTES, Argument, Reply

_GOES, _REFUSED = 1, 2
_WHY_CHARS = 300
_PAGE = 500
_NEWS, _NEWS_END = 11, 20
"""Positions of the sequence counters in what all sequences share."""

_pack = msgspec.msgpack.Encoder().encode


def left_by(backend: Backend, end: TurnEnd | None) -> tuple[Argument, Argument]:
    """Encode the end of a turn for settle.lua and settle_unleased.lua."""
    if end is None:
        return "", ""
    turn = end.turn
    index = -1 if turn.index is None else turn.index
    on_error = "" if turn.on_error is None else turn.on_error.value
    flags = turn.id, index, int(turn.last), int(turn.reset), on_error, int(end.failed)
    token = None if end.token is None else _clean(end.token)
    told = (
        *flags,
        sentence(end.cause),
        token,
        int(end.carry is not None),
        backend.names.owner(turn),
        turn.submitted_at,
    )
    return _pack(told), end.carry or b""


def sentence(why: str) -> str:
    """Return a reason in the form in which it is stored."""
    return shortened(_clean(why), _WHY_CHARS) if why else ""


def _clean(text: str) -> str:
    """Replace lone surrogates, because no server accepts them."""
    return text.encode(errors="replace").decode()


async def line_up(
    backend: Backend,
    owner: str,
    lease_s: float,
    turns: Sequence[tuple[Lease, Turn]],
    terms: SequenceTerms,
) -> LinedUp:
    asked = [
        (
            lease.entry,
            lease.token,
            turn.id,
            -1 if turn.index is None else turn.index,
            int(turn.last),
            int(turn.reset),
            (turn.on_error or terms.on_error).value,
            backend.names.owner(turn),
            turn.submitted_at,
        )
        for lease, turn in turns
    ]
    args: list[Argument] = [owner, lease_s, _packed_terms(terms), _pack(asked)]
    reply = await backend.run("line_up", args)
    facts, verdicts = reply.value
    return LinedUp([_verdict(*told) for told in verdicts], *facts_of(backend, reply, facts))


def _packed_terms(terms: SequenceTerms) -> bytes:
    most = -1 if terms.max_active is None else terms.max_active
    told = [terms.max_idle_s, terms.max_age_s, most, terms.max_waiting, terms.on_error.value, terms.gap_s]
    return _pack([*told, int(terms.refuse_after_end)])


def _goes(index: int, token: bytes, fresh: int, carry: bytes) -> Goes:
    return Goes(index, token.decode(), carry, bool(fresh))


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Offer of an owner to claim the next requests of the sequences of which it settles requests."""

    owner: str
    lease_s: float
    nonce: str
    permit: Permit
    largest: int
    """Size of the largest member that is moved."""

    def packed(self, backend: Backend) -> bytes:
        """Encode the offer for claim_next.lua."""
        permit = self.permit
        by = permit.limit, backend.server_time(permit.read_at), permit.lost
        own = self.owner, self.lease_s, secrets.token_hex(16), CLAIM_BYTES, self.largest
        return _pack((*own, *by, permit.retry_after_max_s, permit.apart))


def handed_of(backend: Backend, reply: Reply, handed: Sequence[Any]) -> tuple[Claimed, Sequence[Goes]]:
    """Decode the reply of claim_next.lua."""
    facts, waiting, flat, turns = handed
    leases = [lease_of(*flat[at : at + 10]) for at in range(0, len(flat), 10)]
    return Claimed(leases, *facts_of(backend, reply, facts), waiting), [_goes(*turn) for turn in turns]


def _verdict(how: int, *told: Any) -> Verdict:
    if how == _GOES:
        return _goes(*told)
    if how == _REFUSED:
        code, why = told
        return Barred(ErrorCode(code.decode()), why.decode())
    return Waits()


@dataclass(frozen=True, slots=True)
class UnservedRow:
    """Remaining request of a sequence, which is to be answered."""

    place: str
    member: bytes | int
    """Member, or its size if it needs a call of its own."""
    code: ErrorCode
    why: str


async def unserved(backend: Backend, most: int, largest: int) -> list[UnservedRow]:
    found = (await backend.run("unserved", [max(1, most), SCRIPT_BYTES, largest])).value
    rows = (found[at : at + 4] for at in range(0, len(found), 4))
    return [
        UnservedRow(place.decode(), member, ErrorCode(code.decode()), why.decode())
        for place, member, code, why in rows
    ]


def counted_of(shared: bytes, parked: int, waiting: int) -> SequenceCounts:
    """Decode the counts in what all sequences share (SHARED_FIELDS in sequences.lua). `shared` is empty if
    there is none yet."""
    told = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(told[at]) if at < len(told) else 0 for at in (1, 9, 10))
    return SequenceCounts(active, parked, held, aborted, waiting)


def news_of(shared: bytes) -> SequenceNews:
    """Decode the sequence counters in what all sequences share."""
    told: list[Any] = msgspec.msgpack.decode(shared) if shared else []
    if len(told) < _NEWS_END:  # no sequence yet, or an older version without counters wrote last
        return SequenceNews()
    return SequenceNews(*told[_NEWS:_NEWS_END])


# What operators see and decide.


async def page(backend: Backend, most: int, after: str, status: SequenceStatus | None) -> SequencePage:
    args: list[Argument] = ["list", after or "0", max(1, min(most, _PAGE))]
    cursor, rows = (await backend.run("sequence", [*args, "" if status is None else status.value])).value
    then = cursor.decode()
    return SequencePage([_seen(*row) for row in rows], "" if then == "0" else then)


async def show(backend: Backend, sequence_id: str) -> SequenceSeen | None:
    row = (await backend.run("sequence", ["show", _clean(sequence_id)])).value
    return None if row is None else _seen(*row)


async def abort(backend: Backend, sequence_id: str, why: str) -> bool:
    """Abort a sequence. Return False if it was aborted before, or has ended."""
    # Dispatchers send their terms with the first sequence. Until then the default terms apply.
    args: list[Argument] = ["abort", _clean(sequence_id), sentence(why), _packed_terms(SequenceTerms())]
    return bool((await backend.run("sequence", args)).value)


async def decide(backend: Backend, verb: str, sequence_id: str, *words: str | float) -> int | None:
    told: int | None = (await backend.run("sequence", [verb, _clean(sequence_id), *words])).value
    return told


def _seen(
    name: bytes,
    status: bytes,
    next_index: int,
    head: int | None,
    waiting: int,
    lives: int,
    done: int,
    failed: int,
    born: bytes | None,
    touched: bytes,
    gap: bytes | None,
    has_token: int,
    carried: int,
    cause: bytes,
    line: Sequence[int],
) -> SequenceSeen:
    return SequenceSeen(
        id=name.decode(errors="replace"),
        status=SequenceStatus(status.decode()),
        next=next_index,
        head=head,
        waiting=waiting,
        lives=lives,
        done=done,
        failed=failed,
        began_at=None if born is None else float(born),
        touched_at=float(touched),
        gap_since=None if gap is None else float(gap),
        has_token=bool(has_token),
        carry_bytes=carried,
        cause=cause.decode(errors="replace"),
        line=list(zip(line[::2], line[1::2], strict=True)),
    )
