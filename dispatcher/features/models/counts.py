"""Count of the requests that wait for a model, as count_requests.lua returns it."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.requests.queue_counts import FeatureCounts


@dataclass(frozen=True, slots=True)
class ModelCounts:
    waiting: int = 0
    """Number of pending requests that wait for a model."""


def decode_counts(value: int) -> FeatureCounts:
    return FeatureCounts((ModelCounts(value),), closed=value)
