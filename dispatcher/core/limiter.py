"""The control law: from what is known of the pool, the limit on our requests in flight.

A reading that shows headroom H, taken while between `lo` and `hi` of our own requests were inside it, proves
that the limit lies between lo + H and hi + H (our own are added back). The limit moves only as far as that
proves:

    L = clamp(L_before, lo + H, hi + H),   L ≤ floor(max_SYS × (1 − B)), max_in_flight

max_SYS is what the configuration says, or the share of that which was learned to fit (`Capacity`).

Each signal keeps a limit of its own; the smallest wins. A lease that ends without an answer lowers L by one
until a reading taken after that. Everything else closes the gate, and the first reason that holds is the one
shown (`Reason`, in order).

The limiter is a state machine without clock, randomness or I/O: every method is an event with its time, and
`allowance(now)` says what may be in flight now and until when that answer stands. Events may come in any
order and twice; none raises.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace

from dispatcher.core.allowance import Allowance
from dispatcher.core.budget import PLAUSIBLE_MOST, Budget, Policy, Reading, Reason, Signal
from dispatcher.core.capacity import Capacity, Sight
from dispatcher.core.held import Held, Interval
from dispatcher.core.losses import Losses
from dispatcher.core.reach import Reach
from dispatcher.core.refusals import HEARD_SLOP_S, Refusals
from dispatcher.core.track import Track
from dispatcher.core.travel import MOST_S, Travel

WINDOW_MOST_S = 10.0
"""No reading's window is longer than this (averages are flushed every 5 s)."""
KEPT_READINGS = 16
REALTIME = "requests that are not ours, or of a dispatcher that died, take all but the reserve"
DISBELIEF = 2
"""So many readings in a row without the requests we surely had running mean: not our pool."""


class Limiter:
    """The law of the module, over a stream of events. One per process."""

    def __init__(self, policy: Policy, uses: Iterable[Signal]) -> None:
        self._policy = policy
        self._tracks = {signal: Track() for signal in uses}
        self._held = Held(horizon_s=_horizon(policy))
        self._learned = Capacity()
        self._travel = Travel()
        self._capacity: float | None = None
        self._losses = Losses()
        self._shared = (float("-inf"), 0)
        self._waiting: int | None = None
        self._withheld = ""
        self._failure: tuple[Reason, str, float] | None = None
        self._failure_closes_at = float("-inf")
        self._draining = self._paused = False
        self._queue_problem: str | None = None
        self._refusals = Refusals()
        self._reach = Reach()
        self._newest_sample_at = float("-inf")
        self._standing: Allowance | None = None

    # ── events: the pool ────────────────────────────────────────────────────────────────────────────────

    def reading(self, reading: Reading, now: float) -> None:
        """A sample of one signal. It is applied once δ has passed after its window.

        A window that is no stretch of time is ignored, so that the reading before it goes stale; what is
        said to be of later than now was taken by now. To be handed a sample of every signal, be it one
        seen before, shows that the pool can be read again.
        """
        track = self._tracks.get(reading.signal)
        if track is None or not float("-inf") < reading.opened_at <= reading.closed_at < float("inf"):
            return
        if reading.closed_at > now:
            reading = replace(reading, opened_at=min(reading.opened_at, now), closed_at=now)
        track.handed_at = now
        if self._failure is not None and all(t.handed_at > self._failure[2] for t in self._tracks.values()):
            self._failure = None
        self._travel.reckon()
        track.waiting.append(reading)
        del track.waiting[:-KEPT_READINGS]
        self._standing = None

    def reading_failed(
        self, reason: Reason, why: str, now: float, *, closes_at: float = float("-inf")
    ) -> None:
        """The signals could not be read: from `closes_at` on (`Patience`) nothing is known until they can."""
        self._failure = (reason if reason.closed else Reason.UNREADABLE, why, now)
        self._failure_closes_at = closes_at
        self._standing = None

    def uses(self, signals: Iterable[Signal]) -> None:
        """Which signals count from now on; one that is new has to be read first."""
        wanted = set(signals)
        if wanted != set(self._tracks):
            self._tracks = {signal: self._tracks.get(signal, Track()) for signal in sorted(wanted)}
            self._standing = None

    def capacity(self, max_requests: float | None, now: float) -> None:
        """What the pool can take as seen elsewhere. Less counts at once, more with the next reading."""
        self._capacity = max_requests
        for track in self._tracks.values():
            if max_requests is not None and (track.capacity is None or max_requests < track.capacity):
                track.capacity = max_requests
            track.reassess(self._policy, self._learned.share)
        self._standing = None

    def settings(self, policy: Policy, now: float) -> None:
        """The operator changed the policy: it holds at once, for the readings at hand too."""
        self._policy = policy
        self._held.horizon_s = max(self._held.horizon_s, _horizon(policy))
        for track in self._tracks.values():
            track.reassess(self._policy, self._learned.share)
        self._standing = None

    # ── events: our own load ────────────────────────────────────────────────────────────────────────────

    def sent(self, key: Hashable, now: float, units: int = 1) -> None:
        self._held.sent(key, now, units)

    def answered(self, key: Hashable, now: float, opened_s: float | None = None) -> None:
        """The request is no longer at the gateway: answered, failed, cut or given up. `opened_s`: how long
        it took to open a connection for it, where one was."""
        if (out_s := self._held.answered(key, now)) is not None:
            self._travel.exchanged(out_s)
        if opened_s is not None:
            self._travel.opened(opened_s)

    def leases(self, now: float, *, others: int, young: int, lost: int, stray: int = 0) -> None:
        """Counted in the queue: units of other owners' leases, leases ever lost, and the strays among those.

        The first count after a reading's window tells what of theirs that reading surely contained: only
        then can it prove room beyond our own.
        """
        counted_at = self._held.counted_at
        self._held.counted(now, others, young)
        for track in self._tracks.values():
            reading = track.reading
            if reading is not None and counted_at < reading.closed_at <= now:
                track.interval = self._ours_in(reading)
                track.reassess(self._policy, self._learned.share)
                self._standing = None
        known = self._losses.lost
        if not self._losses.counted(now, lost, stray):  # a new beginning
            for track in self._tracks.values():
                track.lost_before = lost
            self._standing = None
        elif lost != known:
            self._standing = None

    def shared(self, limit: int, read_at: float) -> None:
        """The newest limit of any replica: the next reading here moves that one, not an older one of ours."""
        self._shared = (read_at, limit)

    def waiting(self, count: int, now: float) -> None:
        """How many requests could be claimed now."""
        self._waiting = count

    def withheld(self, why: str) -> None:
        """Why the newest claim got nothing though something waits; empty: it got some, or nothing waits."""
        self._withheld = why

    # ── events: the gateway ─────────────────────────────────────────────────────────────────────────────

    def overloaded(
        self, now: float, *, until: float, capacity: bool, in_flight: int, heard: bool = False
    ) -> None:
        """The gateway refused a request at `now`; closed until a reading taken after that and until `until`.

        `heard`: another replica's, told again and again (`Refusals.refused`).
        """
        until = min(until, now + self._policy.retry_after_max_s)
        known = self._refusals.refused(now, until, heard=heard)
        if capacity:
            self._learned.refused(in_flight, known=known, heard=heard)
        self._standing = None

    def nobody_home(self, now: float, sent_at: float, why: str, connected: Iterable[float] = ()) -> bool:
        """An answer that no gateway gave (`Reach.bare`). True: there is none."""
        self._standing = None
        return self._reach.bare(now, sent_at, why, connected)

    def unreachable(self, now: float, why: str) -> None:
        """There is no gateway: closed until something answers."""
        self._reach.unreachable(now, why)
        self._standing = None

    def probed(self, now: float, *, others: bool = False) -> None:
        """A probe was sent, or could not be: the next one waits longer (`Reach.probed`)."""
        self._reach.probed(now, others=others)
        self._standing = None

    def reached(self, now: float, sent_at: float) -> None:
        """The gateway answered a request sent at `sent_at`."""
        if self._reach.reached(now, sent_at):
            self._standing = None

    @property
    def without_gateway_since(self) -> float | None:
        """None: there is a gateway, as far as one can know."""
        return None if self._reach.closure is None else self._reach.closure.since

    def look(self, now: float, connected: Iterable[float]) -> bool:
        """Whether requests that are still connected (each since when) show that there is a gateway again."""
        if not self._reach.look(now, connected):
            return False
        self._standing = None
        return True

    # ── events: the operator and the queue ──────────────────────────────────────────────────────────────

    def pause(self, paused: bool, now: float) -> None:
        if paused != self._paused:
            self._paused = paused
            self._standing = None

    def drain(self, now: float) -> None:
        self._draining = True
        self._standing = None

    def queue(self, problem: str | None, now: float) -> None:
        """The queue cannot be reached (why), or can again (None)."""
        if problem != self._queue_problem:
            self._queue_problem = problem
            self._standing = None

    # ── the answer ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Units of our requests that the gateway may hold now, all replicas together."""
        return self._held.own + self._held.others

    @property
    def budgets(self) -> list[Budget]:
        """What each signal leaves."""
        return [track.budget for track in self._tracks.values() if track.budget is not None]

    @property
    def readings(self) -> list[Reading]:
        """The newest reading of each signal."""
        return [track.reading for track in self._tracks.values() if track.reading is not None]

    @property
    def work(self) -> bool:
        """Some request could be claimed when the queue was asked last."""
        return bool(self._waiting)

    def free(self, now: float) -> float | None:
        """What batch work may hold by the newest readings, ours included, whatever closes the gate; None:
        not known. Where a signal counts requests, it is asked."""
        known = [t for t in self._tracks.values() if t.reading is not None and t.budget is not None]
        if any(now - t.reading.closed_at > self._policy.max_age_s for t in known if t.reading):
            return None
        counting = [t for t in known if t.reading is not None and t.reading.exact] or known
        rooms = [
            max(0.0, min((t.interval.lo + t.interval.hi) / 2 + b.headroom, self._policy.most(b.max_sys)))
            for t in counting
            if (b := t.budget) is not None and b.fault is None
        ]
        return min(rooms) if rooms and len(rooms) == len(counting) else None

    @property
    def gateway_problem(self) -> str | None:
        """Why there is no gateway, whatever reason is shown; None: there is one, as far as one can know."""
        return self._reach.closure.why if self._reach.closure is not None else None

    @property
    def most(self) -> int | None:
        """All that the limit can be, by what the newest readings say of the pool; None: not known."""
        return min((self._policy.most(budget.max_sys) for budget in self.budgets), default=None)

    @property
    def others(self) -> int:
        """The part of them that other replicas hold."""
        return self._held.others

    def allowance(self, now: float) -> Allowance:
        """What may be in flight now."""
        standing = self._standing
        if standing is None or (standing.next_check_at is not None and now >= standing.next_check_at):
            standing = self._standing = self._decide(now)
        if standing.reason.closed:
            return standing
        reason = self._open_reason(standing)
        because = self._withheld if reason is Reason.OPEN else ""
        if reason is not standing.reason or because != standing.because:
            standing = self._standing = replace(standing, reason=reason, because=because)
        return standing

    def _decide(self, now: float) -> Allowance:
        self._apply_due(now)
        checks = [r.closed_at + self._travel.delta_s for t in self._tracks.values() for r in t.waiting]
        read_at = self._read_at()
        signal, limit = self._smallest()
        budget = self._tracks[signal].budget if signal is not None else None
        closed, probe = self._closed_without_room(now, read_at, checks), False
        room, cap = limit, self._policy.max_in_flight
        limit = room if cap is None else min(room, cap - self._strays(now, checks))
        if closed is None:
            closed, probe = self._closed_to_sending(now, read_at, limit, checks)
            if limit <= 0 < room and closed == (Reason.NO_ROOM, REALTIME):
                closed = Reason.NO_ROOM, "what silent dispatchers left at the gateway fills max_in_flight"
        reason, because = closed if closed is not None else (Reason.OPEN, "")
        return Allowance(
            limit=0 if reason.closed else limit,
            reason=reason,
            because=because,
            signal=signal,
            budget=budget,
            read_at=read_at,
            lost=self._losses.lost,
            next_check_at=min(checks) if checks else None,
            probe=limit if probe else 0,
        )

    def _closed_without_room(
        self, now: float, read_at: float, checks: list[float]
    ) -> tuple[Reason, str] | None:
        """Why nothing is known, or nothing wanted; appends the times at which that may change."""
        if self._draining:
            return Reason.DRAINING, "shutting down"
        if self._paused:
            return Reason.PAUSED, "paused by an operator"
        if self._queue_problem is not None:
            return Reason.QUEUE_UNREACHABLE, self._queue_problem
        unread = [signal for signal, track in self._tracks.items() if track.reading is None]
        if unread or not self._tracks:
            why = f"no reading yet of {' and '.join(unread) or 'any signal'}"
            return Reason.STARTING, why if self._failure is None else f"{why}: {self._failure[1]}"
        if self._failure is not None:
            if not now < self._failure_closes_at:
                return self._failure[:2]
            checks.append(self._failure_closes_at)
        stale = self._stale(now, checks)
        if stale is not None:
            return stale
        budgets = [t.budget for t in self._tracks.values() if t.budget is not None]
        faults = [(b.fault, f"{b.signal}: {b.because}") for b in budgets if b.fault is not None]
        if faults:
            return min(faults, key=lambda fault: fault[0].rank)
        for signal, track in self._tracks.items():
            if track.disbelieved >= DISBELIEF:
                return Reason.IMPLAUSIBLE, f"{signal} does not show the requests that we have running"
        return None

    def _stale(self, now: float, checks: list[float]) -> tuple[Reason, str] | None:
        for reading in self.readings:
            stale_at = reading.closed_at + self._policy.max_age_s
            if now > stale_at:
                age = now - reading.closed_at
                return Reason.STALE, f"the newest sample of {reading.signal} is {age:.1f} s old"
            # A hair past it: at the very moment the reading still holds, and asking again must make headway.
            checks.append(stale_at + 1e-6)
        return None

    def _closed_to_sending(
        self, now: float, read_at: float, limit: int, checks: list[float]
    ) -> tuple[tuple[Reason, str] | None, bool]:
        """Why the pool may not be sent to though it was read well, and whether to probe the gateway."""
        refused = self._refused(now, read_at, checks)
        closure = self._reach.closure
        if closure is not None:
            probe = now >= closure.next_probe_at and refused is None and limit > 0
            if not probe and closure.next_probe_at > now:
                checks.append(closure.next_probe_at)
            return (Reason.GATEWAY_UNREACHABLE, closure.why), probe
        if refused is not None:
            return refused, False
        if limit <= 0:
            return (Reason.NO_ROOM, REALTIME), False
        return None, False

    def _refused(self, now: float, read_at: float, checks: list[float]) -> tuple[Reason, str] | None:
        why = self._refusals.closed(now, read_at)
        if now < self._refusals.until:
            checks.append(self._refusals.until)
        return (Reason.BACKPRESSURE, why) if why else None

    def _open_reason(self, standing: Allowance) -> Reason:
        in_flight = self.in_flight
        if in_flight > standing.limit and standing.budget is not None and standing.budget.headroom < 0:
            return Reason.SATURATED
        if in_flight >= standing.limit:
            return Reason.FULL
        if self._waiting == 0:
            return Reason.IDLE
        return Reason.OPEN

    def _smallest(self) -> tuple[Signal | None, int]:
        """The signal with the smallest limit, and that limit less the leases lost since its reading."""
        smallest: tuple[Signal | None, int] = (None, 0)
        lost = self._losses.lost
        for signal, track in self._tracks.items():
            limit = track.limit - max(0, lost - track.lost_before)
            if smallest[0] is None or limit < smallest[1]:
                smallest = (signal, limit)
        return smallest

    def _strays(self, now: float, checks: list[float]) -> int:
        """Requests of silent owners that may still run; a reading shows them beside what is surely ours."""
        exact = [(t.reading, t.interval.lo) for t in self._tracks.values() if t.reading and t.reading.exact]
        since = now - self._policy.stray_s
        strays, first_at = self._losses.strays(since, [(r.opened_at, r.load - lo) for r, lo in exact])
        if strays:
            checks.append(first_at + self._policy.stray_s + 1e-6)
        return strays

    def _read_at(self) -> float:
        """When the newest reading was taken, whichever signal it was of."""
        opened = [t.reading.opened_at for t in self._tracks.values() if t.reading is not None]
        return max(opened, default=float("-inf"))

    def _apply_due(self, now: float) -> None:
        applied_to = self._newest_sample_at
        ours_at = self._read_at()
        for track in self._tracks.values():
            for reading in track.due(now, self._travel.delta_s):
                if track.reading is None or reading.closed_at > track.reading.closed_at:
                    self._apply(track, reading, ours_at)
                    applied_to = max(applied_to, reading.closed_at)
        if applied_to > self._newest_sample_at:
            self._newest_sample_at = applied_to  # once per sample, however many signals it was of
            self._learn()

    def _apply(self, track: Track, reading: Reading, ours_at: float) -> None:
        lost_before = self._losses.lost_at(reading.opened_at)
        limit, known = track.limit, track.lost_before
        if self._shared[0] - HEARD_SLOP_S > ours_at:
            limit, known = self._shared[1], self._losses.lost_at(self._shared[0])
        track.before = limit - max(0, lost_before - known)
        track.lost_before = max(track.lost_before, lost_before)
        track.reading = reading
        track.capacity = self._capacity
        track.interval = self._ours_in(reading)
        unseen = reading.exact and reading.load + 0.5 < track.interval.own_lo
        if unseen and self._travel.explained(lambda delta_s: self._shows(reading, delta_s)):
            track.interval, unseen = self._ours_in(reading), False
        track.disbelieved = track.disbelieved + 1 if unseen else 0
        track.reassess(self._policy, self._learned.share)

    def _ours_in(self, reading: Reading) -> Interval:
        """What of ours it contains; without a gateway nothing surely: what connects or hangs is not there."""
        interval = self._held.between(reading.opened_at, reading.closed_at, self._travel.delta_s)
        return interval if self._reach.closure is None else interval.unsure_of_own()

    def _shows(self, reading: Reading, delta_s: float) -> bool:
        """Whether it shows all that we surely had there, if travel took so long."""
        return reading.load + 0.5 >= self._held.least_own(reading.opened_at, reading.closed_at, delta_s)

    def _learn(self) -> None:
        """What the newest sample teaches of the capacity."""
        if self._read_at() <= self._refusals.at:
            return
        tracks = [t for t in self._tracks.values() if t.budget is not None and t.budget.fault is None]
        # A faulty reading keeps the gate shut: that nothing was refused meanwhile teaches nothing.
        if not tracks or len(tracks) < len(self._tracks):
            return
        self._learned.reading(_sight(tracks), self._policy.overload_backoff)
        for track in tracks:
            track.reassess(self._policy, self._learned.share)

    def __repr__(self) -> str:
        standing = self._standing
        shown = f"{standing.reason}, limit {standing.limit}" if standing else "undecided"
        return f"<Limiter {shown}, in flight {self.in_flight}>"


def _sight(tracks: list[Track]) -> Sight:
    """What the newest sample shows of the whole pool, however many signals it was of."""
    seen = [(t.reading, t.interval.hi, t.budget) for t in tracks if t.reading is not None and t.budget]
    apart = [r for r, _, _ in seen if _told_apart(r)]
    newest = max(apart or [r for r, _, _ in seen], key=lambda r: r.closed_at)
    waiting = newest.waiting if apart else max(r.f_epp * r.max_sys for r, _, _ in seen)
    # A pressure score counts nobody; what ran and waited does.
    counted = [(r.load, hi) for r, hi, _ in seen if r.exact]
    counted = counted or [((r.running or 0.0) + r.waiting, hi) for r, hi, _ in seen if _told_apart(r)]
    counted = counted or [(r.load, hi) for r, hi, _ in seen]
    return Sight(
        at=newest.closed_at,
        configured=min(budget.configured for _, _, budget in seen),
        running=newest.running if apart else None,
        waiting=waiting,
        flushed=bool(apart) and newest.flushed,
        realtime=max(max(0.0, load - hi) for load, hi in counted),
    )


def _told_apart(reading: Reading) -> bool:
    """Whether it tells what runs from what waits, in numbers that a pool may have."""
    running, waiting = reading.running, reading.waiting
    return running is not None and 0 <= running <= PLAUSIBLE_MOST and 0 <= waiting <= PLAUSIBLE_MOST


def _horizon(policy: Policy) -> float:
    return policy.max_age_s + WINDOW_MOST_S + 2 * MOST_S
