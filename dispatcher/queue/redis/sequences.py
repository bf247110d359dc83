"""The steps of sequences: what line_up.lua, unserved.lua and sequence.lua are given, and what they reply."""

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
"""Of what all sequences share."""

_pack = msgspec.msgpack.Encoder().encode


def left_by(backend: Backend, end: TurnEnd | None) -> tuple[Argument, Argument]:
    """What a request leaves to its sequence, as settle.lua and expire.lua get it."""
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
    """A reason as it is kept."""
    return shortened(_clean(why), _WHY_CHARS) if why else ""


def _clean(text: str) -> str:
    """Without lone surrogates: no server takes those."""
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
    """An owner takes what comes next of the sequences of which it settles requests, as a claim would."""

    owner: str
    lease_s: float
    nonce: str
    permit: Permit
    largest: int
    """Bytes of the longest member that is moved."""

    def packed(self, backend: Backend) -> bytes:
        """As hand_over.lua gets it."""
        permit = self.permit
        by = permit.limit, backend.server_time(permit.read_at), permit.lost
        own = self.owner, self.lease_s, secrets.token_hex(16), CLAIM_BYTES, self.largest
        return _pack((*own, *by, permit.retry_after_max_s, permit.apart))


def handed_of(backend: Backend, reply: Reply, handed: Sequence[Any]) -> tuple[Claimed, Sequence[Goes]]:
    """What hand_over.lua replies."""
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
    """A request that will not go any more."""

    place: str
    member: bytes | int
    """How many bytes it has, where it wants a call of its own."""
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
    """`shared`: what all sequences share, as sequences.lua packs it (SHARED); empty: there is none yet."""
    told = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(told[at]) if at < len(told) else 0 for at in (1, 9, 10))
    return SequenceCounts(active, parked, held, aborted, waiting)


def news_of(shared: bytes) -> SequenceNews:
    """Of the same."""
    told: list[Any] = msgspec.msgpack.decode(shared) if shared else []
    if len(told) < _NEWS_END:  # there is none yet, or an older version wrote last
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
