"""Pace at which free units are used, so that an endpoint picker spreads the requests over its endpoints.

The scorers of a picker know the load of each endpoint as of their last scrape, PICKER_SCRAPE_S ago at most,
and nothing of what was sent since. Requests that arrive within one interval therefore all go to the endpoint
that was least loaded, and wait there while others have free slots. Room that opens at once (a new reading, a
pause that ends, a start, many answers together) is therefore used at a rate of

    max( endpoints / PICKER_SCRAPE_S,  DRAIN_MARGIN × limit / mean duration )  ×  own share

The first term is one unit per endpoint in each interval. The second keeps the pace above the rate at which a
full pool finishes requests, so that short requests are not slowed down. The own share divides the rate among
the dispatchers of a pool by the units that they hold.

The pace is a token bucket that fills with credit at this rate. It holds the credit of STEP_S, and at least
one unit. A single answer is therefore replaced at once, and idle time saves up no credit for a burst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dispatcher.limit.budget import MAX_PLAUSIBLE_REQUESTS, ROUNDING_TOLERANCE

PICKER_SCRAPE_S = 0.05
"""Default interval at which a picker scrapes the metrics of its endpoints."""
DRAIN_MARGIN = 2.0
"""Factor by which the pace exceeds the rate at which a full pool finishes requests. Answers come irregularly,
and at a margin of 1 each would wait for the ones before it."""
STEP_S = 0.02
"""Time after which more units are granted. Each grant leads to a claim, so there are at most 50 a second."""
MAX_DEBT_S = 1.0
"""Maximum time for which requests wait because earlier ones exceeded the credit. A request with more units
than there is credit is not divided, so it leaves a debt."""
MIN_OWN_SHARE = 0.25
"""Smallest own share. A dispatcher that has just started holds no units, and its pace must not be 0."""


@dataclass(frozen=True, slots=True)
class Grant:
    """How many units may be sent now, and when there will be more."""

    units: int
    next_at: float | None = None
    """Time at which more of the free units may be sent. `None` if all of them may be sent now."""


def compute_send_rate(
    endpoints: float | None, *, limit: int, mean_duration_s: float, own_units: int, other_owners_units: int
) -> float:
    """Return the units per second that this process may send. Infinite if there is nothing to spread: one
    endpoint, no picker, or an unknown number of endpoints."""
    if endpoints is None or not 1 < endpoints <= MAX_PLAUSIBLE_REQUESTS:
        return math.inf
    rate = endpoints / PICKER_SCRAPE_S
    if mean_duration_s > 0:
        rate = max(rate, DRAIN_MARGIN * limit / mean_duration_s)
    if other_owners_units > 0:
        rate *= max(MIN_OWN_SHARE, own_units / (own_units + other_owners_units))
    return rate


@dataclass(slots=True)
class SendPace:
    """Credit of one process. The caller reports the units that it sends with `use_grant`."""

    _credit: float = math.inf
    """Units that may be sent. Negative after a request that had more units than there was credit."""
    _credited_at: float = 0.0
    """Time up to which the credit was computed."""

    def use_grant(self, units: float) -> None:
        """Record that units are sent."""
        self._credit -= units

    def grant(self, now: float, free_units: int, rate: float) -> Grant:
        """Return how many of the free units may be sent at `now`, at this rate per second."""
        if not rate < math.inf:
            self._credit = math.inf
            return Grant(free_units)
        step_units = max(1.0, rate * STEP_S)
        # Some units are sent without a grant, so the debt is bounded by the time it takes to earn it back.
        credit = max(self._credit, -MAX_DEBT_S * rate)
        credit = self._credit = min(credit + rate * max(0.0, now - self._credited_at), step_units)
        self._credited_at = now
        due_units = max(0, math.floor(credit + ROUNDING_TOLERANCE))
        if due_units >= free_units:
            return Grant(free_units)
        return Grant(due_units, now + (step_units - (credit - due_units)) / rate)
