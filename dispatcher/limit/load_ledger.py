"""Bounds on how many batch requests the gateway held during a window of time.

A reading of the pool contains our own load, but the exact amount is unknown: a request starts to count
somewhere between its sending and its arrival, an answer leaves before it reaches us, and the sample was taken
somewhere in a window. Known are two bounds over that window [a, b]:

    least(a, b)  the fewest that the gateway certainly held at any moment: each request from δ after it was
                 sent until δ before its answer came
    most(a, b)   the most that it may have held at any moment: each request from sending to answer

A request counts with its units, regardless of its owner. Requests of other owners are known from counts of
their leases, which are taken from time to time. The bounds use all counts within the window and the nearest
one on each side of it. If one side has none, no request of other owners is certain: all of them may have
ended since the newest count.

A reading may count a call of several units as less: as one if the endpoint picker counts calls, and as its
units if the model servers count items. `Reading.items_beyond_calls` says how far a reading goes beyond calls.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from dispatcher.limit.transit_time import DEFAULT_TRANSIT_S

DELTA_S = DEFAULT_TRANSIT_S
"""δ before HTTP exchanges show another value (`TransitTime`): no request takes longer between this process
and the gateway in either direction."""
MAX_NOTING_SHARE = 0.02
"""Share of a lease's duration that recording its end may take before leases of other owners prove no room."""
HALF_LIFE_S = 60.0
"""Age in seconds at which a measurement of the duration of requests counts half."""


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """Bounds on how many batch requests of all replicas a reading may contain, counted as the reading
    counts."""

    lo: int
    hi: int
    own_lo: int
    """Part of `lo` that belongs to this process: known from memory and not from leases."""

    def limit_to(self, most: float) -> LoadBounds:
        """Return the bounds if the reading contains at most this many batch requests."""
        return LoadBounds(self.lo, max(self.lo, min(self.hi, math.ceil(most))), self.own_lo)

    def drop_own_lower_bound(self) -> LoadBounds:
        """Return the bounds if no request of this process is known to have arrived."""
        return LoadBounds(self.lo - self.own_lo, self.hi, 0)


@dataclass(slots=True)
class _LeaseCount:
    at: float
    certain: int
    possible: int
    is_repeated: bool
    """True if the count before it was the same."""


_at = attrgetter("at")


@dataclass(slots=True)
class LoadLedger:
    """History of requests and lease counts behind the bounds.

    `horizon_s` is the age of the oldest window for which bounds are requested.
    """

    horizon_s: float
    own_units: int = 0
    """Units that this process has at the gateway."""
    ended_count: int = 0
    """Number of requests that have left the gateway so far."""
    _in_flight: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    """Time of sending and units of each request at the gateway."""
    _end_times: array[float] = field(default_factory=lambda: array("d"))
    """Times at which answered requests ended, ascending. `_start_times` has the times of sending, and
    `_units` the units. Arrays save memory: at thousands of requests per second these are most of what grows.
    """
    _start_times: array[float] = field(default_factory=lambda: array("d"))
    _units: array[int] = field(default_factory=lambda: array("q"))
    _multi_unit_call_ended_at: float = float("-inf")
    """Time at which the newest call of several units ended."""
    _lease_counts: list[_LeaseCount] = field(default_factory=list)
    queue_call_s: float = 0.0
    """Longest duration of a recent call that writes to the queue."""
    _measured_at: float | None = None
    """Time of the last call of `measure_duration`."""
    _new_answers: int = 0
    """Number of requests answered since the last call of `measure_duration`."""
    _weighted_answers: float = 0.0
    """Number of requests answered before the last call of `measure_duration`, with a lower weight for older
    ones (HALF_LIFE_S). `_weighted_busy_s` is the time that all requests spent at the gateway, weighted the
    same way."""
    _weighted_busy_s: float = 0.0

    def record_send(self, key: Hashable, at: float, units: int = 1) -> None:
        # Events may arrive twice: the newest sending replaces the earlier one.
        if key in self._in_flight:
            self.own_units -= self._in_flight[key][1]
        self._in_flight[key] = at, units
        self.own_units += units

    def record_answer(self, key: Hashable, at: float) -> float | None:
        """Record that a request left the gateway: answered, cancelled or abandoned. Return how long it was
        there, or `None` if it was not."""
        sent = self._in_flight.pop(key, None)
        if sent is None:
            return None
        start, units = sent
        self.own_units -= units
        self._new_answers += 1
        self.ended_count += 1
        if units > 1:
            self._multi_unit_call_ended_at = max(self._multi_unit_call_ended_at, at)
        # Events may arrive out of order, so an end may be older than its start.
        if at < start:
            at = start
        ends = self._end_times
        # Usually the end of the array. Only answers reported out of order are inserted before it.
        place = len(ends) if not ends or at >= ends[-1] else bisect_right(ends, at)
        ends.insert(place, at)
        self._start_times.insert(place, start)
        self._units.insert(place, units)
        if len(ends) > 1024 and ends[len(ends) // 4] < at - self.horizon_s:
            self._drop_old_requests(at)
        return at - start

    def measure_duration(self, at: float) -> None:
        """Update the mean duration by the number of requests at the gateway now. Called with each reading."""
        last, self._measured_at = self._measured_at, at
        if last is None or at <= last or not (self._in_flight or self._new_answers):
            return
        kept = 0.5 ** ((at - last) / HALF_LIFE_S)
        self._weighted_busy_s = kept * self._weighted_busy_s + len(self._in_flight) * (at - last)
        self._weighted_answers = kept * self._weighted_answers + self._new_answers
        self._new_answers = 0

    @property
    def mean_duration_s(self) -> float:
        """Mean duration of a request of this process. 0 until one was answered.

        It is the number of requests in flight divided by the number answered per second (Little's law). The
        mean over answered requests alone would be too short while long requests are still in flight.
        """
        return self._weighted_busy_s / self._weighted_answers if self._weighted_answers else 0.0

    def record_lease_count(self, at: float, other_owners_units: int, just_leased_units: int) -> None:
        """Record that other owners held `other_owners_units`. `just_leased_units` of them may not have been
        sent yet.

        A lease lasts until the end of its request is recorded in the queue, so some requests of other owners
        have left the gateway already (`_ended_share` of them on average). Twice as many are left out of the
        lower bound, or all if that share exceeds MAX_NOTING_SHARE, because requests that were claimed
        together end together.
        """
        other_owners_units = max(0, other_owners_units)
        share = self._ended_share
        ended = other_owners_units if share > MAX_NOTING_SHARE else round(2 * other_owners_units * share)
        certain = max(0, other_owners_units - max(0, just_leased_units) - ended)
        counts = self._lease_counts
        if counts:
            last = counts[-1]
            at = max(at, last.at)
            if last.certain == certain and last.possible == other_owners_units and last.is_repeated:
                last.at = at  # of a run of equal counts only both ends are kept
                return
            repeats = last.certain == certain and last.possible == other_owners_units
        else:
            repeats = False
        counts.append(_LeaseCount(at, certain, other_owners_units, repeats))
        if len(counts) > 1024 and counts[512].at < at - self.horizon_s:
            del counts[:512]

    @property
    def _ended_share(self) -> float:
        """Share of a lease's duration that recording its end takes, if requests and queue calls of other
        owners take as long as ours. 1 until this process has had a request."""
        noting_s = self.queue_call_s
        if noting_s <= 0:
            return 0.0
        requests = max(self._weighted_answers, len(self._in_flight))
        return noting_s / (self._weighted_busy_s / requests + noting_s) if requests else 1.0

    @property
    def other_owners_units(self) -> int:
        return self._lease_counts[-1].possible if self._lease_counts else 0

    @property
    def counted_at(self) -> float:
        """Time of the newest count of other owners' leases."""
        return self._lease_counts[-1].at if self._lease_counts else float("-inf")

    @property
    def call_count(self) -> int:
        """Number of calls that this process has at the gateway."""
        return len(self._in_flight)

    def bounds_between(
        self, a: float, b: float, delta_s: float = DELTA_S, items_beyond_calls: float = math.inf
    ) -> LoadBounds:
        """Return the bounds for a reading of [a, b] that counts `items_beyond_calls` items beyond calls."""
        least_others, most_others = self.bound_other_owners(a, b)
        own_lo, own_hi = self._compute_min_own(a, b, delta_s), self._compute_max_own(a, b)
        units = LoadBounds(own_lo + least_others, own_hi + most_others, own_lo)
        if items_beyond_calls == math.inf or self._has_single_unit_calls(a):
            return units
        certain = self._compute_min_own(a, b, delta_s, calls=True) + math.floor(items_beyond_calls)
        possible = self._compute_max_own(a, b, calls=True) + math.ceil(items_beyond_calls)
        # The number of calls of other owners is not known. They work on the same queue, so their calls may
        # have several units as well. There are never more calls than units.
        return LoadBounds(min(units.lo, certain), min(units.hi, possible + most_others), min(own_lo, certain))

    def _has_single_unit_calls(self, at: float) -> bool:
        """Return whether no call of this process has had several units recently."""
        return self.own_units == self.call_count and self._multi_unit_call_ended_at < at - self.horizon_s

    def _compute_min_own(self, a: float, b: float, delta_s: float, *, calls: bool = False) -> int:
        """Return this process's own part of `least`: its units, or its `calls`."""
        first = bisect_left(self._end_times, a + delta_s)
        starts: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        at_gateway = 0
        for start, units, end in self._list_ended(first, calls=calls):
            begins, stops = start + delta_s, end - delta_s
            # The request was shorter than 2 δ, or began after the window: it was at no moment certainly
            # there.
            if begins > b or begins >= stops:
                continue
            if begins <= a:
                at_gateway += units
            else:
                starts.append((begins, units))
            if stops < b:
                ends.append((stops, units))
        for start, units in self._list_in_flight(calls=calls):
            begins = start + delta_s
            if begins <= a:
                at_gateway += units
            elif begins <= b:
                starts.append((begins, units))
        ends.sort()
        starts.sort()
        least, begun = at_gateway, 0
        for end, units in ends:
            while begun < len(starts) and starts[begun][0] < end:
                at_gateway += starts[begun][1]
                begun += 1
            at_gateway -= units
            least = min(least, at_gateway)
        return least

    def _compute_max_own(self, a: float, b: float, *, calls: bool = False) -> int:
        first = bisect_left(self._end_times, a)
        starts: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        at_gateway = 0
        for start, units, end in self._list_ended(first, calls=calls):
            if start > b:
                continue
            if start <= a:
                at_gateway += units
            else:
                starts.append((start, units))
            ends.append((end, units))
        for start, units in self._list_in_flight(calls=calls):
            if start <= a:
                at_gateway += units
            elif start <= b:
                starts.append((start, units))
        starts.sort()
        most, ended = at_gateway, 0
        for start, units in starts:
            while ended < len(ends) and ends[ended][0] < start:
                at_gateway -= ends[ended][1]
                ended += 1
            at_gateway += units
            most = max(most, at_gateway)
        return most

    def bound_other_owners(self, a: float, b: float) -> tuple[int, int]:
        """Return the fewest and the most units that other owners may have had at the gateway in [a, b]."""
        counts = self._lease_counts
        if not counts:
            return 0, 0
        first = max(0, bisect_right(counts, a, key=_at) - 1)
        last = max(first, bisect_left(counts, b, key=_at))
        selected = counts[first : last + 1]
        bracketed = counts[0].at <= a and b <= counts[-1].at
        return min(c.certain for c in selected) if bracketed else 0, max(c.possible for c in selected)

    def _list_ended(self, first: int, *, calls: bool) -> Iterator[tuple[float, int, float]]:
        """Return the time of sending, the weight and the end of each ended request."""
        ends = self._end_times[first:]
        return zip(
            self._start_times[first:], [1] * len(ends) if calls else self._units[first:], ends, strict=True
        )

    def _list_in_flight(self, *, calls: bool) -> Iterable[tuple[float, int]]:
        """Return the time of sending and the weight of each request at the gateway."""
        return [(start, 1) for start, _ in self._in_flight.values()] if calls else self._in_flight.values()

    def _drop_old_requests(self, now: float) -> None:
        old = bisect_left(self._end_times, now - self.horizon_s)
        for column in (self._end_times, self._start_times, self._units):
            del column[:old]
