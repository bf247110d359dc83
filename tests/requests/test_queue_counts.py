"""Counts of the requests in a queue."""

from __future__ import annotations

from dispatcher.features.sequences.decisions import SequenceCounts
from dispatcher.requests.queue_counts import QueueCounts


def test_requests_that_wait_for_a_turn_or_a_model_cannot_be_claimed() -> None:
    counts = QueueCounts(
        pending=10, leased=4, delayed=5, dead=6, sequences=SequenceCounts(waiting=3), waiting_for_model=2
    )
    assert counts.claimable_count == 5
