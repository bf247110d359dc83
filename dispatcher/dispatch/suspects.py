"""Requests whose owners died, more than once: how many of them may run here at once.

One of them may be what killed its owners; the others only ran beside it, or a node was lost twice. A process
that dies counts against each suspect that it holds, so of two that run together one would be blamed for the
other.

    one at a time   until two have ended without killing us; each two that end so make room for one more:
                    1, 2, 3, 4, 6, 9 … A deadly one kills again, and the next process begins with one, from
                    the front of the line. A process that reaches the deadly one has finished two thirds of
                    those before it, so it is soon alone, and no other is blamed more than 5 times in a line
                    of 200.
    not at once     a process that is killed again and again for another reason (a node that flaps) would
                    blame the suspects that it took first each time. So a young process takes none while
                    other work waits.
"""

from __future__ import annotations

from dispatcher.dispatch.completions import Ending
from dispatcher.ports import Release

YOUNG_S = 10.0
"""A process that is killed again and again seldom lives this long."""


class Suspects:
    """The rule of their lane: what one process has learned of them since it started."""

    def __init__(self) -> None:
        self._born_at: float | None = None
        self._survived = 0
        self._others_wait = True
        self._held_back = False

    def room(self, held: int, now: float) -> int:
        """How many more may be claimed while `held` are here."""
        if self._born_at is None:
            self._born_at = now
        self._held_back = self._others_wait and now - self._born_at < YOUNG_S
        if self._held_back:
            return 0
        return max(0, 1 + self._survived // 2 - held)

    def claimed(self, waiting: int) -> bool:
        """Told how many requests a claim left. True where suspects were held back for other work, and there
        is none: claim again, with room for them."""
        self._others_wait = waiting > 0
        return self._held_back and not self._others_wait

    def ended(self, ending: Ending) -> bool:
        """The lease of one has ended, which makes room for others."""
        if not (isinstance(ending, Release) and ending.undelivered):
            self._survived += 1
        return True
