"""Spans of time as people write and read them. Pure."""

from __future__ import annotations

import math
import re

_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_PART = re.compile(rf"{_NUMBER} ?({'|'.join(sorted(_UNITS, key=len, reverse=True))}) *")
_BARE = re.compile(_NUMBER)
_SHOWN = 40
"""Characters of what was written that a message repeats."""


def seconds_of(written: str) -> float:
    """`90` (seconds), `90s`, `1.5m`, `2h`, `1d`, `1w`, `250ms`, `1h30m`, `2 h 5 min`.

    Several units go from the largest to the smallest, each once. Raises ValueError, whose message says how to
    write it.
    """
    text = written.strip()
    seconds = float(text) if _BARE.fullmatch(text) else _sum_of_parts(text)
    if not math.isfinite(seconds):
        shown = written if len(written) <= _SHOWN else f"{written[:_SHOWN]}…"
        raise ValueError(f"{shown!r} is no span of time: write 30s, 10m, 1h30m or 2d")
    return seconds


def _sum_of_parts(text: str) -> float:
    """Infinity where it is no span."""
    seconds, smallest, at = 0.0, math.inf, 0
    while found := _PART.match(text, at):
        unit_s = _UNITS[found[2]]
        if unit_s >= smallest:
            return math.inf
        seconds, smallest, at = seconds + float(found[1]) * unit_s, unit_s, found.end()
    return seconds if 0 < at == len(text) else math.inf


def told(seconds: float) -> str:
    """`0.4 s`, `59 s`, `12 min`, `3.5 h`, `2 d`: in two figures, which is what people take in."""
    size = abs(seconds)
    for unit, name in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if size >= 2 * unit or (unit == 60.0 and size >= 100):
            value = size / unit
            return f"{value:.1f}".removesuffix(".0") + f" {name}" if value < 10 else f"{value:.0f} {name}"
    return f"{size:.1f} s" if size < 10 and size != int(size) else f"{size:.0f} s"


def until(at: float, now: float) -> str:
    """`in 12 min`, or `12 min ago`."""
    return f"in {told(at - now)}" if at >= now else f"{told(now - at)} ago"
