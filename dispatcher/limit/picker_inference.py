"""Facts about an endpoint picker that follow from several of its metrics pages together.

**Is its saturation a count, and of what?** The picker's concurrency detector divides the number of unanswered
requests that it sent by endpoints × maxConcurrency. So on every page, with one whole number k,

    saturation × ready endpoints × k = requests in flight

The other detectors compute pressure scores from the KV cache and the queues of the model servers. No such k
fits them. If enough pages with enough different numbers in flight agree exactly on one k, the saturation is a
count and k is maxConcurrency: the capacity of an endpoint, which no series shows. One page that contradicts k
discards it.

A saturation may be the maximum of several detectors, or of requests and tokens. It is a count only while the
detector that counts requests is the largest, and pages of that time agree on a k. If later pages keep showing
more than the count, and no whole number explains it, k is discarded for good.

**Which requests are unknown to the picker?** It counts the requests that it sent itself at once. Its averages
of running and waiting requests include all requests in the model servers, but as of the last flush, up to
FLUSH_S ago. Requests that the servers had beyond the picker's own count at that time came another way: past
the picker, or through its predecessor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

FLUSH_S = 5.0
"""Interval at which the picker rewrites its averages. An average may be of any time that far back."""

FLUSH_LATE_FACTOR = 1.2
"""Maximum time between two flushes, as a multiple of FLUSH_S."""

MAX_USUAL_PER_ENDPOINT = 100.0
"""Default of the picker's maxConcurrency. A larger k is not used as the capacity, because tokens in flight
look like a count of requests while all requests have the same length. The capacity is searched for instead.
"""

PerEndpointSource = Literal["picker", "suggestion", "search"]
"""Source of the requests per endpoint if no setting names them: a k that is or was proven, a k that the pages
so far suggest, or a search because no page shows one."""

MIN_PAGES = 6
MIN_DISTINCT_LOADS = 4
"""Evidence needed for k: the number of pages that must agree (MIN_PAGES), and the number of different loads
in flight among them. The pages must also span more than one flush."""
RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance: saturation and requests in flight are made of whole numbers."""
MAX_ABOVE_COUNT_S = 30.0
"""Time in seconds (in addition to MIN_PAGES pages) for which endpoints that come and go may keep the
saturation above the count."""
SAME_START_S = 5.0
"""Difference up to which two start times are one start. A picker that restarted sooner than that has taught
nothing, because its first averages come later."""
RACE_REQUESTS = 2.0
RACE_SHARE = 0.1
"""Largest difference between the two counters of one page, in requests and as a share. The picker does not
read them at the same time."""


@dataclass(frozen=True, slots=True)
class PickerPage:
    """Values that one replica of the picker shows."""

    saturation: float
    ready_endpoints: float
    in_flight: float
    pressure: float | None = None
    """Result of the utilization detector's formula for the averages of the page. `None` if the page has no
    averages."""


@dataclass(slots=True)
class ConcurrencyInference:
    """Evidence whether a picker's saturation is a count of requests, and of how many per endpoint (k)."""

    k: int | None = None
    """maxConcurrency. `None` if it is not known, or no longer."""
    last_k: int | None = None
    """Last k that was proven, whether or not it was contradicted since."""
    _candidate: int | None = None
    _candidate_since: float = 0.0
    """Time of the first page that showed the candidate."""
    _candidate_pages: int = 0
    _candidate_loads: set[float] = field(default_factory=set)
    _newest_pages: tuple[PickerPage, ...] = ()
    _is_newest_page_off: bool = False
    """True if the newest page was off by more than a race of the counters explains."""
    _was_contradicted: bool = False
    """True if a candidate was contradicted."""
    is_mixed: bool = False
    """True if the saturation was a count on some pages only, so that it can prove nothing any more."""
    _above_since: float | None = None
    """Time of the first page of the current run of pages that show more than the count explains."""
    _pages_above: int = 0
    """Number of pages in the current run of pages that show more than the count explains."""

    @property
    def per_endpoint(self) -> float | None:
        """Number of requests that an endpoint runs at once by the picker's pages. `None` if they do not show
        it."""
        match self.per_endpoint_source:
            case "picker":
                return float(self.last_k or 0)
            case "suggestion":
                return float(self._candidate or 0)
            case "search":
                return None

    @property
    def per_endpoint_source(self) -> PerEndpointSource:
        """Source of `per_endpoint`."""
        if self.last_k is not None and self.last_k <= MAX_USUAL_PER_ENDPOINT:
            return "picker"
        # A pressure score may look like a count on one page, but then not on the next.
        suggested = (
            self.last_k is None
            and not self._was_contradicted
            and self._candidate is not None
            and self._candidate <= MAX_USUAL_PER_ENDPOINT
        )
        return "suggestion" if suggested else "search"

    def mark_not_a_count(self) -> None:
        """Record that the picker shows no saturation, or says that it is no count."""
        self._drop_candidate()

    def forget_picker(self) -> None:
        """Forget everything that was learned, because there is another picker."""
        unknown = ConcurrencyInference()
        for each in fields(self):
            setattr(self, each.name, getattr(unknown, each.name))

    def learn_from_sample(self, pages: Sequence[PickerPage], at: float, *, can_prove: bool = True) -> None:
        """Learn from one sample: a page of each replica at the time `at`. A repeated sample changes nothing.

        `can_prove` says whether the sample may prove a k, or can only contradict one.
        """
        if tuple(pages) == self._newest_pages:
            return
        self._newest_pages = tuple(pages)
        for page in pages:
            if not all(map(math.isfinite, (page.saturation, page.ready_endpoints, page.in_flight))):
                self._drop_candidate()
            elif page.in_flight > 0 or page.saturation > 0:  # an idle page fits every k
                self._learn_from_page(page, at, can_prove=can_prove)

    def _learn_from_page(self, page: PickerPage, at: float, *, can_prove: bool) -> None:
        self._check_above_count(page, at)
        believed = self.k if self.k is not None else self._candidate
        if believed is not None and not self._is_consistent(page, believed):
            self._drop_candidate()
        if self.k is not None or self.is_mixed or not can_prove:
            return
        fitting_k = find_fitting_k(page)
        if fitting_k is None:
            self._was_contradicted = self._was_contradicted or self._candidate is None
            return
        if _is_pressure(page):
            return  # both formulas fit, so the page proves neither
        if self._candidate is None:
            self._candidate, self._candidate_since = fitting_k, at
        if fitting_k == self._candidate:
            self._candidate_pages += 1
            self._candidate_loads.add(page.in_flight)
            # The number of ready endpoints is as of the last flush. While a new pod is missing in it, pages
            # agree on a wrong k, so the agreement has to last longer than a flush.
            has_lasted = at - self._candidate_since > FLUSH_LATE_FACTOR * FLUSH_S
            if (
                has_lasted
                and self._candidate_pages >= MIN_PAGES
                and len(self._candidate_loads) >= MIN_DISTINCT_LOADS
            ):
                self.k = self.last_k = fitting_k

    def _is_consistent(self, page: PickerPage, k: int) -> bool:
        """Return whether the page can come from a detector that counts with this k."""
        counted = page.saturation * page.ready_endpoints * k
        if not math.isfinite(counted) or not math.isclose(
            counted, round(counted), rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE
        ):
            return False
        # One page may be off because its counters are not read at the same time. Two in a row, or a page that
        # fits another k exactly, contradict this k.
        before, self._is_newest_page_off = (
            self._is_newest_page_off,
            abs(counted - page.in_flight) > max(RACE_REQUESTS, RACE_SHARE * page.in_flight),
        )
        return not (self._is_newest_page_off and (before or find_fitting_k(page) is not None))

    def _check_above_count(self, page: PickerPage, at: float) -> None:
        """Discard k if the saturation stays above the count that k explains."""
        if self.last_k is None:
            return
        # The last proven k is checked even after a contradiction, because it still determines `per_endpoint`.
        most = page.in_flight + max(RACE_REQUESTS, RACE_SHARE * page.in_flight)
        if page.saturation * page.ready_endpoints * self.last_k <= most or find_fitting_k(page) is not None:
            self._above_since, self._pages_above = None, 0
            return
        self._pages_above += 1
        if self._above_since is None:
            self._above_since = at
        elif at - self._above_since > MAX_ABOVE_COUNT_S and self._pages_above >= MIN_PAGES:
            self.last_k, self.is_mixed = None, True
            self._drop_candidate()

    def _drop_candidate(self) -> None:
        self._was_contradicted = True
        self.k = self._candidate = None
        self._candidate_pages, self._is_newest_page_off = 0, False
        self._candidate_loads.clear()


@dataclass(slots=True)
class KnownPickers:
    """Replicas of the picker from which the current knowledge was learned."""

    _start_times: dict[str, float | None] = field(default_factory=dict)
    """Start time of each replica's process by its address. `None` if its page does not show the time."""

    def detect_restart(self, start_times: Mapping[str, float | None]) -> bool:
        """Return whether a replica is new or has restarted, so that its configuration may have changed."""
        before = self._start_times
        is_new = bool(before) and any(
            address not in before or _is_other_process(started, before[address])
            for address, started in start_times.items()
        )
        # A replica that could not be scraped for a moment is not a new one when it is back.
        kept = {} if is_new else before
        self._start_times = kept | {
            address: kept.get(address) if started is None else started
            for address, started in start_times.items()
        }
        return is_new


def _is_other_process(started: float | None, before: float | None) -> bool:
    """Return whether these are the start times of two processes.

    The kernel reports the start of one process a little differently after the clock was set.
    """
    return started is not None and before is not None and abs(started - before) > SAME_START_S


def find_fitting_k(page: PickerPage) -> int | None:
    """Return the k that explains this page exactly. `None` if none does."""
    share = page.saturation * page.ready_endpoints
    if not (share > 0 and page.in_flight > 0 and math.isfinite(share)):
        return None
    k = page.in_flight / share
    return round(k) if math.isfinite(k) and k > 0.5 and abs(k - round(k)) <= RELATIVE_TOLERANCE * k else None


def is_same_count(one: float, other: float) -> bool:
    """Return whether two counters of one page may be of the same requests, read at slightly different
    times."""
    return abs(one - other) <= max(RACE_REQUESTS, RACE_SHARE * max(one, other))


def _is_pressure(page: PickerPage) -> bool:
    """Return whether the formula of the utilization detector explains the page as well."""
    return page.pressure is not None and math.isclose(
        page.saturation, page.pressure, rel_tol=RELATIVE_TOLERANCE
    )


@dataclass(slots=True)
class UntrackedRequests:
    """Requests in the model servers that the picker did not send, or does not remember.

    At a flush, the averages A and the picker's own count n are of the same time, and the difference A − n is
    the number of such requests. A flush is recognised by changed averages. It happened between two samples,
    so the larger n of both is used; but n may have been higher in between, for as long as short requests
    take. Of two consecutive flushes the smaller difference therefore counts, because requests that stay
    longer are there at both. (For a picker that shows no averages at first and has just started, one flush
    suffices.) If the averages do not change for longer than a flush takes, a flush without a change must have
    happened: A − n was then at least A minus the largest n since.
    """

    request_count: float = 0.0
    _average: float | None = None
    _previous_difference: float | None = None
    """Difference at the previous flush. `None` if none was seen."""
    _flushed_at: float = 0.0
    _recent_counts: deque[tuple[float, float]] = field(default_factory=deque)
    """Time and n of the samples between which the newest flush may have happened."""

    def learn_from_sample(self, at: float, average: float | None, in_flight: float) -> None:
        """Learn from one sample: the sum of the averages, and the picker's own count at `at`."""
        if not (math.isfinite(in_flight) and (average is None or math.isfinite(average))):
            return  # such a sample is not used for the limit either
        counts = self._recent_counts
        # One sample from before the longest flush interval stays, because the flush may have happened right
        # after it.
        while len(counts) > 1 and counts[1][0] <= at - FLUSH_LATE_FACTOR * FLUSH_S:
            counts.popleft()
        before = counts[-1][1] if counts else in_flight
        counts.append((at, in_flight))
        if average is None:
            self.request_count, self._average, self._previous_difference = 0.0, None, None
            return
        if len(counts) == 1:  # of an unknown flush, perhaps of requests that have ended since
            self._average, self._previous_difference, self._flushed_at = average, 0.0, at
        elif average != self._average:
            newest = max(0.0, average - max(before, in_flight))
            self.request_count = (
                newest if self._previous_difference is None else min(newest, self._previous_difference)
            )
            self._previous_difference, self._flushed_at = newest, at
        elif at - self._flushed_at > FLUSH_LATE_FACTOR * FLUSH_S:  # a flush happened that changed nothing
            self.request_count = max(self.request_count, average - max(count for _, count in counts))
        self._average = average
