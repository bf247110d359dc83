"""Walking the queue for requests past their deadline, when a score may be no deadline at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.ports import Expired

FROM_THE_START = "-inf"
UNSERVED = "u0"
"""In the place of one that no walk has found."""


@dataclass
class Walk:
    """One walk over all scores that tell a deadline in (after, until], in as many calls as it takes.

    The position is a rank: what was found and removed makes it fall, what was found and proved no deadline
    is stepped over.
    """

    after: str
    until: str = ""
    """Empty: as far as the server's clock when the walk starts."""
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
    """Two walks that take turns, so that neither can starve the other.

    `fresh` goes over the deadlines that passed since it last ended: a true one is found within seconds, even
    beside a million scores that are no deadlines. `rest` goes round over all older ones, for what came back
    or was submitted late.
    """

    def __init__(self, now: float) -> None:
        """`now`: the server's Unix time."""
        self.fresh = Walk(f"{now - 1:.6f}")
        self.rest = Walk(FROM_THE_START, f"{now:.6f}")
        self._rests = False

    def next(self) -> Walk:
        """The walk whose turn it is."""
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
        """The ranks behind a removed request fall by one."""
        side, at = item.place[0], int(item.place[1:].partition("|")[0])
        if side == UNSERVED[0]:
            return
        walk = self.fresh if side == "f" else self.rest
        if walk.range == at and walk.offset > 0:
            walk.offset -= 1


def place_of(item: Expired) -> str:
    """What the script calls the place."""
    return item.place.partition("|")[2]
