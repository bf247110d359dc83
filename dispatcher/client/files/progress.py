"""How far a run is: counts, rate, time left, and the words for them. Pure but for what it is told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RATE_OVER_S = 60.0
"""The rate is that of so long."""
FIRST_AFTER_S = 3.0
"""Before that nobody knows: of a first second, in which one answer came, the time left would be minutes."""


@dataclass(frozen=True, slots=True)
class FileProgress:
    """A run at one moment."""

    lines: int
    """Of the input, blank ones left out."""
    done: int
    """Answered, failed or bad: each of them stands in a file."""
    failed: int
    bad: int
    """Of the failed: those that are no requests."""
    in_queue: int
    """Sent, and not yet answered."""
    tokens_in: int
    tokens_out: int
    seconds: float
    """That the run has taken so far, in all its processes."""
    rate: float | None = None
    """Lines done per second, lately; None: not yet known."""
    trouble: str = ""
    """Why it does not go on."""

    @property
    def answered(self) -> int:
        return self.done - self.failed

    @property
    def left_s(self) -> float | None:
        """Until all is done if it goes on like this; None: it does not go on, or nobody knows yet."""
        return None if not self.rate else (self.lines - self.done) / self.rate


class RecentRate:
    """The rate of the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, now: float, done: int) -> float | None:
        """After this many were done by now."""
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - RATE_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (done - before) / (now - since) if now - since >= FIRST_AFTER_S else None


def facts_of(progress: FileProgress) -> list[str]:
    """What there is to say beside how many are done, what matters most first."""
    parts = []
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.left_s is not None and progress.done < progress.lines:
        parts.append(f"{duration(progress.left_s)} left")
    if progress.rate is not None:
        parts.append(f"{progress.rate:,.1f}/s")
    if progress.in_queue:
        # A call that is not answered may have put them there: it is made again until it is known.
        where = "in the queue" + (" or on their way there" if progress.trouble else "")
        parts.append(f"{progress.in_queue:,} {where}")
    if progress.tokens_in or progress.tokens_out:
        parts.append(f"{short(progress.tokens_in)} tokens in, {short(progress.tokens_out)} out")
    return parts


def told(progress: FileProgress) -> str:
    """One line of a log."""
    return ", ".join([f"{progress.done:,} of {progress.lines:,} done", *facts_of(progress)])


def summary(progress: FileProgress) -> str:
    """What came of it, in one sentence."""
    failed = f"{progress.failed:,} failed"
    if progress.bad:
        failed += f" ({progress.bad:,} of them {'a bad line' if progress.bad == 1 else 'bad lines'})"
    tokens = f"{progress.tokens_in:,} tokens in, {progress.tokens_out:,} out"
    return f"{progress.answered:,} answered, {failed}, {tokens}, {duration(progress.seconds)}"


def short(number: int) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(max(0.0, seconds))
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s" if whole else f"{seconds:.1f} s"
