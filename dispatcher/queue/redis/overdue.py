"""Search for requests past their deadline, among scores that may contain no deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.ports import Expired

FROM_THE_START = "-inf"
UNSERVED = "u0"
"""Location of a request of a sequence that no search has found (`Queue.find_remaining_requests`)."""


@dataclass
class Walk:
    """One pass over all scores with a deadline in (after, until], in as many calls as it takes.

    The position is a rank. It falls when a found request is removed, and it steps over found requests whose
    deadline has not passed.
    """

    after: str
    until: str = ""
    """End of the range. Empty until the server's clock at the start of the pass is known."""
    range: int = 0
    offset: int = 0
    ended: bool = False

    @property
    def position(self) -> tuple[str, str, int, int]:
        return self.after, self.until, self.range, self.offset

    def moved(self, until: bytes, next_range: int, next_offset: int) -> None:
        self.until = until.decode()
        self.range, self.offset = next_range, next_offset
        self.ended = next_range < 0


class Overdue:
    """Two passes in turn, so that neither can delay the other for ever.

    `new_deadlines` covers the deadlines that have passed since it last ended. So an overdue request is found
    within seconds, even among a million scores that contain no deadline. `older_deadlines` covers all older
    ones, again and again, because requests are returned to the queue and submitted late.
    """

    def __init__(self, now: float) -> None:
        """`now` is the server's Unix time."""
        self.fresh = Walk(f"{now - 1:.6f}")
        self.rest = Walk(FROM_THE_START, f"{now:.6f}")
        self._rests = False

    def next(self) -> Walk:
        """Return the pass whose turn it is."""
        if self.fresh.ended:
            self.fresh = Walk(self.fresh.until)
        if self.rest.ended:
            self.rest = Walk(FROM_THE_START, self.fresh.after)
        self._rests = not self._rests
        return self.fresh if self._rests else self.rest

    def found(self, walk: Walk, rows: Sequence[tuple[int, bytes, bytes, bytes, int, int]]) -> list[Expired]:
        side = "f" if walk is self.fresh else "r"
        return [
            Expired(f"{side}{at}|{place.decode()}", member, last_try.decode(errors="replace"), *counts)
            for at, place, member, last_try, *counts in rows
        ]

    def removed(self, item: Expired) -> None:
        """Adjust the position: the ranks behind a removed request fall by one."""
        side, at = item.place[0], int(item.place[1:].partition("|")[0])
        if side == UNSERVED[0]:
            return
        walk = self.fresh if side == "f" else self.rest
        if walk.range == at and walk.offset > 0:
            walk.offset -= 1


def place_of(item: Expired) -> str:
    """Return the location as the scripts name it."""
    return item.place.partition("|")[2]
