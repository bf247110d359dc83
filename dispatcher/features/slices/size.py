"""The size of slices, if it is not set: the smallest one at which continuing costs little.

What a slice costs in addition is the time to its first token: the server looks up the beginning of the
generation in its prefix cache, and computes what it does not find there. It is measured by slices of a few
tokens, one in MEASURE_EVERY. Medians are used, because the duration of a call depends on the load of the
server.
"""

from __future__ import annotations

from collections import deque

MAX_OVERHEAD = 0.03
"""Largest part of the time of a slice that may be overhead."""
SIZES = (64, 128, 256, 512, 1024)
"""Sizes to choose from, in tokens."""
DEFAULT_SIZE = 256
"""Size while nothing has been measured."""
MEASURE_EVERY = 25
"""One in this many continued slices measures the overhead."""
MEASURE_TOKENS = 4
"""Number of tokens of a slice that measures."""
SPREAD = 0.5
"""Default of the largest deviation of slices from their size, as a share."""
MIN_SAMPLES = 5
"""Number of measurements before the size changes."""
_WINDOW = 32
_GOLDEN_RATIO = (5**0.5 - 1) / 2


def vary_tokens(size: int, number: int, spread: float = SPREAD) -> int:
    """Return the number of tokens of the slice with this number. It is `size` on average, and differs from it
    by up to `spread` × `size`.

    Slices of equal size that once started together would end together each time, and a realtime request that
    arrives in between would wait as long as a slice takes. Multiples of the golden ratio are spread evenly,
    however many of them there are.
    """
    return max(1, round(size * (1 - spread + 2 * spread * (number * _GOLDEN_RATIO % 1))))


class SizeEstimator:
    """Measurements of one model."""

    def __init__(self) -> None:
        self.size = DEFAULT_SIZE
        """Number of tokens of a slice."""
        self.overhead_s: float | None = None
        """Measured time to the first token of a continued slice. `None` while it is not known."""
        self.is_too_expensive = False
        """True if slices of any size cost more than MAX_OVERHEAD."""
        self._continued_count = 0
        self._short_calls: deque[float] = deque(maxlen=_WINDOW)
        self._token_times: deque[float] = deque(maxlen=_WINDOW)

    def choose_tokens(self, *, is_continued: bool) -> int:
        """Return the number of tokens of the next slice."""
        if is_continued:
            self._continued_count += 1
            if self._continued_count % MEASURE_EVERY == 0:
                return MEASURE_TOKENS
        return self.size

    def record_slice(self, tokens: int, duration_s: float) -> None:
        """Record the duration of a continued slice."""
        if tokens <= 0:
            return
        if tokens <= MEASURE_TOKENS:
            self._short_calls.append(duration_s)
        else:
            self._token_times.append(duration_s / tokens)
            return
        if len(self._short_calls) < MIN_SAMPLES or len(self._token_times) < MIN_SAMPLES:
            return
        token_s = _find_median(self._token_times)
        self.overhead_s = max(0.0, _find_median(self._short_calls) - MEASURE_TOKENS * token_s)
        needed = self.overhead_s / (MAX_OVERHEAD * token_s) if token_s > 0 else float("inf")
        self.is_too_expensive = needed > SIZES[-1]
        self.size = next((size for size in SIZES if size >= needed), SIZES[-1])


def _find_median(values: deque[float]) -> float:
    # Not `statistics.median`: every command imports this module, and would pay for that import at its start.
    return sorted(values)[len(values) // 2]
