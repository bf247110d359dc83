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

from dispatcher.core.gateway.refusals import HEARD_SLOP_S
from dispatcher.core.limit.budget import PLAUSIBLE_MOST, SERVER_LAG_S, Budget, Policy, Reading, Reason, Signal
from dispatcher.core.limit.capacity import ONE_WAITS, Capacity, PoolCounts, Sight
from dispatcher.core.limit.lease_losses import Losses
from dispatcher.core.limit.load_ledger import Interval, LoadLedger
from dispatcher.core.limit.revision import Revised
from dispatcher.core.limit.signal_limit import Track
from dispatcher.core.limit.transit_time import LATE_MOST_S, MOST_S, Travel

WINDOW_MOST_S = 10.0
"""Maximum length of a reading's window. Averages are flushed every 5 s."""
STEADY = 0.05
"""Share by which counts may change between two times and still fit together."""
OTHERS_RECENTLY_S = 3.0
"""Maximum age of a sample that still shows which realtime requests are not new."""
CALLS_COUNTED_S = 15.0
"""Time for which readings must show fewer than our units before they are taken to count calls. The picker's
averages show after two flushes what they count beyond calls."""
DISBELIEF = 2
"""Number of readings in a row that may lack requests which certainly run, before the reading is taken to be
of another pool."""


@dataclass(slots=True)
class SharedLimit:
    """Newest limit of any replica. It is reported again and again."""

    limit: int = 0
    read_at: float = float("-inf")
    """Time at which its reading was taken. The clock offset to the other replica becomes more precise with
    each report."""


class Tracking(Revised):
    """The limit of each signal, and the state from which it follows.

    State that takes effect only with the next reading is changed in place, because it does not change the
    current result and must not increment the revision.
    """

    def __init__(self, policy: Policy, signals: Iterable[Signal]) -> None:
        self.policy = policy
        self.tracks: dict[Signal, Track] = {signal: Track() for signal in signals}
        self.held = LoadLedger(horizon_s=_horizon(policy.max_age_s))
        self.losses = Losses()
        self.learned = Capacity()
        self._travel = Travel()
        self._capacity: float | None = None
        self._shared = SharedLimit()
        self._others: tuple[float, float] | None = None
        """Time at which the picker's counters were last read, and the number of realtime requests that the
        picker had sent."""
        self._applied_at = float("-inf")
        """Time of the newest applied sample of any signal."""
        self._fewer_since: float | None = None
        """Time since which every reading shows fewer than our units. `None` if the newest reading does not.
        """

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────

    def hand_in(self, reading: Reading, now: float) -> bool:
        """Add a sample of one signal. `apply_due_readings` applies it once δ has passed since its window
        closed. Return False if the sample is invalid or its signal is not in use."""
        track = self.tracks.get(reading.signal)
        if track is None or not float("-inf") < reading.opened_at <= reading.closed_at < float("inf"):
            return False
        # A sample cannot be newer than its arrival: the clocks of the source and of this process differ.
        if reading.closed_at > now:
            reading = replace(reading, opened_at=min(reading.opened_at, now), closed_at=now)
        if reading.good_s is not None:
            self.held.horizon_s = max(self.held.horizon_s, _horizon(reading.good_s))
        self._travel.reckon()
        self.held.measure(now)
        track.hand_in(reading, now)
        return True

    def use(self, signals: Iterable[Signal]) -> None:
        """Set the signals in use. A new signal has to be read before the limit can be computed."""
        wanted = set(signals)
        if wanted != set(self.tracks):
            self.tracks = {signal: self.tracks.get(signal, Track()) for signal in sorted(wanted)}

    def set_capacity(self, max_requests: float | None) -> None:
        """Set the capacity known from elsewhere. A smaller one applies at once, a larger one from the next
        reading on."""
        self._capacity = max_requests
        for track in self.tracks.values():
            if max_requests is not None and (track.capacity is None or max_requests < track.capacity):
                track.capacity = max_requests
        self._reassess()

    def set_policy(self, policy: Policy) -> None:
        """Set the policy. It applies at once, also to the current readings."""
        self.policy = policy
        self.held.horizon_s = max(self.held.horizon_s, _horizon(policy.max_age_s))
        self._reassess()

    def answered(self, key: Hashable, now: float, opened_s: float | None) -> None:
        out_s = self.held.answered(key, now)
        if out_s is not None:
            self._travel.exchanged(out_s)
        if opened_s is not None:
            self._travel.opened(opened_s)

    def looped(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop."""
        self._travel.looped(late_s)

    def count_leases(
        self, now: float, *, others: int, young: int, lost: int, stray: int, reachable: bool
    ) -> None:
        """Record the leases counted in the queue.

        The first count after a reading's window bounds how many requests of other owners that reading
        contained. Only then can the reading prove room beyond our own requests.
        """
        counted_at = self.held.counted_at
        self.held.counted(now, others, young)
        for track in self.tracks.values():
            reading = track.reading
            if reading is not None and counted_at < reading.closed_at <= now:
                track.interval = self._ours_in(reading, reachable)
                track.reassess(self.policy, self.learned.share)
        if not self.losses.counted(now, lost, stray):  # the first count, or the queue was emptied
            for track in self.tracks.values():
                track.lost_before = lost

    def share(self, limit: int, read_at: float) -> None:
        """Set the newest limit of any replica. The next reading here moves that limit, and not an older one
        of this process."""
        self._shared.limit, self._shared.read_at = limit, read_at

    def refused(self, in_flight: int, *, known: bool, heard: bool) -> None:
        """Record a refusal for lack of capacity (`CapacityEstimate.record_refusal`)."""
        self.learned.refused(in_flight, known=known, heard=heard)

    def apply_due(self, now: float, *, refused_at: float, reachable: bool) -> None:
        """Apply every sample whose window closed at least δ ago.

        `refused_at` is the time of the gateway's last refusal.
        """
        applied_at = self._applied_at
        ours_at = self.read_at
        for track in self.tracks.values():
            for reading in track.take_due(now, self._travel.delta_s):
                if track.reading is None or reading.closed_at > track.reading.closed_at:
                    self._apply(track, reading, ours_at, reachable)
                    applied_at = max(applied_at, reading.closed_at)
        if applied_at > self._applied_at:
            self._applied_at = applied_at
            if self.read_at > refused_at:
                self._learn()  # once per sample, regardless of the number of its signals

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def revisions(self) -> int:
        """Sum of the revisions of everything from which limit and reason follow."""
        revisions = self.revision + self.losses.revision
        for track in self.tracks.values():  # read several times per turn of the loop, so no generator
            revisions += track.revision
        return revisions

    @property
    def usual_s(self) -> float:
        """Median duration of the newest answered requests of this process. 0 until there was one."""
        return self._travel.median_s

    @property
    def due_at(self) -> list[float]:
        """Times at which the pending samples may be applied."""
        return [r.closed_at + self._travel.delta_s for t in self.tracks.values() for r in t.pending]

    @property
    def handed_at(self) -> float:
        """Time by which every signal had a sample, repeated samples included."""
        return min((track.handed_at for track in self.tracks.values()), default=float("inf"))

    @property
    def read_at(self) -> float:
        """Time at which the newest reading of any signal was taken."""
        return max((reading.opened_at for reading in self.readings), default=float("-inf"))

    @property
    def readings(self) -> list[Reading]:
        """Newest reading of each signal."""
        return [track.reading for track in self.tracks.values() if track.reading is not None]

    @property
    def budgets(self) -> list[Budget]:
        """Budget of each signal."""
        return [track.budget for track in self.tracks.values() if track.budget is not None]

    @property
    def unread(self) -> list[Signal]:
        """Signals without any reading."""
        return [signal for signal, track in self.tracks.items() if track.reading is None]

    def smallest(self) -> tuple[Signal | None, int]:
        """Return the signal with the smallest limit, and that limit minus the leases lost since its
        reading."""
        smallest: tuple[Signal | None, int] = (None, 0)
        lost = self.losses.lost
        for signal, track in self.tracks.items():
            limit = track.limit - max(0, lost - track.lost_before)
            if smallest[0] is None or limit < smallest[1]:
                smallest = (signal, limit)
        return smallest

    def stale(self, now: float) -> tuple[Reason, str] | None:
        """Return why the newest readings are too old. `None` if they are not."""
        for reading in self.readings:
            if now > self._good_until(reading):
                age = now - reading.closed_at
                return Reason.STALE, f"the newest sample of {reading.signal} is {age:.1f} s old"
        return None

    @property
    def stale_at(self) -> list[float]:
        """Times at which the readings become too old. They lie slightly after the limit: at the limit itself
        a reading is still valid, and the next check must make progress."""
        return [self._good_until(reading) + 1e-6 for reading in self.readings]

    def fault(self) -> tuple[Reason, str] | None:
        """Return why the newest readings cannot be right. `None` if they can."""
        faults = [(b.fault, f"{b.signal}: {b.because}") for b in self.budgets if b.fault is not None]
        if faults:
            return min(faults, key=lambda fault: fault[0].rank)
        for signal, track in self.tracks.items():
            if track.disbelieved >= DISBELIEF:
                return Reason.IMPLAUSIBLE, f"{signal} does not show the requests that we have running"
        return None

    def strays(self, now: float) -> tuple[int, float]:
        """Return the number of requests of silent owners that may still run, and the time at which the first
        of them no longer may. A reading shows these requests in addition to the ones that are certainly ours.
        """
        exact = [(t.reading, t.interval.lo) for t in self.tracks.values() if t.reading and t.reading.exact]
        since = now - self.policy.stray_s
        strays, first_at = self.losses.strays(since, [(r.opened_at, r.load - lo) for r, lo in exact])
        # Slightly later for the same reason as in `stale_times`.
        return strays, first_at + self.policy.stray_s + 1e-6

    def free(self, now: float) -> float | None:
        """Return the units that batch requests may hold according to the newest readings, regardless of a
        closed gate. `None` if that is not known. Signals that count requests are preferred."""
        known = [t for t in self.tracks.values() if t.reading is not None and t.budget is not None]
        if any(now > self._good_until(t.reading) for t in known if t.reading):
            return None
        # A pressure score does not contain batch requests, so its headroom says less about them.
        counting = [t for t in known if t.reading is not None and t.reading.exact] or known
        rooms = [
            max(0.0, min((t.interval.lo + t.interval.hi) / 2 + b.headroom, self.policy.most(b.max_sys)))
            for t in counting
            if (b := t.budget) is not None and b.fault is None
        ]
        return min(rooms) if rooms and len(rooms) == len(counting) else None

    def counts_calls(self, now: float) -> bool:
        """Return whether readings count our calls instead of the units in them."""
        return self._fewer_since is not None and now - self._fewer_since >= CALLS_COUNTED_S

    # ── implementation ──────────────────────────────────────────────────────────────────────────────────

    def _good_until(self, reading: Reading) -> float:
        """Return the time from which a reading is too old."""
        return reading.closed_at + (self.policy.max_age_s if reading.good_s is None else reading.good_s)

    def _reassess(self) -> None:
        for track in self.tracks.values():
            track.reassess(self.policy, self.learned.share)

    def _apply(self, track: Track, reading: Reading, ours_at: float, reachable: bool) -> None:
        lost_before = self.losses.lost_at(reading.opened_at)
        limit, known, shared = track.limit, track.lost_before, self._shared
        # Another replica's reading is newer than any here, so its limit is the one to move. The tolerance
        # keeps our own shared limit from looking newer because of a clock error.
        if shared.read_at - HEARD_SLOP_S > ours_at:
            limit, known = shared.limit, self.losses.lost_at(shared.read_at)
        track.before = limit - max(0, lost_before - known)
        track.lost_before = max(track.lost_before, lost_before)
        track.reading = reading
        track.capacity = self._capacity
        track.interval = self._ours_in(reading, reachable)
        if reading.exact and self.held.own:
            fewer = self.held.calls + reading.beyond_calls < self.held.own
            since = reading.closed_at if self._fewer_since is None else self._fewer_since
            self._fewer_since = since if fewer else None
        # Half a request of tolerance, because averages are not whole numbers.
        unseen = reading.exact and reading.load + 0.5 < track.interval.own_lo
        if unseen and self._travel.explained(lambda delta_s: self._shows(reading, delta_s)):
            track.interval, unseen = self._ours_in(reading, reachable), False
        track.disbelieved = track.disbelieved + 1 if unseen else 0
        track.reassess(self.policy, self.learned.share)

    def _ours_in(self, reading: Reading, reachable: bool) -> Interval:
        """Return the bounds on batch requests in the reading. Without a gateway no request of this process is
        certain, because a request that connects or hangs is not at the gateway."""
        interval = self._ours_between(reading, reading.opened_at, self._travel.delta_s)
        return interval if reachable else interval.unsure_of_own()

    def _ours_between(self, reading: Reading, opened_at: float, delta_s: float) -> Interval:
        """Return the bounds on our own load in the reading, counted as the reading counts, for a window that
        opened at `opened_at` and a transit time of `delta_s`."""
        return self.held.between(opened_at, reading.closed_at, delta_s, reading.beyond_calls)

    def _shows(self, reading: Reading, delta_s: float) -> bool:
        """Return whether the reading shows every request that was certainly there under this transit time."""
        return reading.load + 0.5 >= self._ours_between(reading, reading.opened_at, delta_s).own_lo

    def _learn(self) -> None:
        """Update the capacity estimate from the newest sample."""
        tracks = [t for t in self.tracks.values() if t.budget is not None and t.budget.fault is None]
        # A faulty reading closes the gate, so the absence of refusals meanwhile proves nothing.
        if not tracks or len(tracks) < len(self.tracks):
            return
        self.learned.reading(
            self._sight(tracks), reserve=self.policy.reserve, backoff=self.policy.overload_backoff
        )
        self._reassess()

    def _sight(self, tracks: list[Track]) -> Sight:
        """Return the state of the whole pool in the newest sample, from all its signals."""
        seen = [(t.reading, t.interval.hi, t.budget) for t in tracks if t.reading is not None and t.budget]
        apart = [r for r, _, _ in seen if _told_apart(r)]
        newest = max(apart or [r for r, _, _ in seen], key=lambda r: r.closed_at)
        # A pressure score counts no requests, but the counts of running and waiting requests do.
        counted = [(r.load, hi) for r, hi, _ in seen if r.exact]
        counted = counted or [(_counted(r), hi) for r, hi, _ in seen if _told_apart(r)]
        counted = counted or [(r.load, hi) for r, hi, _ in seen]
        averages = newest.averages if apart else None
        return Sight(
            at=newest.closed_at,
            configured=min(budget.configured for _, _, budget in seen),
            known=all(r.capacity_known for r, _, _ in seen),
            realtime=max(max(0.0, load - hi) for load, hi in counted),
            now=self._count(newest) if apart else None,
            averages=None if averages is None else PoolCounts(*averages, averages[0]),
            waiting=newest.f_epp * newest.max_sys,
            took_s=self.held.mean_s,
        )

    def _count(self, reading: Reading) -> PoolCounts | None:
        """Return the requests that ran and that waited at the time of the sample.

        The queues of the model servers may be up to MAX_SERVER_METRICS_AGE_S old, so requests that came since
        then and wait look as if they ran. Therefore only those batch requests certainly ran that were there
        all that time, and only as many realtime requests as were also there at the sample before.
        """
        if reading.running is None:
            return None
        if reading.exact_counts:
            return PoolCounts(reading.running, reading.waiting, reading.running)
        in_queues = reading.waiting - reading.f_epp * reading.max_sys
        # δ is 0 here, because only the change of our load between the beginning and the end matters.
        ours = self._ours_between(reading, reading.opened_at - SERVER_LAG_S, 0.0)
        now, before = max(0.0, reading.running + in_queues - ours.hi), self._others
        then = now
        if before is None or reading.closed_at > before[0]:
            self._others = reading.closed_at, now
            if before is not None and reading.closed_at - before[0] <= OTHERS_RECENTLY_S:
                then = before[1]
        surely = max(0.0, min(reading.running, ours.lo + min(then, now) - in_queues))
        moved = ours.hi - ours.lo + abs(now - then)
        steady = moved <= max(2.0, STEADY * (reading.running + reading.waiting))
        in_picker = in_queues < ONE_WAITS <= reading.waiting
        return PoolCounts(
            reading.running, reading.waiting, surely, steady=steady, exact=False, in_picker=in_picker
        )


def _counted(reading: Reading) -> float:
    """Return all requests in the pool, by a reading that separates running from waiting requests."""
    running, waiting = (
        (reading.averages or (0.0, 0.0)) if reading.running is None else (reading.running, reading.waiting)
    )
    return running + waiting


def _told_apart(reading: Reading) -> bool:
    """Return whether a reading separates running from waiting requests, with plausible numbers."""
    counts = [*(reading.averages or ())]
    if reading.running is not None:
        counts += [reading.running, reading.waiting]
    return bool(counts) and all(0 <= each <= PLAUSIBLE_MOST for each in counts)


def _horizon(oldest_s: float) -> float:
    """Return how long ago a request may have ended that a reading of the given age still contains."""
    return oldest_s + WINDOW_MOST_S + 2 * (MOST_S + LATE_MOST_S)
