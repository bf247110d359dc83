"""The limiter costs next to nothing beside the requests it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from tests.floors import beside, cpu_of

EMPTY_CALLS = 100
"""An event may cost as many. Where Python makes 20 million of them a second, as on a machine of 2024, that is
200,000 events/s."""
IN_FLIGHT = 64
ANSWER_S = 0.05
SECONDS = 5


def nothing(key: int, now: float) -> None:
    pass


def with_everything() -> int:
    """64 in flight, answers after 50 ms: 1,280 requests/s. Leases counted with each claim of eight, a reading
    of two signals each second; what is allowed is asked after every event: that is in the time, not in the
    count."""
    limiter = Limiter(Policy(), (Signal.SATURATION, Signal.REQUESTS))
    events = key = answered = 0
    now = 100.0
    step = ANSWER_S / IN_FLIGHT
    next_reading = now

    for _ in range(round(SECONDS / step)):
        now += step
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
    assert key > SECONDS * IN_FLIGHT / ANSWER_S * 0.9, "the mix is not the one described"
    return events


def only_requests(every: int, window_s: float) -> int:
    """Each answer is replaced at once (answered, allowance, sent), 500 a second, with a reading for every so
    many of them."""
    limiter = Limiter(Policy(), [Signal.SATURATION])
    out: deque[int] = deque()
    now, key, events, turns = 0.0, 0, 0, 2_500
    for turn in range(turns):
        now += 0.002
        if turn % every == 0:
            load = min(1.0, len(out) / 100)
            limiter.add_reading(Reading(Signal.SATURATION, now - window_s, now, load, 0.0, 100.0), now)
            events += 1
        if out:
            limiter.record_answer(out.popleft(), now)
            events += 1
        room = limiter.get_allowance(now).limit - len(out)
        events += 1
        for _ in range(min(room, IN_FLIGHT - len(out))):
            key += 1
            limiter.record_send(key, now)
            out.append(key)
            events += 1
    assert key > turns * 0.9, "the gate must be open for this to measure anything"
    return events


def empty_calls(count: int) -> None:
    for key in range(count):
        nothing(key, 0.0)


@pytest.mark.parametrize(
    "life",
    [
        pytest.param(with_everything, id="two signals, leases, waiting"),
        pytest.param(partial(only_requests, 50, 0.0), id="direct, ten readings a second"),
        pytest.param(partial(only_requests, 500, 5.0), id="averages, one reading a second"),
    ],
)
async def test_an_event_costs_less_than_a_hundred_empty_calls(life: Callable[[], int]) -> None:
    events = life()
    found = await beside(cpu_of(life), cpu_of(partial(empty_calls, 200_000)))
    calls = found.ratio * 200_000 / events
    print(f"{events / found.ours:,.0f} events/s of CPU; an event costs as much as {calls:.0f} empty calls")
    assert calls <= EMPTY_CALLS
