"""The gate reopens after every history: when all faults are over, batch requests soon get all their room.

A history has up to 60 events of any kind, with times that are wrong by up to a second, in a pool of 2 to
2,000 slots. Then all faults end: there are no realtime requests, each second a reading shows what runs, and
every slot is filled at once. The test limits the number of readings until only the reserve is left free.
Before that, the time of a Retry-After passes, and the hold time of a capacity that was learned too low.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.capacity import GROWTH_FREQUENT, MAX_READING_INTERVAL_S
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import DELTA_S
from dispatcher.limit.transit_time import MAX_TRANSIT_S

SLOTS = (2, 8, 20, 64, 200, 512, 2000)
MAX_READINGS = 30
"""Largest number of readings if no capacity was learned."""
RETRY_AFTER_S = 60.0
SIGNAL_SETS = [(Signal.SATURATION,), (Signal.REQUESTS,), (Signal.SATURATION, Signal.REQUESTS)]


class History:
    """Limiter with a random history of events."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.slot_count = self.rng.choice(SLOTS)
        backoff = self.rng.uniform(0.1, 0.9)
        self.policy = Policy(retry_after_max_s=RETRY_AFTER_S, overload_backoff=backoff)
        self.signals = self.rng.choice(SIGNAL_SETS)
        self.limiter = Limiter(self.policy, self.signals)
        self.now = 1000.0
        self.running: list[int] = []
        self.key_count = 0
        self.lost_units = 0

    def run_events(self) -> None:
        """Run up to 60 random events."""
        events: list[Callable[[], None]] = [
            self.add_random_reading,
            self.add_random_reading,
            self.add_random_reading,
            self.send_some,
            self.send_some,
            self.answer_some,
            self.refuse_request,
            self.fail_read,
            self.count_leases,
            self.share_limit,
            self.fail_gateway,
            self.pause_or_fail_queue,
            self.change_capacity,
        ]
        for _ in range(self.rng.randint(1, 60)):
            self.now += self.rng.choice((0.0, 0.05, 0.5, 2.0, 15.0)) * self.rng.random()
            self.rng.choice(events)()
            if self.rng.random() < 0.7:
                self.limiter.get_allowance(self.get_inexact_time())

    def count_readings_until_open(self) -> int:
        """End all faults and return the number of readings until the limit is restored.

        It is more than `max_readings` if the limit was not restored by then.
        """
        self.limiter.set_paused(False, self.now)
        self.limiter.set_queue_problem(None, self.now)
        self.limiter.set_capacity_bound(None, self.now)
        self.now += RETRY_AFTER_S + 2.0 + self.limiter.capacity_estimate.hold_s
        for key in self.running:
            self.limiter.record_answer(key, self.now)
        self.running.clear()
        full = self.policy.compute_max_limit(float(self.slot_count))
        self.limiter.set_waiting_count(full + 1, self.now)
        for count in range(self.max_readings + 1):
            self.limiter.record_lease_counts(
                self.now, other_owners_units=0, just_leased_units=0, lost_units=self.lost_units
            )
            self._probe()
            if self.limiter.get_allowance(self.now).limit == full:
                return count
            self._send_up_to_limit()
            self.now += 1.0
            self._add_reading(load=len(self.running), waiting=0)
            self.now += MAX_TRANSIT_S + 0.01
        return self.max_readings + 1

    @property
    def max_readings(self) -> int:
        """Largest number of readings: the longest first hold, then the growth from one request to all slots.

        The smallest steps of growth add one request each.
        """
        growth = math.log(self.slot_count) / math.log(GROWTH_FREQUENT) + 1.0 / (GROWTH_FREQUENT - 1.0)
        return MAX_READINGS + math.ceil(MAX_READING_INTERVAL_S + growth)

    # Events.

    def get_inexact_time(self) -> float:
        return self.now + self.rng.uniform(-1, 1) * self.rng.choice((0.0, 1.0))

    def add_random_reading(self) -> None:
        load = self.rng.randint(0, round(1.3 * self.slot_count))
        waiting = self.rng.choice((0, 0, self.rng.randint(0, self.slot_count)))
        self._add_reading(
            load=load, waiting=waiting, at=self.get_inexact_time(), window_s=self.rng.random() * 5
        )
        self.limiter.get_allowance(self.now + DELTA_S)

    def send_some(self) -> None:
        self._send_up_to_limit(max_count=self.rng.randint(1, self.slot_count))

    def answer_some(self) -> None:
        opened_s = self.rng.choice((None, 0.001, 0.05, 0.3))
        for _ in range(self.rng.randint(1, 20)):
            if self.running:
                key = self.running.pop(self.rng.randrange(len(self.running)))
                self.limiter.record_answer(key, self.get_inexact_time(), opened_s)

    def refuse_request(self) -> None:
        at = self.get_inexact_time()
        self.limiter.record_refusal(
            at,
            retry_at=at + self.rng.choice((0.0, 1.0, RETRY_AFTER_S, 1e6)),
            is_out_of_capacity=self.rng.random() < 0.8,
            in_flight=self.rng.randint(0, self.slot_count),
            is_remote=self.rng.random() < 0.3,
        )

    def fail_read(self) -> None:
        closes_at = self.now + self.rng.random() * 5
        self.limiter.record_read_failure(
            Reason.UNREADABLE, "lost", self.get_inexact_time(), closes_at=closes_at
        )

    def count_leases(self) -> None:
        lost_count = self.rng.choice((0, 0, self.rng.randint(0, 5)))
        self.lost_units += lost_count
        others = self.rng.randint(0, self.slot_count)
        just_leased, orphaned = self.rng.randint(0, others), self.rng.randint(0, lost_count)
        self.limiter.record_lease_counts(
            self.get_inexact_time(),
            other_owners_units=others,
            just_leased_units=just_leased,
            lost_units=self.lost_units,
            orphaned_units=orphaned,
        )

    def share_limit(self) -> None:
        self.limiter.set_shared_limit(self.rng.randint(0, self.slot_count), self.get_inexact_time())

    def fail_gateway(self) -> None:
        if self.rng.random() < 0.5:
            self.limiter.record_connection_failure(self.get_inexact_time(), "refused")
        else:
            self.limiter.record_intermediary_error(self.now, self.now - 0.01, "empty 503")

    def pause_or_fail_queue(self) -> None:
        if self.rng.random() < 0.5:
            self.limiter.set_paused(self.rng.random() < 0.5, self.now)
        else:
            self.limiter.set_queue_problem(self.rng.choice((None, "away")), self.now)

    def change_capacity(self) -> None:
        self.limiter.set_capacity_bound(
            self.rng.choice((None, 0.0, float(self.rng.randint(1, self.slot_count)))), self.now
        )

    # Helpers.

    def _add_reading(
        self, *, load: int, waiting: int, at: float | None = None, window_s: float = 0.1
    ) -> None:
        at = self.now if at is None else at
        waiting = min(load, waiting)
        for signal in self.signals:
            reading = Reading(
                signal=signal,
                opened_at=at - window_s,
                closed_at=at,
                f_sys=(load - waiting) / self.slot_count,
                f_epp=waiting / self.slot_count,
                max_sys=float(self.slot_count),
                running=float(load - waiting),
                waiting=float(waiting),
            )
            self.limiter.add_reading(reading, self.now)

    def _send_up_to_limit(self, max_count: int | None = None) -> None:
        room = self.limiter.get_allowance(self.now).limit - len(self.running)
        for _ in range(room if max_count is None else min(room, max_count)):
            self.key_count += 1
            self.running.append(self.key_count)
            self.limiter.record_send(self.key_count, self.now)

    def _probe(self) -> None:
        if (
            self.limiter.gateway_unreachable_since is not None
            and self.limiter.get_allowance(self.now).probe_limit
        ):
            self.limiter.record_probe(self.now)
            self.now += 0.05
            self.limiter.record_gateway_answer(self.now, self.now - 0.05)


@pytest.mark.parametrize("histories", [400, pytest.param(100_000, marks=pytest.mark.long)])
def test_gate_reopens_in_time_after_every_history(histories: int) -> None:
    closed = []
    for seed in range(histories):
        history = History(seed)
        history.run_events()
        reading_count = history.count_readings_until_open()
        if reading_count > history.max_readings:
            closed.append((seed, history.slot_count, repr(history.limiter.get_allowance(history.now))))
    assert not closed, closed[:5]
