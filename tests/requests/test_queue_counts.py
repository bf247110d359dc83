"""Counts of the requests in a queue."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.requests.queue_counts import FeatureCounts, QueueCounts


@dataclass(frozen=True)
class Waiting:
    count: int = 0


@dataclass(frozen=True)
class Running:
    count: int = 0


def test_requests_in_closed_lanes_cannot_be_claimed() -> None:
    counted = [
        FeatureCounts((Waiting(3),), closed=3),
        FeatureCounts((Running(1),)),
        FeatureCounts((), closed=2),
    ]
    counts = QueueCounts(pending=10, leased=4, delayed=5, dead=6).add_features(counted)
    assert counts.claimable_count == 5
    assert (counts.of(Waiting), counts.of(Running)) == (Waiting(3), Running(1))


def test_what_a_feature_has_not_counted_has_the_default_values() -> None:
    assert QueueCounts(1, 0, 0, 0).of(Waiting) == Waiting(0)
