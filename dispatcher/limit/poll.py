"""Result of one poll of the pool: readings, or the reasons why there are none."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.limit.budget import Reading, Reason, Signal


@dataclass(frozen=True, slots=True)
class ReadFailure:
    """Reason why a signal (or the whole source if `signal` is `None`) could not be read, and a hint how to
    fix it."""

    reason: Reason
    """UNREADABLE, STALE, NO_ENDPOINTS or IMPLAUSIBLE."""
    why: str
    hint: str = ""
    """Setting or label that fixes the problem. Empty if only time or a repair does."""
    signal: Signal | None = None

    def __str__(self) -> str:
        return self.why if self.signal is None else f"{self.signal}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """A reading for each of `signals`, or the failure that prevented it."""

    completed_at: float
    """Time at which the poll was complete, on the clock of the loop. No reading in it is newer."""
    signals: tuple[Signal, ...]
    """Signals that the limit has to follow from now on."""
    readings: tuple[Reading, ...] = ()
    failures: tuple[ReadFailure, ...] = ()
    """Failures. If there is one, the gate closes at `closes_at`, regardless of `readings`."""
    closes_at: float = float("-inf")
    """Time until which earlier readings stay valid if there are `failures`."""

    @property
    def worst_failure(self) -> ReadFailure | None:
        """The failure that is reported if there are several."""
        return min(self.failures, key=lambda unread: unread.reason.rank, default=None)
