"""The turn of a request in its sequence, as producers write it, and the status of sequences.

A sequence consists of requests that belong together and run in order, one at a time.
docs/reference/queue-contract.md describes what a producer writes, and README.md has the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

import msgspec

LANE = "sequenced"
"""Closed lane of the requests that wait for the end of an earlier one."""
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
    """Digest of the secret, or of the name of the result list. Empty for the default list. `member.py` sets
    it; it is never written into a member."""
    submitted_at: float = 0.0
    """Unix time at which the request was submitted. 0 if the member does not say. `member.py` sets it; it is
    never written into a member."""
    override: str = ""
    """Name of the override of the settings for the model of the request (`SequenceTerms.match_override`).
    Empty if there is none. The dispatcher sets it; it is never written into a member."""

    @property
    def key(self) -> str:
        """Name that the requests of a sequence share. It includes the owner, so that another producer cannot
        use it."""
        return f"sequence {self.owner} {self.id}"

    def move_to_end(self) -> Turn:
        """Return a turn after all others, for a request without which the sequence has gone on."""
        return Turn(self.id, on_error=self.on_error, secret=self.secret)

    def to_fields(self) -> Turn:
        """Return what is written into a member."""
        return Turn(self.id, self.index, self.last, self.reset, self.on_error, self.carry, self.secret)

    def __repr__(self) -> str:
        """Return the fields for logs, without the secret."""
        shown = ("id", "index", "last", "reset", "on_error", "carry")
        return f"Turn({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


def digest_owner(secret: str, results: str) -> str:
    """Return a digest of the secret, or without a secret of the result list, that may use a sequence.

    A secret and a list of the same name have different digests: a name can be guessed, and must not pass for
    the secret.
    """
    if not secret and not results:
        return ""
    text = f"secret {secret}" if secret else f"list {results}"
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


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
