"""Counts of the requests in a queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """Counts of one feature in a queue."""

    parts: Iterable[object]
    """Counts that `QueueCounts.of` returns by their type."""
    closed: int = 0
    """Number of pending requests in the closed lanes of the feature."""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Counts of the requests in a queue, by location."""

    pending: int
    """Number of requests that wait, including those that were returned, and those in closed lanes."""
    leased: int
    """Number of leases of all queues of the pool, that is of requests in flight of all replicas."""
    delayed: int
    dead: int
    units: int = field(default=0, repr=False, compare=False)
    """Weight of all leases in the limit, in units."""
    closed: int = field(default=0, repr=False, compare=False)
    """Number of pending requests in closed lanes, from which no claim takes any."""
    of_features: Mapping[type, Any] = field(default_factory=dict, repr=False, compare=False)
    """Counts of features, by type. Read them with `of`."""

    @property
    def claimable_count(self) -> int:
        """Number of pending requests that a claim may take."""
        return self.pending - self.closed

    def of(self, kind: type[T]) -> T:
        """Return what a feature has counted. The default values of the type if it has counted nothing."""
        found: T | None = self.of_features.get(kind)
        return kind() if found is None else found

    def add_features(self, counted: Iterable[FeatureCounts]) -> QueueCounts:
        """Return the counts with those of features."""
        counted = list(counted)
        of_features = {type(part): part for each in counted for part in each.parts}
        return replace(self, closed=sum(each.closed for each in counted), of_features=of_features)
