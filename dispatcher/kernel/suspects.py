"""Rule for suspects: how many requests that may have killed their owners run here at once.

A suspect is a request whose owners died more than once. One suspect may be the cause; the others only ran at
the same time, or a node was lost twice. A process that dies counts against each suspect that it holds, so of
two suspects that run together, the harmless one would be blamed too.

    one at a time   Start with one. Each two that end without killing the process make room for one more:
                    1, 2, 3, 4, 6, 9 … A deadly request kills the process again, and the next process starts
                    with one, from the front of the queue. A process that reaches the deadly request has
                    finished two thirds of those before it. So the deadly one is soon alone, and in a queue
                    of 200 no other request is blamed more than 5 times.
    not at once     A process that is killed repeatedly for another reason (a flapping node) would blame the
                    suspects that it claimed first each time. So a process claims none in its first
                    seconds while other work waits.
"""

from __future__ import annotations

from dispatcher.kernel.completions import Completion
from dispatcher.queue.contract import Release

STARTUP_S = 10.0
"""Time after the start without suspects. A process that is killed again and again seldom lives this long."""


class SuspectRule:
    """Rule of the lane for suspects, with the experience of this process since it started."""

    def __init__(self) -> None:
        self._started_at: float | None = None
        self._survived_count = 0
        self._has_other_work = True
        self._is_held_back = False

    def compute_room(self, in_flight_count: int, now: float) -> int:
        """Return how many more suspects may be claimed."""
        # Time comes in as an argument, so the first call is the start.
        if self._started_at is None:
            self._started_at = now
        self._is_held_back = self._has_other_work and now - self._started_at < STARTUP_S
        if self._is_held_back:
            return 0
        return max(0, 1 + self._survived_count // 2 - in_flight_count)

    def record_claim(self, claimable_count: int) -> bool:
        """Record how many requests a claim left.

        Return True if suspects were held back for other work and there is none: claim again, with room for
        them.
        """
        self._has_other_work = claimable_count > 0
        return self._is_held_back and not self._has_other_work

    def record_completion(self, completion: Completion) -> bool:
        """Record the end of a suspect, which makes room for others."""
        # A request that was returned unsent says nothing about whether it kills its owner.
        if not (isinstance(completion, Release) and completion.is_undelivered):
            self._survived_count += 1
        return True
