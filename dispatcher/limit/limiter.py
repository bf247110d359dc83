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
    gateway-unreachable  record_connection_failure                    record_gateway_answer,
                                                                      check_connections
    gateway-failing      record_intermediary_error                    the same
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

from dispatcher.limit.allowance import Allowance
from dispatcher.limit.budget import (
    GATEWAY_OUTAGES,
    MAX_PLAUSIBLE_REQUESTS,
    Budget,
    KvUse,
    Policy,
    Reading,
    Reason,
    Signal,
)
from dispatcher.limit.capacity import CapacityEstimate
from dispatcher.limit.gate import Gate, SignalFailure
from dispatcher.limit.limit_tracking import LimitTracker
from dispatcher.limit.poll import Poll
from dispatcher.limit.send_pace import Grant, SendPace, compute_send_rate
from dispatcher.limit.small_capacity import SmallCapacityCheck

NO_ROOM_BY_REALTIME = (
    "realtime requests, or requests of a dispatcher that died, take everything but the reserve"
)
NO_ROOM_BY_ORPHANS = "requests that silent dispatchers left at the gateway fill max_in_flight"


class Limiter:
    """Limiter of one process."""

    def __init__(self, policy: Policy, signals: Iterable[Signal]) -> None:
        self._tracker = LimitTracker(policy, signals)
        self._gate = Gate()
        self._waiting_count: int | None = None
        self._withheld_reason = ""
        self.has_send_pace = False
        """True if free units are granted at a pace, because a picker chooses among several endpoints. Each
        claim reads it, so it is no property."""
        self._send_pace = SendPace()
        self._picker_endpoints: float | None = None
        """Number of endpoints among which a picker chooses, as the newest reading shows it."""
        self._newest_allowance: Allowance | None = None
        self._newest_revision = -1
        """Revision for which the newest allowance was computed."""
        self._open_variants: dict[Reason, Allowance] = {}
        """Variants of the newest allowance, one for each reason of the open gate. Nearly every request
        changes that reason, so the variants are kept."""

    # ── events: the pool ────────────────────────────────────────────────────────────────────────────────

    def apply_poll(self, poll: Poll, now: float) -> None:
        """Apply everything that one poll returned."""
        self.set_signals(poll.signals)
        for reading in poll.readings:
            self.add_reading(reading, now)
        # Good readings of other signals are added above: the gate closes only at `closes_at`.
        worst = poll.worst_failure
        if worst is not None:
            why = f"{worst} (look at: {worst.hint})" if worst.hint else str(worst)
            self.record_read_failure(worst.reason, why, poll.completed_at, closes_at=poll.closes_at)

    def add_reading(self, reading: Reading, now: float) -> None:
        """Add a sample of one signal. It is applied once δ has passed since its window closed.

        An invalid window is ignored, so that the reading before it becomes stale. A time in the future is
        reduced to `now`. A sample of every signal, repeated ones included, shows that the signals can be read
        again.
        """
        self._picker_endpoints = reading.picker_endpoints
        self.has_send_pace = self._picker_endpoints is not None and self._picker_endpoints > 1
        failure = self._gate.signal_failure
        if self._tracker.add_reading(reading, now) and failure is not None:
            self._gate.signal_failure = (
                None if self._tracker.last_complete_sample_at > failure.at else failure
            )

    def record_read_failure(
        self, reason: Reason, why: str, now: float, *, closes_at: float = float("-inf")
    ) -> None:
        """Record that the signals could not be read. From `closes_at` on (`StalenessLimit`) the state of the
        pool is unknown until they can be read."""
        self._gate.signal_failure = SignalFailure(
            reason if reason.is_closed else Reason.UNREADABLE, why, now, closes_at
        )

    def set_signals(self, signals: Iterable[Signal]) -> None:
        """Set the signals in use. A new signal has to be read first."""
        self._tracker.set_signals(signals)

    def set_capacity_bound(self, max_requests: float | None, now: float) -> None:
        """Set the capacity known from elsewhere. A smaller one applies at once, a larger one from the next
        reading on."""
        self._tracker.set_capacity_bound(max_requests)

    def set_policy(self, policy: Policy, now: float) -> None:
        """Set a policy that the operator changed. It applies at once, also to the current readings."""
        self._tracker.set_policy(policy)

    # ── events: own requests and leases ─────────────────────────────────────────────────────────────────

    def use_grant(self, units: float) -> None:
        """Record that units are sent. Called if there is a pace."""
        self._send_pace.use_grant(units)

    def record_send(self, key: Hashable, now: float, units: int = 1) -> None:
        self._tracker.ledger.record_send(key, now, units)

    def record_answer(self, key: Hashable, now: float, opened_s: float | None = None) -> None:
        """Record that a request left the gateway: answered, failed, cancelled or abandoned. `opened_s` is the
        time that it took to open a connection for it, if one was opened."""
        self._tracker.record_answer(key, now, opened_s)

    def record_lease_counts(
        self,
        now: float,
        *,
        other_owners_units: int,
        just_leased_units: int,
        lost_units: int,
        orphaned_units: int = 0,
    ) -> None:
        """Record counts from the queue: units that other owners lease, those leased too recently to have been
        sent, leases ever lost, and orphaned ones among those."""
        reachable = self._gate.is_gateway_reachable
        self._tracker.record_lease_counts(
            now,
            other_owners_units=other_owners_units,
            just_leased_units=just_leased_units,
            lost_units=lost_units,
            orphaned_units=orphaned_units,
            is_gateway_reachable=reachable,
        )

    def set_shared_limit(self, limit: int, read_at: float) -> None:
        """Set the newest limit of any replica. The next reading here moves that limit, and not an older one
        of this process."""
        self._tracker.set_shared_limit(limit, read_at)

    def set_queue_call_time(self, longest_s: float) -> None:
        """Set the longest duration of a recent call that writes to the queue."""
        self._tracker.ledger.queue_call_s = longest_s

    def set_waiting_count(self, count: int, now: float) -> None:
        """Set the number of requests that could be claimed now."""
        self._waiting_count = count

    def set_withheld_reason(self, why: str) -> None:
        """Set why the newest claim returned nothing although requests wait. Empty if it returned some, or
        none waits."""
        self._withheld_reason = why

    # ── events: the gateway ─────────────────────────────────────────────────────────────────────────────

    def set_loop_delay(self, late_s: float) -> None:
        """Set the largest recent delay of the event loop. Answers may have come earlier than they were seen
        by this much."""
        self._tracker.set_loop_delay(late_s)

    def count_in_flight_at_refusal(self, now: float, units: int = 1) -> int:
        """Return the units in flight when `units` of them were refused at `now` and have already been
        recorded as answered."""
        return self._gate.refusals.count_in_flight(self.in_flight + units, self.get_allowance(now).read_at)

    def record_refusal(
        self,
        now: float,
        *,
        retry_at: float,
        is_out_of_capacity: bool,
        in_flight: int,
        is_remote: bool = False,
    ) -> None:
        """Record that the gateway refused a request at `now`. The gate stays closed until `retry_at`, and
        until a reading is taken after the refusal.

        `is_remote` is True if another replica reported the refusal, which it does repeatedly
        (`Refusals.record_refusal`).
        """
        retry_at = min(retry_at, now + self._tracker.policy.retry_after_max_s)
        known = self._gate.refusals.record_refusal(now, retry_at, is_remote=is_remote)
        if is_out_of_capacity:
            self._tracker.record_refusal(in_flight, is_known=known, is_remote=is_remote)

    def record_intermediary_error(
        self, now: float, sent_at: float, why: str, connected_since: Iterable[float] = ()
    ) -> bool:
        """Record a response without gateway headers (`Reachability.record_intermediary_error`). Return True
        if there is no gateway."""
        return self._gate.reachability.record_intermediary_error(now, sent_at, why, connected_since)

    def record_connection_failure(self, now: float, why: str) -> None:
        """Record that no connection to the gateway can be opened. The gate closes until a request gets an
        answer."""
        self._gate.reachability.record_connection_failure(now, why)

    def record_probe(self, now: float, *, has_other_requests: bool = False) -> None:
        """Record that a probe was sent, or could not be sent. The next one waits longer
        (`Reachability.record_probe`)."""
        self._gate.reachability.record_probe(now, has_other_requests=has_other_requests)

    def record_gateway_answer(self, now: float, sent_at: float) -> None:
        """Record that the gateway answered a request sent at `sent_at`."""
        self._gate.reachability.record_success(now, sent_at)

    def check_connections(self, now: float, connected_since: Iterable[float]) -> bool:
        """Return whether requests that are still connected show that the gateway is back. `connected_since`
        has the time of each connection."""
        return self._gate.reachability.check_connections(now, connected_since)

    # ── events: the operator and the queue ──────────────────────────────────────────────────────────────

    def set_paused(self, is_paused: bool, now: float) -> None:
        if is_paused is not self._gate.is_paused:  # reported with each reply of the queue
            self._gate.is_paused = is_paused

    def start_draining(self, now: float) -> None:
        self._gate.is_draining = True

    def set_queue_problem(self, problem: str | None, now: float) -> None:
        """Set why the queue cannot be reached. `None` if it can be reached again."""
        self._gate.queue_problem = problem

    # ── state ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Units of batch requests that the gateway may hold now, over all replicas."""
        return self._tracker.ledger.own_units + self._tracker.ledger.other_owners_units

    @property
    def max_limit(self) -> int | None:
        """Largest limit that the newest readings allow. `None` if it is not known."""
        most = self._tracker.policy.compute_max_limit
        return min((most(budget.max_sys) for budget in self.budgets), default=None)

    @property
    def capacity_estimate(self) -> CapacityEstimate:
        """Capacity of the pool as learned from readings."""
        return self._tracker.capacity_estimate

    @property
    def small_capacity(self) -> SmallCapacityCheck:
        """Evidence that the configured capacity is too small."""
        return self._tracker.small_capacity

    @property
    def other_owners_units(self) -> int:
        """Units in flight that other replicas hold."""
        return self._tracker.ledger.other_owners_units

    def bound_other_owners(self, opened_at: float, closed_at: float) -> tuple[int, int]:
        """Return the fewest and the most units of other replicas at the gateway in a window."""
        return self._tracker.ledger.bound_other_owners(opened_at, closed_at)

    @property
    def kv_use(self) -> KvUse | None:
        """Use of the KV memory by the newest applied reading. `None` if that does not show it."""
        return self._tracker.kv_use

    @property
    def budgets(self) -> list[Budget]:
        """Budget of each signal."""
        return self._tracker.budgets

    @property
    def newest_readings(self) -> list[Reading]:
        """Newest reading of each signal."""
        return self._tracker.newest_readings

    @property
    def realtime_requests(self) -> tuple[float | None, float | None]:
        """Realtime requests of the newest reading: outside the picker's queue, and in it.

        The number of batch requests in flight now differs from the number at the time of the sample.
        Therefore the largest number that may have been in flight within the sample's window is subtracted. A
        signal that counts requests is preferred to one that does not.
        """
        bounded = [
            (each.reading, each.batch_load.hi)
            for each in self._tracker.signal_limits.values()
            if each.reading
        ]
        believed = [each for each in bounded if 0.0 <= each[0].load <= MAX_PLAUSIBLE_REQUESTS]
        known = [each for each in believed if each[0].is_request_count] or believed
        if not known:
            return None, None
        reading, max_batch_load = max(known, key=lambda each: each[0].closed_at)
        waits = reading.f_epp * reading.max_sys
        runs = reading.load - waits
        if (
            not reading.is_request_count and reading.running is not None
        ):  # a pressure score counts no requests
            runs = reading.running + reading.waiting - waits
        return max(0.0, runs - max_batch_load), min(waits, max(0.0, runs + waits - max_batch_load))

    def count_units_as_calls(self, now: float) -> tuple[int, int] | None:
        """Return the units that this process has at the gateway and the number of calls in which it sent
        them, if readings count calls. `None` if they count units, or if both numbers are the same."""
        held = self._tracker.ledger
        return (held.own_units, held.call_count) if self._tracker.counts_calls(now) else None

    @property
    def has_work(self) -> bool:
        """True if a request could be claimed when the queue was last read."""
        return bool(self._waiting_count)

    @property
    def gateway_unreachable_since(self) -> float | None:
        """Time since which the gateway is unreachable. `None` if it is reachable as far as known."""
        return None if self._gate.reachability.outage is None else self._gate.reachability.outage.since

    @property
    def gateway_problem(self) -> str | None:
        """Reason why the gateway is unreachable, regardless of the reported reason. `None` if it is reachable
        as far as known."""
        return None if self._gate.reachability.outage is None else self._gate.reachability.outage.why

    @property
    def signals_problem(self) -> str | None:
        """Reason why the newest poll could not read the signals. `None` if it could."""
        return None if self._gate.signal_failure is None else self._gate.signal_failure.why

    @property
    def mean_duration_s(self) -> float:
        """Mean duration of the requests of this process. 0 until one was answered."""
        return self._tracker.ledger.mean_duration_s

    @property
    def reading_interval_s(self) -> float:
        """Time between the last two readings that showed something new."""
        return self._tracker.capacity_estimate.reading_interval_s

    @property
    def median_duration_s(self) -> float:
        """Median duration of the newest answered requests of this process. 0 until one was answered."""
        return self._tracker.median_duration_s

    def knows_pool(self, now: float) -> bool:
        """Return whether the newest readings still show the state of the pool."""
        return self._tracker.check_staleness(now) is None and self._gate.check_signals(now) is None

    def estimate_free_units(self, now: float) -> float | None:
        """Return the units that batch requests may hold according to the newest readings
        (`LimitTracker.estimate_free_units`)."""
        return self._tracker.estimate_free_units(now)

    # ── result ──────────────────────────────────────────────────────────────────────────────────────────

    def get_allowance(self, now: float) -> Allowance:
        """Return what may be in flight now."""
        # The allowance is read several times per request. It is computed again only after a change or at the
        # time that it names.
        answer = self._newest_allowance
        revisions = self._tracker.total_revision + self._gate.total_revision
        if answer is None or revisions != self._newest_revision or _is_expired(answer, now):
            answer = self._newest_allowance = self._decide_allowance(now)
            self._newest_revision = self._tracker.total_revision + self._gate.total_revision
            self._open_variants.clear()
        if answer.reason.is_closed:
            return answer
        reason = self._find_open_reason(answer)
        # An open gate depends on the requests in flight, which change with every request. Only the reason is
        # replaced, because the limit is the same.
        because = self._withheld_reason if reason is Reason.OPEN else ""
        if reason is not answer.reason or because != answer.detail:
            shade = self._open_variants.get(reason)
            if shade is None or shade.detail != because:
                shade = self._open_variants[reason] = answer.copy_with(reason=reason, detail=because)
            answer = self._newest_allowance = shade
        return answer

    def grant_units(self, now: float, free_units: int) -> Grant:
        """Return how many of the free units may be sent now, and when more of them may be sent. Called if
        there is a pace."""
        held = self._tracker.ledger
        rate = compute_send_rate(
            self._picker_endpoints,
            limit=self.get_allowance(now).limit,
            mean_duration_s=held.mean_duration_s,
            own_units=held.own_units,
            other_owners_units=held.other_owners_units,
        )
        return self._send_pace.grant(now, free_units, rate)

    def _decide_allowance(self, now: float) -> Allowance:
        tracking, gate = self._tracker, self._gate
        tracking.apply_due_readings(
            now, refused_at=gate.refusals.refused_at, is_gateway_reachable=gate.is_gateway_reachable
        )
        checks = [*tracking.due_times, *tracking.stale_times, *gate.change_times]
        signal, room = tracking.find_smallest_limit()
        limit, cap = room, tracking.policy.max_in_flight
        # Readings count orphaned requests as realtime, so only the hard limit on batch requests needs the
        # correction.
        if cap is not None:
            orphans, orphans_until = tracking.estimate_orphans(now)
            limit = min(room, cap - orphans)
            checks.append(orphans_until)
        closed = self._find_closing_reason(now)
        if limit <= 0 and closed is None:
            closed = Reason.NO_ROOM, NO_ROOM_BY_REALTIME if room <= 0 else NO_ROOM_BY_ORPHANS
        reason, because = closed or (Reason.OPEN, "")
        can_probe = reason in GATEWAY_OUTAGES and gate.can_probe(now, tracking.read_at)
        return Allowance(
            limit=0 if reason.is_closed else limit,
            reason=reason,
            detail=because,
            signal=signal,
            budget=None if signal is None else tracking.signal_limits[signal].budget,
            read_at=tracking.read_at,
            lost_units=tracking.losses.lost_units,
            next_check_at=min((at for at in checks if now < at < float("inf")), default=None),
            probe_limit=max(0, limit) if can_probe else 0,
        )

    def _find_closing_reason(self, now: float) -> tuple[Reason, str] | None:
        """Return the first reason that closes the gate, with its details. `None` if only a lack of room may
        close it."""
        tracking, gate = self._tracker, self._gate
        return (
            gate.check_claiming()
            or self._check_starting()
            or gate.check_signals(now)
            or tracking.check_staleness(now)
            or tracking.check_faults()
            or gate.check_gateway()
            or gate.check_refusals(now, tracking.read_at)
        )

    def _check_starting(self) -> tuple[Reason, str] | None:
        unread_signals, failure = self._tracker.unread_signals, self._gate.signal_failure
        if self._tracker.signal_limits and not unread_signals:
            return None
        why = f"no reading yet of {' and '.join(unread_signals) or 'any signal'}"
        return Reason.STARTING, why if failure is None else f"{why}: {failure.why}"

    def _find_open_reason(self, answer: Allowance) -> Reason:
        held = self._tracker.ledger
        in_flight = held.own_units + held.other_owners_units
        if in_flight > answer.limit and answer.budget is not None and answer.budget.headroom < 0:
            return Reason.SATURATED
        if in_flight >= answer.limit:
            return Reason.FULL
        if self._waiting_count == 0:
            return Reason.IDLE
        return Reason.OPEN

    def __repr__(self) -> str:
        answer = self._newest_allowance
        shown = f"{answer.reason}, limit {answer.limit}" if answer else "undecided"
        return f"<Limiter {shown}, in flight {self.in_flight}>"


def _is_expired(answer: Allowance, now: float) -> bool:
    """Return whether the allowance has to be computed again although no event happened."""
    return answer.next_check_at is not None and now >= answer.next_check_at
