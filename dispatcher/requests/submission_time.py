"""The time at which a request was submitted."""

from __future__ import annotations

_TOKEN_TIME_CHARS = 16
"""Number of hexadecimal digits, a time in nanoseconds, with which a token of our clients begins."""
_SAME_MOMENT_S = 5.0
"""Largest difference between `created` and the time in a token. A larger one means that the token begins with
random digits."""


def parse_submission_time(created: int, token: str) -> float:
    """Return the Unix time at which a request was submitted. 0 without `created`.

    It is `data.created`, or the more exact time at the head of a token of our clients if the two agree.
    """
    if not created or len(token) < _TOKEN_TIME_CHARS:
        return float(created)
    try:
        exact = int(token[:_TOKEN_TIME_CHARS], 16) / 1e9
    except ValueError:
        return float(created)
    return exact if abs(exact - created) < _SAME_MOMENT_S else float(created)
