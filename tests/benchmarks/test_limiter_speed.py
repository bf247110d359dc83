"""The limiter costs little compared with the requests it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from tests.cost_comparison import compare_costs, measure_cpu_s

MAX_EMPTY_CALLS = 100
"""Maximum cost of an event.

With 20 million empty calls per second (a machine of 2024) this is 200,000 events/s.
"""
IN_FLIGHT = 64
ANSWER_S = 0.05
SECONDS = 5


def do_nothing(key: int, now: float) -> None:
    pass


def run_mixed_events() -> int:
    """Simulate 64 requests in flight with answers after 50 ms (1,280 requests/s), and return the number of
    events.

    Leases are counted with each claim of eight requests, and two signals are read every second. The allowance
    is computed after every event, which is included in the time but not in the count.
    """
    limiter = Limiter(Policy(), (Signal.SATURATION, Signal.REQUESTS))
    events = key = answered = 0
    now = 100.0
    interval_s = ANSWER_S / IN_FLIGHT
    next_reading = now

    for _ in range(round(SECONDS / interval_s)):
        now += interval_s
        if now >= next_reading:
            for signal in Signal:
                load = (20 + limiter.in_flight) / 100
                limiter.add_reading(Reading(signal, now - 0.01, now, load, 0.0, 100), now)
                limiter.get_allowance(now)
            events += 2
            next_reading += 1.0
        if key - answered >= IN_FLIGHT:
            limiter.record_answer(answered, now)
            limiter.get_allowance(now)
            answered += 1
            events += 1
        if key % 8 == 0:
            limiter.record_lease_counts(
                now, other_owners_units=key // 8 % 3, just_leased_units=0, lost_units=0
            )
            limiter.set_waiting_count(100, now)
            limiter.get_allowance(now)
            events += 2
        if limiter.get_allowance(now).limit > limiter.in_flight:
            limiter.record_send(key, now)
            limiter.get_allowance(now)
            key += 1
            events += 1
    assert key > SECONDS * IN_FLIGHT / ANSWER_S * 0.9, "the mix of events must be as described"
    return events


def run_requests(requests_per_reading: int, window_s: float) -> int:
    """Simulate 500 requests per second, each of which is sent after an answer, and return the number of
    events.

    A reading follows after every `requests_per_reading` requests.
    """
    limiter = Limiter(Policy(), [Signal.SATURATION])
    in_flight: deque[int] = deque()
    now, key, events, iterations = 0.0, 0, 0, 2_500
    for iteration in range(iterations):
        now += 0.002
        if iteration % requests_per_reading == 0:
            load = min(1.0, len(in_flight) / 100)
            limiter.add_reading(Reading(Signal.SATURATION, now - window_s, now, load, 0.0, 100.0), now)
            events += 1
        if in_flight:
            limiter.record_answer(in_flight.popleft(), now)
            events += 1
        room = limiter.get_allowance(now).limit - len(in_flight)
        events += 1
        for _ in range(min(room, IN_FLIGHT - len(in_flight))):
            key += 1
            limiter.record_send(key, now)
            in_flight.append(key)
            events += 1
    assert key > iterations * 0.9, "the gate must be open"
    return events


def run_empty_calls(count: int) -> None:
    for key in range(count):
        do_nothing(key, 0.0)


@pytest.mark.parametrize(
    "run_events",
    [
        pytest.param(run_mixed_events, id="two signals, leases, waiting"),
        pytest.param(partial(run_requests, 50, 0.0), id="direct, ten readings a second"),
        pytest.param(partial(run_requests, 500, 5.0), id="averages, one reading a second"),
    ],
)
async def test_event_costs_less_than_a_hundred_empty_calls(run_events: Callable[[], int]) -> None:
    events = run_events()
    comparison = await compare_costs(
        measure_cpu_s(run_events), measure_cpu_s(partial(run_empty_calls, 200_000))
    )
    calls = comparison.ratio * 200_000 / events
    print(
        f"{events / comparison.ours:,.0f} events/s of CPU; an event costs as much as {calls:.0f} empty calls"
    )
    assert calls <= MAX_EMPTY_CALLS
