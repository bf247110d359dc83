"""A small adversarial pool around real limiters: it decides what each reading saw, anywhere within truth.

Realtime holds some of the pool, ours the rest, each as many units as it weighs. A request of ours reaches the
gateway up to δ after it was sent, leaves it up to δ before its answer is known, and a reading sees what is
there at one moment of a window that it does not tell; of several pickers each at a moment of its own. `dice`
chooses all of that; nothing here reads what the limiter believes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal, round_down
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.load_ledger import DELTA_S
from dispatcher.core.limit.transit_time import MIN_CONNECTS, ONE_WAY_SHARE

AFTER_S = 1.01 * DELTA_S
POLICY = Policy(reserve=0.05, max_age_s=1e6)


@dataclass(slots=True)
class Sent:
    """One request of ours."""

    at: float
    arrives_at: float
    picker: int
    units: int = 1
    left_at: float = math.inf
    answered_at: float = math.inf


@dataclass
class World:
    """One dispatcher and its pool. Every law is checked at every step (`check`)."""

    dice: Random
    max_sys: int
    realtime: int
    policy: Policy = POLICY
    greedy: bool = True
    """Every slot is filled at once."""
    travel_s: float = DELTA_S
    """How long opening a connection takes; no request and no answer travels for longer."""
    pickers: int = 1
    crowd: int = 0
    """So many wait, by what readings tell, though there may be room."""
    heaviest: int = 1
    """Requests weigh from 1 to this, in units of the limit."""
    now: float = 100.0
    log: list[Sent] = field(default_factory=list)
    proven_by: int | None = None
    """Realtime as the reading that last raised the limit saw it."""
    limits: list[int] = field(default_factory=list)
    """The limit after each event since the last `forget_limits`."""
    last_limit: int = 0
    stepped: bool = False
    """The queue's clock was stepped: what it tells of older readings may look newer than what is known."""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.policy, (Signal.SATURATION,))
        if self.travel_s != DELTA_S:
            for key in range(-MIN_CONNECTS, 0):
                self.limiter.record_send(key, self.now - 40)
                self.limiter.record_answer(key, self.now - 30, opened_s=self.travel_s)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._running: dict[int, Sent] = {}
        self._seen: dict[float, tuple[int, int]] = {}
        """For each sample, by its window's end: realtime and ours as it saw them."""
        self.head = 0
        """What the next to be sent weighs; 0: not known yet."""

    # What happens.

    @property
    def compute_room(self) -> float:
        return self.max_sys * (1 - self.policy.reserve)

    @property
    def fair(self) -> int:
        """The limit that a dispatcher would choose who knows everything."""
        return max(0, round_down(self.compute_room - self.realtime))

    @property
    def in_flight(self) -> int:
        return sum(sent.units for sent in self._running.values())

    @property
    def after_s(self) -> float:
        """A reading is applied by then."""
        return 1.01 * self.travel_s

    @property
    def _travels_s(self) -> float:
        """What this one travels."""
        return self.dice.random() * 0.9 * self.travel_s

    @property
    def _least_s(self) -> float:
        """Openings count for exchanges that are not shorter than this."""
        return 1.01 * self.travel_s / ONE_WAY_SHARE if self.travel_s > DELTA_S else 0.0

    def later(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), do))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, do = heapq.heappop(self._agenda)
            do()
            self.act()
        self.now = until
        self.act()

    def finish(self, most: int) -> None:
        """Up to so many of ours leave the gateway; their answers are known up to δ later."""
        begun_by = self.now - self._least_s
        running = [(key, sent) for key, sent in self._running.items() if sent.left_at == math.inf]
        there = [(key, sent) for key, sent in running if sent.at <= begun_by]
        for key, sent in self.dice.sample(there, min(most, len(there))):
            sent.left_at = max(self.now, sent.arrives_at)
            travel_s = sent.left_at - self.now + self._travels_s
            self.later(travel_s, partial(self._answer, key))

    def _answer(self, key: int) -> None:
        self._running.pop(key).answered_at = self.now
        before = self.limiter.get_allowance(self.now).limit
        self.limiter.record_answer(key, self.now)
        assert self.limiter.get_allowance(self.now).limit == before, "a completion moved the limit"

    def sample(self, earlier_s: float = 0.0, later_s: float = 0.0, lag_s: float = 0.0) -> float:
        """A sample taken now; its window is wider, and it is handed in late. How long until it is applied."""
        looks = [self.now - self.dice.random() * earlier_s for _ in range(self.pickers - 1)] + [self.now]
        ours = sum(sent.units for sent in self.log if sent.arrives_at <= looks[sent.picker] < sent.left_at)
        later_s += self.dice.random() * 1e-3  # no two windows end at one moment
        opened_at, closed_at = self.now - earlier_s, self.now + later_s
        load = self.realtime + ours
        self._seen[closed_at] = (self.realtime, ours)
        f_epp = self.dice.choice((0, load // 3)) / self.max_sys
        f_sys = load / self.max_sys - f_epp
        waiting = min(load, self.crowd)
        reading = Reading(
            signal=Signal.SATURATION,
            opened_at=opened_at,
            closed_at=closed_at,
            f_sys=max(0.0, f_sys),
            f_epp=f_epp,
            max_sys=self.max_sys,
            running=load - waiting if self.crowd else None,
            waiting=waiting,
        )
        self.later(later_s + lag_s, lambda: self.limiter.add_reading(reading, self.now))
        # Look at the limit the moment each reading is applied, so that none hides what another did.
        heapq.heappush(self._agenda, (closed_at + self.travel_s, next(self._order), lambda: None))
        return later_s + max(lag_s, self.after_s)

    # Trouble.

    def lose_a_scrape(self, closes_in_s: float) -> None:
        self.limiter.record_read_failure(
            Reason.UNREADABLE, "lost", self.now, closes_at=self.now + closes_in_s
        )

    def refuse(self, retry_after_s: float) -> None:
        until = self.now + retry_after_s
        self.limiter.record_refusal(
            self.now, retry_at=until, is_out_of_capacity=True, in_flight=self.in_flight
        )

    def echo(self, step_s: float) -> None:
        """The queue tells the limit of our newest reading, by a clock that was stepped meanwhile; what would
        be of later than now counts as now."""
        allowance = self.limiter.get_allowance(self.now)
        if not allowance.reason.is_closed:
            self.stepped |= step_s != 0
            self.limiter.set_shared_limit(allowance.limit, min(self.now, allowance.read_at + step_s))

    # What the dispatcher does, and the laws.

    def act(self) -> None:
        allowance = self.limiter.get_allowance(self.now)
        self.check()
        most = allowance.limit - self.in_flight
        for _ in range(most if self.greedy else self.dice.randint(0, max(0, most))):
            if not self._head_fits(allowance.limit):
                break
            key, units, self.head = len(self.log), self.head, 0
            sent = Sent(self.now, self.now + self._travels_s, self.dice.randrange(self.pickers), units)
            self.log.append(sent)
            self._running[key] = sent
            self.limiter.record_send(key, self.now, units)
            assert self.proven_by is not None
            if self.stepped:
                continue
            assert self.proven_by + self.in_flight <= self.compute_room + 1e-6, (
                "more than a reading ever proved"
            )

    def _head_fits(self, limit: int) -> bool:
        """Whether there is room for all of the head. One that is heavier than the limit is passed over; any
        other is not overtaken, as the queue has it."""
        if not 0 < self.head <= limit:
            self.head = self.dice.randint(1, max(1, min(self.heaviest, limit)))
        return self.head <= limit - self.in_flight

    def check(self) -> None:
        allowance = self.limiter.get_allowance(self.now)
        limit = allowance.limit
        assert limit <= round_down(self.compute_room)
        if allowance.reason in (Reason.UNREADABLE, Reason.BACKPRESSURE):
            return  # closed for a while; what opens again is no rise
        newest = self.limiter.newest_readings
        if newest:
            realtime, ours = self._seen[newest[0].closed_at]
            if limit > self.last_limit:
                self.proven_by = realtime
                proven = limit <= self.compute_room - realtime + 1e-6
                assert proven or self.stepped, "raised beyond what the reading proves"
            most = self._most_held(newest[0].opened_at, newest[0].closed_at)
            assert limit <= max(0, round_down(self.compute_room - realtime) + most - ours), (
                "beyond the interval"
            )
        self.last_limit = limit
        self.limits.append(limit)

    def _most_held(self, a: float, b: float) -> int:
        """The most of ours between sending and answer at any moment of [a, b], counted one by one."""
        moments = [a, *(sent.at for sent in self.log if a <= sent.at <= b)]
        return max(
            sum(sent.units for sent in self.log if sent.at <= at <= sent.answered_at) for at in moments
        )
