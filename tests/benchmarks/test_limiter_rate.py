"""The control law must cost nothing beside the requests it governs."""

from __future__ import annotations

import time
from collections import deque

import pytest

from dispatcher.core.budget import Policy, Reading, Signal
from dispatcher.core.limiter import Limiter

EVENTS_PER_S = 200_000


def events_per_s(requests: int, every: int, window_s: float) -> float:
    """A busy second of life over and over: at 64 in flight each answer is replaced at once (answered,
    allowance, sent), 500 a second, with a reading for every so many of them."""
    limiter = Limiter(Policy(), [Signal.SATURATION])
    out: deque[int] = deque()
    now, key, events = 0.0, 0, 0
    begun = time.process_time()
    for turn in range(requests):
        now += 0.002
        if turn % every == 0:
            load = min(1.0, len(out) / 100)
            limiter.reading(Reading(Signal.SATURATION, now - window_s, now, load, 0.0, 100.0), now)
            events += 1
        if out:
            limiter.answered(out.popleft(), now)
            events += 1
        room = limiter.allowance(now).limit - len(out)
        events += 1
        for _ in range(min(room, 64 - len(out))):
            key += 1
            limiter.sent(key, now)
            out.append(key)
            events += 1
    elapsed = time.process_time() - begun
    assert key > requests * 0.9, "the gate must be open for this to measure anything"
    return events / elapsed


@pytest.mark.serial
@pytest.mark.parametrize(
    ("every", "window_s"), [(50, 0.0), (500, 5.0)], ids=["direct, ten a second", "averages, one a second"]
)
def test_limiter_handles_200_000_events_a_second(every: int, window_s: float) -> None:
    """CPU time of the best of five, so that the machine's other work does not count."""
    best = max(events_per_s(20_000, every, window_s) for _ in range(5))
    print(f"{best:,.0f} events/s")
    assert best >= EVENTS_PER_S
