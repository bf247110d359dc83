"""No past keeps a pool shut: when trouble is over, batch work soon has all its room again.

A history is up to 60 events of any kind, with times up to a second wrong, in a pool of 2 to 2,000 slots. Then
all is well: nothing of realtime's is there, each second a reading shows what runs, and every slot is filled
at once. What counts is how many readings it takes until the limit is all but the reserve. A Retry-After has
its time first, and so has the hold of a capacity that was learned too low, which then grows with what runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.capacity import GROWTH_FREQUENT, MAX_READING_INTERVAL_S
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.load_ledger import DELTA_S
from dispatcher.core.limit.transit_time import MAX_TRANSIT_S

SLOTS = (2, 8, 20, 64, 200, 512, 2000)
MOST_READINGS = 30
"""So many readings at the most where nothing was learned of the capacity."""
RETRY_AFTER_S = 60.0
FORMS = [(Signal.SATURATION,), (Signal.REQUESTS,), (Signal.SATURATION, Signal.REQUESTS)]


class History:
    """One limiter, and what happened to it."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.slots = self.dice.choice(SLOTS)
        backoff = self.dice.uniform(0.1, 0.9)
        self.policy = Policy(retry_after_max_s=RETRY_AFTER_S, overload_backoff=backoff)
        self.signals = self.dice.choice(FORMS)
        self.limiter = Limiter(self.policy, self.signals)
        self.now = 1000.0
        self.running: list[int] = []
        self.keys = 0
        self.lost = 0

    def live(self) -> None:
        """Up to 60 events."""
        events: list[Callable[[], None]] = [
            self.read,
            self.read,
            self.read,
            self.fill,
            self.fill,
            self.answer,
            self.refuse,
            self.lose_scrape,
            self.count_leases,
            self.tell_limit,
            self.lose_gateway,
            self.meet_switch,
            self.shrink,
        ]
        for _ in range(self.dice.randint(1, 60)):
            self.now += self.dice.choice((0.0, 0.05, 0.5, 2.0, 15.0)) * self.dice.random()
            self.dice.choice(events)()
            if self.dice.random() < 0.7:
                self.limiter.get_allowance(self.about_now())

    def readings_until_open(self) -> int:
        """From the moment at which all is well; more than `most_readings`: not by then."""
        self.limiter.set_paused(False, self.now)
        self.limiter.set_queue_problem(None, self.now)
        self.limiter.set_capacity_bound(None, self.now)
        self.now += RETRY_AFTER_S + 2.0 + self.limiter.capacity_estimate.hold_s
        for key in self.running:
            self.limiter.record_answer(key, self.now)
        self.running.clear()
        full = self.policy.compute_max_limit(float(self.slots))
        self.limiter.set_waiting_count(full + 1, self.now)
        for several in range(self.most_readings + 1):
            self.limiter.record_lease_counts(
                self.now, other_owners_units=0, just_leased_units=0, lost_units=self.lost
            )
            self._probe()
            if self.limiter.get_allowance(self.now).limit == full:
                return several
            self._fill_up()
            self.now += 1.0
            self._show(load=len(self.running), waiting=0)
            self.now += MAX_TRANSIT_S + 0.01
        return self.most_readings + 1

    @property
    def most_readings(self) -> int:
        """The bound: the longest first hold, and the growth from one request to all slots. The smallest steps
        add one request each."""
        growth = math.log(self.slots) / math.log(GROWTH_FREQUENT) + 1.0 / (GROWTH_FREQUENT - 1.0)
        return MOST_READINGS + math.ceil(MAX_READING_INTERVAL_S + growth)

    # What may happen.

    def about_now(self) -> float:
        return self.now + self.dice.uniform(-1, 1) * self.dice.choice((0.0, 1.0))

    def read(self) -> None:
        load = self.dice.randint(0, round(1.3 * self.slots))
        waiting = self.dice.choice((0, 0, self.dice.randint(0, self.slots)))
        self._show(load=load, waiting=waiting, at=self.about_now(), window_s=self.dice.random() * 5)
        self.limiter.get_allowance(self.now + DELTA_S)

    def fill(self) -> None:
        self._fill_up(most=self.dice.randint(1, self.slots))

    def answer(self) -> None:
        opened_s = self.dice.choice((None, 0.001, 0.05, 0.3))
        for _ in range(self.dice.randint(1, 20)):
            if self.running:
                key = self.running.pop(self.dice.randrange(len(self.running)))
                self.limiter.record_answer(key, self.about_now(), opened_s)

    def refuse(self) -> None:
        at = self.about_now()
        self.limiter.record_refusal(
            at,
            retry_at=at + self.dice.choice((0.0, 1.0, RETRY_AFTER_S, 1e6)),
            is_out_of_capacity=self.dice.random() < 0.8,
            in_flight=self.dice.randint(0, self.slots),
            is_remote=self.dice.random() < 0.3,
        )

    def lose_scrape(self) -> None:
        closes_at = self.now + self.dice.random() * 5
        self.limiter.record_read_failure(Reason.UNREADABLE, "lost", self.about_now(), closes_at=closes_at)

    def count_leases(self) -> None:
        gone = self.dice.choice((0, 0, self.dice.randint(0, 5)))
        self.lost += gone
        others = self.dice.randint(0, self.slots)
        young, stray = self.dice.randint(0, others), self.dice.randint(0, gone)
        self.limiter.record_lease_counts(
            self.about_now(),
            other_owners_units=others,
            just_leased_units=young,
            lost_units=self.lost,
            orphaned_units=stray,
        )

    def tell_limit(self) -> None:
        self.limiter.set_shared_limit(self.dice.randint(0, self.slots), self.about_now())

    def lose_gateway(self) -> None:
        if self.dice.random() < 0.5:
            self.limiter.record_connection_failure(self.about_now(), "refused")
        else:
            self.limiter.record_intermediary_error(self.now, self.now - 0.01, "empty 503")

    def meet_switch(self) -> None:
        if self.dice.random() < 0.5:
            self.limiter.set_paused(self.dice.random() < 0.5, self.now)
        else:
            self.limiter.set_queue_problem(self.dice.choice((None, "away")), self.now)

    def shrink(self) -> None:
        self.limiter.set_capacity_bound(
            self.dice.choice((None, 0.0, float(self.dice.randint(1, self.slots)))), self.now
        )

    # How.

    def _show(self, *, load: int, waiting: int, at: float | None = None, window_s: float = 0.1) -> None:
        at = self.now if at is None else at
        waiting = min(load, waiting)
        for signal in self.signals:
            reading = Reading(
                signal=signal,
                opened_at=at - window_s,
                closed_at=at,
                f_sys=(load - waiting) / self.slots,
                f_epp=waiting / self.slots,
                max_sys=float(self.slots),
                running=float(load - waiting),
                waiting=float(waiting),
            )
            self.limiter.add_reading(reading, self.now)

    def _fill_up(self, most: int | None = None) -> None:
        room = self.limiter.get_allowance(self.now).limit - len(self.running)
        for _ in range(room if most is None else min(room, most)):
            self.keys += 1
            self.running.append(self.keys)
            self.limiter.record_send(self.keys, self.now)

    def _probe(self) -> None:
        if (
            self.limiter.gateway_unreachable_since is not None
            and self.limiter.get_allowance(self.now).probe_limit
        ):
            self.limiter.record_probe(self.now)
            self.now += 0.05
            self.limiter.record_gateway_answer(self.now, self.now - 0.05)


@pytest.mark.parametrize("histories", [400, pytest.param(100_000, marks=pytest.mark.long)])
def test_any_past_is_over_in_time(histories: int) -> None:
    shut = []
    for seed in range(histories):
        history = History(seed)
        history.live()
        took = history.readings_until_open()
        if took > history.most_readings:
            shut.append((seed, history.slots, repr(history.limiter.get_allowance(history.now))))
    assert not shut, shut[:5]
