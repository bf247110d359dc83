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

from dispatcher.core.limit.transit_time import USUAL_S

DELTA_S = USUAL_S
"""δ before HTTP exchanges show another value (`TransitTime`): no request takes longer between this process
and the gateway in either direction."""
NOTING_MOST = 0.02
"""Share of a lease's duration that recording its end may take before leases of other owners prove no room."""
HALF_LIFE_S = 60.0
"""Age in seconds at which a measurement of the duration of requests counts half."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds on how many batch requests of all replicas a reading may contain, counted as the reading
    counts."""

    lo: int
    hi: int
    own_lo: int
    """Part of `lo` that belongs to this process: known from memory and not from leases."""

    def unsure_of_own(self) -> Interval:
        """Return the bounds if no request of this process is known to have arrived."""
        return Interval(self.lo - self.own_lo, self.hi, 0)


@dataclass(slots=True)
class _LeaseCount:
    at: float
    surely: int
    maybe: int
    repeats: bool
    """True if the count before it was the same."""


_at = attrgetter("at")


@dataclass(slots=True)
class LoadLedger:
    """History of requests and lease counts behind the bounds.

    `horizon_s` is the age of the oldest window for which bounds are requested.
    """

    horizon_s: float
    own: int = 0
    """Units that this process has at the gateway."""
    _live: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    """Time of sending and units of each request at the gateway."""
    _ends: array[float] = field(default_factory=lambda: array("d"))
    """Times at which answered requests ended, ascending. `_start_times` has the times of sending, and
    `_units` the units. Arrays save memory: at thousands of requests per second these are most of what grows.
    """
    _starts: array[float] = field(default_factory=lambda: array("d"))
    _units: array[int] = field(default_factory=lambda: array("q"))
    _several_at: float = float("-inf")
    """Time at which the newest call of several units ended."""
    _others: list[_LeaseCount] = field(default_factory=list)
    queue_call_s: float = 0.0
    """Longest duration of a recent call that writes to the queue."""
    _measured_at: float | None = None
    """Time of the last call of `measure_duration`."""
    _answers: int = 0
    """Number of requests answered since the last call of `measure_duration`."""
    _answered: float = 0.0
    """Number of requests answered before the last call of `measure_duration`, with a lower weight for older
    ones (HALF_LIFE_S). `_weighted_busy_s` is the time that all requests spent at the gateway, weighted the
    same way."""
    _busy_s: float = 0.0

    def sent(self, key: Hashable, at: float, units: int = 1) -> None:
        # Events may arrive twice: the newest sending replaces the earlier one.
        if key in self._live:
            self.own -= self._live[key][1]
        self._live[key] = at, units
        self.own += units

    def answered(self, key: Hashable, at: float) -> float | None:
        """Record that a request left the gateway: answered, cancelled or abandoned. Return how long it was
        there, or `None` if it was not."""
        sent = self._live.pop(key, None)
        if sent is None:
            return None
        start, units = sent
        self.own -= units
        self._answers += 1
        if units > 1:
            self._several_at = max(self._several_at, at)
        took_s = at - start
        # Events may arrive out of order, so an end may be older than its start.
        if took_s < 0:
            took_s, at = 0.0, start
        ends = self._ends
        # Usually the end of the array. Only answers reported out of order are inserted before it.
        place = len(ends) if not ends or at >= ends[-1] else bisect_right(ends, at)
        ends.insert(place, at)
        self._starts.insert(place, start)
        self._units.insert(place, units)
        if len(ends) > 1024 and ends[len(ends) // 4] < at - self.horizon_s:
            self._forget(at)
        return took_s

    def measure(self, at: float) -> None:
        """Update the mean duration by the number of requests at the gateway now. Called with each reading."""
        last, self._measured_at = self._measured_at, at
        if last is None or at <= last or not (self._live or self._answers):
            return
        kept = 0.5 ** ((at - last) / HALF_LIFE_S)
        self._busy_s = kept * self._busy_s + len(self._live) * (at - last)
        self._answered = kept * self._answered + self._answers
        self._answers = 0

    @property
    def mean_s(self) -> float:
        """Mean duration of a request of this process. 0 until one was answered.

        It is the number of requests in flight divided by the number answered per second (Little's law). The
        mean over answered requests alone would be too short while long requests are still in flight.
        """
        return self._busy_s / self._answered if self._answered else 0.0

    def counted(self, at: float, others: int, young: int) -> None:
        """Record that other owners held `other_owners_units`, of which `just_leased_units` may not have been
        sent yet.

        A lease lasts until the end of its request is recorded in the queue, so some requests of other owners
        have left the gateway already (`_ended_share` of them on average). Twice as many are left out of the
        lower bound, or all if that share exceeds MAX_NOTING_SHARE, because requests that were claimed
        together end together.
        """
        others = max(0, others)
        share = self._ended_share
        ended = others if share > NOTING_MOST else round(2 * others * share)
        surely = max(0, others - max(0, young) - ended)
        counts = self._others
        if counts:
            last = counts[-1]
            at = max(at, last.at)
            if last.surely == surely and last.maybe == others and last.repeats:
                last.at = at  # of a run of equal counts only both ends are kept
                return
            repeats = last.surely == surely and last.maybe == others
        else:
            repeats = False
        counts.append(_LeaseCount(at, surely, others, repeats))
        if len(counts) > 1024 and counts[512].at < at - self.horizon_s:
            del counts[:512]

    @property
    def _ended_share(self) -> float:
        """Share of a lease's duration that recording its end takes, if requests and queue calls of other
        owners take as long as ours. 1 until this process has had a request."""
        noting_s = self.queue_call_s
        if noting_s <= 0:
            return 0.0
        requests = max(self._answered, len(self._live))
        return noting_s / (self._busy_s / requests + noting_s) if requests else 1.0

    @property
    def others(self) -> int:
        return self._others[-1].maybe if self._others else 0

    @property
    def counted_at(self) -> float:
        """Time of the newest count of other owners' leases."""
        return self._others[-1].at if self._others else float("-inf")

    @property
    def calls(self) -> int:
        """Number of calls that this process has at the gateway."""
        return len(self._live)

    def between(
        self, a: float, b: float, delta_s: float = DELTA_S, beyond_calls: float = math.inf
    ) -> Interval:
        """Return the bounds for a reading of [a, b] that counts `items_beyond_calls` items beyond calls."""
        least_others, most_others = self._others_between(a, b)
        own_lo, own_hi = self._least_own(a, b, delta_s), self._most_own(a, b)
        units = Interval(own_lo + least_others, own_hi + most_others, own_lo)
        if beyond_calls == math.inf or self._sends_single(a):
            return units
        surely = self._least_own(a, b, delta_s, calls=True) + math.floor(beyond_calls)
        maybe = self._most_own(a, b, calls=True) + math.ceil(beyond_calls)
        # The number of calls of other owners is not known. They work on the same queue, so their calls may
        # have several units as well. There are never more calls than units.
        return Interval(min(units.lo, surely), min(units.hi, maybe + most_others), min(own_lo, surely))

    def _sends_single(self, at: float) -> bool:
        """Return whether no call of this process has had several units recently."""
        return self.own == self.calls and self._several_at < at - self.horizon_s

    def _least_own(self, a: float, b: float, delta_s: float, *, calls: bool = False) -> int:
        """Return this process's own part of `least`: its units, or its `calls`."""
        first = bisect_left(self._ends, a + delta_s)
        starts: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        held = 0
        for start, units, end in self._ended_from(first, calls=calls):
            begins, stops = start + delta_s, end - delta_s
            # The request was shorter than 2 δ, or began after the window: it was at no moment certainly
            # there.
            if begins > b or begins >= stops:
                continue
            if begins <= a:
                held += units
            else:
                starts.append((begins, units))
            if stops < b:
                ends.append((stops, units))
        for start, units in self._running(calls=calls):
            begins = start + delta_s
            if begins <= a:
                held += units
            elif begins <= b:
                starts.append((begins, units))
        ends.sort()
        starts.sort()
        least, begun = held, 0
        for end, units in ends:
            while begun < len(starts) and starts[begun][0] < end:
                held += starts[begun][1]
                begun += 1
            held -= units
            least = min(least, held)
        return least

    def _most_own(self, a: float, b: float, *, calls: bool = False) -> int:
        first = bisect_left(self._ends, a)
        starts: list[tuple[float, int]] = []
        ends: list[tuple[float, int]] = []
        held = 0
        for start, units, end in self._ended_from(first, calls=calls):
            if start > b:
                continue
            if start <= a:
                held += units
            else:
                starts.append((start, units))
            ends.append((end, units))
        for start, units in self._running(calls=calls):
            if start <= a:
                held += units
            elif start <= b:
                starts.append((start, units))
        starts.sort()
        most, ended = held, 0
        for start, units in starts:
            while ended < len(ends) and ends[ended][0] < start:
                held -= ends[ended][1]
                ended += 1
            held += units
            most = max(most, held)
        return most

    def _others_between(self, a: float, b: float) -> tuple[int, int]:
        counts = self._others
        if not counts:
            return 0, 0
        first = max(0, bisect_right(counts, a, key=_at) - 1)
        last = max(first, bisect_left(counts, b, key=_at))
        seen = counts[first : last + 1]
        bracketed = counts[0].at <= a and b <= counts[-1].at
        return min(c.surely for c in seen) if bracketed else 0, max(c.maybe for c in seen)

    def _ended_from(self, first: int, *, calls: bool) -> Iterator[tuple[float, int, float]]:
        """Return the time of sending, the weight and the end of each ended request."""
        ends = self._ends[first:]
        return zip(self._starts[first:], [1] * len(ends) if calls else self._units[first:], ends, strict=True)

    def _running(self, *, calls: bool) -> Iterable[tuple[float, int]]:
        """Return the time of sending and the weight of each request at the gateway."""
        return [(start, 1) for start, _ in self._live.values()] if calls else self._live.values()

    def _forget(self, now: float) -> None:
        old = bisect_left(self._ends, now - self.horizon_s)
        for of_all in (self._ends, self._starts, self._units):
            del of_all[:old]
