"""The score of a request: its place in line, and what it tells of the deadline. Pure."""

from __future__ import annotations

import math

PRIORITY_STEP = 10**11
"""Score = priority × this + deadline, so that score mod this is the deadline."""
PRIORITIES = range(10)
TOLD_FROM = 10**9
"""A remainder below this is no deadline of anybody's: foreign producers may use any scores."""


def score_of(deadline: int, priority: int | None = None) -> float:
    """The score our producers give: the deadline, after all more urgent priorities (0 first, to 9).

    Raises ValueError for another priority.
    """
    if priority is None:
        return float(deadline)
    if priority not in PRIORITIES:
        raise ValueError(f"priority {priority}: must be 0 (first) to 9")
    return float(priority * PRIORITY_STEP + deadline)


def deadline_of_score(score: float) -> int:
    """The deadline that a score tells where its producer kept to `score_of`; 0 where it cannot tell any.

    Foreign producers may use any number: read the member before acting on it.
    """
    return int(score % PRIORITY_STEP) if 0 <= score < math.inf else 0
