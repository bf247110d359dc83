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
known capacity is doubted only from BACKLOG_SHARE on.

Probe. A ceiling can be wrong or outdated. After a hold time without waiting requests, the estimate exceeds it
by PROBE_STEP. If more requests then run and none waits, the next probe exceeds the ceiling by twice as much,
and after PROBE_SUCCESSES of them the ceiling is dropped. If requests wait, the ceiling stays, and the next
hold time is twice as long.

Refusal. The first reading after a refusal judges it (until then the gate is closed). A reading that shows a
full pool or waiting requests explains the refusal. Otherwise FITTED_AT_REFUSAL of the requests that were
there becomes the ceiling, but no less than what ran recently while none waited, and no less than β of the
estimate: a gateway may refuse a request regardless of free capacity.

Bounds, with an interval between two readings that show something new (FLUSH_S for averages): a growing
estimate lets at most GROWTH times the true capacity run, or one request more than it. It reaches m times what
runs in ln(m) / ln(GROWTH) + 2 intervals. A ceiling that is too low delays that by its hold time and
PROBE_SUCCESSES intervals.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dispatcher.core.limit.budget import MOST_IN_FLIGHT, SLACK
from dispatcher.core.limit.picker_inference import FLUSH_S

GROWTH = 1.24
"""Factor by which more requests may run than ran while none waited."""
GROWTH_LIVE, LIVE_S = 1.16, 2.0
"""GROWTH if readings come at least every FREQUENT_S: there are more steps then, and they are smaller."""
GROWTH_REALTIME = 1.1
"""GROWTH for realtime requests: if they fill most of a pool, little room is left."""
GROWTH_CAREFUL, LONG_S = 1.04, 10.0
"""GROWTH_REALTIME if readings come at least every FREQUENT_S, and batch requests take longer than
LONG_REQUEST_S or none has been answered yet. Too many requests would then hold their slots for long."""
PROBE, CLIMBS = 0.04, 3
"""Share of the ceiling by which the first probe exceeds it (at least one request). Each further probe after a
success exceeds it by twice as much, and after PROBE_SUCCESSES successes the ceiling is dropped."""
HOLD_S, HOLD_MOST_S = 10.0, 120.0
"""Seconds without waiting requests before a ceiling is probed: for a new ceiling, and at most."""
HOLD_BEATS, HOLD_TOOK, HOLD_MOST = 4.0, 1.0, 24.0
"""First hold time in reading intervals, and in mean durations of a batch request (a failed probe holds slots
for that long); and the maximum hold time in either unit. The largest resulting number of seconds applies."""
BEAT_MOST_S = 60.0
SAME = 0.1
"""Relative difference up to which a new ceiling confirms the previous one."""
RIGHT = 0.97
"""Share of a known capacity that has to run to show that the capacity is right."""
LATELY_S, LATELY_BEATS, LATELY_MOST_S = 30.0, 30.0, 450.0
"""Time, in seconds and in reading intervals, for which a number of requests that ran while none waited bounds
the effect of a refusal."""
LEAST = 0.001
"""Smallest share. The estimate has to recover from it in reasonable time."""
ONE_WAITS = 0.5
"""Number of requests from which on a request counts as waiting. The mean of several samples need not be
whole."""
FEW = 0.01
"""Share of the running requests up to which waiting requests are ignored: they wait for the next step of the
server."""
FITTED = 0.9
"""Share of the requests present at a refusal that are assumed to have run while the others waited."""
CROWD, CROWD_TOGETHER = 0.1, 0.4
"""Waiting requests as a share of the running ones. A known capacity is doubted from BACKLOG_SHARE on, if the
shares of readings in a row add up to BACKLOG_SHARE_SUM."""
AGAIN, AGAIN_TOGETHER = 0.03, 0.08
"""Lower limits that apply instead if a ceiling is known, a request was refused, or the capacity is not
known."""
ROW = 3
"""Number of readings in a row whose largest number of running requests becomes the ceiling."""

LONGEST_ROW = 30
"""Maximum number of readings with a backlog that are kept."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Numbers of running requests and of requests that waited at the same time."""

    running: float
    waiting: float
    surely_running: float
    """Part of `running` that certainly ran. It is smaller if `waiting` was counted before `running`, because
    requests that came in between may be waiting."""
    steady: bool = True
    """True if the counts hardly changed recently, so that they fit together although they were taken at
    different times."""
    exact: bool = True
    """True if both were counted at the same time."""
    in_picker: bool = False
    """True if all waiting requests wait in the picker, which counts them together with the requests that it
    sent."""


@dataclass(frozen=True, slots=True)
class Sight:
    """State of the whole pool in one sample, in requests."""

    at: float
    """Time at which the sample was taken."""
    configured: float
    """Capacity that the configuration or the picker names, or else the number with which the search starts.
    """
    known: bool
    """True if `configured_capacity` is the capacity. Otherwise it is only the start of the search."""
    realtime: float
    """Realtime requests in the pool, running or waiting."""
    now: PoolCounts | None = None
    """Counts at the time of the sample. `None` if running and waiting requests cannot be separated."""
    averages: PoolCounts | None = None
    """Averages of the picker as of its last flush. Other samples show the same averages."""
    waiting: float = 0.0
    """Requests that certainly wait at the time of the sample, at least in the picker."""
    took_s: float = 0.0
    """Mean duration of batch requests."""


@dataclass(slots=True)
class Capacity:
    """The estimate and its components. All numbers of requests are shares of the configured capacity."""

    share: float | None = None
    """The estimate. `None` if the capacity is known and nothing else was learned."""
    ceiling: float | None = None
    """Requests that ran while others waited. `None` if no request was seen waiting, or the ceiling was
    disproved."""
    confirmed: int = 0
    """Number of times in a row that a failed probe measured the same ceiling."""
    _known: bool | None = None
    """True if the capacity was known at the last reading. `None` before the first reading."""
    _configured: float = 0.0
    """Configured capacity at the last reading."""
    _probing: bool = False
    """True while the estimate exceeds the ceiling."""
    _climbs: int = 0
    """Number of probes in a row that succeeded."""
    _above: int = 0
    """Number of readings in a row in which more requests than the ceiling ran while none waited."""
    _quiet_since: float = float("-inf")
    """Time at which requests waited last, or the ceiling was measured."""
    _beat_s: float = 1.0
    """Time between the last two readings that showed something new."""
    _took_s: float = 0.0
    """Mean duration of batch requests, according to the newest reading."""
    _seen_at: float | None = None
    _ran: deque[tuple[float, float]] = field(default_factory=deque)
    """Times and numbers of requests that ran recently while none waited."""
    _crowds: list[tuple[float, float]] = field(default_factory=list)
    """Running requests, and waiting requests as a share of them, for each reading in a row with a backlog."""
    _flush: tuple[float, PoolCounts] | None = None
    """Time at which the averages of the newest flush were seen first, and the averages."""
    _realtime: float | None = None
    """Realtime requests, according to the newest reading."""
    _ours: int | None = None
    """Largest number of batch requests in flight at a refusal that no reading has judged yet."""
    _turned_away: int = 0
    """Number of those requests that were refused themselves."""

    def refused(self, ours: int, *, known: bool = False, heard: bool = False) -> None:
        """Record a refusal for lack of capacity with `in_flight` batch requests in flight, those refused with
        it included.

        Requests that are refused together are removed from the count one by one, and replicas do not know
        each other's newest count. Of several refusals under one reading, the largest number is therefore the
        right one. `is_known` is True for a refusal at the time of an earlier one. `is_remote` is True for a
        refusal that another replica reported; its request is not among those counted here.
        """
        if (known and self._ours is None) or self._realtime is None:
            return  # already judged, or older than the first reading of the pool
        self._ours = max(self._ours or 0, ours)
        self._turned_away += 0 if heard else 1

    def reading(self, sight: Sight, *, reserve: float, backoff: float) -> None:
        """Learn from a sample that the limiter applied, taken after the newest refusal.

        `reserve` is the share of the pool that batch requests never take. `backoff` is β.
        """
        self._follow(sight)
        before, self._realtime = self._realtime, sight.realtime
        ours, self._ours = self._ours, None
        refused, now, flush = ours is not None, sight.now, self._new_averages(sight)
        if now is None and flush is None and sight.averages is not None and not refused:
            return  # an earlier sample showed these averages
        turned_away, self._turned_away = self._turned_away, 0
        if self._seen_at is not None:
            self._beat_s = min(max(sight.at - self._seen_at, 0.0), BEAT_MOST_S)
        self._seen_at, self._took_s = sight.at, min(sight.took_s, BEAT_MOST_S)
        most = max((each.surely_running for each in (now, flush) if each is not None), default=0.0)
        # The configured capacity runs, so it is right. Waiting requests and refusals are explained by a full
        # pool.
        if sight.known and most >= RIGHT * sight.configured:
            self._remember(sight.at, most / sight.configured)
            self._crowds.clear()
            self._forget()
            return
        # Counts of different times scatter, so they prove a backlog only if there are no averages.
        fits = now is not None and (now.exact or now.in_picker or sight.averages is None)
        witness = now if fits else flush
        if witness is not None and self._shows_crowd(witness, sight, refused=refused):
            return
        if self._somebody_waits(sight, now or flush):
            return
        surely = self._surely(sight, now, flush)
        if surely is not None:
            self._remember(sight.at, surely)
        if ours is not None:
            # Nothing explains the refusal: the pool ran less than was there. The larger number of realtime
            # requests counts, because some may have ended between the refusal and this reading.
            fitted = FITTED * (max(0, ours - turned_away) + max(before or 0.0, sight.realtime))
            share = 1.0 if self.share is None else self.share
            self._quiet_since = sight.at
            self._measured(min(share, max(fitted / sight.configured, self._lately, backoff * share)))
        elif self.share is not None:
            self._nobody_waits(sight, surely, witness, reserve)

    @property
    def hold_s(self) -> float:
        """Seconds without waiting requests before the ceiling is probed."""
        first = max(HOLD_S, HOLD_BEATS * self._beat_s, HOLD_TOOK * self._took_s)
        most = max(HOLD_MOST_S, HOLD_MOST * self._beat_s, HOLD_MOST * self._took_s)
        return min(first * 2.0 ** min(max(0, self.confirmed - 1), 16), most)

    def _follow(self, sight: Sight) -> None:
        """Apply what the sample says about the configured capacity."""
        if self._known is not sight.known:
            scale = self._configured / sight.configured
            ceiling = None if self.ceiling is None else self.ceiling * scale
            self._forget()
            if not sight.known:  # at the start, or when the capacity is no longer named
                self.share = 1.0
            elif ceiling is not None and ceiling < RIGHT:
                self.share = self.ceiling = ceiling
            # The history is kept as shares, so it has to be rescaled to the new configured capacity.
            self._ran = deque((at, ran * scale) for at, ran in self._ran)
            self._crowds.clear()
        self._known, self._configured = sight.known, sight.configured

    def _new_averages(self, sight: Sight) -> PoolCounts | None:
        """Return the averages of a flush that no earlier sample has shown. All samples of one flush are one
        observation."""
        if sight.averages is None:
            return None
        last = self._flush
        if last is not None and sight.averages == last[1] and sight.at - last[0] < FLUSH_S:
            return None
        self._flush = sight.at, sight.averages
        return sight.averages

    def _shows_crowd(self, count: PoolCounts, sight: Sight, *, refused: bool) -> bool:
        """Return whether enough requests wait to show what the pool runs at once. If they did so often
        enough, that number becomes the ceiling."""
        sure = refused or self.share is not None or not sight.known
        least, enough = (AGAIN, AGAIN_TOGETHER) if sure else (CROWD, CROWD_TOGETHER)
        crowd = count.waiting / count.running if count.running > 0 else 0.0
        if count.waiting < 2 * ONE_WAITS or crowd < least or not count.steady:
            self._crowds.clear()
            return False
        self._quiet_since = sight.at
        self._crowds = [*self._crowds[1 - LONGEST_ROW :], (count.running / sight.configured, crowd)]
        # A burst that has just arrived can look like a backlog in one sample, but not in the averages.
        alone = refused or (sure and count is sight.averages)
        if sum(crowd for _, crowd in self._crowds) >= enough and (alone or len(self._crowds) > 1):
            self._measured(max(ran for ran, _ in self._crowds[-ROW:]))
        return True

    def _somebody_waits(self, sight: Sight, count: PoolCounts | None) -> bool:
        """Return whether any request waits now. A few waiting requests may not show the capacity, but they
        stop the growth."""
        running, waiting = (0.0, 0.0) if count is None else (count.running, count.waiting)
        if max(waiting, sight.waiting) < max(ONE_WAITS, FEW * running):
            return False
        self._quiet_since = sight.at
        # The probe failed: the ceiling is confirmed.
        if self._probing and self.ceiling is not None:
            self._measured(self.ceiling)
        # An exact count above the estimate is a fact even while requests wait, so the estimate follows it.
        ran = running / sight.configured
        if count is not None and count.exact and self.share is not None and ran > self.share:
            self.share = ran
            self.ceiling = None if self.ceiling is None else ran
        return True

    def _surely(self, sight: Sight, *counts: PoolCounts | None) -> float | None:
        """Return the largest share that the counts prove to have run. `None` without counts."""
        shown = [each for each in counts if each is not None]
        # After a reading with waiting requests, the picker may just have sent requests that it held back to
        # model servers whose queues it has not read again. Only counts of the same time prove anything then.
        waited = sight.at <= self._quiet_since + self._beat_s
        proofs = [each.surely_running for each in shown if each.exact or not waited]
        return max(proofs, default=0.0) / sight.configured if shown else None

    def _measured(self, share: float) -> None:
        """Set the ceiling to the number that the pool was seen to run at once."""
        share = max(LEAST, share)
        if self._known and share >= 1.0:
            self._forget()
            return
        same = self.ceiling is not None and abs(share - self.ceiling) <= SAME * self.ceiling
        if not same:
            self.confirmed = 1
        elif self._probing:
            self.confirmed += 1
        self.share = self.ceiling = share
        self._probing, self._climbs, self._above = False, 0, 0

    def _nobody_waits(
        self, sight: Sight, surely: float | None, witness: PoolCounts | None, reserve: float
    ) -> None:
        """Let the estimate grow as far as running requests prove room.

        `witness` is the count that may disprove a ceiling. If its numbers are of different times, it has to
        contradict the ceiling in two readings in a row.
        """
        one = 1.0 / sight.configured
        share = 1.0 if self.share is None else self.share
        if self.ceiling is not None:
            proof = self._surely(sight, witness)
            if proof is not None:
                self._above = self._above + 1 if proof >= self.ceiling + ONE_WAITS * one else 0
            if witness is None or proof is None or self._above < (1 if witness.exact else 2):
                self._hold_or_probe(sight, surely, self.ceiling, reserve)
                return
            surely = proof
            self._climbs, self._above, self.confirmed = self._climbs + 1, 0, 0
            if self._climbs < CLIMBS:
                self.ceiling, self._probing = surely, True
                self._take(sight, max(share, _probed(surely, PROBE * 2.0**self._climbs, sight, reserve)))
                return
            self.ceiling, self._probing, self._climbs = None, False, 0
        if surely is not None and surely > 0:
            # Batch and realtime requests grow at different rates, so they are separated first.
            realtime = min(surely, sight.realtime * one)
            growth, others = GROWTH, GROWTH_REALTIME
            if self._beat_s <= LIVE_S:
                growth = GROWTH_LIVE
                others = GROWTH_REALTIME if 0.0 < self._took_s < LONG_S else GROWTH_CAREFUL
            may_run = growth * (surely - realtime) + others * realtime
            self._take(sight, max(share, max(may_run, surely + one) / (1.0 - reserve)))

    def _hold_or_probe(self, sight: Sight, surely: float | None, ceiling: float, reserve: float) -> None:
        """Keep the ceiling, which nothing disproves, or start or continue a probe."""
        if self._probing and self.share is not None:
            # Endpoints that came or went, or a changed reserve, may require more than the probe started with.
            share = max(self.share, _probed(ceiling, PROBE * 2.0**self._climbs, sight, reserve))
            # If no reading can show what runs, the absence of waiting requests has to do as proof.
            self._take(sight, share * GROWTH if surely is None else share)
        elif sight.at - self._quiet_since >= self.hold_s:
            self._probing = True
            self._take(sight, _probed(ceiling, PROBE, sight, reserve))

    def _take(self, sight: Sight, share: float) -> None:
        self.share = min(max(share, LEAST), max(1.0, MOST_IN_FLIGHT / sight.configured))
        if sight.known and self.share >= 1.0:
            self._forget()

    def _forget(self) -> None:
        """Discard everything that was learned."""
        self.share = self.ceiling = None
        self._probing, self._climbs, self._above, self.confirmed = False, 0, 0, 0

    def _remember(self, at: float, ran: float) -> None:
        self._ran.append((at, ran))
        while self._ran[0][0] < at - min(max(LATELY_S, LATELY_BEATS * self._beat_s), LATELY_MOST_S):
            self._ran.popleft()

    @property
    def _lately(self) -> float:
        return max((ran for _, ran in self._ran), default=0.0)


def _probed(ceiling: float, by: float, sight: Sight, reserve: float) -> float:
    """Return the estimate that exceeds the ceiling by a share of `step`, and by at least one whole
    request."""
    requests = ceiling * sight.configured
    return max(requests * (1.0 + by), math.ceil(requests - SLACK) + 1) / sight.configured / (1.0 - reserve)
