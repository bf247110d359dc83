"""Requests whose owners died, more than once: how many of them may run here at once.

One of them may be what killed its owners, the others stood beside it, or nothing but a node was lost twice.
Whoever dies with a suspect counts against it, so two of them beside each other would be blamed for one.

    one at a time   until two have ended without killing us; each two that end so make room for one more:
                    1, 2, 3, 4, 6, 9 … A deadly one kills again, and the next process begins with one, from
                    the front of the line. Whoever takes the deadly one has ended two thirds of those before
                    it, so it is soon alone, and no other is blamed more than 5 times in a line of 200.
    not at once     a process that others keep killing (a node that flaps) would blame whom it took first
                    each time. So while other work waits, one that is young takes no suspects.
"""

from __future__ import annotations

from dispatcher.dispatch.endings import Ending
from dispatcher.ports import Release

YOUNG_S = 10.0
"""Whoever is killed again and again seldom lives this long."""


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
        """What a claim left to be claimed. True where nothing but suspects may be left that were held back:
        ask again."""
        self._others_wait = waiting > 0
        return self._held_back and not self._others_wait

    def ended(self, ending: Ending) -> bool:
        """The lease of one has ended, which makes room for others."""
        if not (isinstance(ending, Release) and ending.undelivered):
            self._survived += 1
        return True
