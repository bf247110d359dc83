"""Estimate of how many requests the pool runs at once, learned from readings.

The estimate is a share of the configured capacity, so that it stays right when endpoints come and go. If the
configuration or the endpoint picker names the capacity, the estimate starts there and never exceeds it. If
neither does, `configured` is a small number of requests per endpoint, and the estimate grows without an upper
bound as far as readings prove room.

Growth. Requests that run while none waits prove room for themselves. The next estimate lets GROWTH times as
many run.

Ceiling. Requests that wait while others run show the capacity itself: it is the number that runs. The
estimate falls to it. Requests that wait in a model server do not count as running, and an earlier, larger
number does not keep the estimate up. A few requests may wait for one endpoint while another is free, so a
known capacity is doubted only from BACKLOG_SHARE on. Observations that show no such backlog are skipped, up
to MAX_CLEAN_OBSERVATIONS of them in a row.

Probe. A ceiling can be wrong or outdated. After a hold time without waiting requests, the estimate exceeds it
by PROBE_STEP. If more requests then run and none waits, the next probe exceeds the ceiling by twice as much,
and after PROBE_SUCCESSES of them the ceiling is dropped. If requests wait, the ceiling stays, and the next
hold time is twice as long.

Refusal. The first reading after a refusal judges it (until then the gate is closed). A reading that shows a
full pool or waiting requests explains the refusal. Otherwise FITTED_AT_REFUSAL of the requests that were
there becomes the ceiling, but no less than what ran recently while none waited, and no less than β of the
estimate: a gateway may refuse a request regardless of free capacity.

Short requests. If requests take up to SHORT_REQUEST_S, the pool is half empty again when the reading after a
refusal is taken, and while it is full some of its requests are always in transit. Readings then never show
the whole capacity. If at most FEW_REFUSED of the requests were refused, and at least PLAUSIBLE_SHARE of the
configured capacity was there, all other requests therefore count as having run recently, so that refusals
that do not depend on the load do not lower the estimate again and again. And the probe of a ceiling that
refusals have set succeeds if enough requests are there and none is refused, even if no reading shows that
they run.

Bounds, with an interval between two readings that show something new (FLUSH_S for averages): a growing
estimate lets at most GROWTH times the true capacity run, or one request more than it. It reaches m times what
runs in ln(m) / ln(GROWTH) + 2 intervals. A ceiling that is too low delays that by its hold time and
PROBE_SUCCESSES intervals.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dispatcher.limit.budget import MAX_IN_FLIGHT, ROUNDING_TOLERANCE
from dispatcher.limit.picker_inference import FLUSH_S

GROWTH = 1.24
"""Factor by which more requests may run than ran while none waited."""
GROWTH_FREQUENT, FREQUENT_S = 1.16, 2.0
"""GROWTH if readings come at least every FREQUENT_S: there are more steps then, and they are smaller."""
GROWTH_REALTIME = 1.1
"""GROWTH for realtime requests: if they fill most of a pool, little room is left."""
GROWTH_CAREFUL, LONG_REQUEST_S = 1.04, 10.0
"""GROWTH_REALTIME if readings come at least every FREQUENT_S, and batch requests take longer than
LONG_REQUEST_S or none has been answered yet. Too many requests would then hold their slots for long."""
PROBE_STEP, PROBE_SUCCESSES = 0.04, 3
"""Share of the ceiling by which the first probe exceeds it (at least one request). Each further probe after a
success exceeds it by twice as much, and after PROBE_SUCCESSES successes the ceiling is dropped."""
HOLD_S, MAX_HOLD_S = 10.0, 120.0
"""Seconds without waiting requests before a ceiling is probed: for a new ceiling, and at most."""
HOLD_READINGS, HOLD_DURATIONS, MAX_HOLD_MULTIPLE = 4.0, 1.0, 24.0
"""First hold time in reading intervals, and in mean durations of a batch request (a failed probe holds slots
for that long); and the maximum hold time in either unit. The largest resulting number of seconds applies."""
MAX_READING_INTERVAL_S = 60.0
CONFIRMATION_TOLERANCE = 0.1
"""Relative difference up to which a new ceiling confirms the previous one."""
CAPACITY_REACHED = 0.97
"""Share of a known capacity that has to run to show that the capacity is right."""
RECENT_S, RECENT_READINGS, MAX_RECENT_S = 30.0, 30.0, 450.0
"""Time, in seconds and in reading intervals, for which a number of requests that ran while none waited bounds
the effect of a refusal."""
MIN_SHARE = 0.001
"""Smallest share. The estimate has to recover from it in reasonable time."""
MIN_WAITING = 0.5
"""Number of requests from which on a request counts as waiting. The mean of several samples need not be
whole."""
NEGLIGIBLE_WAITING_SHARE = 0.01
"""Share of the running requests up to which waiting requests are ignored: they wait for the next step of the
server."""
FITTED_AT_REFUSAL = 0.9
"""Share of the requests present at a refusal that are assumed to have run while the others waited."""
BACKLOG_SHARE, BACKLOG_SHARE_SUM = 0.1, 0.4
"""Waiting requests as a share of the running ones. A known capacity is doubted from BACKLOG_SHARE on, if the
shares of readings in a row add up to BACKLOG_SHARE_SUM."""
SENSITIVE_BACKLOG_SHARE, SENSITIVE_BACKLOG_SHARE_SUM = 0.03, 0.08
"""Lower limits that apply instead if a ceiling is known, a request was refused, or the capacity is not
known."""
SHORT_REQUEST_S = 1.0
"""Mean duration up to which requests are short."""
PLAUSIBLE_SHARE = 0.5
"""Smallest share of the configured capacity at which refusals of few requests may be independent of the load.
A pool that refuses below it is smaller than configured."""
FEW_REFUSED = 0.1
"""Largest share of refused requests with which all others count as having run. It is a share of the requests
that were there, and of the requests that have ended since the previous refusal."""
CEILING_READINGS = 3
"""Number of readings in a row whose largest number of running requests becomes the ceiling."""

MAX_BACKLOG_READINGS = 30
"""Maximum number of readings with a backlog that are kept."""
MAX_CLEAN_OBSERVATIONS = 2
"""Number of observations without a backlog through which the backlogs before them are kept. Where calls are
ended early for waiting realtime requests, a backlog disappears until the limit has opened again."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of running requests and of requests that waited at the same time."""

    running: float
    waiting: float
    certainly_running: float
    """Part of `running` that certainly ran. It is smaller if `waiting` was counted before `running`, because
    requests that came in between may be waiting."""
    is_steady: bool = True
    """True if the counts hardly changed recently, so that they fit together although they were taken at
    different times."""
    is_exact: bool = True
    """True if both were counted at the same time."""
    is_waiting_in_picker: bool = False
    """True if all waiting requests wait in the picker, which counts them together with the requests that it
    sent."""
    is_uneven: bool = False
    """True if requests wait in some endpoints while others have room, or such a distribution is likely. Then
    the waiting requests show nothing about the capacity."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """State of the whole pool in one sample, in requests."""

    sampled_at: float
    """Time at which the sample was taken."""
    configured_capacity: float
    """Capacity that the configuration or the picker names, or else the number with which the search starts.
    """
    is_capacity_known: bool
    """True if `configured_capacity` is the capacity. Otherwise it is only the start of the search."""
    realtime_requests: float
    """Realtime requests in the pool, running or waiting."""
    ended_requests: int = 0
    """Number of batch requests of this process that have ended so far, answered or refused (a counter)."""
    present_requests: float = 0.0
    """Realtime requests in the pool, and batch requests that were sent and not answered."""
    current_counts: PoolCounts | None = None
    """Counts at the time of the sample. `None` if running and waiting requests cannot be separated."""
    average_counts: PoolCounts | None = None
    """Averages of the picker as of its last flush. Other samples show the same averages."""
    waiting_requests: float = 0.0
    """Requests that certainly wait at the time of the sample, at least in the picker."""
    mean_duration_s: float = 0.0
    """Mean duration of batch requests."""


@dataclass(slots=True)
class CapacityEstimate:
    """The estimate and its components. All numbers of requests are shares of the configured capacity."""

    share: float | None = None
    """The estimate. `None` if the capacity is known and nothing else was learned."""
    ceiling: float | None = None
    """Requests that ran while others waited. `None` if no request was seen waiting, or the ceiling was
    disproved."""
    confirmations: int = 0
    """Number of times in a row that a failed probe measured the same ceiling."""
    _is_capacity_known: bool | None = None
    """True if the capacity was known at the last reading. `None` before the first reading."""
    _configured_capacity: float = 0.0
    """Configured capacity at the last reading."""
    _was_set_by_refusals: bool = False
    """True if the ceiling was set by refusals, and so by the number of requests that were there."""
    _is_probing: bool = False
    """True while the estimate exceeds the ceiling."""
    _probe_successes: int = 0
    """Number of probes in a row that succeeded."""
    _readings_above_ceiling: int = 0
    """Number of readings in a row in which more requests than the ceiling ran while none waited."""
    _no_waiting_since: float = float("-inf")
    """Time at which requests waited last, or the ceiling was measured."""
    reading_interval_s: float = 1.0
    """Time between the last two readings that showed something new."""
    _mean_duration_s: float = 0.0
    """Mean duration of batch requests, according to the newest reading."""
    _snapshot_at: float | None = None
    _recent_running: deque[tuple[float, float]] = field(default_factory=deque)
    """Times and numbers of requests that ran recently while none waited."""
    _backlogs: list[tuple[float, float]] = field(default_factory=list)
    """Running requests, and waiting requests as a share of them, for each recent reading with a backlog."""
    _clean_observations: int = 0
    """Number of observations in a row without a backlog."""
    _newest_flush: tuple[float, PoolCounts] | None = None
    """Time at which the averages of the newest flush were seen first, and the averages."""
    _realtime_requests: float | None = None
    """Realtime requests, according to the newest reading."""
    _in_flight_at_refusal: int | None = None
    """Largest number of batch requests in flight at a refusal that no reading has judged yet."""
    _refused_requests: int = 0
    """Number of those requests that were refused themselves."""
    _ended_before: int = 0
    """Value of `PoolSnapshot.ended_requests` when the newest refusal was judged."""

    def record_refusal(self, in_flight: int, *, is_known: bool = False, is_remote: bool = False) -> None:
        """Record a refusal for lack of capacity with `in_flight` batch requests in flight, those refused with
        it included.

        Requests that are refused together are removed from the count one by one, and replicas do not know
        each other's newest count. Of several refusals under one reading, the largest number is therefore the
        right one. `is_known` is True for a refusal at the time of an earlier one. `is_remote` is True for a
        refusal that another replica reported; its request is not among those counted here.
        """
        if (is_known and self._in_flight_at_refusal is None) or self._realtime_requests is None:
            return  # already judged, or older than the first reading of the pool
        self._in_flight_at_refusal = max(self._in_flight_at_refusal or 0, in_flight)
        self._refused_requests += 0 if is_remote else 1

    def learn_from_snapshot(self, snapshot: PoolSnapshot, *, reserve: float, backoff: float) -> None:
        """Learn from a sample that the limiter applied, taken after the newest refusal.

        `reserve` is the share of the pool that batch requests never take. `backoff` is β.
        """
        self._update_configured(snapshot)
        realtime_before, self._realtime_requests = self._realtime_requests, snapshot.realtime_requests
        in_flight, self._in_flight_at_refusal = self._in_flight_at_refusal, None
        was_refused, now, flush = (
            in_flight is not None,
            snapshot.current_counts,
            self._take_new_averages(snapshot),
        )
        if now is None and flush is None and snapshot.average_counts is not None and not was_refused:
            return  # an earlier sample showed these averages
        refused_requests, self._refused_requests = self._refused_requests, 0
        if self._snapshot_at is not None:
            self.reading_interval_s = min(
                max(snapshot.sampled_at - self._snapshot_at, 0.0), MAX_READING_INTERVAL_S
            )
        self._snapshot_at, self._mean_duration_s = (
            snapshot.sampled_at,
            min(snapshot.mean_duration_s, MAX_READING_INTERVAL_S),
        )
        max_running = max((each.certainly_running for each in (now, flush) if each is not None), default=0.0)
        # The configured capacity runs, so it is right. Waiting requests and refusals are explained by a full
        # pool.
        if snapshot.is_capacity_known and max_running >= CAPACITY_REACHED * snapshot.configured_capacity:
            self._record_running(snapshot.sampled_at, max_running / snapshot.configured_capacity)
            self._backlogs.clear()
            self._reset_estimate()
            return
        # Counts of different times scatter, so they prove a backlog only if there are no averages.
        is_consistent = now is not None and (
            now.is_exact or now.is_waiting_in_picker or snapshot.average_counts is None
        )
        witness = now if is_consistent else flush
        if witness is not None and self._record_backlog(witness, snapshot, was_refused=was_refused):
            return
        if self._record_waiting(snapshot, now or flush):
            return
        proven = self._compute_proven_share(snapshot, now, flush)
        if proven is not None:
            self._record_running(snapshot.sampled_at, proven)
        if in_flight is not None:
            # Nothing explains the refusal: the pool ran less than was there. The larger number of realtime
            # requests counts, because some may have ended between the refusal and this reading.
            fitted = (
                max(0, in_flight - refused_requests) + max(realtime_before or 0.0, snapshot.realtime_requests)
            ) / snapshot.configured_capacity
            ended = snapshot.ended_requests - self._ended_before
            self._ended_before = snapshot.ended_requests
            is_few = refused_requests <= FEW_REFUSED * min(in_flight, ended)
            if self._has_short_requests and is_few and fitted >= PLAUSIBLE_SHARE:
                # The largest number is kept, because no reading can show more than the ceiling.
                self._record_running(snapshot.sampled_at, max(fitted, self._max_recent_running))
            share = 1.0 if self.share is None else self.share
            self._no_waiting_since = snapshot.sampled_at
            self._set_ceiling(
                min(share, max(FITTED_AT_REFUSAL * fitted, self._max_recent_running, backoff * share))
            )
            self._was_set_by_refusals = self.ceiling is not None
        elif self.share is not None:
            if self._counts_present_requests and proven is not None:
                present = snapshot.present_requests
                witness = PoolCounts(present, 0.0, present)
                proven = max(proven, present / snapshot.configured_capacity)
            self._grow_estimate(snapshot, proven, witness, reserve)

    @property
    def _has_short_requests(self) -> bool:
        return 0.0 < self._mean_duration_s <= SHORT_REQUEST_S

    @property
    def _counts_present_requests(self) -> bool:
        """True if the ceiling is a number of requests that were there, and readings cannot show as many
        running."""
        return self._was_set_by_refusals and self._has_short_requests

    @property
    def hold_s(self) -> float:
        """Seconds without waiting requests before the ceiling is probed."""
        first = max(HOLD_S, HOLD_READINGS * self.reading_interval_s, HOLD_DURATIONS * self._mean_duration_s)
        most = max(
            MAX_HOLD_S,
            MAX_HOLD_MULTIPLE * self.reading_interval_s,
            MAX_HOLD_MULTIPLE * self._mean_duration_s,
        )
        return min(first * 2.0 ** min(max(0, self.confirmations - 1), 16), most)

    def _update_configured(self, snapshot: PoolSnapshot) -> None:
        """Apply what the sample says about the configured capacity."""
        if self._is_capacity_known is not snapshot.is_capacity_known:
            scale = self._configured_capacity / snapshot.configured_capacity
            ceiling = None if self.ceiling is None else self.ceiling * scale
            self._reset_estimate()
            if not snapshot.is_capacity_known:  # at the start, or when the capacity is no longer named
                self.share = 1.0
            elif ceiling is not None and ceiling < CAPACITY_REACHED:
                self.share = self.ceiling = ceiling
            # The history is kept as shares, so it has to be rescaled to the new configured capacity.
            self._recent_running = deque((at, ran * scale) for at, ran in self._recent_running)
            self._backlogs.clear()
        self._is_capacity_known, self._configured_capacity = (
            snapshot.is_capacity_known,
            snapshot.configured_capacity,
        )

    def _take_new_averages(self, snapshot: PoolSnapshot) -> PoolCounts | None:
        """Return the averages of a flush that no earlier sample has shown. All samples of one flush are one
        observation."""
        if snapshot.average_counts is None:
            return None
        last = self._newest_flush
        if (
            last is not None
            and (snapshot.average_counts.running, snapshot.average_counts.waiting)
            == (last[1].running, last[1].waiting)
            and snapshot.sampled_at - last[0] < FLUSH_S
        ):
            return None
        self._newest_flush = snapshot.sampled_at, snapshot.average_counts
        return snapshot.average_counts

    def _record_backlog(self, count: PoolCounts, snapshot: PoolSnapshot, *, was_refused: bool) -> bool:
        """Return whether enough requests wait to show what the pool runs at once. If they did so often
        enough, that number becomes the ceiling."""
        is_sensitive = was_refused or self.share is not None or not snapshot.is_capacity_known
        least, enough = (
            (SENSITIVE_BACKLOG_SHARE, SENSITIVE_BACKLOG_SHARE_SUM)
            if is_sensitive
            else (BACKLOG_SHARE, BACKLOG_SHARE_SUM)
        )
        waiting_share = count.waiting / count.running if count.running > 0 else 0.0
        is_evidence = count.is_steady and not count.is_uneven
        if count.waiting < 2 * MIN_WAITING or waiting_share < least or not is_evidence:
            self._clean_observations += 1
            if self._clean_observations > MAX_CLEAN_OBSERVATIONS:
                self._backlogs.clear()
            return False
        self._clean_observations = 0
        self._no_waiting_since = snapshot.sampled_at
        self._backlogs = [
            *self._backlogs[1 - MAX_BACKLOG_READINGS :],
            (count.running / snapshot.configured_capacity, waiting_share),
        ]
        # A burst that has just arrived can look like a backlog in one sample. The averages of a flush are one
        # sample as well: means over the endpoints, and not over time. The queues of now are another one.
        now = snapshot.current_counts
        still_waits = (
            is_sensitive
            and now is not None
            and now is not count
            and not now.is_uneven
            and now.waiting >= max(2 * MIN_WAITING, least * now.running)
        )
        if sum(waiting_share for _, waiting_share in self._backlogs) >= enough and (
            was_refused or still_waits or len(self._backlogs) > 1
        ):
            self._set_ceiling(max(ran for ran, _ in self._backlogs[-CEILING_READINGS:]))
            self._was_set_by_refusals = False
        return True

    def _record_waiting(self, snapshot: PoolSnapshot, count: PoolCounts | None) -> bool:
        """Return whether any request waits now. A few waiting requests may not show the capacity, but they
        stop the growth."""
        running, waiting = (0.0, 0.0) if count is None else (count.running, count.waiting)
        if max(waiting, snapshot.waiting_requests) < max(MIN_WAITING, NEGLIGIBLE_WAITING_SHARE * running):
            return False
        self._no_waiting_since = snapshot.sampled_at
        # The probe failed: the ceiling is confirmed.
        is_uneven = count is not None and count.is_uneven
        if self._is_probing and self.ceiling is not None and not is_uneven:
            self._set_ceiling(self.ceiling)
        # An exact count above the estimate is a fact even while requests wait, so the estimate follows it.
        ran = running / snapshot.configured_capacity
        if count is not None and count.is_exact and self.share is not None and ran > self.share:
            self.share = ran
            self.ceiling = None if self.ceiling is None else ran
        return True

    def _compute_proven_share(self, snapshot: PoolSnapshot, *counts: PoolCounts | None) -> float | None:
        """Return the largest share that the counts prove to have run. `None` without counts."""
        shown = [each for each in counts if each is not None]
        # After a reading with waiting requests, the picker may just have sent requests that it held back to
        # model servers whose queues it has not read again. Only counts of the same time prove anything then.
        waited = snapshot.sampled_at <= self._no_waiting_since + self.reading_interval_s
        proofs = [each.certainly_running for each in shown if each.is_exact or not waited]
        return max(proofs, default=0.0) / snapshot.configured_capacity if shown else None

    def _set_ceiling(self, share: float) -> None:
        """Set the ceiling to the number that the pool was seen to run at once."""
        share = max(MIN_SHARE, share)
        if self._is_capacity_known and share >= 1.0:
            self._reset_estimate()
            return
        same = self.ceiling is not None and abs(share - self.ceiling) <= CONFIRMATION_TOLERANCE * self.ceiling
        if not same:
            self.confirmations = 1
        elif self._is_probing:
            self.confirmations += 1
        self.share = self.ceiling = share
        self._is_probing, self._probe_successes, self._readings_above_ceiling = False, 0, 0

    def _grow_estimate(
        self, snapshot: PoolSnapshot, proven: float | None, witness: PoolCounts | None, reserve: float
    ) -> None:
        """Let the estimate grow as far as running requests prove room.

        `witness` is the count that may disprove a ceiling. If its numbers are of different times, it has to
        contradict the ceiling in two readings in a row.
        """
        one = 1.0 / snapshot.configured_capacity
        share = 1.0 if self.share is None else self.share
        if self.ceiling is not None:
            proof = self._compute_proven_share(snapshot, witness)
            if proof is not None:
                self._readings_above_ceiling = (
                    self._readings_above_ceiling + 1 if proof >= self.ceiling + MIN_WAITING * one else 0
                )
            if (
                witness is None
                or proof is None
                or self._readings_above_ceiling < (1 if witness.is_exact else 2)
            ):
                self._hold_or_probe(snapshot, proven, self.ceiling, reserve)
                return
            proven = proof
            self._probe_successes, self._readings_above_ceiling, self.confirmations = (
                self._probe_successes + 1,
                0,
                0,
            )
            if self._probe_successes < PROBE_SUCCESSES:
                self.ceiling, self._is_probing = proven, True
                self._set_share(
                    snapshot,
                    max(
                        share,
                        _compute_probe_share(
                            proven, PROBE_STEP * 2.0**self._probe_successes, snapshot, reserve
                        ),
                    ),
                )
                return
            self.ceiling, self._is_probing, self._probe_successes = None, False, 0
        if proven is not None and proven > 0:
            # Batch and realtime requests grow at different rates, so they are separated first.
            realtime = min(proven, snapshot.realtime_requests * one)
            growth, realtime_growth = GROWTH, GROWTH_REALTIME
            if self.reading_interval_s <= FREQUENT_S:
                growth = GROWTH_FREQUENT
                realtime_growth = (
                    GROWTH_REALTIME if 0.0 < self._mean_duration_s < LONG_REQUEST_S else GROWTH_CAREFUL
                )
            may_run = growth * (proven - realtime) + realtime_growth * realtime
            self._set_share(snapshot, max(share, max(may_run, proven + one) / (1.0 - reserve)))

    def _hold_or_probe(
        self, snapshot: PoolSnapshot, proven: float | None, ceiling: float, reserve: float
    ) -> None:
        """Keep the ceiling, which nothing disproves, or start or continue a probe."""
        if self._is_probing and self.share is not None:
            # Endpoints that came or went, or a changed reserve, may require more than the probe started with.
            share = max(
                self.share,
                _compute_probe_share(ceiling, PROBE_STEP * 2.0**self._probe_successes, snapshot, reserve),
            )
            if proven is None:
                # No reading can show what runs, so the absence of waiting requests has to do as proof.
                share *= GROWTH
            elif self._counts_present_requests and proven >= FITTED_AT_REFUSAL * ceiling:
                # The readings may be too imprecise to raise the limit by one step, so take further ones.
                share *= 1.0 + PROBE_STEP
            self._set_share(snapshot, share)
        elif snapshot.sampled_at - self._no_waiting_since >= self.hold_s:
            self._is_probing = True
            self._set_share(snapshot, _compute_probe_share(ceiling, PROBE_STEP, snapshot, reserve))

    def _set_share(self, snapshot: PoolSnapshot, share: float) -> None:
        self.share = min(max(share, MIN_SHARE), max(1.0, MAX_IN_FLIGHT / snapshot.configured_capacity))
        if snapshot.is_capacity_known and self.share >= 1.0:
            self._reset_estimate()

    def _reset_estimate(self) -> None:
        """Discard everything that was learned."""
        self.share = self.ceiling = None
        self._was_set_by_refusals = False
        self._is_probing, self._probe_successes, self._readings_above_ceiling, self.confirmations = (
            False,
            0,
            0,
            0,
        )

    def _record_running(self, at: float, ran: float) -> None:
        self._recent_running.append((at, ran))
        while self._recent_running[0][0] < at - min(
            max(RECENT_S, RECENT_READINGS * self.reading_interval_s), MAX_RECENT_S
        ):
            self._recent_running.popleft()

    @property
    def _max_recent_running(self) -> float:
        return max((ran for _, ran in self._recent_running), default=0.0)


def _compute_probe_share(ceiling: float, step: float, snapshot: PoolSnapshot, reserve: float) -> float:
    """Return the estimate that exceeds the ceiling by a share of `step`, and by at least one whole
    request."""
    requests = ceiling * snapshot.configured_capacity
    return (
        max(requests * (1.0 + step), math.ceil(requests - ROUNDING_TOLERANCE) + 1)
        / snapshot.configured_capacity
        / (1.0 - reserve)
    )
