"""Count of the requests that miss their deadlines, one by one: the reference for the forecast."""

from __future__ import annotations

from collections.abc import Sequence


def count_late_one_by_one(slacks: Sequence[float], rate: float, service_s: float) -> int:
    """Return how many requests are late, given the time to each deadline in the order of the queue."""
    return sum(rank / rate + service_s > slack + 1e-6 for rank, slack in enumerate(slacks, 1))
