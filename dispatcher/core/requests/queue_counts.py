"""Counts of the requests in a queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.core.sequences.decisions import SequenceCounts, SequenceNews


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the requests in a queue, by location."""

    pending: int
    """Number of requests that wait, including those that were returned, wait for a turn in a sequence, or for
    a model."""
    leased: int
    """Number of leases of all queues of the pool, that is of requests in flight of all replicas."""
    delayed: int
    dead: int
    units: int = field(default=0, repr=False, compare=False)
    """Weight of all leases in the limit, in units."""
    sequences: SequenceCounts = field(default=SequenceCounts(), repr=False, compare=False)
    news: SequenceNews = field(default_factory=SequenceNews, repr=False, compare=False)
    awaiting: int = field(default=0, repr=False, compare=False)
    """Number of pending requests that wait for a model."""

    @property
    def claimable(self) -> int:
        """Number of pending requests that a claim may take."""
        # These two are in closed lanes.
        return self.pending - self.sequences.waiting - self.awaiting
