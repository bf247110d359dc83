"""Count of the requests that have begun, as count_requests.lua returns it."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.requests.queue_counts import FeatureCounts


@dataclass(frozen=True, slots=True)
class SliceCounts:
    started: int = 0
    """Number of pending requests with a part of the answer from earlier calls."""


def decode_counts(value: int) -> FeatureCounts:
    return FeatureCounts((SliceCounts(value),))
