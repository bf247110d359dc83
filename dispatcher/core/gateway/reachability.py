"""Reachability of the gateway, judged by connections and answers.

A failed connection is clear. An intermediary error (an empty 500 or 404, a 401, 407, or a 502, 503 or 504
without drop reason) may mean that the gateway lost its backend, that one of several endpoints has died and
still gets requests, or that the request itself is at fault. The responses look the same, but the other
requests show the difference:

    reachable     another request, sent no earlier, got through: it was answered, or stays connected longer
                  than such an error takes
    unreachable   ERRORS_IN_A_ROW such errors in a row. If other requests recently got through next to such
                  errors, only if none gets through for MIXED_ERRORS_S.

An intermediary error that takes MAX_PROBE_PAUSE_S or longer never closes the gate: in each slot, such
requests follow each other no faster than probes, and sent one at a time as probes they would delay all
others. `intermediary_errors` decides what such an error costs its request.

While the gateway is unreachable, one probe at a time shows when it is back: by its answer, or by staying
connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dispatcher.core.limit.revision import Revised

PROBE_FIRST_S = 0.1
PROBE_MOST_S = 1.0
PROBE_OTHERS_S = 0.2
"""Pauses between probes double from the first to the maximum. The shorter maximum applies if a server answers
and other requests wait, each of which may show that it is a gateway."""
BARE_IN_A_ROW = 3
"""Number of intermediary errors in a row after which the gateway is unreachable, unless other requests get
through."""
MEMORY_S = 10.0
"""Time for which a success next to such errors is remembered. It shows that only one endpoint is dead, until
that endpoint is removed or recovers."""
PATIENCE_S = 0.5
CONNECTED_S = 2.0
"""Time for which a request must stay connected to a gateway that refused connections before, to prove that it
is back."""
HELD_LEAST_S = 0.25
HELD_TIMES = 4.0
"""Factor on the duration of the quickest intermediary error. A request that stays connected for that product,
but at least MIN_CONNECTED_S and at most CONNECTED_S longer than the error took, was routed to a working
endpoint."""


@dataclass(frozen=True, slots=True)
class Closure:
    """Period without a gateway."""

    since: float
    why: str
    next_probe_at: float
    bare: bool
    """True if a server answers at the address."""
    pause_s: float = PROBE_FIRST_S


class Reach(Revised):
    """State of the gateway. Events may arrive in any order, each with its time."""

    def __init__(self) -> None:
        self.closure: Closure | None = None
        """Current outage. `None` if the gateway is reachable as far as known."""
        self._bare = 0
        """Number of intermediary errors in a row."""
        self._bare_since = self._bare_at = 0.0
        """Time at which the first of these requests was sent, and the time of its error."""
        self._quickest_s = CONNECTED_S
        """Shortest duration of one of these errors."""
        self._through_at = float("-inf")
        """Time at which a request last got through next to such errors."""

    @property
    def held_s(self) -> float:
        """Time for which a request must stay connected to prove that it got through."""
        if not self._bare:
            return CONNECTED_S
        return max(HELD_LEAST_S, min(HELD_TIMES * self._quickest_s, self._quickest_s + CONNECTED_S))

    def unreachable(self, now: float, why: str) -> None:
        """Record that no connection can be opened."""
        if self.closure is None:
            self._bare = 0
            self._close(now, now, why, bare=False)
        else:
            self.closure = replace(self.closure, why=why, bare=False)

    def bare(self, now: float, sent_at: float, why: str, connected: Iterable[float]) -> bool:
        """Record an intermediary error of a request that was sent at `sent_at`. Return True if there is no
        gateway.

        `connected_since` has the time since which each other request is connected.
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
        # With a recent success, only one endpoint of several may be dead, so the gate stays open a little
        # longer.
        if self.closure is None and self._bare >= BARE_IN_A_ROW and not known:
            self._close(self._bare_since, now, why, bare=True)
        elif self.closure is not None:
            self.closure = replace(self.closure, why=why, bare=True)
        return self.closure is not None

    def look(self, now: float, connected: Iterable[float]) -> bool:
        """Return whether a request has been connected long enough to have got through, and that changes the
        state."""
        return any(self.reached(now, since) for since in connected if now - since >= self.held_s)

    def reached(self, now: float, sent_at: float) -> bool:
        """Record that a request sent at `sent_at` was answered or stayed connected. Return True if that ends
        an outage.

        A request that was sent before the outage proves nothing about the gateway since then.
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
        """Record that a probe was sent, or could not be sent. The next one waits longer. `has_other_requests`
        is True if other requests wait."""
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
            # A success next to errors shows that only one endpoint is dead. A success without errors shows
            # nothing new.
            self._through_at = now
        self._bare = 0
