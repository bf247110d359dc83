"""Impact of batch requests on interactive users: latency over the last minutes, next to the batch share.

A picker (or a model server) shows cumulative histograms of the time to first token and of the time per output
token after it. Their growth within a window shows the latency of the requests in that window. If the series
separate priorities, only requests with priority 0 or more are counted: realtime requests alone.

Nothing is controlled by these values. Every problem with them is reported in `why_not`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

WINDOW_S = 300.0
"""Length of the window. A quantile of few requests means little, so it spans minutes."""
SHARE_EACH_S = 5.0
"""Interval over which the batch share is averaged before it is stored."""

Buckets = Mapping[float, float]
"""Number of observations up to each upper bound. The last bound is infinite."""
Of = Literal["realtime", "all"]


@dataclass(frozen=True, slots=True)
class Price:
    """Latencies of the last minutes, in seconds. `None` if a value is not known."""

    ttft_p50_s: float | None = None
    """Time to first token."""
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    """Time per output token after the first."""
    tpot_p95_s: float | None = None
    of: Of = "all"
    """Requests that the values cover. `all` if the series do not separate batch from realtime requests, or no
    label marks batch requests."""
    requests: int = 0
    """Number of requests on which the values are based."""
    batch_share: float | None = None
    """Batch requests in flight as a share of the capacity, averaged over the same window."""
    source: str = ""
    """Source of the series."""
    why_not: str = "not read yet"
    """Reason why a value is not known. Empty if all are known."""


@dataclass(frozen=True, slots=True)
class Histograms:
    """Histograms of one replica of a source at one time. `None` if the replica has no such series."""

    replica: str
    ttft: Buckets | None = None
    tpot: Buckets | None = None
    of: Of = "all"
    name: str = ""
    """Name of the series."""
    why_not: str = ""
    """Reason why there is nothing to count. Empty if there is something."""
    flawed: bool = False
    """True if a series exists but cannot be read."""


@dataclass(slots=True)
class _Step:
    """Growth of all histograms between two samples."""

    at: float
    ttft: dict[float, float] = field(default_factory=dict)
    tpot: dict[float, float] = field(default_factory=dict)


def flaw(buckets: Buckets) -> str:
    """Return what is wrong with a histogram. Empty if it is valid."""
    bounds = sorted(buckets)
    if any(math.isnan(bound) for bound in buckets) or not bounds or bounds[-1] != math.inf:
        return "a histogram has no last bucket"
    values = [buckets[bound] for bound in bounds]
    if not all(math.isfinite(value) and value >= 0 for value in values):
        return "a histogram counts what is no number of requests"
    # A sum of rounded increases may decrease by a rounding error.
    if any(later < earlier * (1 - 1e-9) - 1e-6 for earlier, later in itertools.pairwise(values)):
        return "a histogram's buckets contradict each other"
    return ""


def quantile(buckets: Buckets, q: float) -> float | None:
    """Return the value that a share q of the observations does not exceed, computed like Prometheus:
    observations are spread evenly in their bucket, and the last bucket counts as its lower bound. `None`
    without observations."""
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
    """Return the impact that follows from the growth of the histograms in the window."""
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
    """Batch share of the pool over the window."""

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
    """Growth of the histograms of all replicas of one source within the window.

    The first histogram of a replica is only the baseline. A histogram that shrank was reset and counts from
    zero. An invalid histogram counts for nothing, and is reported until it is valid again.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._before: dict[str, Histograms] = {}
        self._steps: deque[_Step] = deque()
        self._of: Of = "all"
        self._name = ""
        self._why_not = "not read yet"

    def saw(self, at: float, seen: Sequence[Histograms]) -> None:
        """Add the current histograms of all replicas. Called every few seconds."""
        self._of = "realtime" if seen and all(each.of == "realtime" for each in seen) else "all"
        self._name = next((each.name for each in seen if each.name), "")
        flawed = next(filter(None, map(_flaw, seen)), "") or _apart(seen)
        self._why_not = flawed or next((each.why_not for each in seen if each.why_not), "")
        if flawed:
            return
        step = _Step(at)
        for each in seen:
            before = self._before.get(each.replica)
            # The first request creates a series. A series that was missing before has therefore counted from
            # zero since.
            if before is not None and (not before.name or (before.name, before.of) == (each.name, each.of)):
                _grow(step.ttft, before.ttft, each.ttft)
                _grow(step.tpot, before.tpot, each.tpot)
        self._before = {each.replica: each for each in seen}
        self._steps.append(step)
        while self._steps[0].at < at - self._window_s:
            self._steps.popleft()

    def price(self, share: float | None, source: str) -> Price:
        """Return the impact over the window that ends with the newest histograms."""
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
    """Return why the histograms cannot be added up. Empty if they can."""
    for kind in ([each.ttft for each in seen], [each.tpot for each in seen]):
        # A histogram without requests may consist of its last bucket only.
        if len({frozenset(buckets) for buckets in kind if buckets and len(buckets) > 1}) > 1:
            return "the replicas' histograms have other buckets each"
    return ""


def _grow(into: dict[float, float], before: Buckets | None, after: Buckets | None) -> None:
    if after is None:
        return
    # A histogram that was missing before has counted from zero since.
    began_anew = before is None or any(after.get(bound, -1.0) < value for bound, value in before.items())
    _add(
        into, after if began_anew or before is None else {b: v - before.get(b, 0.0) for b, v in after.items()}
    )


def _add(into: dict[float, float], more: Buckets) -> None:
    for bound, value in more.items():
        into[bound] = into.get(bound, 0.0) + value
