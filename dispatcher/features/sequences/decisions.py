"""Decisions about turns in sequences, and counts of sequences.

features/sequences/turns.py describes what producers write, and README.md has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dispatcher.common.patterns import matches_pattern
from dispatcher.features.sequences.turns import OnError, SequenceSnapshot, SequenceStatus
from dispatcher.wire_format import ErrorCode


@dataclass(frozen=True, slots=True)
class SequenceOverride:
    """Settings for the sequences of some models, in place of the general ones."""

    match: str
    """Pattern of the names of the models. It is also the name of the override in the queue."""
    max_idle_s: float | None = None
    """`None` for the general value."""
    max_active: int | None = None
    """Largest number of these sequences that are active at once, within the general number. `None` for no
    limit of their own."""


GAP_S = 60.0
"""Seconds for which requests wait for a missing index. A request that is submitted at all arrives within
seconds, even if its producer connects again, and a lost producer must not block its sequence for long."""


@dataclass(frozen=True, slots=True)
class SequenceTerms:
    """Settings of the operator for all sequences of a queue."""

    max_idle_s: float = 600.0
    """Seconds without a running or waiting request after which a sequence has ended. Its end is remembered as
    long."""
    max_age_s: float = 86_400.0
    """Seconds after its beginning when a sequence ends, with the request that runs."""
    max_active: int | None = None
    """Largest number of sequences that are active at once; further ones wait until one ends. `None` for no
    limit."""
    max_waiting: int = 1000
    """Largest number of waiting requests of one sequence. Further requests are rejected."""
    on_error: OnError = OnError.ABORT
    """Behaviour after a failure, for requests that do not choose one."""
    gap_s: float = GAP_S
    """Seconds that later requests wait for a missing index, counted from when it could have been sent."""
    refuse_after_end: bool = False
    """True if requests after the end of a sequence are rejected while the end is remembered. Otherwise they
    begin a new run."""
    overrides: tuple[SequenceOverride, ...] = ()
    """Overrides for models. The first one that matches applies."""

    def match_override(self, model: str) -> str:
        """Return the name of the override for a model. Empty if there is none."""
        if not model:
            return ""
        return next((each.match for each in self.overrides if matches_pattern(each.match, model)), "")

    def get_max_idle_s(self, override: str) -> float:
        """Return the idle time of sequences with this override. The general value counts if the override was
        removed from the settings."""
        found = self._get_override(override)
        return self.max_idle_s if found is None or found.max_idle_s is None else found.max_idle_s

    def get_max_active(self, override: str) -> int | None:
        """Return the number of active sequences to which an override is limited. `None` for no limit."""
        found = self._get_override(override)
        return None if found is None else found.max_active

    def _get_override(self, name: str) -> SequenceOverride | None:
        return next((each for each in self.overrides if each.match == name), None) if name else None


class TurnGranted(msgspec.Struct, frozen=True):
    """The turn is granted: the request may be sent, now and at each later attempt."""

    index: int
    sticky_token: str
    """Sticky token of the sequence. Empty if it has none."""
    conversation: bytes
    is_first: bool
    """True if the request is the first of a sequence run, so that nothing is known of an earlier one."""


@dataclass(frozen=True, slots=True)
class TurnWaits:
    """The turn has not come: the request was returned, undelivered, and waits in its sequence. (Or its lease
    is no longer held by the caller.)"""


@dataclass(frozen=True, slots=True)
class TurnRejected:
    """The turn is rejected for ever. The caller keeps the lease and settles it with this error; the sequence
    does not know the request."""

    code: ErrorCode
    why: str
    """One sentence that says why."""


TurnDecision = TurnGranted | TurnWaits | TurnRejected


@dataclass(frozen=True, slots=True)
class OverrideCounts:
    """Counts of the sequences with one override."""

    match: str
    active: int
    parked: int


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """Counts of the sequences of a queue."""

    active: int = 0
    """Number of sequences that run or are held."""
    parked: int = 0
    """Number of sequences that wait to begin."""
    held: int = 0
    aborted: int = 0
    waiting: int = 0
    """Number of requests that wait for their turn."""
    overrides: tuple[OverrideCounts, ...] = ()
    """Counts of each override that any active or parked sequence has, by the name of the override."""

    @classmethod
    def from_statuses(
        cls, count: Mapping[SequenceStatus, int], waiting: int, overrides: tuple[OverrideCounts, ...]
    ) -> SequenceCounts:
        """Return the counts, given the number of sequences by status."""
        held, aborted = count.get(SequenceStatus.HELD, 0), count.get(SequenceStatus.ABORTED, 0)
        alive = count.get(SequenceStatus.OPEN, 0) + held
        return cls(alive, count.get(SequenceStatus.PARKED, 0), held, aborted, waiting, overrides)


@dataclass(slots=True)
class SequenceCounters:
    """Counters of what happened to the sequences of a queue, since the queue has had any."""

    held: int = 0
    """Number of times that a request failed and its sequence was held for an operator."""
    released: int = 0
    aborted: int = 0
    """Number of sequences aborted by a failed request or by an operator."""
    cancelled: int = 0
    idle: int = 0
    """Number of sequences that ended because no request of them ran or waited for max_idle_s."""
    aged: int = 0
    """Number of sequences that ended because they had run for max_age_s."""
    gaps: int = 0
    """Number of missing indexes that were skipped."""
    last_held: str = ""
    """Id of the sequence that was held last."""
    last_aborted: str = ""


@dataclass(frozen=True, slots=True)
class SequencePage:
    """One page of a listing of all sequences."""

    sequences: Sequence[SequenceSnapshot]
    after: str
    """Cursor of the next page. Empty if this is the last page."""
