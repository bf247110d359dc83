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
SHARE_INTERVAL_S = 5.0
"""Interval over which the batch share is averaged before it is stored."""

Buckets = Mapping[float, float]
"""Number of observations up to each upper bound. The last bound is infinite."""
Scope = Literal["realtime", "all"]


@dataclass(frozen=True, slots=True)
class RealtimeImpact:
    """Latencies of the last minutes, in seconds. `None` if a value is not known."""

    ttft_p50_s: float | None = None
    """Time to first token."""
    ttft_p95_s: float | None = None
    tpot_p50_s: float | None = None
    """Time per output token after the first."""
    tpot_p95_s: float | None = None
    scope: Scope = "all"
    """Requests that the values cover. `all` if the series do not separate batch from realtime requests, or no
    label marks batch requests."""
    request_count: int = 0
    """Number of requests on which the values are based."""
    batch_share: float | None = None
    """Batch requests in flight as a share of the capacity, averaged over the same window."""
    source: str = ""
    """Source of the series."""
    why_not: str = "not read yet"
    """Reason why a value is not known. Empty if all are known."""


@dataclass(frozen=True, slots=True)
class ReplicaHistograms:
    """Histograms of one replica of a source at one time. `None` if the replica has no such series."""

    replica: str
    ttft: Buckets | None = None
    tpot: Buckets | None = None
    scope: Scope = "all"
    series_name: str = ""
    """Name of the series."""
    why_not: str = ""
    """Reason why there is nothing to count. Empty if there is something."""
    is_flawed: bool = False
    """True if a series exists but cannot be read."""


@dataclass(slots=True)
class _GrowthStep:
    """Growth of all histograms between two samples."""

    at: float
    ttft: dict[float, float] = field(default_factory=dict)
    tpot: dict[float, float] = field(default_factory=dict)


def find_flaw(buckets: Buckets) -> str:
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


def compute_quantile(buckets: Buckets, q: float) -> float | None:
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


def compute_impact(
    ttft: Buckets | None, tpot: Buckets | None, scope: Scope, source: str, batch_share: float | None
) -> RealtimeImpact:
    """Return the impact that follows from the growth of the histograms in the window."""
    why = [problem for problem in map(find_flaw, filter(None, (ttft, tpot))) if problem]
    if why:
        return RealtimeImpact(scope=scope, batch_share=batch_share, source=source, why_not=why[0])
    if not ttft and not tpot:
        return RealtimeImpact(scope=scope, batch_share=batch_share, source=source)
    counted = ttft or tpot or {}
    impact = RealtimeImpact(
        compute_quantile(ttft, 0.5) if ttft else None,
        compute_quantile(ttft, 0.95) if ttft else None,
        compute_quantile(tpot, 0.5) if tpot else None,
        compute_quantile(tpot, 0.95) if tpot else None,
        scope=scope,
        request_count=round(counted[math.inf]),
        batch_share=batch_share,
        source=source,
    )
    return replace(impact, why_not=_explain_missing(impact))


def _explain_missing(impact: RealtimeImpact) -> str:
    whose = "realtime request" if impact.scope == "realtime" else "request"
    if impact.request_count == 0:
        return f"no {whose} was answered in the last {WINDOW_S / 60:g} minutes"
    if impact.ttft_p50_s is None:
        return "the time to the first token is not shown"
    if impact.tpot_p50_s is None:
        return "no time per output token: not shown, or no answer was streamed"
    return ""


class BatchShares:
    """Batch share of the pool over the window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._means: deque[tuple[float, float, int]] = deque()

    def add_share(self, at: float, share: float | None) -> None:
        if share is None or not math.isfinite(share):
            return
        if self._means and at - self._means[-1][0] < SHARE_INTERVAL_S:
            since, total, count = self._means.pop()
            self._means.append((since, total + share, count + 1))
        else:
            self._means.append((at, share, 1))
        while self._means[0][0] < at - self._window_s:
            self._means.popleft()

    @property
    def mean_share(self) -> float | None:
        if not self._means:
            return None
        return sum(total / count for _, total, count in self._means) / len(self._means)


class HistogramGrowth:
    """Growth of the histograms of all replicas of one source within the window.

    The first histogram of a replica is only the baseline. A histogram that shrank was reset and counts from
    zero. An invalid histogram counts for nothing, and is reported until it is valid again.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._newest_histograms: dict[str, ReplicaHistograms] = {}
        self._steps: deque[_GrowthStep] = deque()
        self._scope: Scope = "all"
        self._series_name = ""
        self._why_not = "not read yet"

    def add_histograms(self, at: float, replicas: Sequence[ReplicaHistograms]) -> None:
        """Add the current histograms of all replicas. Called every few seconds."""
        self._scope = "realtime" if replicas and all(each.scope == "realtime" for each in replicas) else "all"
        self._series_name = next((each.series_name for each in replicas if each.series_name), "")
        flawed = next(filter(None, map(_find_replica_flaw, replicas)), "") or _find_bucket_mismatch(replicas)
        self._why_not = flawed or next((each.why_not for each in replicas if each.why_not), "")
        if flawed:
            return
        step = _GrowthStep(at)
        for each in replicas:
            before = self._newest_histograms.get(each.replica)
            # The first request creates a series. A series that was missing before has therefore counted from
            # zero since.
            if before is not None and (
                not before.series_name or (before.series_name, before.scope) == (each.series_name, each.scope)
            ):
                _add_growth(step.ttft, before.ttft, each.ttft)
                _add_growth(step.tpot, before.tpot, each.tpot)
        self._newest_histograms = {each.replica: each for each in replicas}
        self._steps.append(step)
        while self._steps[0].at < at - self._window_s:
            self._steps.popleft()

    def compute_impact(self, batch_share: float | None, source: str) -> RealtimeImpact:
        """Return the impact over the window that ends with the newest histograms."""
        source = f"{source}: {self._series_name}" if self._series_name else source
        if self._why_not:
            return RealtimeImpact(
                scope=self._scope, batch_share=batch_share, source=source, why_not=self._why_not
            )
        ttft, tpot = _GrowthStep(0).ttft, _GrowthStep(0).tpot
        for step in self._steps:
            _add_buckets(ttft, step.ttft)
            _add_buckets(tpot, step.tpot)
        if not ttft and not tpot:
            return RealtimeImpact(
                scope=self._scope,
                batch_share=batch_share,
                source=source,
                why_not=_explain_missing(RealtimeImpact(scope=self._scope)),
            )
        return compute_impact(ttft, tpot, self._scope, source, batch_share)


def _find_replica_flaw(histograms: ReplicaHistograms) -> str:
    if histograms.is_flawed:
        return histograms.why_not
    return next(
        (why for each in (histograms.ttft, histograms.tpot) if each is not None and (why := find_flaw(each))),
        "",
    )


def _find_bucket_mismatch(replicas: Sequence[ReplicaHistograms]) -> str:
    """Return why the histograms cannot be added up. Empty if they can."""
    for kind in ([each.ttft for each in replicas], [each.tpot for each in replicas]):
        # A histogram without requests may consist of its last bucket only.
        if len({frozenset(buckets) for buckets in kind if buckets and len(buckets) > 1}) > 1:
            return "the replicas' histograms have other buckets each"
    return ""


def _add_growth(total: dict[float, float], before: Buckets | None, after: Buckets | None) -> None:
    if after is None:
        return
    # A histogram that was missing before has counted from zero since.
    began_anew = before is None or any(after.get(bound, -1.0) < value for bound, value in before.items())
    _add_buckets(
        total,
        after if began_anew or before is None else {b: v - before.get(b, 0.0) for b, v in after.items()},
    )


def _add_buckets(total: dict[float, float], more: Buckets) -> None:
    for bound, value in more.items():
        total[bound] = total.get(bound, 0.0) + value
