"""Who misses its deadline, by the plainest count there is: what spans and rates are held to."""

from __future__ import annotations

from collections.abc import Sequence


def late_one_by_one(slacks: Sequence[float], rate: float, service_s: float) -> int:
    """Each request by its rank."""
    return sum(rank / rate + service_s > slack + 1e-6 for rank, slack in enumerate(slacks, 1))
