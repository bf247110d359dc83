"""How the queue will fare if it goes on like this: who misses its deadline, how near the next one is. Pure.

Requests go in the order of their scores, at the rate at which they went lately: the r-th of the line is at
risk where now + r/rate + its service is past its deadline. Those ahead of it are counted as if all of them
were served. One that is past its deadline leaves at once instead, so that behind many which cannot be saved
fewer may be lost than are at risk.

The line is known by counts of neighbours (`Span`), which cost the same however long it is. It is what is
pending: returned to its place and suspects included (as if those ran with all others), what is delayed only
when it is due again. A score tells a deadline where its remainder by 10^11 can be one (2001 or later): others
take their turn, and nobody knows whether they are late.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dispatcher.core.requests.score import PRIORITIES, PRIORITY_STEP, TOLD_FROM

RATE_S = 120.0
"""What was served so long ago counts a third of what is served now."""
KNOWN_AFTER_S = 60.0
"""With requests waiting and none served for so long, the rate is known to be none."""
GAP_S = 60.0
"""Two looks further apart say nothing: nobody knows who waited between them."""
REPLICAS = 50
"""Named at the most."""
_CREATED = re.compile(rb'"created"\s*:\s*([0-9]{1,11})\b')


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbours in the line."""

    count: int
    low: float | None = None
    """Unix seconds: no deadline of theirs is before; None: their scores tell none."""
    high: float = math.inf
    """Each is before this. Within a second of `low`: each is `low`."""


@dataclass(frozen=True, slots=True)
class Head:
    """The first of one priority."""

    start: bytes
    """Its member's beginning, or all of it."""
    deadline: float | None = None
    """Unix seconds; None: its score tells none."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One dispatcher that lives, or holds leases."""

    owner: str
    leases: int
    silent_s: float | None
    """Since its last sign of life; None: it gives none (queue.owner_timeout_s is 0)."""


@dataclass(frozen=True, slots=True)
class LineAhead:
    """The queue at one moment, as far as counts can tell it."""

    now: float
    """Unix seconds, by the queue's clock."""
    spans: Sequence[Span]
    """All that is pending, in order."""
    heads: Sequence[Head]
    """Of each priority that has any, of each set that holds them."""
    settled: int
    """Leases ever ended with a result or a burial, of all owners (a counter)."""
    leased: int
    replicas: Sequence[Replica]
    """Some of them where there are very many."""
    owners: int
    """How many there are."""

    @property
    def pending(self) -> int:
        return sum(span.count for span in self.spans)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a line comes to. None: not known."""

    oldest_pending_age_s: float | None
    """By `data.created` of the first of each priority: no request was read but those. None: none says it."""
    earliest_deadline_s: float | None
    """How long until the earliest deadline; below 0: it is past. Of those that scores tell."""
    at_risk: int | None
    """Pending requests that miss their deadline at `service_rate`; of those that scores tell."""
    service_rate: float | None
    """Requests that all replicas finish in a second, lately, while some wait."""
    service_s: float
    """From a claim to its end, lately."""
    replicas: tuple[Replica, ...] = ()
    owners: int = 0
    """How many replicas there are, those that are not among `replicas` included."""


class Served:
    """The rate at which the line moves and how long each takes, by a counter and the leases in between.

    Only time counts in which requests waited: what an empty queue does not get done says nothing of what it
    could. Where none waited at one end of a look, the rate seen is one that can be had, and never lowers the
    mean.
    """

    def __init__(self) -> None:
        self._before: tuple[float, int, int, int] | None = None
        self._weight_s = self._count = self._lease_s = 0.0

    @property
    def rate(self) -> float | None:
        """Requests per second; None: not known yet."""
        if not self._count and self._weight_s < KNOWN_AFTER_S:
            return None
        return self._count / self._weight_s

    @property
    def service_s(self) -> float:
        """A lease's mean length: those that run, by those that end in a second."""
        return self._lease_s / self._count if self._count else 0.0

    def observe(self, line: LineAhead) -> None:
        """Look at the line; every few seconds."""
        pending = line.pending
        before, self._before = self._before, (line.now, line.settled, pending, line.leased)
        if before is None:
            return
        passed_s, settled = line.now - before[0], line.settled - before[1]
        if not 0 < passed_s <= GAP_S or settled < 0:  # the clock or the counter began anew
            return
        waited = pending > 0 and before[2] > 0
        rate = self.rate
        if not waited and (rate is None or settled / passed_s <= rate):
            return
        kept = math.exp(-passed_s / RATE_S)
        self._weight_s = self._weight_s * kept + passed_s
        self._count = self._count * kept + settled
        self._lease_s = self._lease_s * kept + passed_s * (line.leased + before[3]) / 2


def look(line: LineAhead, rate: float | None, service_s: float) -> Outlook:
    """What the line comes to at this rate."""
    deadlines = [head.deadline for head in line.heads if head.deadline is not None]
    created = [at for head in line.heads if (at := created_at(head.start)) is not None]
    told = any(span.low is not None for span in line.spans)
    return Outlook(
        oldest_pending_age_s=max(0.0, line.now - min(created)) if created else None,
        earliest_deadline_s=min(deadlines) - line.now if deadlines else None,
        at_risk=0 if not told else None if rate is None else at_risk(line.spans, line.now, rate, service_s),
        service_rate=rate,
        service_s=service_s,
        replicas=tuple(line.replicas),
        owners=line.owners,
    )


def at_risk(spans: Iterable[Span], now: float, rate: float, service_s: float) -> int:
    """How many of the line miss their deadlines where `rate` of them a second end, each after `service_s`.

    The r-th does where now + r/rate + service_s is past its deadline. Neighbours of a wider span are taken to
    lie evenly in it.
    """
    ahead, missed = 0, 0.0
    for span in spans:
        if span.low is not None:
            width_s = span.high - span.low
            step_s = width_s / span.count if width_s > 1 else 0.0
            first_s = span.low - now - service_s + step_s / 2
            # The j-th of the span, from 0 on, is late where ahead + j + 1 > rate × (first_s + j × step_s).
            missed += _above(ahead + 1 - rate * first_s, 1 - rate * step_s, span.count)
        ahead += span.count
    return round(missed)


def _above(start: float, slope: float, count: int) -> float:
    """For how many j of 0 … count - 1 start + j × slope is above 0 (by more than a rounding)."""
    start -= 1e-6
    if slope == 0:
        return count if start > 0 else 0
    crossing = -start / slope
    if slope > 0:
        return count - min(count, max(0, math.floor(crossing) + 1))
    return min(count, max(0, math.ceil(crossing)))


def lying(requests: Iterable[tuple[float, bytes]]) -> tuple[list[Span], list[Head]]:
    """Spans and heads of requests that are all at hand, each with its score and member."""
    alike: dict[float, int] = {}
    first: dict[float, bytes] = {}
    for score, member in requests:
        if score not in first:
            alike[score], first[score] = 1, member
            continue
        alike[score] += 1
        if member < first[score]:
            first[score] = member
    counts: dict[tuple[int, float | None], int] = {}
    heads: dict[tuple[int, bool], Head] = {}
    for score in sorted(alike):
        told = told_by(score)
        priority, deadline = told or (_block(score), None)
        counts[priority, deadline] = counts.get((priority, deadline), 0) + alike[score]
        heads.setdefault((priority, told is None), Head(first[score], deadline))
    spans = [
        Span(count) if deadline is None else Span(count, deadline, deadline + 1)
        for (_, deadline), count in counts.items()
    ]
    firsts = [head for (block, untold), head in heads.items() if not (untold and (block, False) in heads)]
    return spans, firsts


def _block(score: float) -> int:
    return int(min(max(score // PRIORITY_STEP, -1), len(PRIORITIES))) if math.isfinite(score) else -1


def told_by(score: float) -> tuple[int, float] | None:
    """Priority and deadline that a score tells; None: none."""
    if not 0 <= score < len(PRIORITIES) * PRIORITY_STEP:
        return None
    priority, deadline = divmod(score, PRIORITY_STEP)
    return (int(priority), deadline) if deadline >= TOLD_FROM else None


def created_at(start: bytes) -> int | None:
    """`data.created` by a member's beginning, where it stands before the payload (as all that we know write
    it); None where it does not, or is 0."""
    found = _CREATED.search(start.partition(b'"payload"')[0])
    return int(found[1]) or None if found else None
