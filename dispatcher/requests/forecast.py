"""Forecast of the queue if it continues at its present rate: requests at risk of missing their deadlines.

Requests are sent in the order of their scores, at the recent rate. The r-th request of the queue is at risk
if now + r/rate + its service time is later than its deadline. The forecast assumes that all requests ahead of
it are served. In fact a request that is past its deadline leaves the queue at once, so that fewer requests
may miss their deadlines than are counted as at risk.

The input consists of counts of neighbours (`QueueSpan`), whose cost does not depend on the length of the
queue. They cover all pending requests: also returned requests and suspects (as if suspects ran with all
others), and delayed requests only once they are due again. A score contains a deadline if its remainder
modulo 10^11 can be one (2001 or later). Other requests are sent in their order too, but their deadlines are
not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispatcher.requests.score import EARLIEST_DEADLINE, PRIORITIES, PRIORITY_STEP

RATE_TIME_CONSTANT_S = 120.0
"""Time constant of the average rate: a request that ended this long ago counts a third of one that ends
now."""
RATE_KNOWN_AFTER_S = 60.0
"""Seconds of waiting requests without any served request after which the rate counts as known, and as
zero."""
MAX_SNAPSHOT_GAP_S = 60.0
"""Longest time between two snapshots that are compared. In a longer time the queue may have been empty."""
MAX_REPLICAS_LISTED = 50
"""Largest number of replicas that a forecast lists by name."""
_CREATED = re.compile(rb'"created"\s*:\s*([0-9]{1,11})\b')


@dataclass(frozen=True, slots=True)
class QueueSpan:
    """Requests that are neighbours in the queue."""

    count: int
    low: float | None = None
    """Unix time before which none of their deadlines is. `None` if their scores contain no deadlines."""
    high: float = math.inf
    """Unix time before which all their deadlines are. If it is within a second of `low`, all deadlines are
    `low`."""


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """The first request of one priority."""

    member_start: bytes
    """The beginning of its member, or all of it."""
    deadline: float | None = None
    """Unix time of its deadline. `None` if its score contains none."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A dispatcher that is alive, or holds leases."""

    owner: str
    leases: int
    silent_s: float | None
    """Seconds since its last heartbeat. `None` if it sends none (queue.owner_timeout_s is 0)."""


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The state of a queue at one moment, as far as counts describe it."""

    now: float
    """Unix time by the queue's clock."""
    spans: Sequence[QueueSpan]
    """All pending requests, in order."""
    first_requests: Sequence[FirstRequest]
    """The first request of each priority, in each set that holds pending requests."""
    settled_count: int
    """Number of leases that ever ended with a result or as dead-letter requests, over all owners (a
    counter)."""
    leased_count: int
    replicas: Sequence[Replica]
    """The replicas, or some of them if there are very many."""
    owner_count: int
    """Number of all owners."""

    @property
    def pending_count(self) -> int:
        return sum(span.count for span in self.spans)


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """Forecast of a queue. A value that is not known is `None`."""

    oldest_pending_age_s: float | None
    """Age of the oldest request, by `data.created` of the first request of each priority; other members are
    not read. `None` if none of these says when it was created."""
    earliest_deadline_s: float | None
    """Seconds until the earliest deadline that a score contains. Negative if it has passed."""
    at_risk: int | None
    """Number of pending requests that miss their deadlines at `service_rate`, among those whose scores
    contain one."""
    service_rate: float | None
    """Requests per second that all replicas together finished recently, while requests waited."""
    service_s: float
    """Recent average time from the claim of a request to its end, in seconds."""
    replicas: tuple[Replica, ...] = ()
    owner_count: int = 0
    """Number of all replicas, also of those that `replicas` leaves out."""


class ServiceRateMeter:
    """Measure the rate at which requests end and the time that each takes, from a counter and the number of
    leases.

    Only time in which requests waited counts: an empty queue says nothing about the rate that is possible. If
    no request waited at one end of an interval, the measured rate is a lower bound of the possible rate, so
    it may raise the average, and never lowers it.
    """

    def __init__(self) -> None:
        self._previous: tuple[float, int, int, int] | None = None
        self._weight_s = self._settled_count = self._lease_s = 0.0

    @property
    def rate_per_s(self) -> float | None:
        """Requests per second. `None` if the rate is not known yet."""
        if not self._settled_count and self._weight_s < RATE_KNOWN_AFTER_S:
            return None
        return self._settled_count / self._weight_s

    @property
    def service_s(self) -> float:
        """Average duration of a lease in seconds: the leases in flight, divided by the number that end per
        second."""
        return self._lease_s / self._settled_count if self._settled_count else 0.0

    def record_snapshot(self, snapshot: QueueSnapshot) -> None:
        """Record a snapshot of the queue. Callers do this every few seconds."""
        pending = snapshot.pending_count
        previous, self._previous = (
            self._previous,
            (snapshot.now, snapshot.settled_count, pending, snapshot.leased_count),
        )
        if previous is None:
            return
        elapsed_s, settled = snapshot.now - previous[0], snapshot.settled_count - previous[1]
        if not 0 < elapsed_s <= MAX_SNAPSHOT_GAP_S or settled < 0:  # the clock or the counter was reset
            return
        had_pending = pending > 0 and previous[2] > 0
        rate = self.rate_per_s
        if not had_pending and (rate is None or settled / elapsed_s <= rate):
            return
        # Exponential decay by elapsed time, so that the interval between snapshots does not matter.
        kept = math.exp(-elapsed_s / RATE_TIME_CONSTANT_S)
        self._weight_s = self._weight_s * kept + elapsed_s
        self._settled_count = self._settled_count * kept + settled
        self._lease_s = self._lease_s * kept + elapsed_s * (snapshot.leased_count + previous[3]) / 2


def compute_forecast(snapshot: QueueSnapshot, rate: float | None, service_s: float) -> QueueForecast:
    """Return the forecast of a queue at this rate."""
    deadlines = [head.deadline for head in snapshot.first_requests if head.deadline is not None]
    created = [at for head in snapshot.first_requests if (at := parse_created(head.member_start)) is not None]
    has_deadlines = any(span.low is not None for span in snapshot.spans)
    return QueueForecast(
        oldest_pending_age_s=max(0.0, snapshot.now - min(created)) if created else None,
        earliest_deadline_s=min(deadlines) - snapshot.now if deadlines else None,
        at_risk=0
        if not has_deadlines
        else None
        if rate is None
        else count_at_risk(snapshot.spans, snapshot.now, rate, service_s),
        service_rate=rate,
        service_s=service_s,
        replicas=tuple(snapshot.replicas),
        owner_count=snapshot.owner_count,
    )


def count_at_risk(spans: Iterable[QueueSpan], now: float, rate: float, service_s: float) -> int:
    """Return how many requests miss their deadlines if `rate` of them end per second, each after `service_s`.

    The r-th request misses its deadline if now + r/rate + service_s is later. Within a span the deadlines are
    assumed to be evenly distributed.
    """
    ahead, missed = 0, 0.0
    for span in spans:
        if span.low is not None:
            width_s = span.high - span.low
            # All deadlines of a span of at most one second are equal (see `QueueSpan.high`).
            step_s = width_s / span.count if width_s > 1 else 0.0
            first_s = span.low - now - service_s + step_s / 2
            # Request j of the span (from 0) is late if ahead + j + 1 > rate × (first_s + j × step_s).
            missed += _count_above_zero(ahead + 1 - rate * first_s, 1 - rate * step_s, span.count)
        ahead += span.count
    return round(missed)


def _count_above_zero(start: float, slope: float, count: int) -> float:
    """Return for how many j of 0 … count - 1 the value start + j × slope is above 0, by more than a rounding
    error."""
    # Rounding errors must not count a request as late.
    start -= 1e-6
    if slope == 0:
        return count if start > 0 else 0
    crossing = -start / slope
    if slope > 0:
        return count - min(count, max(0, math.floor(crossing) + 1))
    return min(count, max(0, math.ceil(crossing)))


def summarize_requests(requests: Iterable[tuple[float, bytes]]) -> tuple[list[QueueSpan], list[FirstRequest]]:
    """Return spans and first requests for requests that are all in memory, each given by score and member."""
    counts_by_score: dict[float, int] = {}
    first_members: dict[float, bytes] = {}
    for score, member in requests:
        if score not in first_members:
            counts_by_score[score], first_members[score] = 1, member
            continue
        counts_by_score[score] += 1
        # Members with equal scores are ordered by their bytes, as in Redis.
        if member < first_members[score]:
            first_members[score] = member
    counts: dict[tuple[int, float | None], int] = {}
    heads: dict[tuple[int, bool], FirstRequest] = {}
    for score in sorted(counts_by_score):
        decoded = decode_score(score)
        # Requests without a deadline in their score count with the priority whose range their score is in.
        priority, deadline = decoded or (_priority_block(score), None)
        counts[priority, deadline] = counts.get((priority, deadline), 0) + counts_by_score[score]
        heads.setdefault((priority, decoded is None), FirstRequest(first_members[score], deadline))
    spans = [
        QueueSpan(count) if deadline is None else QueueSpan(count, deadline, deadline + 1)
        for (_, deadline), count in counts.items()
    ]
    firsts = [head for (block, untold), head in heads.items() if not (untold and (block, False) in heads)]
    return spans, firsts


def _priority_block(score: float) -> int:
    return int(min(max(score // PRIORITY_STEP, -1), len(PRIORITIES))) if math.isfinite(score) else -1


def decode_score(score: float) -> tuple[int, float] | None:
    """Return the priority and the deadline that a score contains. `None` if it contains none."""
    if not 0 <= score < len(PRIORITIES) * PRIORITY_STEP:
        return None
    priority, deadline = divmod(score, PRIORITY_STEP)
    return (int(priority), deadline) if deadline >= EARLIEST_DEADLINE else None


def parse_created(member_start: bytes) -> int | None:
    """Return `data.created`, given the beginning of a member. `None` if it is missing, 0, or behind the
    payload.

    All producers that we know write `created` before `payload`.
    """
    # The search ends at the payload, which may have a field `created` of its own.
    match = _CREATED.search(member_start.partition(b'"payload"')[0])
    return int(match[1]) or None if match else None
