"""Whether there is a gateway at all, judged by what comes back. Pure.

A connection that fails says it at once. A bare answer (an empty 500 or 404, a 401, 407, a bare 502, 503 or
504) may mean that the gateway lost what it leads to, or only that one endpoint of several has died and is
still sent requests, or that this one request is to blame. They look the same one by one, and differ in what
becomes of the others:

    there      another request, sent no earlier, got through: it was answered, or stays connected longer than
               such an answer takes
    gone       BARE_IN_A_ROW such answers in a row; where others got through beside such answers not long ago,
               only if nobody does for PATIENCE_S

A bare answer that takes PROBE_MOST_S or longer closes nothing: in each slot such requests follow each other
no faster than probes do, and one after the other as probes they would keep everybody waiting. What a bare
answer costs its own request is judged in `bounces`.

While there is none, one probe at a time shows when it is back: by its answer, or by staying connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dispatcher.core.limit.revision import Revised

PROBE_FIRST_S = 0.1
PROBE_MOST_S = 1.0
PROBE_OTHERS_S = 0.2
"""Pauses between probes double from the first to the most; to the smaller one where something answers there
and other requests wait, of which any may show that it is a gateway."""
BARE_IN_A_ROW = 3
"""So many answers in a row that no gateway gave mean that there is none, unless others get through."""
MEMORY_S = 10.0
"""How long it is remembered that others got through beside such answers: an endpoint is dead, until it is
taken out or comes back."""
PATIENCE_S = 0.5
CONNECTED_S = 2.0
"""Who stays connected this long to a gateway that could not be connected to has reached it."""
HELD_LEAST_S = 0.25
HELD_TIMES = 4.0
"""Who stays connected so many times longer than the quickest of the bare answers took, at least HELD_LEAST_S
and at most CONNECTED_S longer, was let through to an endpoint that works."""


@dataclass(frozen=True, slots=True)
class Closure:
    """A stretch without a gateway."""

    since: float
    why: str
    next_probe_at: float
    bare: bool
    """Something answers there."""
    pause_s: float = PROBE_FIRST_S


class Reach(Revised):
    """Events in any order, with their times; `closure` is the answer."""

    def __init__(self) -> None:
        self.closure: Closure | None = None
        """None: there is a gateway, as far as one can know."""
        self._bare = 0
        """Answers in a row that no gateway gave."""
        self._bare_since = self._bare_at = 0.0
        """When the first of them was sent, and when it came."""
        self._quickest_s = CONNECTED_S
        """The shortest time that one of them took."""
        self._through_at = float("-inf")
        """When it was last seen that somebody had got through beside them."""

    @property
    def held_s(self) -> float:
        """How long a request must stay connected to show that it got through."""
        if not self._bare:
            return CONNECTED_S
        return max(HELD_LEAST_S, min(HELD_TIMES * self._quickest_s, self._quickest_s + CONNECTED_S))

    def unreachable(self, now: float, why: str) -> None:
        """It cannot be connected to."""
        if self.closure is None:
            self._bare = 0
            self._close(now, now, why, bare=False)
        else:
            self.closure = replace(self.closure, why=why, bare=False)

    def bare(self, now: float, sent_at: float, why: str, connected: Iterable[float]) -> bool:
        """An answer that no gateway gave, to a request sent at `sent_at`. True: there is none.

        `connected`: since when each of the other requests under way holds its connection.
        """
        took_s = max(0.0, now - sent_at)
        if took_s >= PROBE_MOST_S:
            return self.closure is not None
        self._quickest_s = min(self._quickest_s, took_s) if self._bare else took_s
        if self._bare == 0:
            self._bare_since, self._bare_at = sent_at, now
        self._bare += 1
        self.look(now, connected)
        known = now - self._through_at <= MEMORY_S and now - self._bare_at <= PATIENCE_S
        if self.closure is None and self._bare >= BARE_IN_A_ROW and not known:
            self._close(self._bare_since, now, why, bare=True)
        elif self.closure is not None:
            self.closure = replace(self.closure, why=why, bare=True)
        return self.closure is not None

    def look(self, now: float, connected: Iterable[float]) -> bool:
        """Whether somebody has been connected for long enough to have got through. True: that is news."""
        return any(self.reached(now, since) for since in connected if now - since >= self.held_s)

    def reached(self, now: float, sent_at: float) -> bool:
        """A request sent at `sent_at` was answered, or stayed connected. True: that is news.

        What was sent before the trouble began proves nothing about the gateway since.
        """
        if self.closure is not None:
            if sent_at < self.closure.since:
                return False
            self.closure = None
            self._got_through(now)
            return True
        if self._bare and sent_at >= self._bare_since:
            self._got_through(now)
        return False

    def probed(self, now: float, *, others: bool = False) -> None:
        """A probe was sent, or could not be: the next one waits longer. `others`: other requests wait."""
        closure = self.closure
        if closure is not None:
            most_s = PROBE_OTHERS_S if closure.bare and others else PROBE_MOST_S
            self.closure = replace(
                closure,
                next_probe_at=now + min(closure.pause_s, most_s),
                pause_s=min(closure.pause_s * 2, PROBE_MOST_S),
            )

    def _close(self, since: float, now: float, why: str, *, bare: bool) -> None:
        self.closure = Closure(since, why, now + PROBE_FIRST_S, bare)

    def _got_through(self, now: float) -> None:
        if self._bare:
            self._through_at = now
        self._bare = 0
