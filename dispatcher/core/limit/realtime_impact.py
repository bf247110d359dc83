"""What batch work costs interactive users: their latency in the last minutes, our share beside it. Pure.

A picker (or a model server) shows cumulative histograms of the time to the first token and of the time per
output token after it. What they grew by within a window says what requests of that window saw. Where the
series tell priorities, only requests with priority 0 or more are looked at: realtime alone.

Nothing is steered by any of this, and whatever is wrong with it is said in `why_not`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

WINDOW_S = 300.0
"""Minutes, for a quantile of few requests says little."""
SHARE_EACH_S = 5.0
"""Our share is kept as means of so long."""

Buckets = Mapping[float, float]
"""Upper bound → observations no greater; the last bound is infinite."""
Of = Literal["realtime", "all"]


@dataclass(frozen=True, slots=True)
class Price:
    """Latencies of the last minutes, in seconds. None: not known."""

    ttft_p50_s: float | None = None
    """Time to first token."""
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    """Time per output token after the first."""
    tpot_p95_s: float | None = None
    of: Of = "all"
    """`all`: the series do not tell our requests from realtime's, or nothing marks ours."""
    requests: int = 0
    """How many it is based on."""
    batch_share: float | None = None
    """Our requests in flight as a share of the capacity, on average over the same time."""
    source: str = ""
    """Whose series they are."""
    why_not: str = "not read yet"
    """Why something is not known; empty: all of it is."""


@dataclass(frozen=True, slots=True)
class Histograms:
    """What one replica of a source shows at one moment. None: it has no such series."""

    replica: str
    ttft: Buckets | None = None
    tpot: Buckets | None = None
    of: Of = "all"
    name: str = ""
    """Of the series."""
    why_not: str = ""
    """Why there is nothing to count; empty: there is something."""
    flawed: bool = False
    """It is there, and cannot be read."""


@dataclass(slots=True)
class _Step:
    """What all histograms grew by between two looks."""

    at: float
    ttft: dict[float, float] = field(default_factory=dict)
    tpot: dict[float, float] = field(default_factory=dict)


def flaw(buckets: Buckets) -> str:
    """What is wrong with a histogram; empty: nothing."""
    bounds = sorted(buckets)
    if any(math.isnan(bound) for bound in buckets) or not bounds or bounds[-1] != math.inf:
        return "a histogram has no last bucket"
    values = [buckets[bound] for bound in bounds]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        return "a histogram counts what is no number of requests"
    # A sum of rounded increases may fall by a rounding.
    if any(later < earlier * (1 - 1e-9) - 1e-6 for earlier, later in itertools.pairwise(values)):
        return "a histogram's buckets contradict each other"
    return ""


def quantile(buckets: Buckets, q: float) -> float | None:
    """The value that a share q of the observations does not exceed, as Prometheus reckons it: they are taken
    to lie evenly in their bucket; in the last one its lower bound. None: there is no observation."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]]
    if total <= 0:
        return None
    rank = q * total
    below, low = 0.0, 0.0
    for bound in bounds:
        here = buckets[bound]
        if here >= rank and here > below:
            if bound == math.inf:
                return low
            within = low + (bound - low) * (rank - below) / (here - below)
            return min(within, bound) if bound > 0 else bound
        below, low = max(below, here), bound
    return low


def price(ttft: Buckets | None, tpot: Buckets | None, of: Of, source: str, share: float | None) -> Price:
    """The price by what the histograms grew by in the window."""
    why = [problem for problem in map(flaw, filter(None, (ttft, tpot))) if problem]
    if why:
        return Price(of=of, batch_share=share, source=source, why_not=why[0])
    if not ttft and not tpot:
        return Price(of=of, batch_share=share, source=source)
    counted = ttft or tpot or {}
    found = Price(
        quantile(ttft, 0.5) if ttft else None,
        quantile(ttft, 0.95) if ttft else None,
        quantile(tpot, 0.5) if tpot else None,
        quantile(tpot, 0.95) if tpot else None,
        of=of,
        requests=round(counted[math.inf]),
        batch_share=share,
        source=source,
    )
    return replace(found, why_not=_missing(found))


def _missing(found: Price) -> str:
    whose = "realtime request" if found.of == "realtime" else "request"
    if found.requests == 0:
        return f"no {whose} was answered in the last {WINDOW_S / 60:g} minutes"
    if found.ttft_p50_s is None:
        return "the time to the first token is not shown"
    if found.tpot_p50_s is None:
        return "no time per output token: not shown, or no answer was streamed"
    return ""


class Shares:
    """Our share of the pool over the window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._means: deque[tuple[float, float, int]] = deque()

    def saw(self, at: float, share: float | None) -> None:
        if share is None or not math.isfinite(share):
            return
        if self._means and at - self._means[-1][0] < SHARE_EACH_S:
            since, total, count = self._means.pop()
            self._means.append((since, total + share, count + 1))
        else:
            self._means.append((at, share, 1))
        while self._means[0][0] < at - self._window_s:
            self._means.popleft()

    @property
    def mean(self) -> float | None:
        if not self._means:
            return None
        return sum(total / count for _, total, count in self._means) / len(self._means)


class Growth:
    """What the histograms of all replicas of one source grew by in the window.

    A replica's first histogram is only where counting begins; one that shrank has begun anew, and counts from
    zero. What is no histogram counts for nothing, and is told until it is one.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._before: dict[str, Histograms] = {}
        self._steps: deque[_Step] = deque()
        self._of: Of = "all"
        self._name = ""
        self._why_not = "not read yet"

    def saw(self, at: float, seen: Sequence[Histograms]) -> None:
        """Look at all replicas; every few seconds."""
        self._of = "realtime" if seen and all(each.of == "realtime" for each in seen) else "all"
        self._name = next((each.name for each in seen if each.name), "")
        flawed = next(filter(None, map(_flaw, seen)), "") or _apart(seen)
        self._why_not = flawed or next((each.why_not for each in seen if each.why_not), "")
        if flawed:
            return
        step = _Step(at)
        for each in seen:
            before = self._before.get(each.replica)
            # A series is made by the first request: one that was not there has counted from zero since.
            if before is not None and (not before.name or (before.name, before.of) == (each.name, each.of)):
                _grow(step.ttft, before.ttft, each.ttft)
                _grow(step.tpot, before.tpot, each.tpot)
        self._before = {each.replica: each for each in seen}
        self._steps.append(step)
        while self._steps[0].at < at - self._window_s:
            self._steps.popleft()

    def price(self, share: float | None, source: str) -> Price:
        """The price of the window that ends with the newest look."""
        source = f"{source}: {self._name}" if self._name else source
        if self._why_not:
            return Price(of=self._of, batch_share=share, source=source, why_not=self._why_not)
        ttft, tpot = _Step(0).ttft, _Step(0).tpot
        for step in self._steps:
            _add(ttft, step.ttft)
            _add(tpot, step.tpot)
        if not ttft and not tpot:
            return Price(of=self._of, batch_share=share, source=source, why_not=_missing(Price(of=self._of)))
        return price(ttft, tpot, self._of, source, share)


def _flaw(seen: Histograms) -> str:
    if seen.flawed:
        return seen.why_not
    return next((why for each in (seen.ttft, seen.tpot) if each is not None and (why := flaw(each))), "")


def _apart(seen: Sequence[Histograms]) -> str:
    """Why the histograms cannot be added up; empty: they can."""
    for kind in ([each.ttft for each in seen], [each.tpot for each in seen]):
        # One without requests may have its last bucket only.
        if len({frozenset(buckets) for buckets in kind if buckets and len(buckets) > 1}) > 1:
            return "the replicas' histograms have other buckets each"
    return ""


def _grow(into: dict[float, float], before: Buckets | None, after: Buckets | None) -> None:
    if after is None:
        return
    # A histogram that was not there has counted from zero since.
    began_anew = before is None or any(after.get(bound, -1.0) < value for bound, value in before.items())
    _add(
        into, after if began_anew or before is None else {b: v - before.get(b, 0.0) for b, v in after.items()}
    )


def _add(into: dict[float, float], more: Buckets) -> None:
    for bound, value in more.items():
        into[bound] = into.get(bound, 0.0) + value
