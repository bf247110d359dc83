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
others. `judge` decides what such an error costs its request.

While the gateway is unreachable, one probe at a time shows when it is back: by its answer, or by staying
connected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dispatcher.common.revision import Revisioned

FIRST_PROBE_PAUSE_S = 0.1
MAX_PROBE_PAUSE_S = 1.0
MAX_PROBE_PAUSE_OTHERS_S = 0.2
"""Pauses between probes double from the first to the maximum. The shorter maximum applies if a server answers
and other requests wait, each of which may show that it is a gateway."""
ERRORS_IN_A_ROW = 3
"""Number of intermediary errors in a row after which the gateway is unreachable, unless other requests get
through."""
SUCCESS_MEMORY_S = 10.0
"""Time for which a success next to such errors is remembered. It shows that only one endpoint is dead, until
that endpoint is removed or recovers."""
MIXED_ERRORS_S = 0.5
CONNECTED_S = 2.0
"""Time for which a request must stay connected to a gateway that refused connections before, to prove that it
is back."""
MIN_CONNECTED_S = 0.25
CONNECTED_FACTOR = 4.0
"""Factor on the duration of the quickest intermediary error. A request that stays connected for that product,
but at least MIN_CONNECTED_S and at most CONNECTED_S longer than the error took, was routed to a working
endpoint."""


@dataclass(frozen=True, slots=True)
class GatewayOutage:
    """Period without a gateway."""

    since: float
    why: str
    next_probe_at: float
    is_answering: bool
    """True if a server answers at the address."""
    pause_s: float = FIRST_PROBE_PAUSE_S


class Reachability(Revisioned):
    """State of the gateway. Events may arrive in any order, each with its time."""

    def __init__(self) -> None:
        self.outage: GatewayOutage | None = None
        """Current outage. `None` if the gateway is reachable as far as known."""
        self._error_count = 0
        """Number of intermediary errors in a row."""
        self._errors_since = self._first_error_at = 0.0
        """Time at which the first of these requests was sent, and the time of its error."""
        self._quickest_error_s = CONNECTED_S
        """Shortest duration of one of these errors."""
        self._success_at = float("-inf")
        """Time at which a request last got through next to such errors."""

    @property
    def required_connected_s(self) -> float:
        """Time for which a request must stay connected to prove that it got through."""
        if not self._error_count:
            return CONNECTED_S
        return max(
            MIN_CONNECTED_S,
            min(CONNECTED_FACTOR * self._quickest_error_s, self._quickest_error_s + CONNECTED_S),
        )

    def record_connection_failure(self, now: float, why: str) -> None:
        """Record that no connection can be opened."""
        if self.outage is None:
            self._error_count = 0
            self._start_outage(now, now, why, is_answering=False)
        else:
            self.outage = replace(self.outage, why=why, is_answering=False)

    def record_intermediary_error(
        self, now: float, sent_at: float, why: str, connected_since: Iterable[float]
    ) -> bool:
        """Record an intermediary error of a request that was sent at `sent_at`. Return True if there is no
        gateway.

        `connected_since` has the time since which each other request is connected.
        """
        took_s = max(0.0, now - sent_at)
        if took_s >= MAX_PROBE_PAUSE_S:
            return self.outage is not None
        self._quickest_error_s = min(self._quickest_error_s, took_s) if self._error_count else took_s
        if self._error_count == 0:
            self._errors_since, self._first_error_at = sent_at, now
        self._error_count += 1
        self.check_connections(now, connected_since)
        is_endpoint_failure = (
            now - self._success_at <= SUCCESS_MEMORY_S and now - self._first_error_at <= MIXED_ERRORS_S
        )
        # With a recent success, only one endpoint of several may be dead, so the gate stays open a little
        # longer.
        if self.outage is None and self._error_count >= ERRORS_IN_A_ROW and not is_endpoint_failure:
            self._start_outage(self._errors_since, now, why, is_answering=True)
        elif self.outage is not None:
            self.outage = replace(self.outage, why=why, is_answering=True)
        return self.outage is not None

    def check_connections(self, now: float, connected_since: Iterable[float]) -> bool:
        """Return whether a request has been connected long enough to have got through, and that changes the
        state."""
        return any(
            self.record_success(now, since)
            for since in connected_since
            if now - since >= self.required_connected_s
        )

    def record_success(self, now: float, sent_at: float) -> bool:
        """Record that a request sent at `sent_at` was answered or stayed connected. Return True if that ends
        an outage.

        A request that was sent before the outage proves nothing about the gateway since then.
        """
        if self.outage is not None:
            if sent_at < self.outage.since:
                return False
            self.outage = None
            self._reset_errors(now)
            return True
        if self._error_count and sent_at >= self._errors_since:
            self._reset_errors(now)
        return False

    def record_probe(self, now: float, *, has_other_requests: bool = False) -> None:
        """Record that a probe was sent, or could not be sent. The next one waits longer. `has_other_requests`
        is True if other requests wait."""
        outage = self.outage
        if outage is not None:
            most_s = (
                MAX_PROBE_PAUSE_OTHERS_S if outage.is_answering and has_other_requests else MAX_PROBE_PAUSE_S
            )
            self.outage = replace(
                outage,
                next_probe_at=now + min(outage.pause_s, most_s),
                pause_s=min(outage.pause_s * 2, MAX_PROBE_PAUSE_S),
            )

    def _start_outage(self, since: float, now: float, why: str, *, is_answering: bool) -> None:
        self.outage = GatewayOutage(since, why, now + FIRST_PROBE_PAUSE_S, is_answering)

    def _reset_errors(self, now: float) -> None:
        if self._error_count:
            # A success next to errors shows that only one endpoint is dead. A success without errors shows
            # nothing new.
            self._success_at = now
        self._error_count = 0
