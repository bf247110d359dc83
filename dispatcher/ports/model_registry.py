"""What the owners of a pool tell each other of the versions of its models. Part of `ports`.

None of it moves a request. What is told lapses by itself; what operators say stays until they take it back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelMarks:
    """What holds now."""

    warm: frozenset[tuple[str, str]] = frozenset()
    """Model and endpoint: it answers there as fast as it will."""
    used: frozenset[str] = frozenset()
    """Models that some owner says it has under way."""
    labels: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Version by family and label, as operators set them."""
    drained: Mapping[str, str] = field(default_factory=dict)
    """Models that an operator drains: by whom, since when and why, as a sentence goes on ("by ada …")."""
    problem: str = ""
    """Of what is there some cannot be read, and counts for nothing: a sentence that says which."""
    labelled: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By whom, and since when, each label is set, as a sentence goes on ("by ada …")."""
    warming: frozenset[tuple[str, str, str]] = frozenset()
    """Model, endpoint, owner: who has the right to warm it there."""


@dataclass(frozen=True, slots=True)
class PinAsked:
    """A version is asked for, by a sequence or a job that is to keep the one it gets."""

    key: str
    """Of whoever keeps it: unique among all in the pool."""
    version: str
    """The one that it gets where it has none."""
    keeps: Sequence[str]
    """Of those that it may have, the ones it may go on with."""
    for_s: float
    """So long it is kept from the last time it was asked for."""


class ModelBoard(Protocol):
    """The part of `Queue` that versions of models need. Each method is one atomic step, safe to repeat, and
    raises QueueUnavailableError alone. Where another program's key stands in the way nothing is warm,
    labelled or drained, no right is given, and each pin is the version proposed: `ModelMarks.problem` says
    so."""

    async def marks(
        self, keep: Collection[tuple[str, str]], cold: Collection[tuple[str, str]], using: Collection[str]
    ) -> ModelMarks:
        """Refresh those of `keep` (model and endpoint) that are marked warm still, remove `cold`, say what
        this owner has under way, and tell all that holds now.

        A mark lapses 60 s after any owner refreshed it last; one that was removed, or has lapsed, does not
        come back by `keep`. What an owner has under way holds until it says otherwise, for 15 s.
        """
        ...

    async def model_marks(self) -> ModelMarks:
        """All that holds now, as `marks` tells it; reads only."""
        ...

    async def warming(self, model: str, endpoint: str) -> bool:
        """Take the right to warm it, or renew it as the one who has it: it lapses after 30 s. False: another
        owner has it."""
        ...

    async def warmed(self, model: str, endpoint: str) -> None:
        """Mark it warm, and give the right back."""
        ...

    async def unwarmed(self, model: str, endpoint: str) -> None:
        """Give the right back; it is not marked by this."""
        ...

    async def pin(self, pins: Sequence[PinAsked]) -> Sequence[str]:
        """The version of each: the one that it was given before, if that is among `keeps`, else the one that
        is proposed now, which it has from then on. 100,000 are remembered; those that were not asked for the
        longest go first."""
        ...
