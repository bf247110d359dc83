"""How far the limit may go by what was read of the pool, and by what was ours at the time. Pure.

A reading that shows headroom H, taken while between `lo` and `hi` of our own requests were inside it, proves
that the limit lies between lo + H and hi + H (our own are added back). The limit moves only as far as that
proves:

    L = clamp(L_before, lo + H, hi + H),   L ≤ floor(max_SYS × (1 − B)), max_in_flight

max_SYS is what the configuration says, or the share of that which was learned to fit (`Capacity`). Each
signal has a limit of its own (`Track`); the smallest wins. A lease that ends without an answer lowers it by
one until a reading taken after that (`Losses`).
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
"""No reading's window is longer than this (averages are flushed every 5 s)."""
STEADY = 0.05
"""Counts of different moments fit together if they changed by no more than this share between them."""
OTHERS_RECENTLY_S = 3.0
"""A sample this old still shows how many of the requests that are not ours are not new."""
CALLS_COUNTED_S = 15.0
"""Readings that show fewer than our units for so long count calls. What the picker's averages show beyond
calls is known after two of its flushes."""
DISBELIEF = 2
"""So many readings in a row without the requests we surely had running mean: not our pool."""


@dataclass(slots=True)
class SharedLimit:
    """The newest limit of any replica, as it is told again and again."""

    limit: int = 0
    read_at: float = float("-inf")
    """When its reading was taken, by a clock that is known a little better each time."""


class Tracking(Revised):
    """The limit of each signal, and what moves it.

    What counts with the next reading alone is changed in place: it is no revision of what is known now.
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
        """When the picker's counters were read last, and how many requests that are not ours it had sent."""
        self._applied_at = float("-inf")
        """When the newest sample was taken, of any signal."""
        self._fewer_since: float | None = None
        """Since when each reading shows fewer than our units. `None` if the newest one does not."""

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────

    def hand_in(self, reading: Reading, now: float) -> bool:
        """A sample of one signal; `apply_due` acts on it when δ has passed after its window. False: it is
        none."""
        track = self.tracks.get(reading.signal)
        if track is None or not float("-inf") < reading.opened_at <= reading.closed_at < float("inf"):
            return False
        if reading.closed_at > now:
            reading = replace(reading, opened_at=min(reading.opened_at, now), closed_at=now)
        if reading.good_s is not None:
            self.held.horizon_s = max(self.held.horizon_s, _horizon(reading.good_s))
        self._travel.reckon()
        self.held.measure(now)
        track.hand_in(reading, now)
        return True

    def use(self, signals: Iterable[Signal]) -> None:
        """Which signals count from now on; one that is new has to be read first."""
        wanted = set(signals)
        if wanted != set(self.tracks):
            self.tracks = {signal: self.tracks.get(signal, Track()) for signal in sorted(wanted)}

    def set_capacity(self, max_requests: float | None) -> None:
        """What the pool can take as seen elsewhere. Less counts at once, more with the next reading."""
        self._capacity = max_requests
        for track in self.tracks.values():
            if max_requests is not None and (track.capacity is None or max_requests < track.capacity):
                track.capacity = max_requests
        self._reassess()

    def set_policy(self, policy: Policy) -> None:
        """It holds at once, for the readings at hand too."""
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
        """Note the largest recent delay of the event loop."""
        self._travel.looped(late_s)

    def count_leases(
        self, now: float, *, others: int, young: int, lost: int, stray: int, reachable: bool
    ) -> None:
        """The first count after a reading's window tells what of theirs that reading surely contained: only
        then can it prove room beyond our own."""
        counted_at = self.held.counted_at
        self.held.counted(now, others, young)
        for track in self.tracks.values():
            reading = track.reading
            if reading is not None and counted_at < reading.closed_at <= now:
                track.interval = self._ours_in(reading, reachable)
                track.reassess(self.policy, self.learned.share)
        if not self.losses.counted(now, lost, stray):  # a new beginning
            for track in self.tracks.values():
                track.lost_before = lost

    def share(self, limit: int, read_at: float) -> None:
        """The newest limit of any replica: the next reading here moves that one, not an older one of ours."""
        self._shared.limit, self._shared.read_at = limit, read_at

    def refused(self, in_flight: int, *, known: bool, heard: bool) -> None:
        """Refused for lack of capacity (`Capacity.refused`)."""
        self.learned.refused(in_flight, known=known, heard=heard)

    def apply_due(self, now: float, *, refused_at: float, reachable: bool) -> None:
        """Act on every sample whose window closed δ ago. `refused_at`: when the gateway last refused one;
        `reachable`: there is a gateway."""
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
                self._learn()  # once per sample, however many signals it was of

    # ── what is known ───────────────────────────────────────────────────────────────────────────────────

    @property
    def revisions(self) -> int:
        """Of all that the limit and the reasons are made of."""
        revisions = self.revision + self.losses.revision
        for track in self.tracks.values():  # asked several times each turn: no generator
            revisions += track.revision
        return revisions

    @property
    def usual_s(self) -> float:
        """Median duration of the newest answered requests of this process. 0 until there was one."""
        return self._travel.median_s

    @property
    def due_at(self) -> list[float]:
        """When each pending sample may be acted upon."""
        return [r.closed_at + self._travel.delta_s for t in self.tracks.values() for r in t.pending]

    @property
    def handed_at(self) -> float:
        """When there was last a sample of every signal, new or not."""
        return min((track.handed_at for track in self.tracks.values()), default=float("inf"))

    @property
    def read_at(self) -> float:
        """When the newest reading was taken, whichever signal it was of."""
        return max((reading.opened_at for reading in self.readings), default=float("-inf"))

    @property
    def readings(self) -> list[Reading]:
        """The newest reading of each signal."""
        return [track.reading for track in self.tracks.values() if track.reading is not None]

    @property
    def budgets(self) -> list[Budget]:
        """What each signal leaves."""
        return [track.budget for track in self.tracks.values() if track.budget is not None]

    @property
    def unread(self) -> list[Signal]:
        """Signals without any reading."""
        return [signal for signal, track in self.tracks.items() if track.reading is None]

    def smallest(self) -> tuple[Signal | None, int]:
        """The signal with the smallest limit, and that limit less the leases lost since its reading."""
        smallest: tuple[Signal | None, int] = (None, 0)
        lost = self.losses.lost
        for signal, track in self.tracks.items():
            limit = track.limit - max(0, lost - track.lost_before)
            if smallest[0] is None or limit < smallest[1]:
                smallest = (signal, limit)
        return smallest

    def stale(self, now: float) -> tuple[Reason, str] | None:
        """Why the newest readings are no longer acted upon."""
        for reading in self.readings:
            if now > self._good_until(reading):
                age = now - reading.closed_at
                return Reason.STALE, f"the newest sample of {reading.signal} is {age:.1f} s old"
        return None

    @property
    def stale_at(self) -> list[float]:
        """When each reading is too old. A hair past it: at the very moment the reading still holds, and
        asking again must make headway."""
        return [self._good_until(reading) + 1e-6 for reading in self.readings]

    def fault(self) -> tuple[Reason, str] | None:
        """Why the newest readings cannot be right."""
        faults = [(b.fault, f"{b.signal}: {b.because}") for b in self.budgets if b.fault is not None]
        if faults:
            return min(faults, key=lambda fault: fault[0].rank)
        for signal, track in self.tracks.items():
            if track.disbelieved >= DISBELIEF:
                return Reason.IMPLAUSIBLE, f"{signal} does not show the requests that we have running"
        return None

    def strays(self, now: float) -> tuple[int, float]:
        """Requests of silent owners that may still run, and when the first of them no longer may; a reading
        shows them beside what is surely ours."""
        exact = [(t.reading, t.interval.lo) for t in self.tracks.values() if t.reading and t.reading.exact]
        since = now - self.policy.stray_s
        strays, first_at = self.losses.strays(since, [(r.opened_at, r.load - lo) for r, lo in exact])
        return strays, first_at + self.policy.stray_s + 1e-6

    def free(self, now: float) -> float | None:
        """What batch work may hold by the newest readings, ours included, whatever closes the gate; None:
        not known. Where a signal counts requests, it is asked."""
        known = [t for t in self.tracks.values() if t.reading is not None and t.budget is not None]
        if any(now > self._good_until(t.reading) for t in known if t.reading):
            return None
        counting = [t for t in known if t.reading is not None and t.reading.exact] or known
        rooms = [
            max(0.0, min((t.interval.lo + t.interval.hi) / 2 + b.headroom, self.policy.most(b.max_sys)))
            for t in counting
            if (b := t.budget) is not None and b.fault is None
        ]
        return min(rooms) if rooms and len(rooms) == len(counting) else None

    def counts_calls(self, now: float) -> bool:
        """Return whether readings count our calls, and not the units in them."""
        return self._fewer_since is not None and now - self._fewer_since >= CALLS_COUNTED_S

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────────

    def _good_until(self, reading: Reading) -> float:
        """When it is too old to be acted upon."""
        return reading.closed_at + (self.policy.max_age_s if reading.good_s is None else reading.good_s)

    def _reassess(self) -> None:
        for track in self.tracks.values():
            track.reassess(self.policy, self.learned.share)

    def _apply(self, track: Track, reading: Reading, ours_at: float, reachable: bool) -> None:
        lost_before = self.losses.lost_at(reading.opened_at)
        limit, known, shared = track.limit, track.lost_before, self._shared
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
        unseen = reading.exact and reading.load + 0.5 < track.interval.own_lo
        if unseen and self._travel.explained(lambda delta_s: self._shows(reading, delta_s)):
            track.interval, unseen = self._ours_in(reading, reachable), False
        track.disbelieved = track.disbelieved + 1 if unseen else 0
        track.reassess(self.policy, self.learned.share)

    def _ours_in(self, reading: Reading, reachable: bool) -> Interval:
        """What of ours it contains; without a gateway nothing surely: what connects or hangs is not there."""
        interval = self._ours_between(reading, reading.opened_at, self._travel.delta_s)
        return interval if reachable else interval.unsure_of_own()

    def _ours_between(self, reading: Reading, opened_at: float, delta_s: float) -> Interval:
        """Return the bounds on our own load in the reading, counted as the reading counts, for a window that
        opened at `opened_at` and a transit time of `delta_s`."""
        return self.held.between(opened_at, reading.closed_at, delta_s, reading.beyond_calls)

    def _shows(self, reading: Reading, delta_s: float) -> bool:
        """Whether it shows all that we surely had there, if travel took so long."""
        return reading.load + 0.5 >= self._ours_between(reading, reading.opened_at, delta_s).own_lo

    def _learn(self) -> None:
        """What the newest sample teaches of the capacity."""
        tracks = [t for t in self.tracks.values() if t.budget is not None and t.budget.fault is None]
        # A faulty reading keeps the gate shut: that nothing was refused meanwhile teaches nothing.
        if not tracks or len(tracks) < len(self.tracks):
            return
        self.learned.reading(
            self._sight(tracks), reserve=self.policy.reserve, backoff=self.policy.overload_backoff
        )
        self._reassess()

    def _sight(self, tracks: list[Track]) -> Sight:
        """Return the newest sample's view of the whole pool, made of all signals of that sample."""
        seen = [(t.reading, t.interval.hi, t.budget) for t in tracks if t.reading is not None and t.budget]
        apart = [r for r, _, _ in seen if _told_apart(r)]
        newest = max(apart or [r for r, _, _ in seen], key=lambda r: r.closed_at)
        # A pressure score counts nobody; what ran and waited does.
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
        """Return the requests that ran and that waited at the moment of the sample.

        The queues of the model servers may be up to SERVER_LAG_S old, so that requests which came since then
        and wait look as if they ran. Therefore only those of our requests certainly ran that were there all
        that time, and only as many other requests as were also there at the sample before.
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
    """All requests in the pool, by a reading that tells what runs from what waits."""
    running, waiting = (
        (reading.averages or (0.0, 0.0)) if reading.running is None else (reading.running, reading.waiting)
    )
    return running + waiting


def _told_apart(reading: Reading) -> bool:
    """Whether it tells what runs from what waits, in numbers that a pool may have."""
    counts = [*(reading.averages or ())]
    if reading.running is not None:
        counts += [reading.running, reading.waiting]
    return bool(counts) and all(0 <= each <= PLAUSIBLE_MOST for each in counts)


def _horizon(oldest_s: float) -> float:
    """How long ago requests may have ended that a reading of that age still shows."""
    return oldest_s + WINDOW_MOST_S + 2 * (MOST_S + LATE_MOST_S)
