"""The limit of each signal, and the readings and leases that move it.

A reading with headroom H contains between `lo` and `hi` batch requests. Because these are added back, the
reading proves that the limit is between lo + H and hi + H. The limit moves only as far as that proves:

    L = clamp(L_before, lo + H, hi + H),   L ≤ floor(max_SYS × (1 − B)), max_in_flight

max_SYS is the configured capacity, or the share of it that was learned to fit (`CapacityEstimate`). Each
signal has its own limit (`SignalLimit`), and the smallest one applies. A lease that ends without an answer
lowers it by one until a reading is taken after that (`LeaseLosses`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from dispatcher.common.revision import Revisioned
from dispatcher.limit.budget import (
    MAX_PLAUSIBLE_REQUESTS,
    MAX_SERVER_METRICS_AGE_S,
    Budget,
    KvUse,
    Policy,
    Reading,
    Reason,
    Signal,
)
from dispatcher.limit.capacity import MIN_WAITING, CapacityEstimate, PoolCounts, PoolSnapshot
from dispatcher.limit.lease_losses import LeaseLosses
from dispatcher.limit.load_ledger import LoadBounds, LoadLedger
from dispatcher.limit.signal_limit import SignalLimit
from dispatcher.limit.small_capacity import SmallCapacityCheck
from dispatcher.limit.transit_time import MAX_LOOP_DELAY_S, MAX_TRANSIT_S, TransitTime
from dispatcher.requests.outcomes.refusals import REMOTE_CLOCK_ERROR_S

MAX_WINDOW_S = 10.0
"""Maximum length of a reading's window. Averages are flushed every 5 s."""
STEADY_SHARE = 0.05
"""Share by which counts may change between two times and still fit together."""
REALTIME_RECENT_S = 3.0
"""Maximum age of a sample that still shows which realtime requests are not new."""
CALLS_COUNTED_S = 15.0
"""Time for which readings must show fewer than our units before they are taken to count calls. The picker's
averages show after two flushes what they count beyond calls."""
MAX_UNSEEN_READINGS = 2
"""Number of readings in a row that may lack requests which certainly run, before the reading is taken to be
of another pool."""


@dataclass(slots=True)
class SharedLimit:
    """Newest limit of any replica. It is reported again and again."""

    limit: int = 0
    read_at: float = float("-inf")
    """Time at which its reading was taken. The clock offset to the other replica becomes more precise with
    each report."""


class LimitTracker(Revisioned):
    """The limit of each signal, and the state from which it follows.

    State that takes effect only with the next reading is changed in place, because it does not change the
    current result and must not increment the revision.
    """

    def __init__(self, policy: Policy, signals: Iterable[Signal]) -> None:
        self.policy = policy
        self.signal_limits: dict[Signal, SignalLimit] = {signal: SignalLimit() for signal in signals}
        self.ledger = LoadLedger(horizon_s=_compute_horizon_s(policy.max_age_s))
        self.losses = LeaseLosses()
        self.capacity_estimate = CapacityEstimate()
        self.small_capacity = SmallCapacityCheck()
        self.kv_use: KvUse | None = None
        """Use of the KV memory by the newest applied reading."""
        self._transit_time = TransitTime()
        self._capacity_bound: float | None = None
        self._shared_limit = SharedLimit()
        self._realtime_sample: tuple[float, float] | None = None
        """Time at which the picker's counters were last read, and the number of realtime requests that the
        picker had sent."""
        self._applied_at = float("-inf")
        """Time of the newest applied sample of any signal."""
        self._has_batch_priority = False
        """True if batch requests have a negative priority, as the newest reading with requests of this
        process showed."""
        self._below_units_since: float | None = None
        """Time since which every reading shows fewer than our units. `None` if the newest reading does not.
        """

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────

    def add_reading(self, reading: Reading, now: float) -> bool:
        """Add a sample of one signal. `apply_due_readings` applies it once δ has passed since its window
        closed. Return False if the sample is invalid or its signal is not in use."""
        track = self.signal_limits.get(reading.signal)
        if track is None or not float("-inf") < reading.opened_at <= reading.closed_at < float("inf"):
            return False
        # A sample cannot be newer than its arrival: the clocks of the source and of this process differ.
        if reading.closed_at > now:
            reading = replace(
                reading,
                opened_at=min(reading.opened_at, now),
                closed_at=now,
                kv_use=_limit_kv_window(reading.kv_use, now),
            )
        if reading.max_age_s is not None:
            self.ledger.horizon_s = max(self.ledger.horizon_s, _compute_horizon_s(reading.max_age_s))
        self._transit_time.update_delta()
        self.ledger.measure_duration(now)
        track.add_reading(reading, now)
        return True

    def set_signals(self, signals: Iterable[Signal]) -> None:
        """Set the signals in use. A new signal has to be read before the limit can be computed."""
        desired = set(signals)
        if desired != set(self.signal_limits):
            self.signal_limits = {
                signal: self.signal_limits.get(signal, SignalLimit()) for signal in sorted(desired)
            }

    def set_capacity_bound(self, max_requests: float | None) -> None:
        """Set the capacity known from elsewhere. A smaller one applies at once, a larger one from the next
        reading on."""
        self._capacity_bound = max_requests
        if max_requests is not None:
            for track in self.signal_limits.values():
                bound = track.capacity_bound
                track.capacity_bound = max_requests if bound is None else min(bound, max_requests)
        self._update_limits()

    def set_policy(self, policy: Policy) -> None:
        """Set the policy. It applies at once, also to the current readings."""
        self.policy = policy
        self.ledger.horizon_s = max(self.ledger.horizon_s, _compute_horizon_s(policy.max_age_s))
        self._update_limits()

    def record_answer(self, key: Hashable, now: float, opened_s: float | None) -> None:
        out_s = self.ledger.record_answer(key, now)
        if out_s is not None:
            self._transit_time.record_exchange(out_s)
        if opened_s is not None:
            self._transit_time.record_connect(opened_s)

    def set_loop_delay(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop."""
        self._transit_time.set_loop_delay(late_s)

    def record_lease_counts(
        self,
        now: float,
        *,
        other_owners_units: int,
        just_leased_units: int,
        lost_units: int,
        orphaned_units: int,
        is_gateway_reachable: bool,
    ) -> None:
        """Record the leases counted in the queue.

        The first count after a reading's window bounds how many requests of other owners that reading
        contained. Only then can the reading prove room beyond our own requests.
        """
        counted_at = self.ledger.counted_at
        self.ledger.record_lease_count(now, other_owners_units, just_leased_units)
        for track in self.signal_limits.values():
            reading = track.reading
            if reading is not None and counted_at < reading.closed_at <= now:
                track.batch_load = self._bound_batch_load(reading, is_gateway_reachable)
                track.update_limit(self.policy, self.capacity_estimate.share)
        if not self.losses.record_counts(
            now, lost_units, orphaned_units
        ):  # the first count, or the queue was emptied
            for track in self.signal_limits.values():
                track.lost_before = lost_units

    def set_shared_limit(self, limit: int, read_at: float) -> None:
        """Set the newest limit of any replica. The next reading here moves that limit, and not an older one
        of this process."""
        self._shared_limit.limit, self._shared_limit.read_at = limit, read_at

    def record_refusal(self, in_flight: int, *, is_known: bool, is_remote: bool) -> None:
        """Record a refusal for lack of capacity (`CapacityEstimate.record_refusal`)."""
        self.capacity_estimate.record_refusal(in_flight, is_known=is_known, is_remote=is_remote)
        self.small_capacity.record_refusal()

    def apply_due_readings(self, now: float, *, refused_at: float, is_gateway_reachable: bool) -> None:
        """Apply every sample whose window closed at least δ ago.

        `refused_at` is the time of the gateway's last refusal.
        """
        applied_at = self._applied_at
        own_read_at = self.read_at
        for track in self.signal_limits.values():
            for reading in track.take_due_readings(now, self._transit_time.delta_s):
                if track.reading is None or reading.closed_at > track.reading.closed_at:
                    self._apply_reading(track, reading, own_read_at, is_gateway_reachable)
                    applied_at = max(applied_at, reading.closed_at)
        if applied_at > self._applied_at:
            self._applied_at = applied_at
            if self.read_at > refused_at:
                self._learn_capacity()  # once per sample, regardless of the number of its signals

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def total_revision(self) -> int:
        """Sum of the revisions of everything from which limit and reason follow."""
        revisions = self.revision + self.losses.revision
        for track in self.signal_limits.values():  # read several times per round of the loop, so no generator
            revisions += track.revision
        return revisions

    @property
    def median_duration_s(self) -> float:
        """Median duration of the newest answered requests of this process. 0 until there was one."""
        return self._transit_time.median_s

    @property
    def due_times(self) -> list[float]:
        """Times at which the pending samples may be applied."""
        return [
            r.closed_at + self._transit_time.delta_s
            for t in self.signal_limits.values()
            for r in t.pending_readings
        ]

    @property
    def last_complete_sample_at(self) -> float:
        """Time by which every signal had a sample, repeated samples included."""
        return min((track.last_sample_at for track in self.signal_limits.values()), default=float("inf"))

    @property
    def read_at(self) -> float:
        """Time at which the newest reading of any signal was taken."""
        return max((reading.opened_at for reading in self.newest_readings), default=float("-inf"))

    @property
    def newest_readings(self) -> list[Reading]:
        """Newest reading of each signal."""
        return [track.reading for track in self.signal_limits.values() if track.reading is not None]

    @property
    def budgets(self) -> list[Budget]:
        """Budget of each signal."""
        return [track.budget for track in self.signal_limits.values() if track.budget is not None]

    @property
    def unread_signals(self) -> list[Signal]:
        """Signals without any reading."""
        return [signal for signal, track in self.signal_limits.items() if track.reading is None]

    def find_smallest_limit(self) -> tuple[Signal | None, int]:
        """Return the signal with the smallest limit, and that limit minus the leases lost since its
        reading."""
        smallest: tuple[Signal | None, int] = (None, 0)
        lost = self.losses.lost_units
        for signal, track in self.signal_limits.items():
            limit = track.limit - max(0, lost - track.lost_before)
            if smallest[0] is None or limit < smallest[1]:
                smallest = (signal, limit)
        return smallest

    def check_staleness(self, now: float) -> tuple[Reason, str] | None:
        """Return why the newest readings are too old. `None` if they are not."""
        for reading in self.newest_readings:
            if now > self._compute_stale_at(reading):
                age = now - reading.closed_at
                return Reason.STALE, f"the newest sample of {reading.signal} is {age:.1f} s old"
        return None

    @property
    def stale_times(self) -> list[float]:
        """Times at which the readings become too old. They lie slightly after the limit: at the limit itself
        a reading is still valid, and the next check must make progress."""
        return [self._compute_stale_at(reading) + 1e-6 for reading in self.newest_readings]

    def check_faults(self) -> tuple[Reason, str] | None:
        """Return why the newest readings cannot be right. `None` if they can."""
        faults = [(b.fault, f"{b.signal}: {b.fault_detail}") for b in self.budgets if b.fault is not None]
        if faults:
            return min(faults, key=lambda fault: fault[0].rank)
        for signal, track in self.signal_limits.items():
            if track.unseen_readings >= MAX_UNSEEN_READINGS:
                return Reason.IMPLAUSIBLE, f"{signal} does not show the requests that we have running"
        return None

    def estimate_orphans(self, now: float) -> tuple[int, float]:
        """Return the number of requests of silent owners that may still run, and the time at which the first
        of them no longer may. A reading shows these requests in addition to the ones that are certainly ours.
        """
        exact = [
            (t.reading, t.batch_load.lo)
            for t in self.signal_limits.values()
            if t.reading and t.reading.is_request_count
        ]
        since = now - self.policy.orphan_timeout_s
        orphans, first_at = self.losses.estimate_orphans(
            since, [(r.opened_at, r.load - lo) for r, lo in exact]
        )
        # Slightly later for the same reason as in `stale_times`.
        return orphans, first_at + self.policy.orphan_timeout_s + 1e-6

    def estimate_free_units(self, now: float) -> float | None:
        """Return the units that batch requests may hold according to the newest readings, regardless of a
        closed gate. `None` if that is not known. Signals that count requests are preferred."""
        known = [
            (t.reading, t.batch_load, t.budget) for t in self.signal_limits.values() if t.reading and t.budget
        ]
        if any(now > self._compute_stale_at(reading) for reading, _, _ in known):
            return None
        # A pressure score does not contain batch requests, so its headroom says less about them.
        counting = [each for each in known if each[0].is_request_count] or known
        for _, _, budget in counting:  # called in each round of the loop, where a generator costs more
            if budget.fault is not None:
                return None
        rooms = [
            min((load.lo + load.hi) / 2 + budget.headroom, self.policy.compute_max_limit(budget.max_sys))
            for _, load, budget in counting
        ]
        return max(0.0, min(rooms)) if rooms else None

    def counts_calls(self, now: float) -> bool:
        """Return whether readings count our calls instead of the units in them."""
        return self._below_units_since is not None and now - self._below_units_since >= CALLS_COUNTED_S

    # ── implementation ──────────────────────────────────────────────────────────────────────────────────

    def _compute_stale_at(self, reading: Reading) -> float:
        """Return the time from which a reading is too old."""
        return reading.closed_at + (self.policy.max_age_s if reading.max_age_s is None else reading.max_age_s)

    def _update_limits(self) -> None:
        for track in self.signal_limits.values():
            track.update_limit(self.policy, self.capacity_estimate.share)

    def _apply_reading(
        self, track: SignalLimit, reading: Reading, own_read_at: float, is_gateway_reachable: bool
    ) -> None:
        lost_before = self.losses.count_lost_before(reading.opened_at)
        limit, lost_before_limit, shared = track.limit, track.lost_before, self._shared_limit
        # Another replica's reading is newer than any here, so its limit is the one to move. The tolerance
        # keeps our own shared limit from looking newer because of a clock error.
        if shared.read_at - REMOTE_CLOCK_ERROR_S > own_read_at:
            limit, lost_before_limit = shared.limit, self.losses.count_lost_before(shared.read_at)
        track.previous_limit = limit - max(0, lost_before - lost_before_limit)
        track.lost_before = max(track.lost_before, lost_before)
        track.reading = reading
        if reading.closed_at >= self._applied_at:
            self.kv_use = reading.kv_use
        track.capacity_bound = self._capacity_bound
        self._check_batch_priority(reading)
        track.batch_load = self._bound_batch_load(reading, is_gateway_reachable)
        if reading.is_request_count and self.ledger.own_units:
            is_below_units = self.ledger.call_count + reading.items_beyond_calls < self.ledger.own_units
            since = reading.closed_at if self._below_units_since is None else self._below_units_since
            self._below_units_since = since if is_below_units else None
        is_unseen = reading.is_request_count and not _shows_own_requests(reading, track.batch_load)
        if is_unseen and self._transit_time.increase_delta(
            lambda delta_s: _shows_own_requests(
                reading, self._bound_batch_load_since(reading, reading.opened_at, delta_s)
            )
        ):
            track.batch_load, is_unseen = self._bound_batch_load(reading, is_gateway_reachable), False
        track.unseen_readings = track.unseen_readings + 1 if is_unseen else 0
        track.update_limit(self.policy, self.capacity_estimate.share)

    def _bound_batch_load(self, reading: Reading, is_gateway_reachable: bool) -> LoadBounds:
        """Return the bounds on batch requests in the reading. Without a gateway no request of this process is
        certain, because a request that connects or hangs is not at the gateway."""
        interval = self._bound_batch_load_since(reading, reading.opened_at, self._transit_time.delta_s)
        if reading.max_batch_requests is not None and self._has_batch_priority:
            interval = interval.limit_to(reading.max_batch_requests)
        return interval if is_gateway_reachable else interval.drop_own_lower_bound()

    def _check_batch_priority(self, reading: Reading) -> None:
        """Find out whether the requests of this process are among those with a negative priority. They are
        not if they have no objective, or one that the picker does not know."""
        if reading.max_batch_requests is None:
            return
        bounds = self._bound_batch_load_since(reading, reading.opened_at, self._transit_time.delta_s)
        if bounds.own_lo:
            self._has_batch_priority = reading.max_batch_requests >= bounds.own_lo

    def _bound_batch_load_since(self, reading: Reading, opened_at: float, delta_s: float) -> LoadBounds:
        """Return the bounds on our own load in the reading, counted as the reading counts, for a window that
        opened at `opened_at` and a transit time of `delta_s`."""
        return self.ledger.bounds_between(opened_at, reading.closed_at, delta_s, reading.items_beyond_calls)

    def _learn_capacity(self) -> None:
        """Update the capacity estimate from the newest sample."""
        tracks = [t for t in self.signal_limits.values() if t.budget is not None and t.budget.fault is None]
        # A faulty reading closes the gate, so the absence of refusals meanwhile proves nothing.
        if not tracks or len(tracks) < len(self.signal_limits):
            return
        snapshot, reserve = self._make_snapshot(tracks), self.policy.reserve
        self.capacity_estimate.learn_from_snapshot(
            snapshot, reserve=reserve, backoff=self.policy.overload_backoff
        )
        self.small_capacity.record_snapshot(
            snapshot, reserve=reserve, is_learned=self.capacity_estimate.share is not None
        )
        self._update_limits()

    def _make_snapshot(self, tracks: list[SignalLimit]) -> PoolSnapshot:
        """Return the state of the whole pool in the newest sample, from all its signals."""
        assessed = [
            (t.reading, t.batch_load.hi, t.budget) for t in tracks if t.reading is not None and t.budget
        ]
        distinct = [r for r, _, _ in assessed if _has_plausible_counts(r)]
        newest = max(distinct or [r for r, _, _ in assessed], key=lambda r: r.closed_at)
        # A pressure score counts no requests, but the counts of running and waiting requests do.
        counted = [(r.load, hi) for r, hi, _ in assessed if r.is_request_count]
        counted = counted or [(_sum_counts(r), hi) for r, hi, _ in assessed if _has_plausible_counts(r)]
        counted = counted or [(r.load, hi) for r, hi, _ in assessed]
        load, hi = max(counted, key=_count_realtime)
        averages = newest.averages if distinct else None
        return PoolSnapshot(
            sampled_at=newest.closed_at,
            configured_capacity=min(budget.configured_max_sys for _, _, budget in assessed),
            is_capacity_known=all(r.is_capacity_known for r, _, _ in assessed),
            realtime_requests=max(0.0, load - hi),
            ended_requests=self.ledger.ended_count,
            present_requests=max(load, hi),
            current_counts=self._count_requests(newest) if distinct else None,
            average_counts=None
            if averages is None
            else PoolCounts(*averages, averages[0], is_uneven=newest.are_averages_uneven),
            waiting_requests=newest.f_epp * newest.max_sys,
            mean_duration_s=self.ledger.mean_duration_s,
        )

    def _count_requests(self, reading: Reading) -> PoolCounts | None:
        """Return the requests that ran and that waited at the time of the sample.

        The queues of the model servers may be up to MAX_SERVER_METRICS_AGE_S old, so requests that came since
        then and wait look as if they ran. Therefore only those batch requests certainly ran that were there
        all that time, and only as many realtime requests as were also there at the sample before.
        """
        if reading.running is None:
            return None
        if reading.has_exact_counts:
            return PoolCounts(reading.running, reading.waiting, reading.running, is_uneven=reading.is_uneven)
        in_queues = reading.waiting - reading.f_epp * reading.max_sys
        # δ is 0 here, because only the change of our load between the beginning and the end matters.
        batch_load = self._bound_batch_load_since(reading, reading.opened_at - MAX_SERVER_METRICS_AGE_S, 0.0)
        now, before = max(0.0, reading.running + in_queues - batch_load.hi), self._realtime_sample
        then = now
        if before is None or reading.closed_at > before[0]:
            self._realtime_sample = reading.closed_at, now
            if before is not None and reading.closed_at - before[0] <= REALTIME_RECENT_S:
                then = before[1]
        certain = max(0.0, min(reading.running, batch_load.lo + min(then, now) - in_queues))
        moved = batch_load.hi - batch_load.lo + abs(now - then)
        steady = moved <= max(2.0, STEADY_SHARE * (reading.running + reading.waiting))
        in_picker = in_queues < MIN_WAITING <= reading.waiting
        return PoolCounts(
            reading.running,
            reading.waiting,
            certain,
            is_steady=steady,
            is_exact=False,
            is_waiting_in_picker=in_picker,
            is_uneven=reading.is_uneven,
        )


def _shows_own_requests(reading: Reading, batch_load: LoadBounds) -> bool:
    """Return whether the reading shows every request of this process that was certainly there."""
    # Half a request of tolerance, because averages are not whole numbers.
    return reading.load + 0.5 >= batch_load.own_lo


def _count_realtime(load_and_batch: tuple[float, int]) -> float:
    """Return the number of realtime requests in a reading. The arguments are its load, and the largest number
    of batch requests that it may contain."""
    load, batch = load_and_batch
    return load - batch


def _sum_counts(reading: Reading) -> float:
    """Return all requests in the pool, by a reading that separates running from waiting requests."""
    running, waiting = (
        (reading.averages or (0.0, 0.0)) if reading.running is None else (reading.running, reading.waiting)
    )
    return running + waiting


def _has_plausible_counts(reading: Reading) -> bool:
    """Return whether a reading separates running from waiting requests, with plausible numbers."""
    counts = [*(reading.averages or ())]
    if reading.running is not None:
        counts += [reading.running, reading.waiting]
    return bool(counts) and all(0 <= each <= MAX_PLAUSIBLE_REQUESTS for each in counts)


def _limit_kv_window(kv_use: KvUse | None, now: float) -> KvUse | None:
    """Return the use with a window that does not reach beyond `now`."""
    if kv_use is None:
        return None
    return replace(kv_use, opened_at=min(kv_use.opened_at, now), closed_at=min(kv_use.closed_at, now))


def _compute_horizon_s(oldest_s: float) -> float:
    """Return how long ago a request may have ended that a reading of the given age still contains."""
    return oldest_s + MAX_WINDOW_S + 2 * (MAX_TRANSIT_S + MAX_LOOP_DELAY_S)
