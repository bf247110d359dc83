"""One reading of the pool, and what it leaves for batch work: D = 1 − (F_SYS + F_EPP + B).

A reading speaks of one signal and one sample. The budget is arithmetic on it: no memory, no clock. What
becomes of a budget (how far it moves the limit, and when) is the limiter's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SLACK = 1e-6
"""In requests: sums of fractions such as 0.1 + 0.2 come out a hair off, and must not cost or win a slot."""
MOST_IN_FLIGHT = 1_000_000
"""The limit is never more, whatever a page or a setting says: beyond any pool, and far within the integers of
Redis."""


SERVER_LAG_S = 0.5
"""The picker's metrics of the model servers are at most this old."""
PLAUSIBLE_MOST = 1e9
"""Requests. A capacity or a load beyond it is a mistake of what shows it: no pool has so many."""


class Signal(StrEnum):
    """What a reading measures."""

    SATURATION = "saturation"
    """The EPP's pool saturation and its queue."""
    REQUESTS = "requests"
    """Running and waiting requests, counted."""


class Reason(StrEnum):
    """Why the limit is what it is; the first that holds is shown (declared in that order)."""

    meaning: str
    """In a few words, for whoever sees the reason alone."""

    def __new__(cls, value: str, meaning: str) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_, reason.meaning = value, meaning
        return reason

    DRAINING = ("draining", "shutting down")
    PAUSED = ("paused", "an operator paused the queue")
    QUEUE_UNREACHABLE = ("queue-unreachable", "the queue's server cannot be reached")
    STARTING = ("starting", "a signal has not been read yet")
    UNREADABLE = ("unreadable", "the metrics cannot be read")
    STALE = ("stale", "the newest sample is too old")
    NO_ENDPOINTS = ("no-endpoints", "the pool has no ready endpoint")
    IMPLAUSIBLE = ("implausible", "the metrics cannot be true")
    GATEWAY_UNREACHABLE = ("gateway-unreachable", "the gateway cannot be reached")
    BACKPRESSURE = ("backpressure", "the gateway refused a request as overloaded")
    NO_ROOM = ("no-room", "requests that are not ours take everything but the reserve")
    # Closed above this line (the limit is 0), open below.
    SATURATED = ("saturated", "the pool is fuller than the reserve allows")
    FULL = ("full", "our work fills what there is")
    IDLE = ("idle", "no request is ready to be sent")
    OPEN = ("open", "there is room, and work for it")

    rank: int
    """Its place among them."""
    closed: bool
    """Nothing is sent while it holds."""


for _rank, _reason in enumerate(Reason):
    _reason.rank = _rank
for _reason in Reason:
    _reason.closed = _reason.rank <= Reason.NO_ROOM.rank


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator decided about the budget."""

    reserve: float = 0.05
    """B: the share of the pool that batch work never takes."""
    upper: float | None = None
    """u: a budget above it is not believed; None: 1 − reserve."""
    max_sys: float | None = None
    """Capacity in requests; None: ready endpoints × per_endpoint."""
    per_endpoint: float | None = None
    """Requests that an endpoint runs at once. `None` if the pages of the picker or of the model servers have
    to say it, or else the readings."""
    initial_per_endpoint: float = 8.0
    """Requests per endpoint with which the search for an unknown capacity starts."""
    max_in_flight: int | None = None
    """Hard cap on our requests, whatever the readings say."""
    overload_backoff: float = 0.7
    """β: one refusal leaves at least this share of what was taken for the capacity."""
    max_age_s: float = 10.0
    """A sample older than this is not acted upon."""
    retry_after_max_s: float = 60.0
    """A longer Retry-After is cut to this."""
    stray_s: float = 30.0
    """A request whose owner fell silent may still run for so long after its lease was taken back."""

    @property
    def ceiling_d(self) -> float:
        return 1.0 - self.reserve if self.upper is None else self.upper

    def most(self, max_sys: float) -> int:
        """No reading raises the limit over it: floor(max_SYS × (1 − B)), MOST_IN_FLIGHT, the own cap."""
        room = min(whole(max_sys * (1.0 - self.reserve)), MOST_IN_FLIGHT)
        return room if self.max_in_flight is None else min(room, self.max_in_flight)


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of one signal, taken somewhere in [opened_at, closed_at] on the process clock."""

    signal: Signal
    opened_at: float
    closed_at: float
    f_sys: float
    """cur_SYS / max_SYS; above 1: oversubscribed."""
    f_epp: float
    """cur_EPP / max_SYS."""
    max_sys: float
    """Capacity in requests, of the same sample."""
    exact: bool = True
    """It counts requests, so our own must show in it. The default saturation detector is a pressure score
    and does not."""
    source: str = ""
    """Where it came from: `epp`, `prometheus`."""
    raw: Mapping[str, float] = field(default_factory=dict)
    """The values it was made of, by series, for people."""
    running: float | None = None
    """Requests that run in the model servers at the moment of the sample. `None` if nobody shows them apart
    from those that wait."""
    waiting: float = 0.0
    """Requests that wait at that moment, in the picker or in the model servers."""
    exact_counts: bool = True
    """These two were counted together. Otherwise `running` is what the picker sent by now less what waited in
    the model servers up to SERVER_LAG_S before."""
    averages: tuple[float, float] | None = None
    """Requests that ran and that waited in the model servers at the picker's last flush. `None` if the picker
    does not show both."""
    capacity_known: bool = True
    """`max_sys` is what a setting, the picker or the model servers say; otherwise the dispatcher starts there
    and has to find the capacity."""
    beyond_calls: float = math.inf
    """Number of items of our calls that it may count beyond one for each call: 0 if it counts calls, infinite
    if it is of the model servers, which count items."""
    good_s: float | None = None
    """A sample of this source may grow so old before it is not acted upon; None: the policy's max_age_s."""

    @property
    def load(self) -> float:
        """What it shows running and waiting, in requests."""
        return (self.f_sys + self.f_epp) * self.max_sys


@dataclass(frozen=True, slots=True)
class Budget:
    """A reading under a policy, every term of it."""

    signal: Signal
    f_sys: float
    f_epp: float
    reserve: float
    d: float
    headroom: int
    """H = floor(max_SYS × D), in requests; negative when the pool is over-full."""
    max_sys: float
    configured: float
    """max_SYS by the configuration, the sample and the watch. `max_sys` is less where a known capacity proved
    too large, and more or less where the capacity was not known (`known`)."""
    known: bool = True
    """`configured` is the capacity; otherwise it is where the search for it started."""
    fault: Reason | None = None
    """Why it must not be acted upon: NO_ENDPOINTS or IMPLAUSIBLE; None when it may."""
    because: str = ""
    """The fault in words."""

    @property
    def learned(self) -> bool:
        """Whether readings showed that less fits than the known capacity."""
        return self.known and self.max_sys < self.configured


def whole(requests: float) -> int:
    """The whole requests in a number of them, forgiving what floats lose."""
    return math.floor(requests + SLACK)


def assess(
    reading: Reading, policy: Policy, capacity: float | None = None, share: float | None = None
) -> Budget:
    """The budget that a reading leaves under a policy.

    `capacity`: what the pool can take as known from elsewhere (the Kubernetes watch). A smaller one than the
    sample's counts at once, with the sample's load rescaled to it; a larger one is not believed yet.
    `share`: what was learned to fit of that (None: all of it), likewise.
    """
    f_sys, f_epp, max_sys = reading.f_sys, reading.f_epp, reading.max_sys
    if not (math.isfinite(f_sys) and math.isfinite(f_epp) and math.isfinite(max_sys)):
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, "a value that is not a finite number")
    if capacity is not None and math.isnan(capacity):
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, "a capacity that is not a number")
    if f_sys < 0 or f_epp < 0 or max_sys < 0:
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, "a negative load or capacity")
    if max(max_sys, reading.load) > PLAUSIBLE_MOST:
        why = f"a capacity of {max_sys:.3g} and a load of {reading.load:.3g} requests: no pool has so many"
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, why)
    configured = max_sys if capacity is None else min(capacity, max_sys)
    fitting = configured if share is None else configured * share
    if fitting != max_sys:
        if fitting > 0:
            # A pressure score says how full the pool is whatever it is configured for.
            f_sys *= max_sys / (fitting if reading.exact else configured)
            f_epp *= max_sys / fitting
        max_sys = fitting
    if max_sys <= 0:
        return _faulty(reading, policy, Reason.NO_ENDPOINTS, "no endpoint is ready")
    d = 1.0 - (f_sys + f_epp + policy.reserve)
    if not math.isfinite(max_sys * d):
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, "a load beyond all numbers")
    budget = Budget(
        signal=reading.signal,
        f_sys=f_sys,
        f_epp=f_epp,
        reserve=policy.reserve,
        d=d,
        headroom=whole(max_sys * d),
        max_sys=max_sys,
        configured=configured,
        known=reading.capacity_known,
    )
    if (d - policy.ceiling_d) * max_sys > SLACK:
        why = f"D {d:.3f} is above {policy.ceiling_d:.3f}, more room than an idle pool has"
        return _faulty(reading, policy, Reason.IMPLAUSIBLE, why)
    return budget


def _faulty(reading: Reading, policy: Policy, fault: Reason, because: str) -> Budget:
    return Budget(
        signal=reading.signal,
        f_sys=reading.f_sys,
        f_epp=reading.f_epp,
        reserve=policy.reserve,
        d=float("nan"),
        headroom=0,
        max_sys=reading.max_sys,
        configured=reading.max_sys,
        fault=fault,
        because=because,
    )
