"""Score of a request: its place in the queue, with its priority and deadline."""

from __future__ import annotations

import math

PRIORITY_STEP = 10**11
"""Score = priority × this + deadline, so that score mod this is the deadline."""
PRIORITIES = range(10)
EARLIEST_DEADLINE = 10**9
"""Smallest remainder of a score that counts as a deadline. Foreign producers may use any scores."""


def compute_score(deadline: int, priority: int | None = None) -> float:
    """Return the score that the Python client uses: priority first (0 before 9), then deadline.

    Requests without a priority have the deadline as score, as those of priority 0. Raise `ValueError` for a
    priority out of range.
    """
    if priority is None:
        return float(deadline)
    if priority not in PRIORITIES:
        raise ValueError(f"priority {priority}: must be 0 (first) to 9")
    return float(priority * PRIORITY_STEP + deadline)


def floor_to_priority(score: float) -> float:
    """Return the lowest score with the same priority: the place of a request with progress, which goes before
    all others of its priority. Scores beyond all priorities are treated alike; an infinite one stays
    infinite."""
    if math.isinf(score):
        return score
    # `min`, because the product of a very large number may be rounded up.
    return min(score, math.floor(score / PRIORITY_STEP) * float(PRIORITY_STEP))


def decode_deadline(score: float) -> int:
    """Return the deadline that a score contains if its producer used `compute_score`. 0 if it cannot contain
    one.

    Foreign producers may use any number as score, so read the member before acting on the deadline.
    """
    return int(score % PRIORITY_STEP) if 0 <= score < math.inf else 0
