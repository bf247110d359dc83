"""δ, the longest time that a request or its answer takes between us and the gateway. Pure.

No series shows δ. It is estimated from:

    from the start   USUAL_S is the value for a local network and a gateway that decides in milliseconds.
    openings         Opening a connection takes a whole round trip, and more with TLS. Once several openings
                     were timed, the slowest of the newest replaces USUAL_S. It may be less, so that short
                     requests are seen to be there at all, or more, up to a quarter of a short exchange.
    readings         A reading that shows fewer of our requests than were surely there under δ shows that δ is
                     larger (uploads, tokenization), if a δ explains it that is at most MOST_S and less than
                     half of an exchange. This increase is forgotten little by little.
    event loop       A late event loop sees answers later than they came. Its delay is added.

A reading that no such δ explains is not of our pool. The limiter decides what follows from that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

USUAL_S = 0.02
LEAST_S = 0.005
MOST_S = 0.2
OPENINGS = 8
"""So many connections were opened before their times are believed; the slowest of as many again counts."""
EXCHANGES = 64
"""Of so many exchanges, the newest, the shorter ones count: the first quarter."""
EACH_WAY, EACH_WAY_MOST = 0.25, 0.45
"""Of a short exchange: the most that openings make of one way, and what no way takes."""
LATE_MOST_S = 2.0
"""Largest delay of the event loop, in seconds, that is added to δ."""
STEP = 1.25
FORGOTTEN = 0.99
"""With each reading, of what readings showed."""


@dataclass(slots=True)
class Travel:
    """δ in force, and what it is made of."""

    delta_s: float = USUAL_S
    _openings: deque[float] = field(default_factory=lambda: deque(maxlen=2 * OPENINGS))
    _exchanges: deque[float] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    _shown: float = 0.0
    _late_s: float = 0.0
    """Largest recent delay of the event loop."""

    def opened(self, seconds: float) -> None:
        """A connection to the gateway was opened, in so long."""
        self._openings.append(max(0.0, seconds))

    def exchanged(self, seconds: float) -> None:
        """A request was sent and came back, in so long."""
        self._exchanges.append(max(0.0, seconds))

    def looped(self, late_s: float) -> None:
        """Note the largest recent delay of the event loop."""
        self._late_s = min(max(0.0, late_s), LATE_MOST_S)

    def reckon(self) -> None:
        """A reading is at hand: δ from what is known by now."""
        self._shown *= FORGOTTEN
        usual = USUAL_S
        if len(self._openings) >= OPENINGS:
            most = max(USUAL_S, min(EACH_WAY * self._short, MOST_S))
            usual = min(max(LEAST_S, *self._openings), most)
        self.delta_s = max(usual, min(self._shown, self._most)) + self._late_s

    def explained(self, fits: Callable[[float], bool]) -> bool:
        """A reading shows fewer of ours than were surely there. Whether a longer δ explains that (`fits`);
        then it is in force from now on."""
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
        """What a short exchange of ours takes; infinite while none is known."""
        return sorted(self._exchanges)[len(self._exchanges) // 4] if self._exchanges else float("inf")

    @property
    def _most(self) -> float:
        return min(MOST_S, EACH_WAY_MOST * self._short)
