"""A request's turn in its sequence: what a producer says of it, and what may come of it. Pure.

A sequence is requests that belong together: they run in order, one at a time. docs/queue-contract.md has what
a producer writes, core/sequences.py the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

MAX_SEQUENCE_BYTES = 256
INDEX_MOST = 10**15 - 1
"""Of an index: it stands in 16 digits, and floats count as far as that."""
LOOK_S = 30.0
"""A head is looked at this often: an owner of a version that knows no sequences ends it without a word."""
LINE_SEEN = 20
"""Of those that wait: so many are shown."""
LIVES_MOST = 100
"""Of one sequence, that wait behind each other."""
UNPARK_MOST = 100
"""Sequences that one step lets begin."""


class OnError(StrEnum):
    """What becomes of a sequence of which a request has failed."""

    CONTINUE = "continue"
    ABORT = "abort"
    """All later ones are answered SEQUENCE_ABORTED, with the cause."""
    HOLD = "hold"
    """The later ones wait until an operator has decided."""


class Carry(StrEnum):
    """What a request is built on."""

    OFF = "off"
    """It is sent as it was written."""
    MESSAGES = "messages"
    """The conversation so far goes before what it says (core/carry.py)."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's place in a sequence, as its producer wrote it."""

    id: str
    """Of the sequence: 1 to 256 bytes."""
    index: int | None = None
    """Its number, from 0 on; None: behind all that the sequence has when the request comes."""
    last: bool = False
    """The sequence ends with it."""
    reset: bool = False
    """The sequence begins anew with it, after all that came before it."""
    on_error: OnError | None = None
    """None: as the settings say."""
    carry: Carry | None = None
    """None: as the settings say."""


class TurnFields(msgspec.Struct):
    """`data.sequence` as a decoder reads it."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_BYTES)]
    index: Annotated[int, msgspec.Meta(ge=0, le=INDEX_MOST)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None

    def turn(self) -> Turn | None:
        """None where the id is too long in bytes."""
        if len(self.id.encode()) > MAX_SEQUENCE_BYTES:
            return None
        on_error = None if self.on_error is None else OnError(self.on_error)
        carry = None if self.carry is None else Carry(self.carry)
        return Turn(self.id, self.index, bool(self.last), bool(self.reset), on_error, carry)


def foreign_turn(metadata: Mapping[str, str]) -> Turn | None:
    """What a producer that knows no `data.sequence` says in its metadata: `sequence_id`, `sequence_index`.

    Never a reason to refuse: whoever wrote such names before they meant something here wrote what he liked.
    An id that can be none is none, and an index that can be none leaves the order to the arrival.
    """
    name = metadata.get("sequence_id", "")
    if not 0 < len(name.encode()) <= MAX_SEQUENCE_BYTES:
        return None
    told = metadata.get("sequence_index", "")
    index = int(told) if told.isascii() and told.isdigit() and len(told) <= 15 else None
    return Turn(name, index)


@dataclass(frozen=True, slots=True)
class Session:
    """What the dispatcher says of a request's sequence on its way to the model server."""

    headers: Mapping[str, str]
    """Names in lower case. They go in the place of the caller's."""
    token_header: str
    """In the answer: what takes the next request to the same server. Nobody else's word in the request."""


class SequenceStatus(StrEnum):
    OPEN = "open"
    """Its requests go, one at a time."""
    PARKED = "parked"
    """It has not begun: max_active others are alive."""
    HELD = "held"
    """A request has failed, and an operator is to decide."""
    ABORTED = "aborted"
    """What comes is answered SEQUENCE_ABORTED."""
    ENDED = "ended"
    """What comes is answered SEQUENCE_ENDED."""


@dataclass(frozen=True, slots=True)
class SequenceSeen:
    """A sequence at one moment."""

    id: str
    status: SequenceStatus
    next: int
    """The index that goes next."""
    head: int | None
    """The entry whose turn it is."""
    waiting: int
    """Requests in its line, of lives to come too."""
    lives: int
    """That which runs, and those that begin with a reset which waits."""
    done: int
    """Requests of this life that have ended."""
    failed: int
    """Those of them without an answer."""
    began_at: float | None
    """Unix seconds: when the first of this life went."""
    touched_at: float
    """Unix seconds: its last activity."""
    gap_since: float | None
    """Unix seconds: since when it waits for an index that is missing."""
    has_token: bool
    carry_bytes: int
    cause: str
    """Why it is held, aborted or ended."""
    line: Sequence[tuple[int, int]] = ()
    """Index and entry of the first that wait in this life, where that was asked for."""
