"""Outcomes of the last attempts of one process: failures, refusals, and the time of the last answer.

A gateway that answers 500 to everything can be reached, so the gate stays open while all requests wait for a
retry. The health of the dispatcher (`limit/health.py`) is computed from these outcomes. Only the kind of a
failure is kept and never the text of the gateway: kinds are few, and an answer may contain a payload.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    UncountedError,
    Unreachable,
)

KEPT_ATTEMPTS = 20
"""Number of attempts that are kept. After as many successes, earlier failures are forgotten."""
RECENT_S = 300.0
"""Age from which an attempt is no longer relevant."""
MIN_FAILURES = 3
"""Minimum number of failures that is reported, even after few attempts."""
MIN_FAILURE_SHARE = 0.25
"""Minimum share of failures that is reported: five of twenty. A rate of one failure in a hundred never
reaches it."""
MAX_KINDS = 3
"""Number of kinds that the sentence names, the most frequent first."""


@dataclass(frozen=True, slots=True)
class UnansweredAttempts:
    """Attempts that ended since the last answered one."""

    first_ended_at: float
    """Time at which the first of them ended."""
    last_ended_at: float
    """Time at which the last of them ended."""
    failed_count: int = 0
    refused_count: int = 0

    @property
    def total_count(self) -> int:
        return self.failed_count + self.refused_count


class RecentAttempts:
    """Last attempts of one process."""

    __slots__ = ("_ended", "answered_at", "unanswered")

    def __init__(self) -> None:
        self._ended: deque[tuple[float, str, str]] = deque(maxlen=KEPT_ATTEMPTS)
        """End of each attempt that was not refused, the kind of its failure, and the status of an answer that
        rejects the request (4xx). Kind and status are empty for a success."""
        self.unanswered: UnansweredAttempts | None = None
        """Attempts since the last answer. `None` if the last attempt was answered, or there was none."""
        self.answered_at: float | None = None
        """Time at which the last answered attempt ended."""

    def record_attempt(self, at: float, outcome: Outcome, status: int | None) -> None:
        """Record that an attempt has ended. `status` is the status of the gateway's answer, if there was one.

        An eviction is no failure. An attempt that was not sent, or whose model is not served, says nothing
        about the gateway. Neither is counted.
        """
        match outcome:
            case Delivered(status=code):
                self._record_answered(at, str(code) if code >= 400 else "")
            case TooLarge():
                self._record_answered(at, "")
            case Failed(kind=kind) | Unreachable(kind=kind) | UncountedError(kind=kind):
                self._ended.append((at, str(kind if status is None else status), ""))
                self._record_unanswered(at, failed=1)
            case Overloaded():
                self._record_unanswered(at, refused=1)
            case _:
                pass

    def describe_problem(self, now: float) -> str | None:
        """Return `Of the last 20 attempts 20 failed: 500 (18), connection reset (2), the newest 4 s ago`.
        `None` if too few failed, or none ended recently."""
        failures = self.describe_failures(now)
        if failures is None:
            return None
        newest_s = max(0.0, now - max(at for at, kind, _ in self._ended if kind))
        return f"{failures}, the newest {newest_s:.0f} s ago"

    def describe_failures(self, now: float) -> str | None:
        """Return the sentence of `describe_problem` without the age."""
        recent = [each for each in self._ended if now - each[0] < RECENT_S]
        kinds = [kind for _, kind, _ in recent if kind]
        if len(kinds) < max(MIN_FAILURES, MIN_FAILURE_SHARE * len(recent)):
            return None
        return f"Of the last {len(recent)} attempts {len(kinds)} failed: {_describe_most_frequent(kinds)}"

    def has_only_failures(self, now: float) -> bool:
        """Return whether no recent attempt was answered, and there were enough of them to say so."""
        kinds = [kind for at, kind, _ in self._ended if now - at < RECENT_S]
        return len(kinds) >= MIN_FAILURES and all(kinds)

    def describe_rejections(self, now: float) -> str | None:
        """Return `Of the last 20 answers 20 rejected their request: 404 (20)`. `None` if too few did."""
        answers = [each for each in self._ended if now - each[0] < RECENT_S and not each[1]]
        rejected = [status for _, _, status in answers if status]
        if len(rejected) < max(MIN_FAILURES, MIN_FAILURE_SHARE * len(answers)):
            return None
        whole = f"Of the last {len(answers)} answers {len(rejected)} rejected their request"
        return f"{whole}: {_describe_most_frequent(rejected)}"

    def _record_answered(self, at: float, status: str) -> None:
        self._ended.append((at, "", status))
        self.unanswered = None
        self.answered_at = at

    def _record_unanswered(self, at: float, *, failed: int = 0, refused: int = 0) -> None:
        before = self.unanswered or UnansweredAttempts(at, at)
        self.unanswered = UnansweredAttempts(
            before.first_ended_at, at, before.failed_count + failed, before.refused_count + refused
        )


def _describe_most_frequent(kinds: Iterable[str]) -> str:
    """Return the most frequent kinds with their counts, and the count of all others."""
    counts = Counter(kinds).most_common()
    named = [f"{kind} ({count})" for kind, count in counts[:MAX_KINDS]]
    if more := sum(count for _, count in counts[MAX_KINDS:]):
        named.append(f"others ({more})")
    return ", ".join(named)
