"""Small simulated pool around a real limiter, whose readings show any state that is possible.

Realtime requests and batch requests share the pool, each with its weight in units. A batch request reaches
the gateway up to δ after it was sent, and leaves it up to δ before its answer is known. A reading shows the
state at an unknown moment of its time window; with several pickers, each of them is read at another moment.
`rng` chooses all of these times. Nothing in this module reads the internal state of the limiter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from dispatcher.limit.budget import Policy, Reading, Reason, Signal, round_down
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import DELTA_S
from dispatcher.limit.transit_time import MIN_CONNECTS, ONE_WAY_SHARE

APPLY_DELAY_S = 1.01 * DELTA_S
POLICY = Policy(reserve=0.05, max_age_s=1e6)


@dataclass(slots=True)
class SentRequest:
    """A batch request that was sent."""

    sent_at: float
    arrives_at: float
    picker: int
    units: int = 1
    left_at: float = math.inf
    answered_at: float = math.inf


@dataclass
class AdversarialPool:
    """One dispatcher and its pool. Every law is checked at every step (`check_laws`)."""

    rng: Random
    max_sys: int
    realtime: int
    policy: Policy = POLICY
    fills_at_once: bool = True
    """True if every free slot is filled at once."""
    transit_s: float = DELTA_S
    """Time to open a connection. No transit of a request or an answer takes longer."""
    picker_count: int = 1
    waiting_count: int = 0
    """Number of waiting requests that readings show, although there may be room."""
    foreign_batch_count: int | None = None
    """Realtime requests that have a negative priority, if readings show priorities. `None` if they do not."""
    max_units: int = 1
    """Largest weight of a request, in units of the limit."""
    now: float = 100.0
    sent_requests: list[SentRequest] = field(default_factory=list)
    proven_realtime: int | None = None
    """Realtime requests in the reading that last raised the limit."""
    limits: list[int] = field(default_factory=list)
    """The limit after each event, until a test clears the list."""
    last_limit: int = 0
    has_clock_stepped: bool = False
    """True if the clock of the queue was stepped, so that shared limits of older readings may look newer."""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.policy, (Signal.SATURATION,))
        if self.transit_s != DELTA_S:
            for key in range(-MIN_CONNECTS, 0):
                self.limiter.record_send(key, self.now - 40)
                self.limiter.record_answer(key, self.now - 30, opened_s=self.transit_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._running: dict[int, SentRequest] = {}
        self._contents_by_sample: dict[float, tuple[int, int]] = {}
        """Realtime units and batch units in each sample, by the end of its time window."""
        self.next_units = 0
        """Weight of the next request to be sent. 0 if it is not chosen yet."""

    # Events.

    @property
    def usable_capacity(self) -> float:
        return self.max_sys * (1 - self.policy.reserve)

    @property
    def ideal_limit(self) -> int:
        """The limit of a dispatcher that knows the exact state of the pool."""
        return max(0, round_down(self.usable_capacity - self.realtime))

    @property
    def in_flight(self) -> int:
        return sum(sent.units for sent in self._running.values())

    @property
    def apply_delay_s(self) -> float:
        """Time after which a reading has been applied."""
        return 1.01 * self.transit_s

    @property
    def _random_transit_s(self) -> float:
        """Transit time of one request or answer."""
        return self.rng.random() * 0.9 * self.transit_s

    @property
    def _min_exchange_s(self) -> float:
        """Shortest exchange for which the time to open a connection counts as transit time."""
        return 1.01 * self.transit_s / ONE_WAY_SHARE if self.transit_s > DELTA_S else 0.0

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self.fill_pool()
        self.now = until
        self.fill_pool()

    def finish_requests(self, max_count: int) -> None:
        """Let up to this many batch requests leave the gateway. Their answers are known up to δ later."""
        latest_start = self.now - self._min_exchange_s
        running = [(key, sent) for key, sent in self._running.items() if sent.left_at == math.inf]
        eligible = [(key, sent) for key, sent in running if sent.sent_at <= latest_start]
        for key, sent in self.rng.sample(eligible, min(max_count, len(eligible))):
            sent.left_at = max(self.now, sent.arrives_at)
            transit_s = sent.left_at - self.now + self._random_transit_s
            self.schedule(transit_s, partial(self._answer, key))

    def _answer(self, key: int) -> None:
        self._running.pop(key).answered_at = self.now
        limit_before = self.limiter.get_allowance(self.now).limit
        self.limiter.record_answer(key, self.now)
        assert self.limiter.get_allowance(self.now).limit == limit_before, "a completion moved the limit"

    def take_sample(self, earlier_s: float = 0.0, later_s: float = 0.0, lag_s: float = 0.0) -> float:
        """Take a sample with a time window, and report it late. Return the time until it is applied."""
        sampled_at = [self.now - self.rng.random() * earlier_s for _ in range(self.picker_count - 1)] + [
            self.now
        ]
        own_units = sum(
            sent.units
            for sent in self.sent_requests
            if sent.arrives_at <= sampled_at[sent.picker] < sent.left_at
        )
        later_s += self.rng.random() * 1e-3  # no two time windows end at the same moment
        opened_at, closed_at = self.now - earlier_s, self.now + later_s
        load = self.realtime + own_units
        self._contents_by_sample[closed_at] = (self.realtime, own_units)
        f_epp = self.rng.choice((0, load // 3)) / self.max_sys
        f_sys = load / self.max_sys - f_epp
        waiting = min(load, self.waiting_count)
        reading = Reading(
            signal=Signal.SATURATION,
            opened_at=opened_at,
            closed_at=closed_at,
            f_sys=max(0.0, f_sys),
            f_epp=f_epp,
            max_sys=self.max_sys,
            running=load - waiting if self.waiting_count else None,
            waiting=waiting,
            max_batch_requests=None
            if self.foreign_batch_count is None
            else own_units + min(self.foreign_batch_count, self.realtime),
        )
        self.schedule(later_s + lag_s, lambda: self.limiter.add_reading(reading, self.now))
        # The limit is checked when each reading is applied, so that no reading hides the effect of another.
        heapq.heappush(self._events, (closed_at + self.transit_s, next(self._order), lambda: None))
        return later_s + max(lag_s, self.apply_delay_s)

    # Faults.

    def fail_read(self, closes_in_s: float) -> None:
        self.limiter.record_read_failure(
            Reason.UNREADABLE, "read failed", self.now, closes_at=self.now + closes_in_s
        )

    def refuse_request(self, retry_after_s: float) -> None:
        until = self.now + retry_after_s
        self.limiter.record_refusal(
            self.now, retry_at=until, is_out_of_capacity=True, in_flight=self.in_flight
        )

    def echo_shared_limit(self, step_s: float) -> None:
        """Return the limit of the newest reading from the queue, with a time by a clock that was stepped.

        Future times count as now.
        """
        allowance = self.limiter.get_allowance(self.now)
        if not allowance.reason.is_closed:
            self.has_clock_stepped |= step_s != 0
            self.limiter.set_shared_limit(allowance.limit, min(self.now, allowance.read_at + step_s))

    # Actions of the dispatcher, and the laws.

    def fill_pool(self) -> None:
        allowance = self.limiter.get_allowance(self.now)
        self.check_laws()
        free_units = allowance.limit - self.in_flight
        for _ in range(free_units if self.fills_at_once else self.rng.randint(0, max(0, free_units))):
            if not self._next_request_fits(allowance.limit):
                break
            key, units, self.next_units = len(self.sent_requests), self.next_units, 0
            sent = SentRequest(
                self.now, self.now + self._random_transit_s, self.rng.randrange(self.picker_count), units
            )
            self.sent_requests.append(sent)
            self._running[key] = sent
            self.limiter.record_send(key, self.now, units)
            assert self.proven_realtime is not None
            if self.has_clock_stepped:
                continue
            assert self.proven_realtime + self.in_flight <= self.usable_capacity + 1e-6, (
                "more requests are in flight than a reading proved"
            )

    def _next_request_fits(self, limit: int) -> bool:
        """Return whether there is room for the next request. One that is heavier than the limit is skipped.

        Any other request is not overtaken, as in the queue.
        """
        if not 0 < self.next_units <= limit:
            self.next_units = self.rng.randint(1, max(1, min(self.max_units, limit)))
        return self.next_units <= limit - self.in_flight

    def check_laws(self) -> None:
        allowance = self.limiter.get_allowance(self.now)
        limit = allowance.limit
        assert limit <= round_down(self.usable_capacity)
        if allowance.reason in (Reason.UNREADABLE, Reason.BACKPRESSURE):
            return  # the gate is closed for a while, and reopening does not count as a rise
        newest = self.limiter.newest_readings
        if newest:
            realtime, own_units = self._contents_by_sample[newest[0].closed_at]
            if limit > self.last_limit:
                self.proven_realtime = realtime
                is_proven = limit <= self.usable_capacity - realtime + 1e-6
                assert is_proven or self.has_clock_stepped, "the limit rose beyond what the reading proves"
            max_held = self._max_in_flight_between(newest[0].opened_at, newest[0].closed_at)
            assert limit <= max(0, round_down(self.usable_capacity - realtime) + max_held - own_units), (
                "the limit exceeds the upper bound"
            )
        self.last_limit = limit
        self.limits.append(limit)

    def _max_in_flight_between(self, a: float, b: float) -> int:
        """Return the largest number of batch units in flight at any moment of [a, b], counted one by one."""
        moments = [a, *(sent.sent_at for sent in self.sent_requests if a <= sent.sent_at <= b)]
        return max(
            sum(sent.units for sent in self.sent_requests if sent.sent_at <= at <= sent.answered_at)
            for at in moments
        )
