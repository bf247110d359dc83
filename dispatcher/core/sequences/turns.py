"""A request's turn in its sequence: what a producer says of it, and what may come of it. Pure.

A sequence is requests that belong together: they run in order, one at a time. docs/queue-contract.md has what
a producer writes, core/sequences/rules.py the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Literal

import msgspec

MAX_SEQUENCE_BYTES = 256
SECRET_CHARS_LEAST, SECRET_CHARS_MOST = 16, 256
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
_TOKEN_TIME_CHARS = 16
"""Number of hexadecimal digits, a time in nanoseconds, with which a token of our clients begins."""
_SAME_MOMENT_S = 5.0
"""Largest difference between `created` and the time in a token. A larger one means that the token begins with
random digits."""


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
    """The conversation so far goes before what it says (core/sequences/conversation.py)."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's place in a sequence, as its producer wrote it."""

    id: str
    """Id of the sequence, 1 to 256 bytes."""
    index: int | None = None
    """Number of the request in the sequence, from 0 on. `None` puts it behind all requests that the sequence
    has when it comes."""
    last: bool = False
    """The sequence ends with it."""
    reset: bool = False
    """The sequence begins anew with it, after all that came before it."""
    on_error: OnError | None = None
    """`None` stands for the value in the settings."""
    carry: Carry | None = None
    """`None` stands for the value in the settings."""
    secret: str = ""
    """Secret that proves that the producer may use the sequence. If it is empty, the name of the producer's
    result list is the proof."""
    owner: str = ""
    """Digest of the secret, or of the name of the result list. Empty for the default list. `parse` sets it;
    it is never written into a member."""
    submitted_at: float = 0.0
    """Unix time at which the request was submitted. 0 if the member does not say. `parse` sets it; it is
    never written into a member."""

    def __repr__(self) -> str:
        """Return the fields for logs, without the secret."""
        shown = ("id", "index", "last", "reset", "on_error", "carry")
        return f"Turn({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class TurnFields(msgspec.Struct):
    """`data.sequence` as a decoder reads it."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_BYTES)]
    index: Annotated[int, msgspec.Meta(ge=0, le=INDEX_MOST)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None
    secret: (
        Annotated[str, msgspec.Meta(min_length=SECRET_CHARS_LEAST, max_length=SECRET_CHARS_MOST)] | None
    ) = None

    def turn(self, results: str, submitted_at: float) -> Turn | None:
        """Return the turn. `None` if the id has too many bytes."""
        if len(self.id.encode()) > MAX_SEQUENCE_BYTES:
            return None
        return Turn(
            self.id,
            self.index,
            bool(self.last),
            bool(self.reset),
            None if self.on_error is None else OnError(self.on_error),
            None if self.carry is None else Carry(self.carry),
            self.secret or "",
            owner_of(self.secret or "", results),
            submitted_at,
        )


def owner_of(secret: str, results: str) -> str:
    """Return a digest of the secret, or without a secret of the result list, that may use a sequence.

    A secret and a list of the same name have different digests: a name can be guessed, and must not pass for
    the secret.
    """
    if not secret and not results:
        return ""
    text = f"secret {secret}" if secret else f"list {results}"
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def submission_time(created: int, token: str) -> float:
    """Return the Unix time at which a request was submitted. 0 without `created`.

    It is `data.created`, or the more exact time at the head of a token of our clients if the two agree.
    """
    if not created or len(token) < _TOKEN_TIME_CHARS:
        return float(created)
    try:
        exact = int(token[:_TOKEN_TIME_CHARS], 16) / 1e9
    except ValueError:
        return float(created)
    return exact if abs(exact - created) < _SAME_MOMENT_S else float(created)


def foreign_turn(metadata: Mapping[str, str], results: str = "", submitted_at: float = 0.0) -> Turn | None:
    """What a producer that knows no `data.sequence` says in its metadata: `sequence_id`, `sequence_index`.

    Never a reason to refuse: whoever wrote such names before they meant something here wrote what he liked.
    An id that can be none is none, and an index that can be none leaves the order to the arrival.
    """
    name = metadata.get("sequence_id", "")
    if not 0 < len(name.encode()) <= MAX_SEQUENCE_BYTES:
        return None
    told = metadata.get("sequence_index", "")
    index = int(told) if told.isascii() and told.isdigit() and len(told) <= 15 else None
    return Turn(name, index, owner=owner_of("", results), submitted_at=submitted_at)


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
