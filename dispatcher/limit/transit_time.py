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

DEFAULT_TRANSIT_S = 0.02
MIN_TRANSIT_S = 0.005
MAX_TRANSIT_S = 0.2
MIN_CONNECTS = 8
"""Number of connections whose times are needed before they count. The slowest of the newest 2 × MIN_CONNECTS
counts."""
KEPT_EXCHANGES = 64
"""Number of recent HTTP exchanges that are kept. The first quartile of them is the duration of a short
exchange."""
ONE_WAY_SHARE, MAX_ONE_WAY_SHARE = 0.25, 0.45
"""Shares of a short exchange: the largest share that connection times may attribute to one way, and the share
that one way never exceeds."""
MAX_LOOP_DELAY_S = 2.0
"""Largest delay of the event loop, in seconds, that is added to δ."""
STEP_FACTOR = 1.25
INCREASE_DECAY = 0.99
"""Factor that each reading applies to the increase that earlier readings required."""


@dataclass(slots=True)
class TransitTime:
    """Current value of δ, and its components."""

    delta_s: float = DEFAULT_TRANSIT_S
    _connect_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=2 * MIN_CONNECTS))
    _exchange_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_EXCHANGES))
    _increased_s: float = 0.0
    _loop_delay_s: float = 0.0
    """Largest recent delay of the event loop."""

    def record_connect(self, seconds: float) -> None:
        """Record the time that it took to open a connection to the gateway."""
        self._connect_times_s.append(max(0.0, seconds))

    def record_exchange(self, seconds: float) -> None:
        """Record the duration of one request with its answer."""
        self._exchange_times_s.append(max(0.0, seconds))

    def set_loop_delay(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop."""
        self._loop_delay_s = min(max(0.0, late_s), MAX_LOOP_DELAY_S)

    def update_delta(self) -> None:
        """Compute δ for a new reading."""
        self._increased_s *= INCREASE_DECAY
        usual = DEFAULT_TRANSIT_S
        if len(self._connect_times_s) >= MIN_CONNECTS:
            most = max(DEFAULT_TRANSIT_S, min(ONE_WAY_SHARE * self._short_exchange_s, MAX_TRANSIT_S))
            usual = min(max(MIN_TRANSIT_S, *self._connect_times_s), most)
        self.delta_s = max(usual, min(self._increased_s, self._max_transit_s)) + self._loop_delay_s

    def increase_delta(self, fits: Callable[[float], bool]) -> bool:
        """Return whether a larger δ explains a reading that shows fewer batch requests than expected. `fits`
        says whether a given δ does; the first one that fits becomes the current δ."""
        # The loop delay is added to every candidate, so the search runs over δ without it.
        delta_s, most = self.delta_s - self._loop_delay_s, self._max_transit_s
        while delta_s < most:
            delta_s = min(delta_s * STEP_FACTOR, most)
            if fits(delta_s + self._loop_delay_s):
                self._increased_s = delta_s
                self.delta_s = delta_s + self._loop_delay_s
                return True
        return False

    @property
    def median_s(self) -> float:
        """Median duration of the newest exchanges. 0 while none is known."""
        return (
            sorted(self._exchange_times_s)[len(self._exchange_times_s) // 2]
            if self._exchange_times_s
            else 0.0
        )

    @property
    def _short_exchange_s(self) -> float:
        """Duration of a short exchange. Infinite while none is known."""
        return (
            sorted(self._exchange_times_s)[len(self._exchange_times_s) // 4]
            if self._exchange_times_s
            else float("inf")
        )

    @property
    def _max_transit_s(self) -> float:
        return min(MAX_TRANSIT_S, MAX_ONE_WAY_SHARE * self._short_exchange_s)
