"""Durations in the format that people write and read."""

from __future__ import annotations

import math
import re
from itertools import pairwise

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)\s*")
_PARTS = re.compile(f"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def parse_duration(written: str) -> float:
    """Return the seconds of a duration such as `90`, `90s`, `1.5m`, `1h30m`, `1d` or `250ms`. Each unit may
    occur once, the larger one first. Raises ValueError with a message that shows the format."""
    text = written.strip()
    seconds, why = math.inf, ""
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif _PARTS.fullmatch(text):
        parts = [(float(count), unit) for count, unit in _PART.findall(text)]
        for (_, unit), (_, following) in pairwise(parts):
            if _UNITS[following] >= _UNITS[unit]:
                why = f" ({following} behind {unit}: each unit once, the larger one first)"
        seconds = sum(count * _UNITS[unit] for count, unit in parts)
    if why or not math.isfinite(seconds):
        raise ValueError(f"{written!r} is no span of time{why}: write 90s, 10m, 1h30m, 8h or 1d")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration as `0.4 s`, `59 s`, `12 min`, `3.5 h` or `2 d`. Two digits suffice for people."""
    size = abs(seconds)
    for unit, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        # Seconds are shown up to 99 s, every other unit from two of it on.
        if size >= 2 * unit or (unit == 60.0 and size >= 100):
            value = size / unit
            return f"{value:.1f}".removesuffix(".0") + f" {name}" if value < 10 else f"{value:.0f} {name}"
    return f"{size:.1f} s" if size < 10 and size != int(size) else f"{size:.0f} s"


def format_time_until(at: float, now: float) -> str:
    """Return `in 12 min` or `12 min ago`."""
    return f"in {format_duration(at - now)}" if at >= now else f"{format_duration(now - at)} ago"
