"""Choice of an endpoint by a picker whose scorers know the endpoints only by their last scrape.

Between two scrapes the picker sends every request to the endpoint that was least loaded at the first of them,
however many it has sent there since.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, inf
from random import Random


class StaleScorer:
    """Loads of the endpoints as of the last scrape. All endpoints are scraped at once, every `scrape_s`."""

    def __init__(self, scrape_s: float, seed: object = 0) -> None:
        self._scrape_s = scrape_s
        self._draws = Random(f"{seed}/scorer")
        self._known_loads: list[float] = []
        self.scrape_at = -inf
        """Time of the next scrape."""

    def record_loads(self, now: float, loads: Sequence[float]) -> None:
        """Record the loads until `now`. It has to be called before each change of them."""
        if now >= self.scrape_at or len(loads) != len(self._known_loads):
            self._known_loads = [*loads]
            self.scrape_at = (floor(now / self._scrape_s) + 1) * self._scrape_s

    def choose_endpoint(self, candidates: Sequence[int]) -> int:
        """Return the endpoint with the lowest known load, and one of them at random if there are several."""
        lowest = min(self._known_loads[number] for number in candidates)
        return self._draws.choice([each for each in candidates if self._known_loads[each] == lowest])
