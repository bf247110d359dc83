"""Counts of the requests in a queue."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.features.sequences.decisions import SequenceCounters, SequenceCounts


@dataclass(frozen=True, slots=True)
class QueueCounts:
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
    sequence_counters: SequenceCounters = field(default_factory=SequenceCounters, repr=False, compare=False)
    waiting_for_model: int = field(default=0, repr=False, compare=False)
    """Number of pending requests that wait for a model."""
    started: int = field(default=0, repr=False, compare=False)
    """Number of pending requests with a part of the answer from earlier calls."""

    @property
    def claimable_count(self) -> int:
        """Number of pending requests that a claim may take."""
        # These two are in closed lanes.
        return self.pending - self.sequences.waiting - self.waiting_for_model
