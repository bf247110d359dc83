"""What is asked about turns in sequences and what is answered: whose it is, what a request leaves, how many
there are. Pure; core/sequences/turns.py has what a producer says, core/sequences/rules.py the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dispatcher.core.requests.result import ErrorCode
from dispatcher.core.sequences.turns import OnError, SequenceSeen, SequenceStatus, Turn


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """What the operator decided for all sequences of a line."""

    max_idle_s: float = 600.0
    """A sequence of which nothing runs or waits for so long has ended; and so long its end is remembered."""
    max_age_s: float = 86_400.0
    """One that began so long ago ends with the request that runs."""
    max_active: int | None = None
    """Sequences that are alive at once; the others wait until one ends. None: any number."""
    max_waiting: int = 1000
    """Requests of one sequence that wait; further ones are refused."""
    on_error: OnError = OnError.ABORT
    """For a request that does not say."""
    gap_s: float = 60.0
    """How long the others wait for an index that is missing, from when it could have gone."""
    refuse_after_end: bool = False
    """What comes after the end, as long as that is remembered, is refused; else it begins a new life."""


class TurnEnd(msgspec.Struct, frozen=True):
    """What a request leaves to its sequence when it ends."""

    turn: Turn
    """So that one which ends before it was lined up is not waited for."""
    failed: bool = False
    """It has no answer that the next one could build on."""
    cause: str = ""
    """One sentence: how it failed."""
    token: str | None = None
    """What takes the next request to the same server; None: as before, empty: none any more."""
    carry: bytes | None = None
    """What the next request is built on; None: as before."""


class Goes(msgspec.Struct, frozen=True):
    """The request is its sequence's head: it may be sent, now and at each later try."""

    index: int
    token: str
    """That of the sequence; empty: none."""
    carry: bytes
    fresh: bool
    """It is the first of a life: nothing is known of one before it."""


@dataclass(frozen=True, slots=True)
class Waits:
    """It is not its turn: it was given back, undelivered, and waits in the line of its sequence. (Or its
    lease is no longer the caller's.)"""


@dataclass(frozen=True, slots=True)
class Barred:
    """It will never go. Its lease stays the caller's, who settles it with this as its error; the sequence
    does not know it."""

    code: ErrorCode
    why: str
    """One sentence."""


Verdict = Goes | Waits | Barred


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """How many sequences a line has."""

    active: int = 0
    """Alive: they run, or are held."""
    parked: int = 0
    """They wait to begin."""
    held: int = 0
    aborted: int = 0
    waiting: int = 0
    """Requests that wait for their turn."""

    @classmethod
    def of(cls, count: Mapping[SequenceStatus, int], waiting: int) -> SequenceCounts:
        """By their status."""
        held, aborted = count.get(SequenceStatus.HELD, 0), count.get(SequenceStatus.ABORTED, 0)
        alive = count.get(SequenceStatus.OPEN, 0) + held
        return cls(alive, count.get(SequenceStatus.PARKED, 0), held, aborted, waiting)


@dataclass(slots=True)
class SequenceNews:
    """What has happened to the sequences of a line, counted since there are any: what people are told of."""

    held: int = 0
    """So often a request has failed, and its sequence waits for an operator since."""
    released: int = 0
    aborted: int = 0
    """By a request that failed, or by an operator."""
    cancelled: int = 0
    idle: int = 0
    """Ended, for nothing of them ran or waited for max_idle_s."""
    aged: int = 0
    """Ended, for they had run for max_age_s."""
    gaps: int = 0
    """Indexes that were missing have been passed over."""
    last_held: str = ""
    """The newest of those: its id."""
    last_aborted: str = ""


@dataclass(frozen=True, slots=True)
class SequencePage:
    """One page of a look at all sequences."""

    found: Sequence[SequenceSeen]
    after: str
    """Where the next page begins; empty: this was the last one."""
