"""δ, the upper bound of the time that a request or its answer takes between this process and the gateway.

No series shows δ. It is estimated from:

    start         DEFAULT_TRANSIT_S fits a local network and a gateway that decides in milliseconds.
    connections   Opening a connection takes a whole round trip, and more with TLS. Once several were timed,
                  the slowest recent one replaces the default. It may be less, so that short requests
                  certainly arrive, or more, up to a quarter of a short HTTP exchange.
    readings      A reading that shows fewer of our requests than a given δ guarantees proves that δ is larger
                  (uploads, tokenization), if a δ of at most MAX_TRANSIT_S and less than half of an exchange
                  explains it. Each later reading forgets a part of this increase.
    event loop    A late event loop sees answers later than they came, so its delay is added.

A reading that no such δ explains does not belong to our pool. The limiter decides what follows from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

USUAL_S = 0.02
LEAST_S = 0.005
MOST_S = 0.2
OPENINGS = 8
"""Number of connections whose times are needed before they count. The slowest of the newest 2 × MIN_CONNECTS
counts."""
EXCHANGES = 64
"""Number of recent HTTP exchanges that are kept. The first quartile of them is the duration of a short
exchange."""
EACH_WAY, EACH_WAY_MOST = 0.25, 0.45
"""Shares of a short exchange: the largest share that connection times may attribute to one way, and the share
that one way never exceeds."""
LATE_MOST_S = 2.0
"""Largest delay of the event loop, in seconds, that is added to δ."""
STEP = 1.25
FORGOTTEN = 0.99
"""Factor that each reading applies to the increase that earlier readings required."""


@dataclass(slots=True)
class Travel:
    """Current value of δ, and its components."""

    delta_s: float = USUAL_S
    _openings: deque[float] = field(default_factory=lambda: deque(maxlen=2 * OPENINGS))
    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    _shown: float = 0.0
    _late_s: float = 0.0
    """Largest recent delay of the event loop."""

    def opened(self, seconds: float) -> None:
        """Record the time that it took to open a connection to the gateway."""
        self._openings.append(max(0.0, seconds))

    def exchanged(self, seconds: float) -> None:
        """Record the duration of one request with its answer."""
        self._exchanges.append(max(0.0, seconds))

    def looped(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop."""
        self._late_s = min(max(0.0, late_s), LATE_MOST_S)

    def reckon(self) -> None:
        """Compute δ for a new reading."""
        self._shown *= FORGOTTEN
        usual = USUAL_S
        if len(self._openings) >= OPENINGS:
            most = max(USUAL_S, min(EACH_WAY * self._short, MOST_S))
            usual = min(max(LEAST_S, *self._openings), most)
        self.delta_s = max(usual, min(self._shown, self._most)) + self._late_s

    def explained(self, fits: Callable[[float], bool]) -> bool:
        """Return whether a larger δ explains a reading that shows fewer batch requests than expected. `fits`
        says whether a given δ does; the first one that fits becomes the current δ."""
        # The loop delay is added to every candidate, so the search runs over δ without it.
        delta_s, most = self.delta_s - self._late_s, self._most
        while delta_s < most:
            delta_s = min(delta_s * STEP, most)
            if fits(delta_s + self._late_s):
                self._shown = delta_s
                self.delta_s = delta_s + self._late_s
                return True
        return False

    @property
    def median_s(self) -> float:
        """Median duration of the newest exchanges. 0 while none is known."""
        return sorted(self._exchanges)[len(self._exchanges) // 2] if self._exchanges else 0.0

    @property
    def _short(self) -> float:
        """Duration of a short exchange. Infinite while none is known."""
        return sorted(self._exchanges)[len(self._exchanges) // 4] if self._exchanges else float("inf")

    @property
    def _most(self) -> float:
        return min(MOST_S, EACH_WAY_MOST * self._short)
