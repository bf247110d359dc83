"""Progress of a run: counts, rate and remaining time, and their text form. Does no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RATE_WINDOW_S = 60.0
"""Length of the time window over which the rate is computed."""
FIRST_RATE_AFTER_S = 3.0
"""Seconds until the first rate is given. An earlier one would rest on the first few answers."""


@dataclass(frozen=True, slots=True)
class FileProgress:
    """Progress of a run of a batch file at one moment."""

    lines: int
    """Number of lines in the input, without blank lines."""
    done: int
    """Number of lines that are written to the output or to the errors file."""
    failed: int
    """Number of lines that are written to the errors file, bad lines included."""
    bad: int
    """Number of lines that are not valid requests."""
    in_queue: int
    """Number of lines that were sent and are not done."""
    tokens_in: int
    """Sum of the prompt tokens of all answers."""
    tokens_out: int
    """Sum of the generated tokens of all answers."""
    seconds: float
    """Seconds that the run has taken so far, in all its processes."""
    rate: float | None = None
    """Lines done per second in the last minute, or `None` if it is not known yet."""
    connection_error: str = ""
    """Error that keeps the run from continuing, or empty."""

    @property
    def answered(self) -> int:
        """Number of lines in the output, which were answered with a status of 2xx."""
        return self.done - self.failed

    @property
    def left_s(self) -> float | None:
        """Seconds until the run is finished at the current rate, or `None` if the rate is 0 or unknown."""
        return None if not self.rate else (self.lines - self.done) / self.rate


class RecentRate:
    """Rate of lines done over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update_rate(self, now: float, done: int) -> float | None:
        """Add a sample, the number of lines done by now, and return the rate in lines per second."""
        self._samples.append((now, done))
        # Keep one sample that is older than the window, so that the rate covers all of it.
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        return (done - before) / (now - since) if now - since >= FIRST_RATE_AFTER_S else None


def progress_facts(progress: FileProgress) -> list[str]:
    """Return short descriptions of a progress beside the number of done lines, the most important first."""
    parts = []
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.left_s is not None and progress.done < progress.lines:
        parts.append(f"{format_duration(progress.left_s)} left")
    if progress.rate is not None:
        parts.append(f"{progress.rate:,.1f}/s")
    if progress.in_queue:
        # A call without an answer may have submitted them. It is repeated until the answer arrives.
        where = "in the queue" + (" or on their way there" if progress.connection_error else "")
        parts.append(f"{progress.in_queue:,} {where}")
    if progress.tokens_in or progress.tokens_out:
        parts.append(f"{format_count(progress.tokens_in)} tokens in, {format_count(progress.tokens_out)} out")
    return parts


def progress_line(progress: FileProgress) -> str:
    """Return the progress as one line for a log."""
    return ", ".join([f"{progress.done:,} of {progress.lines:,} done", *progress_facts(progress)])


def summarize_run(progress: FileProgress) -> str:
    """Return a summary of a finished run."""
    failed = f"{progress.failed:,} failed"
    if progress.bad:
        failed += f" ({progress.bad:,} of them {'a bad line' if progress.bad == 1 else 'bad lines'})"
    tokens = f"{progress.tokens_in:,} tokens in, {progress.tokens_out:,} out"
    return f"{progress.answered:,} answered, {failed}, {tokens}, {format_duration(progress.seconds)}"


def format_count(number: int) -> str:
    """Return a count in a short form: `950`, `12.3k`, `4.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)


def format_duration(seconds: float) -> str:
    """Return a time as text: `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = round(max(0.0, seconds))
    for size, unit, below, smaller in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s" if whole else f"{seconds:.1f} s"
