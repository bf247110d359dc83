"""The control law: from what is known of the pool, the limit on our requests in flight.

Two ideas meet here. What was read moves a limit (`Tracking`), and other things close the gate whatever the
limit is (`Gate`). The first reason that holds is the one shown (`Reason`, in this order):

    reason               holds from                                   until
    draining             drain                                        the end
    paused               pause(True)                                  pause(False)
    queue-unreachable    queue(why)                                   queue(None)
    starting             the start, or a signal that is new           a reading of each signal
    unreadable           reading_failed, from its closes_at on        a sample of each signal is handed in
    stale                max_age after the newest reading             a newer one
    no-endpoints         a reading that says so                       one that does not
    implausible          a reading that cannot be right; two in       one that can; one that does
                         a row that do not show ours
    gateway-unreachable  unreachable, bare_answer              reached, look
    backpressure         overloaded                                   a reading taken after it, and its until
    no-room              a reading, settings, capacity or lost        the same
                         leases that leave a limit of 0
    saturated, full,     open: by what is in flight and what waits
    idle, open

The limiter is a state machine without clock, randomness or I/O: every method is an event with its time, and
`allowance(now)` says what may be in flight now and until when that answer stands. Events may come in any
order and twice; none raises.
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
    """The law of the module, over a stream of events. One per process."""

    def __init__(self, policy: Policy, uses: Iterable[Signal]) -> None:
        self._tracking = Tracking(policy, uses)
        self._gate = Gate()
        self._waiting: int | None = None
        self._withheld = ""
        self._answer: Allowance | None = None
        self._answer_of = -1
        """The revisions that it was made of."""
        self._shades: dict[Reason, Allowance] = {}
        """That answer for each reason to be open: each request's coming and going takes it to another."""

    # ── events: the pool ────────────────────────────────────────────────────────────────────────────────

    def poll(self, poll: Poll, now: float) -> None:
        """All that one poll tells."""
        self.uses(poll.signals)
        for reading in poll.readings:
            self.reading(reading, now)
        worst = poll.worst
        if worst is not None:
            why = f"{worst} (look at: {worst.hint})" if worst.hint else str(worst)
            self.reading_failed(worst.reason, why, poll.at, closes_at=poll.closes_at)

    def reading(self, reading: Reading, now: float) -> None:
        """A sample of one signal. It is applied once δ has passed after its window.

        A window that is no stretch of time is ignored, so that the reading before it goes stale; what is
        said to be of later than now was taken by now. To be handed a sample of every signal, be it one
        seen before, shows that the pool can be read again.
        """
        failure = self._gate.failure
        if self._tracking.hand_in(reading, now) and failure is not None:
            self._gate.failure = None if self._tracking.handed_at > failure.at else failure

    def reading_failed(
        self, reason: Reason, why: str, now: float, *, closes_at: float = float("-inf")
    ) -> None:
        """The signals could not be read: from `closes_at` on (`Patience`) nothing is known until they can."""
        self._gate.failure = Failure(reason if reason.closed else Reason.UNREADABLE, why, now, closes_at)

    def uses(self, signals: Iterable[Signal]) -> None:
        """Which signals count from now on; one that is new has to be read first."""
        self._tracking.use(signals)

    def capacity(self, max_requests: float | None, now: float) -> None:
        """What the pool can take as seen elsewhere. Less counts at once, more with the next reading."""
        self._tracking.set_capacity(max_requests)

    def settings(self, policy: Policy, now: float) -> None:
        """The operator changed the policy: it holds at once, for the readings at hand too."""
        self._tracking.set_policy(policy)

    # ── events: our own load ────────────────────────────────────────────────────────────────────────────

    def sent(self, key: Hashable, now: float, units: int = 1) -> None:
        self._tracking.held.sent(key, now, units)

    def answered(self, key: Hashable, now: float, opened_s: float | None = None) -> None:
        """The request is no longer at the gateway: answered, failed, cut or given up. `opened_s`: how long
        it took to open a connection for it, where one was."""
        self._tracking.answered(key, now, opened_s)

    def leases(self, now: float, *, others: int, young: int, lost: int, stray: int = 0) -> None:
        """Counted in the queue: units that others lease, leases ever lost, and the strays among those."""
        reachable = self._gate.reachable
        self._tracking.count_leases(
            now, others=others, young=young, lost=lost, stray=stray, reachable=reachable
        )

    def shared(self, limit: int, read_at: float) -> None:
        """The newest limit of any replica: the next reading here moves that one, not an older one of ours."""
        self._tracking.share(limit, read_at)

    def queue_took(self, longest_s: float) -> None:
        """Note the longest time that a recent call took that writes to the queue."""
        self._tracking.held.queue_call_s = longest_s

    def waiting(self, count: int, now: float) -> None:
        """How many requests could be claimed now."""
        self._waiting = count

    def withheld(self, why: str) -> None:
        """Why the newest claim got nothing though something waits; empty: it got some, or nothing waits."""
        self._withheld = why

    # ── events: the gateway ─────────────────────────────────────────────────────────────────────────────

    def looped(self, late_s: float) -> None:
        """Note the largest recent delay of the event loop. Answers may have come earlier by this much than
        they were seen."""
        self._tracking.looped(late_s)

    def in_flight_when_refused(self, now: float, units: int = 1) -> int:
        """How many units of ours there were when so many are refused at `now` and were told to be
        `answered`."""
        return self._gate.refusals.together(self.in_flight + units, self.allowance(now).read_at)

    def overloaded(
        self, now: float, *, until: float, capacity: bool, in_flight: int, heard: bool = False
    ) -> None:
        """The gateway refused a request at `now`; closed until a reading taken after that and until `until`.

        `heard`: another replica's, told again and again (`Refusals.refused`).
        """
        until = min(until, now + self._tracking.policy.retry_after_max_s)
        known = self._gate.refusals.refused(now, until, heard=heard)
        if capacity:
            self._tracking.refused(in_flight, known=known, heard=heard)

    def bare_answer(self, now: float, sent_at: float, why: str, connected: Iterable[float] = ()) -> bool:
        """An answer that no gateway gave (`Reach.bare`). True: there is none."""
        return self._gate.reach.bare(now, sent_at, why, connected)

    def unreachable(self, now: float, why: str) -> None:
        """There is no gateway: closed until something answers."""
        self._gate.reach.unreachable(now, why)

    def probed(self, now: float, *, others: bool = False) -> None:
        """A probe was sent, or could not be: the next one waits longer (`Reach.probed`)."""
        self._gate.reach.probed(now, others=others)

    def reached(self, now: float, sent_at: float) -> None:
        """The gateway answered a request sent at `sent_at`."""
        self._gate.reach.reached(now, sent_at)

    def look(self, now: float, connected: Iterable[float]) -> bool:
        """Whether requests that are still connected (each since when) show that there is a gateway again."""
        return self._gate.reach.look(now, connected)

    # ── events: the operator and the queue ──────────────────────────────────────────────────────────────

    def pause(self, paused: bool, now: float) -> None:
        if paused is not self._gate.paused:  # told with each answer of the queue
            self._gate.paused = paused

    def drain(self, now: float) -> None:
        self._gate.draining = True

    def queue(self, problem: str | None, now: float) -> None:
        """The queue cannot be reached (why), or can again (None)."""
        self._gate.queue_problem = problem

    # ── what is known ───────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Units of our requests that the gateway may hold now, all replicas together."""
        return self._tracking.held.own + self._tracking.held.others

    @property
    def most(self) -> int | None:
        """All that the limit can be, by what the newest readings say of the pool; None: not known."""
        most = self._tracking.policy.most
        return min((most(budget.max_sys) for budget in self.budgets), default=None)

    @property
    def learned(self) -> Capacity:
        """The pool's capacity as learned from readings."""
        return self._tracking.learned

    @property
    def others(self) -> int:
        """The part of them that other replicas hold."""
        return self._tracking.held.others

    @property
    def budgets(self) -> list[Budget]:
        """What each signal leaves."""
        return self._tracking.budgets

    @property
    def readings(self) -> list[Reading]:
        """The newest reading of each signal."""
        return self._tracking.readings

    @property
    def not_ours(self) -> tuple[float | None, float | None]:
        """Requests of the newest reading that cannot be ours: outside the picker's queue, and in it.

        The number of our requests in flight now is not the number at the time of the sample. So the largest
        number that may have been in flight within the sample's window is subtracted. A signal that counts
        requests is preferred to one that does not.
        """
        tracks = [(each.reading, each.interval.hi) for each in self._tracking.tracks.values() if each.reading]
        believed = [each for each in tracks if 0.0 <= each[0].load <= PLAUSIBLE_MOST]
        known = [each for each in believed if each[0].exact] or believed
        if not known:
            return None, None
        reading, ours = max(known, key=lambda each: each[0].closed_at)
        waits = reading.f_epp * reading.max_sys
        runs = reading.load - waits
        if not reading.exact and reading.running is not None:  # a pressure score counts nobody
            runs = reading.running + reading.waiting - waits
        return max(0.0, runs - ours), min(waits, max(0.0, runs + waits - ours))

    def counted_as_calls(self, now: float) -> tuple[int, int] | None:
        """Return the units that this process has at the gateway and how many calls they are, where readings
        count calls. `None` if they count units, or if it makes no difference."""
        held = self._tracking.held
        return (held.own, held.calls) if self._tracking.counts_calls(now) else None

    @property
    def work(self) -> bool:
        """Some request could be claimed when the queue was asked last."""
        return bool(self._waiting)

    @property
    def without_gateway_since(self) -> float | None:
        """None: there is a gateway, as far as one can know."""
        return None if self._gate.reach.closure is None else self._gate.reach.closure.since

    @property
    def gateway_problem(self) -> str | None:
        """Why there is no gateway, whatever reason is shown; None: there is one, as far as one can know."""
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
        """Duration of an ordinary answered request of this process. 0 until one was answered."""
        return self._tracking.usual_s

    def knows_pool(self, now: float) -> bool:
        """Whether the newest readings still show the state of the pool."""
        return self._tracking.stale(now) is None and self._gate.unreadable(now) is None

    def free(self, now: float) -> float | None:
        """What batch work may hold by the newest readings (`Tracking.free`)."""
        return self._tracking.free(now)

    # ── the answer ──────────────────────────────────────────────────────────────────────────────────────

    def allowance(self, now: float) -> Allowance:
        """What may be in flight now."""
        answer = self._answer
        revisions = self._tracking.revisions + self._gate.revisions
        if answer is None or revisions != self._answer_of or _over(answer, now):
            answer = self._answer = self._decide(now)
            self._answer_of = self._tracking.revisions + self._gate.revisions
            self._shades.clear()
        if answer.reason.closed:
            return answer
        reason = self._open_reason(answer)
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
        """The first reason that holds, and its particulars; None: there is none but a lack of room."""
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
    """Whether it has to be asked again, though nothing happened."""
    return answer.next_check_at is not None and now >= answer.next_check_at
