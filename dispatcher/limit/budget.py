"""One reading of the pool, and the budget that it leaves for batch requests: D = 1 − (F_SYS + F_EPP + B).

A reading is one sample of one signal. The budget is computed from it without memory or a clock. The limiter
decides how far and when a budget moves the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

ROUNDING_TOLERANCE = 1e-6
"""Tolerance in requests. Sums of fractions such as 0.1 + 0.2 are slightly inexact, and that must not add or
remove a slot."""
MAX_IN_FLIGHT = 1_000_000
"""Upper bound of the limit, whatever a metrics page or a setting says. It is larger than any pool, and well
within the integer range of Redis."""


MAX_SERVER_METRICS_AGE_S = 0.5
"""Maximum age of the picker's metrics of the model servers."""
MAX_PLAUSIBLE_REQUESTS = 1e9
"""Maximum plausible capacity or load in requests. A larger number is a defect of its source."""


class Signal(StrEnum):
    """Quantity that a reading measures."""

    SATURATION = "saturation"
    """Pool saturation of the endpoint picker, and its queue."""
    REQUESTS = "requests"
    """Number of running and waiting requests."""


class Reason(StrEnum):
    """Reason for the current limit. The first one that applies is reported, in the order of declaration."""

    meaning: str
    """The reason as a clause. Page, status, explanations and health all use this wording."""

    def __new__(cls, value: str, meaning: str) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_, reason.meaning = value, meaning
        return reason

    DRAINING = ("draining", "the dispatcher is shutting down")
    PAUSED = ("paused", "the queue is paused")
    QUEUE_UNREACHABLE = ("queue-unreachable", "the queue cannot be used")
    STARTING = ("starting", "a signal has not been read yet")
    UNREADABLE = ("unreadable", "the signals cannot be read")
    STALE = ("stale", "the signals are too old")
    NO_ENDPOINTS = ("no-endpoints", "the pool has no ready endpoint")
    IMPLAUSIBLE = ("implausible", "the signals cannot be true")
    GATEWAY_UNREACHABLE = ("gateway-unreachable", "the gateway cannot be reached")
    GATEWAY_FAILING = ("gateway-failing", "the gateway answers every request with an error")
    BACKPRESSURE = ("backpressure", "the gateway refused a request as overloaded")
    NO_ROOM = ("no-room", "realtime requests take everything but the reserve")
    # Closed above this line (the limit is 0), open below.
    SATURATED = ("saturated", "the pool is fuller than the reserve allows")
    FULL = ("full", "batch requests fill the limit")
    IDLE = ("idle", "no request is ready to be sent")
    OPEN = ("open", "there is room, and requests are sent")

    rank: int
    """Position in the order of declaration."""
    is_closed: bool
    """True if nothing is sent for this reason."""


GATEWAY_OUTAGES = (Reason.GATEWAY_UNREACHABLE, Reason.GATEWAY_FAILING)
"""Reasons for which nothing is sent but probes, which show when the gateway is back."""

for _rank, _reason in enumerate(Reason):
    _reason.rank = _rank
for _reason in Reason:
    _reason.is_closed = _reason.rank <= Reason.NO_ROOM.rank


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the operator that determine the budget."""

    reserve: float = 0.05
    """B: share of the pool that batch requests never take."""
    max_budget: float | None = None
    """u: largest budget that is plausible. `None` for 1 − reserve, which no reading exceeds."""
    max_sys: float | None = None
    """Capacity in requests. `None` for ready endpoints × per_endpoint."""
    per_endpoint: float | None = None
    """Requests that an endpoint runs at once. `None` if the number comes from the metrics of the picker or of
    the model servers, or else from readings."""
    initial_per_endpoint: float = 8.0
    """Requests per endpoint with which the search for an unknown capacity starts."""
    learns_capacity: bool = False
    """True if the capacity that is named is only the start of the search for the capacity."""
    max_in_flight: int | None = None
    """Hard limit on batch requests in flight, regardless of readings."""
    overload_backoff: float = 0.7
    """β: smallest share of the capacity estimate that remains after one refusal."""
    max_age_s: float = 10.0
    """Age from which a sample is no longer used."""
    retry_after_max_s: float = 60.0
    """Maximum Retry-After. A longer one is shortened to this."""
    orphan_timeout_s: float = 30.0
    """Time for which the request of a silent owner may still run after its lease was taken back."""

    def compute_max_limit(self, max_sys: float) -> int:
        """Return the largest limit that a reading can justify: the smallest of floor(max_SYS × (1 − B)),
        MAX_IN_FLIGHT and `max_in_flight`."""
        room = min(round_down(max_sys * (1.0 - self.reserve)), MAX_IN_FLIGHT)
        return room if self.max_in_flight is None else min(room, self.max_in_flight)


@dataclass(frozen=True, slots=True)
class KvUse:
    """Use of the KV memory of all ready endpoints, at some moment within [opened_at, closed_at]."""

    share: float
    """Mean share of the memory in use."""
    capacity_tokens: float | None
    """KV memory of all endpoints together in tokens. `None` if the pages do not show it."""
    endpoints: float | None
    """Number of ready endpoints. `None` if it is not known."""
    opened_at: float
    closed_at: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample of one signal, taken at an unknown time within [opened_at, closed_at] on the process
    clock."""

    signal: Signal
    opened_at: float
    closed_at: float
    f_sys: float
    """Share of the capacity that is in use: cur_SYS / max_SYS. Above 1 if the pool is oversubscribed."""
    f_epp: float
    """Requests in the picker's queue as a share of the capacity: cur_EPP / max_SYS."""
    max_sys: float
    """Capacity in requests, from the same sample."""
    is_request_count: bool = True
    """True if the signal counts requests, so that batch requests must be visible in it. The default
    saturation detector is a pressure score and does not."""
    source: str = ""
    """Source of the sample: `epp` or `prometheus`."""
    raw_values: Mapping[str, float] = field(default_factory=dict)
    """Values from which the reading was made, by series, for display."""
    running: float | None = None
    """Requests that run in the model servers at the time of the sample. `None` if no series separates them
    from waiting requests."""
    waiting: float = 0.0
    """Requests that wait at that time, in the picker or in the model servers."""
    has_exact_counts: bool = True
    """True if `running` and `waiting` were counted together. Otherwise `running` is the number of requests
    that the picker has sent, minus the number that waited in the model servers up to MAX_SERVER_METRICS_AGE_S
    before."""
    averages: tuple[float, float] | None = None
    """Requests that ran and requests that waited in the model servers at the picker's last flush. `None` if
    the picker does not show both."""
    is_uneven: bool = False
    """True if some of the `waiting` requests wait in one endpoint while others have room, so that they show
    nothing about the capacity."""
    are_averages_uneven: bool = False
    """The same for the waiting requests of `averages`."""
    is_capacity_known: bool = True
    """True if `max_sys` comes from a setting, the picker or the model servers. Otherwise `max_sys` is only
    the start of the search for the capacity."""
    items_beyond_calls: float = math.inf
    """Number of items of batch calls that the reading may count beyond one per call: 0 if it counts calls,
    infinite if it comes from model servers, which count items."""
    max_batch_requests: float | None = None
    """Most batch requests that the reading can contain, by the priorities that the picker shows, counted as
    the reading counts. `None` if it shows none."""
    max_age_s: float | None = None
    """Age from which a sample of this source is no longer used. `None` for `Policy.max_age_s`."""
    kv_use: KvUse | None = None
    """`None` if the source does not show it."""
    picker_endpoints: float | None = None
    """Number of endpoints among which a picker chooses. `None` if there is no picker, or the number is not
    known."""

    @property
    def load(self) -> float:
        """Running and waiting requests in total."""
        return (self.f_sys + self.f_epp) * self.max_sys


@dataclass(frozen=True, slots=True)
class Budget:
    """All terms of the budget that follow from a reading and a policy."""

    signal: Signal
    f_sys: float
    f_epp: float
    reserve: float
    d: float
    headroom: int
    """H = floor(max_SYS × D), in requests. Negative if the pool is overfull."""
    max_sys: float
    configured_max_sys: float
    """max_SYS by the configuration, the sample and the watch. `max_sys` is smaller if a known capacity proved
    too large, and differs in either direction if the capacity is not known."""
    is_capacity_known: bool = True
    """True if `configured_max_sys` is the capacity. Otherwise it is only the start of the search for the
    capacity."""
    fault: Reason | None = None
    """Reason why the budget must not be used: NO_ENDPOINTS or IMPLAUSIBLE. `None` if it may be used."""
    fault_detail: str = ""
    """The fault in words."""

    @property
    def is_capacity_learned(self) -> bool:
        """True if readings showed that the pool runs less than its known capacity."""
        return self.is_capacity_known and self.max_sys < self.configured_max_sys


def round_down(requests: float) -> int:
    """Return the number of whole requests, with a tolerance for rounding errors of floats."""
    return math.floor(requests + ROUNDING_TOLERANCE)


def compute_budget(
    reading: Reading, policy: Policy, capacity: float | None = None, learned_share: float | None = None
) -> Budget:
    """Return the budget that a reading leaves under a policy.

    `capacity` is the capacity known from elsewhere (the Kubernetes watch). If it is smaller than the
    sample's, it applies at once, and the load of the sample is rescaled to it; a larger one is ignored until
    a sample shows it. `learned_share` is the share of the capacity that was learned to fit (`None` for all of
    it), and is applied in the same way.
    """
    f_sys, f_epp, max_sys = reading.f_sys, reading.f_epp, reading.max_sys
    if not (math.isfinite(f_sys) and math.isfinite(f_epp) and math.isfinite(max_sys)):
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, "a value that is not a finite number")
    if capacity is not None and math.isnan(capacity):
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, "a capacity that is not a number")
    if f_sys < 0 or f_epp < 0 or max_sys < 0:
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, "a negative load or capacity")
    if max(max_sys, reading.load) > MAX_PLAUSIBLE_REQUESTS:
        why = f"a capacity of {max_sys:.3g} and a load of {reading.load:.3g} requests: no pool has so many"
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, why)
    configured = max_sys if capacity is None else min(capacity, max_sys)
    fitting = configured if learned_share is None else configured * learned_share
    if fitting != max_sys:
        if fitting > 0:
            # A pressure score is a fraction of the real capacity. A smaller learned capacity must not be
            # applied to it a second time, so it is rescaled by the configured capacity only.
            f_sys *= max_sys / (fitting if reading.is_request_count else configured)
            f_epp *= max_sys / fitting
        max_sys = fitting
    if max_sys <= 0:
        return _make_faulty_budget(reading, policy, Reason.NO_ENDPOINTS, "no endpoint is ready")
    # D = 1 − (F_SYS + F_EPP + B). Each term is a share of the same max_SYS.
    d = 1.0 - (f_sys + f_epp + policy.reserve)
    if not math.isfinite(max_sys * d):
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, "a load beyond all numbers")
    budget = Budget(
        signal=reading.signal,
        f_sys=f_sys,
        f_epp=f_epp,
        reserve=policy.reserve,
        d=d,
        headroom=round_down(max_sys * d),
        max_sys=max_sys,
        configured_max_sys=configured,
        is_capacity_known=reading.is_capacity_known,
    )
    # More room than an idle pool has means that a series is missing or wrong. Sending on such a reading would
    # overfill the pool.
    if policy.max_budget is not None and (d - policy.max_budget) * max_sys > ROUNDING_TOLERANCE:
        why = f"D {d:.3f} is above {policy.max_budget:.3f}, more room than an idle pool has"
        return _make_faulty_budget(reading, policy, Reason.IMPLAUSIBLE, why)
    return budget


def _make_faulty_budget(reading: Reading, policy: Policy, fault: Reason, detail: str) -> Budget:
    return Budget(
        signal=reading.signal,
        f_sys=reading.f_sys,
        f_epp=reading.f_epp,
        reserve=policy.reserve,
        d=float("nan"),
        headroom=0,
        max_sys=reading.max_sys,
        configured_max_sys=reading.max_sys,
        fault=fault,
        fault_detail=detail,
    )
