"""The limiter: computes the limit on batch requests in flight from a stream of events.

Readings move a limit (`LimitTracker`), and other conditions close the gate regardless of that limit (`Gate`).
The first reason that applies is reported (`Reason`, in this order):

    reason               applies from                                 until
    draining             start_draining                               the end
    paused               set_paused(True)                             set_paused(False)
    queue-unreachable    set_queue_problem(why)                       set_queue_problem(None)
    starting             the start, or a new signal                   a reading of each signal
    unreadable           record_read_failure, from its closes_at on   a sample of each signal
    stale                max_age after the newest reading             a newer reading
    no-endpoints         a reading that says so                       a reading that does not
    implausible          a reading that cannot be right; two in       a reading that can be right; one that
                         a row that lack our requests                 contains them
    gateway-unreachable  record_connection_failure,                   record_gateway_answer,
                         record_intermediary_error                    check_connections
    backpressure         record_refusal                               a reading after it, and its retry_at
    no-room              a reading, policy, capacity bound or lost    the same
                         leases that leave a limit of 0
    saturated, full,     the gate is open: depends on requests in flight and waiting
    idle, open

The limiter is a state machine without clock, randomness or I/O. Every method is an event with its time, and
`get_allowance(now)` returns how many requests may be in flight and until when that result is valid. Events
may arrive in any order and more than once; none raises an exception.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from dispatcher.core.limit.allowance import Allowance
from dispatcher.core.limit.budget import PLAUSIBLE_MOST, Budget, Policy, Reading, Reason, Signal
from dispatcher.core.limit.capacity import Capacity
from dispatcher.core.limit.gate import Failure, Gate
from dispatcher.core.limit.limit_tracking import Tracking
from dispatcher.core.limit.poll import Poll

REALTIME = "requests that are not ours, or of a dispatcher that died, take all but the reserve"
STRAYS = "what silent dispatchers left at the gateway fills max_in_flight"


class Limiter:
    """Limiter of one process."""

    def __init__(self, policy: Policy, uses: Iterable[Signal]) -> None:
        self._tracking = Tracking(policy, uses)
        self._gate = Gate()
        self._waiting: int | None = None
        self._withheld = ""
        self._answer: Allowance | None = None
        self._answer_of = -1
        """Revision for which the newest allowance was computed."""
        self._shades: dict[Reason, Allowance] = {}
        """Variants of the newest allowance, one for each reason of the open gate. Nearly every request
        changes that reason, so the variants are kept."""

    # ── events: the pool ────────────────────────────────────────────────────────────────────────────────

    def poll(self, poll: Poll, now: float) -> None:
        """Apply everything that one poll returned."""
        self.uses(poll.signals)
        for reading in poll.readings:
            self.reading(reading, now)
        # Good readings of other signals are added above: the gate closes only at `closes_at`.
        worst = poll.worst
        if worst is not None:
            why = f"{worst} (look at: {worst.hint})" if worst.hint else str(worst)
            self.reading_failed(worst.reason, why, poll.at, closes_at=poll.closes_at)

    def reading(self, reading: Reading, now: float) -> None:
        """Add a sample of one signal. It is applied once δ has passed since its window closed.

        An invalid window is ignored, so that the reading before it becomes stale. A time in the future is
        reduced to `now`. A sample of every signal, repeated ones included, shows that the signals can be read
        again.
        """
        failure = self._gate.failure
        if self._tracking.hand_in(reading, now) and failure is not None:
            self._gate.failure = None if self._tracking.handed_at > failure.at else failure

    def reading_failed(
        self, reason: Reason, why: str, now: float, *, closes_at: float = float("-inf")
    ) -> None:
        """Record that the signals could not be read. From `closes_at` on (`StalenessLimit`) the state of the
        pool is unknown until they can be read."""
        self._gate.failure = Failure(reason if reason.closed else Reason.UNREADABLE, why, now, closes_at)

    def uses(self, signals: Iterable[Signal]) -> None:
        """Set the signals in use. A new signal has to be read first."""
        self._tracking.use(signals)

    def capacity(self, max_requests: float | None, now: float) -> None:
        """Set the capacity known from elsewhere. A smaller one applies at once, a larger one from the next
        reading on."""
        self._tracking.set_capacity(max_requests)

    def settings(self, policy: Policy, now: float) -> None:
        """Set a policy that the operator changed. It applies at once, also to the current readings."""
        self._tracking.set_policy(policy)

    # ── events: own requests and leases ─────────────────────────────────────────────────────────────────

    def sent(self, key: Hashable, now: float, units: int = 1) -> None:
        self._tracking.held.sent(key, now, units)

    def answered(self, key: Hashable, now: float, opened_s: float | None = None) -> None:
        """Record that a request left the gateway: answered, failed, cancelled or abandoned. `opened_s` is the
        time that it took to open a connection for it, if one was opened."""
        self._tracking.answered(key, now, opened_s)

    def leases(self, now: float, *, others: int, young: int, lost: int, stray: int = 0) -> None:
        """Record counts from the queue: units that other owners lease, those leased too recently to have been
        sent, leases ever lost, and orphaned ones among those."""
        reachable = self._gate.reachable
        self._tracking.count_leases(
            now, others=others, young=young, lost=lost, stray=stray, reachable=reachable
        )

    def shared(self, limit: int, read_at: float) -> None:
        """Set the newest limit of any replica. The next reading here moves that limit, and not an older one
        of this process."""
        self._tracking.share(limit, read_at)

    def queue_took(self, longest_s: float) -> None:
        """Set the longest duration of a recent call that writes to the queue."""
        self._tracking.held.queue_call_s = longest_s

    def waiting(self, count: int, now: float) -> None:
        """Set the number of requests that could be claimed now."""
        self._waiting = count

    def withheld(self, why: str) -> None:
        """Set why the newest claim returned nothing although requests wait. Empty if it returned some, or
        none waits."""
        self._withheld = why

    # ── events: the gateway ─────────────────────────────────────────────────────────────────────────────

    def looped(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop. Answers may have come earlier than they were seen
        by this much."""
        self._tracking.looped(late_s)

    def in_flight_when_refused(self, now: float, units: int = 1) -> int:
        """Return the units in flight when `units` of them were refused at `now` and have already been
        recorded as answered."""
        return self._gate.refusals.together(self.in_flight + units, self.allowance(now).read_at)

    def overloaded(
        self, now: float, *, until: float, capacity: bool, in_flight: int, heard: bool = False
    ) -> None:
        """Record that the gateway refused a request at `now`. The gate stays closed until `retry_at`, and
        until a reading is taken after the refusal.

        `is_remote` is True if another replica reported the refusal, which it does repeatedly
        (`Refusals.record_refusal`).
        """
        until = min(until, now + self._tracking.policy.retry_after_max_s)
        known = self._gate.refusals.refused(now, until, heard=heard)
        if capacity:
            self._tracking.refused(in_flight, known=known, heard=heard)

    def bare_answer(self, now: float, sent_at: float, why: str, connected: Iterable[float] = ()) -> bool:
        """Record a response without gateway headers (`Reachability.record_intermediary_error`). Return True
        if there is no gateway."""
        return self._gate.reach.bare(now, sent_at, why, connected)

    def unreachable(self, now: float, why: str) -> None:
        """Record that no connection to the gateway can be opened. The gate closes until a request gets an
        answer."""
        self._gate.reach.unreachable(now, why)

    def probed(self, now: float, *, others: bool = False) -> None:
        """Record that a probe was sent, or could not be sent. The next one waits longer
        (`Reachability.record_probe`)."""
        self._gate.reach.probed(now, others=others)

    def reached(self, now: float, sent_at: float) -> None:
        """Record that the gateway answered a request sent at `sent_at`."""
        self._gate.reach.reached(now, sent_at)

    def look(self, now: float, connected: Iterable[float]) -> bool:
        """Return whether requests that are still connected show that the gateway is back. `connected_since`
        has the time of each connection."""
        return self._gate.reach.look(now, connected)

    # ── events: the operator and the queue ──────────────────────────────────────────────────────────────

    def pause(self, paused: bool, now: float) -> None:
        if paused is not self._gate.paused:  # reported with each reply of the queue
            self._gate.paused = paused

    def drain(self, now: float) -> None:
        self._gate.draining = True

    def queue(self, problem: str | None, now: float) -> None:
        """Set why the queue cannot be reached. `None` if it can be reached again."""
        self._gate.queue_problem = problem

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Units of batch requests that the gateway may hold now, over all replicas."""
        return self._tracking.held.own + self._tracking.held.others

    @property
    def most(self) -> int | None:
        """Largest limit that the newest readings allow. `None` if it is not known."""
        most = self._tracking.policy.most
        return min((most(budget.max_sys) for budget in self.budgets), default=None)

    @property
    def learned(self) -> Capacity:
        """Capacity of the pool as learned from readings."""
        return self._tracking.learned

    @property
    def others(self) -> int:
        """Units in flight that other replicas hold."""
        return self._tracking.held.others

    @property
    def budgets(self) -> list[Budget]:
        """Budget of each signal."""
        return self._tracking.budgets

    @property
    def readings(self) -> list[Reading]:
        """Newest reading of each signal."""
        return self._tracking.readings

    @property
    def not_ours(self) -> tuple[float | None, float | None]:
        """Realtime requests of the newest reading: outside the picker's queue, and in it.

        The number of batch requests in flight now differs from the number at the time of the sample.
        Therefore the largest number that may have been in flight within the sample's window is subtracted. A
        signal that counts requests is preferred to one that does not.
        """
        tracks = [(each.reading, each.interval.hi) for each in self._tracking.tracks.values() if each.reading]
        believed = [each for each in tracks if 0.0 <= each[0].load <= PLAUSIBLE_MOST]
        known = [each for each in believed if each[0].exact] or believed
        if not known:
            return None, None
        reading, ours = max(known, key=lambda each: each[0].closed_at)
        waits = reading.f_epp * reading.max_sys
        runs = reading.load - waits
        if not reading.exact and reading.running is not None:  # a pressure score counts no requests
            runs = reading.running + reading.waiting - waits
        return max(0.0, runs - ours), min(waits, max(0.0, runs + waits - ours))

    def counted_as_calls(self, now: float) -> tuple[int, int] | None:
        """Return the units that this process has at the gateway and the number of calls in which it sent
        them, if readings count calls. `None` if they count units, or if both numbers are the same."""
        held = self._tracking.held
        return (held.own, held.calls) if self._tracking.counts_calls(now) else None

    @property
    def work(self) -> bool:
        """True if a request could be claimed when the queue was last read."""
        return bool(self._waiting)

    @property
    def without_gateway_since(self) -> float | None:
        """Time since which the gateway is unreachable. `None` if it is reachable as far as known."""
        return None if self._gate.reach.closure is None else self._gate.reach.closure.since

    @property
    def gateway_problem(self) -> str | None:
        """Reason why the gateway is unreachable, regardless of the reported reason. `None` if it is reachable
        as far as known."""
        return None if self._gate.reach.closure is None else self._gate.reach.closure.why

    @property
    def signals_problem(self) -> str | None:
        """Reason why the newest poll could not read the signals. `None` if it could."""
        return None if self._gate.failure is None else self._gate.failure.why

    @property
    def mean_s(self) -> float:
        """Mean duration of the requests of this process. 0 until one was answered."""
        return self._tracking.held.mean_s

    @property
    def usual_s(self) -> float:
        """Median duration of the newest answered requests of this process. 0 until one was answered."""
        return self._tracking.usual_s

    def knows_pool(self, now: float) -> bool:
        """Return whether the newest readings still show the state of the pool."""
        return self._tracking.stale(now) is None and self._gate.unreadable(now) is None

    def free(self, now: float) -> float | None:
        """Return the units that batch requests may hold according to the newest readings
        (`LimitTracker.estimate_free_units`)."""
        return self._tracking.free(now)

    # ── result ──────────────────────────────────────────────────────────────────────────────────────────

    def allowance(self, now: float) -> Allowance:
        """Return what may be in flight now."""
        # The allowance is read several times per request. It is computed again only after a change or at the
        # time that it names.
        answer = self._answer
        revisions = self._tracking.revisions + self._gate.revisions
        if answer is None or revisions != self._answer_of or _over(answer, now):
            answer = self._answer = self._decide(now)
            self._answer_of = self._tracking.revisions + self._gate.revisions
            self._shades.clear()
        if answer.reason.closed:
            return answer
        reason = self._open_reason(answer)
        # An open gate depends on the requests in flight, which change with every request. Only the reason is
        # replaced, because the limit is the same.
        because = self._withheld if reason is Reason.OPEN else ""
        if reason is not answer.reason or because != answer.because:
            shade = self._shades.get(reason)
            if shade is None or shade.because != because:
                shade = self._shades[reason] = answer.but(reason=reason, because=because)
            answer = self._answer = shade
        return answer

    def _decide(self, now: float) -> Allowance:
        tracking, gate = self._tracking, self._gate
        tracking.apply_due(now, refused_at=gate.refusals.at, reachable=gate.reachable)
        checks = [*tracking.due_at, *tracking.stale_at, *gate.changes_at]
        signal, room = tracking.smallest()
        limit, cap = room, tracking.policy.max_in_flight
        # Readings count orphaned requests as realtime, so only the hard limit on batch requests needs the
        # correction.
        if cap is not None:
            strays, gone_at = tracking.strays(now)
            limit = min(room, cap - strays)
            checks.append(gone_at)
        closed = self._closed(now)
        if limit <= 0 and closed is None:
            closed = Reason.NO_ROOM, REALTIME if room <= 0 else STRAYS
        reason, because = closed or (Reason.OPEN, "")
        probe = limit > 0 and reason is Reason.GATEWAY_UNREACHABLE and gate.may_probe(now, tracking.read_at)
        return Allowance(
            limit=0 if reason.closed else limit,
            reason=reason,
            because=because,
            signal=signal,
            budget=None if signal is None else tracking.tracks[signal].budget,
            read_at=tracking.read_at,
            lost=tracking.losses.lost,
            next_check_at=min((at for at in checks if now < at < float("inf")), default=None),
            probe=limit if probe else 0,
        )

    def _closed(self, now: float) -> tuple[Reason, str] | None:
        """Return the first reason that closes the gate, with its details. `None` if only a lack of room may
        close it."""
        tracking, gate = self._tracking, self._gate
        return (
            gate.closed_to_claiming()
            or self._starting()
            or gate.unreadable(now)
            or tracking.stale(now)
            or tracking.fault()
            or gate.unreachable()
            or gate.refused(now, tracking.read_at)
        )

    def _starting(self) -> tuple[Reason, str] | None:
        unread, failure = self._tracking.unread, self._gate.failure
        if self._tracking.tracks and not unread:
            return None
        why = f"no reading yet of {' and '.join(unread) or 'any signal'}"
        return Reason.STARTING, why if failure is None else f"{why}: {failure.why}"

    def _open_reason(self, answer: Allowance) -> Reason:
        held = self._tracking.held
        in_flight = held.own + held.others
        if in_flight > answer.limit and answer.budget is not None and answer.budget.headroom < 0:
            return Reason.SATURATED
        if in_flight >= answer.limit:
            return Reason.FULL
        if self._waiting == 0:
            return Reason.IDLE
        return Reason.OPEN

    def __repr__(self) -> str:
        answer = self._answer
        shown = f"{answer.reason}, limit {answer.limit}" if answer else "undecided"
        return f"<Limiter {shown}, in flight {self.in_flight}>"


def _over(answer: Allowance, now: float) -> bool:
    """Return whether the allowance has to be computed again although no event happened."""
    return answer.next_check_at is not None and now >= answer.next_check_at
