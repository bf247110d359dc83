"""What one poll of the pool tells: readings, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.limit.budget import Reading, Reason, Signal


@dataclass(frozen=True, slots=True)
class Unread:
    """Why a signal (or, without one, the whole source) could not be read, and what mends it."""

    reason: Reason
    """UNREADABLE, STALE, NO_ENDPOINTS or IMPLAUSIBLE."""
    why: str
    hint: str = ""
    """The setting or label that mends it; empty where only time or a repair does."""
    signal: Signal | None = None

    def __str__(self) -> str:
        return self.why if self.signal is None else f"{self.signal}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """For each of `signals` a reading, or a reason why there is none."""

    at: float
    """When it was known, on the loop's clock; no reading in it is of later."""
    signals: tuple[Signal, ...]
    """The signals that the limit must follow from now on."""
    readings: tuple[Reading, ...] = ()
    unread: tuple[Unread, ...] = ()
    """Not empty: the gate must close at `closes_at`, whatever `readings` say."""
    closes_at: float = float("-inf")
    """Until then the readings before stand, where these are `unread`."""

    @property
    def worst(self) -> Unread | None:
        """What is shown of all that could not be read."""
        return min(self.unread, key=lambda unread: unread.reason.rank, default=None)
