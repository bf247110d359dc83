"""Search for requests past their deadline, among scores that may contain no deadline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.queue.contract import UnleasedRequest

FROM_START = "-inf"
UNSEARCHED = "u0"
"""Beginning of the location of a request that no search has found, but a call of a feature."""


@dataclass
class ScoreWalk:
    """One pass over all scores with a deadline in (after, until], in as many calls as it takes.

    The position is a rank. It falls when a found request is removed, and it steps over found requests whose
    deadline has not passed.
    """

    after: str
    until: str = ""
    """End of the range. Empty until the server's clock at the start of the pass is known."""
    range_index: int = 0
    offset: int = 0
    has_ended: bool = False

    def advance_to(self, until: bytes, next_range: int, next_offset: int) -> None:
        self.until = until.decode()
        self.range_index, self.offset = next_range, next_offset
        self.has_ended = next_range < 0


class OverdueSearch:
    """Two alternating passes, so that neither can delay the other for ever.

    `new_deadlines` covers the deadlines that have passed since it last ended. So an overdue request is found
    within seconds, even among a million scores that contain no deadline. `older_deadlines` covers all older
    ones, again and again, because requests are returned to the queue and submitted late.
    """

    def __init__(self, now: float) -> None:
        """`now` is the server's Unix time."""
        self.new_deadlines = ScoreWalk(f"{now - 1:.6f}")
        self.older_deadlines = ScoreWalk(FROM_START, f"{now:.6f}")
        self._is_new_next = False

    def next_walk(self) -> ScoreWalk:
        """Return the pass that comes next."""
        if self.new_deadlines.has_ended:
            self.new_deadlines = ScoreWalk(self.new_deadlines.until)
        if self.older_deadlines.has_ended:
            self.older_deadlines = ScoreWalk(FROM_START, self.new_deadlines.after)
        self._is_new_next = not self._is_new_next
        return self.new_deadlines if self._is_new_next else self.older_deadlines

    def record_found(
        self, walk: ScoreWalk, rows: Sequence[tuple[int, bytes, bytes, bytes, int, int, bytes]]
    ) -> list[UnleasedRequest]:
        side = "f" if walk is self.new_deadlines else "r"
        return [
            UnleasedRequest(
                f"{side}{at}|{place.decode()}",
                member,
                last_try.decode(errors="replace"),
                failed_attempts,
                refusals,
                progress,
            )
            for at, place, member, last_try, failed_attempts, refusals, progress in rows
        ]

    def record_removed(self, item: UnleasedRequest) -> None:
        """Adjust the position: the ranks behind a removed request fall by one."""
        side, at = item.location[0], int(item.location[1:].partition("|")[0])
        if side == UNSEARCHED[0]:
            return
        walk = self.new_deadlines if side == "f" else self.older_deadlines
        if walk.range_index == at and walk.offset > 0:
            walk.offset -= 1


def parse_location(item: UnleasedRequest) -> str:
    """Return the location as the scripts name it."""
    return item.location.partition("|")[2]
