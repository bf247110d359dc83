"""The turn of a request in its sequence, as producers write it, and the status of sequences.

A sequence consists of requests that belong together and run in order, one at a time.
docs/reference/queue-contract.md describes what a producer writes, and README.md has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Literal

import msgspec

MAX_SEQUENCE_ID_BYTES = 256
MIN_SECRET_CHARS, MAX_SECRET_CHARS = 16, 256
MAX_INDEX = 10**15 - 1
"""Largest index. Indexes have 16 digits in Redis, and floats are exact up to this number."""


class OnError(StrEnum):
    """Behaviour of a sequence after a request of it has failed."""

    CONTINUE = "continue"
    ABORT = "abort"
    """All later requests are answered SEQUENCE_ABORTED, with the cause."""
    HOLD = "hold"
    """The later requests wait until an operator has decided."""


class CarryMode(StrEnum):
    """Mode in which the dispatcher continues a conversation."""

    OFF = "off"
    """The request is sent unchanged."""
    MESSAGES = "messages"
    """The conversation so far is inserted before the messages of the request
    (features/sequences/conversation.py)."""


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Place of a request in a sequence, as its producer wrote it."""

    id: str
    """Id of the sequence, 1 to 256 bytes."""
    index: int | None = None
    """Number of the request in the sequence, from 0 on. `None` puts it behind all requests that the sequence
    has when it comes."""
    last: bool = False
    """True if the sequence ends with this request."""
    reset: bool = False
    """True if the sequence begins anew with this request, after all that came before it."""
    on_error: OnError | None = None
    """`None` stands for the value in the settings."""
    carry: CarryMode | None = None
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
    override: str = ""
    """Name of the override of the settings for the model of the request (`SequenceTerms.match_override`).
    Empty if there is none. The dispatcher sets it; it is never written into a member."""

    def move_to_end(self) -> Turn:
        """Return a turn after all others, for a request without which the sequence has gone on."""
        return Turn(self.id, on_error=self.on_error, secret=self.secret)

    def __repr__(self) -> str:
        """Return the fields for logs, without the secret."""
        shown = ("id", "index", "last", "reset", "on_error", "carry")
        return f"Turn({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class TurnFields(msgspec.Struct):
    """`data.sequence` as a decoder reads it."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SEQUENCE_ID_BYTES)]
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)] | None = None
    last: bool | None = None
    reset: bool | None = None
    on_error: Literal["continue", "abort", "hold"] | None = None
    carry: Literal["off", "messages"] | None = None
    secret: Annotated[str, msgspec.Meta(min_length=MIN_SECRET_CHARS, max_length=MAX_SECRET_CHARS)] | None = (
        None
    )

    def to_turn(self, results: str, submitted_at: float) -> Turn | None:
        """Return the turn. `None` if the id has too many bytes."""
        if len(self.id.encode()) > MAX_SEQUENCE_ID_BYTES:
            return None
        return Turn(
            self.id,
            self.index,
            bool(self.last),
            bool(self.reset),
            None if self.on_error is None else OnError(self.on_error),
            None if self.carry is None else CarryMode(self.carry),
            self.secret or "",
            digest_owner(self.secret or "", results),
            submitted_at,
        )


def digest_owner(secret: str, results: str) -> str:
    """Return a digest of the secret, or without a secret of the result list, that may use a sequence.

    A secret and a list of the same name have different digests: a name can be guessed, and must not pass for
    the secret.
    """
    if not secret and not results:
        return ""
    text = f"secret {secret}" if secret else f"list {results}"
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def parse_foreign_turn(
    metadata: Mapping[str, str], results: str = "", submitted_at: float = 0.0
) -> Turn | None:
    """Return the turn that a producer without `data.sequence` states in its metadata: `sequence_id`,
    `sequence_index`.

    These never reject a request, because producers may use these names with another meaning. An invalid id is
    treated as absent, and without a valid index the order of arrival counts.
    """
    sequence_id = metadata.get("sequence_id", "")
    if not 0 < len(sequence_id.encode()) <= MAX_SEQUENCE_ID_BYTES:
        return None
    index_text = metadata.get("sequence_index", "")
    # 15 digits are at most MAX_INDEX.
    index = (
        int(index_text) if index_text.isascii() and index_text.isdigit() and len(index_text) <= 15 else None
    )
    return Turn(sequence_id, index, owner=digest_owner("", results), submitted_at=submitted_at)


class SequenceStatus(StrEnum):
    OPEN = "open"
    """The requests of the sequence are sent, one at a time."""
    PARKED = "parked"
    """The sequence has not begun, because max_active others are active, or max_active others of its model."""
    HELD = "held"
    """A request has failed, and an operator must decide."""
    ABORTED = "aborted"
    """Requests that come are answered SEQUENCE_ABORTED."""
    ENDED = "ended"
    """Requests that come are answered SEQUENCE_ENDED."""


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A sequence at one moment."""

    id: str
    status: SequenceStatus
    expected_index: int
    """Index that is expected next."""
    next_entry: int | None
    """Entry whose turn it is. `None` if there is none."""
    waiting_count: int
    """Number of waiting requests, also of later runs."""
    run_count: int
    """Number of runs: the present one, and those that begin with a waiting reset."""
    ended_count: int
    """Number of requests of the present run that have ended."""
    failed_count: int
    """Number of ended requests without an answer."""
    began_at: float | None
    """Unix time at which the first request of the present run was granted its turn."""
    last_active_at: float
    """Unix time of the last activity."""
    gap_since: float | None
    """Unix time since which a missing index is waited for."""
    has_token: bool
    conversation_bytes: int
    cause: str
    """Reason why the sequence is held, aborted or ended."""
    override: str = ""
    """Pattern of the entry of `sequences.models` that applies. Empty if there is none."""
    waiting_requests: Sequence[tuple[int, int]] = ()
    """Index and entry of the first waiting requests of the present run, if they were asked for."""
