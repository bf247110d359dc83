"""δ, the time that a request or an answer may take, by what our own exchanges show."""

from __future__ import annotations

import operator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.transit_time import (
    DEFAULT_TRANSIT_S,
    MAX_TRANSIT_S,
    MIN_CONNECTS,
    MIN_TRANSIT_S,
    TransitTime,
)

SECONDS = st.floats(-1, 100)


def travel(openings: float | None = None, exchanges: float | None = None) -> TransitTime:
    made = TransitTime()
    for _ in range(MIN_CONNECTS):
        if openings is not None:
            made.record_connect(openings)
        if exchanges is not None:
            made.record_exchange(exchanges)
    made.update_delta()
    return made


@pytest.mark.parametrize(
    ("openings", "exchanges", "delta_s"),
    [
        (None, None, DEFAULT_TRANSIT_S),
        (None, 3.0, DEFAULT_TRANSIT_S),
        (None, 0.04, DEFAULT_TRANSIT_S),
        (0.008, 3.0, 0.008),
        (0.06, 3.0, 0.06),
        (0.06, 0.1, 0.025),
        (30.0, 300.0, MAX_TRANSIT_S),
        (0.06, 0.01, DEFAULT_TRANSIT_S),
        (0.0, 0.0, MIN_TRANSIT_S),
    ],
)
def test_delta_is_what_openings_take_or_what_is_usual(
    openings: float | None, exchanges: float | None, delta_s: float
) -> None:
    assert travel(openings, exchanges).delta_s == pytest.approx(delta_s)


def test_few_openings_are_not_believed_and_the_slowest_counts() -> None:
    made = TransitTime()
    for _ in range(MIN_CONNECTS - 1):
        made.record_connect(0.001)
    made.update_delta()
    assert made.delta_s == DEFAULT_TRANSIT_S
    made.record_connect(0.012)
    made.update_delta()
    assert made.delta_s == 0.012


def test_reading_that_a_longer_way_explains_makes_it_longer_for_a_while() -> None:
    made = travel()
    assert made.increase_delta(lambda delta_s: delta_s >= 0.07)
    assert 0.07 <= made.delta_s < 0.1
    for _ in range(500):
        made.update_delta()
    assert made.delta_s == DEFAULT_TRANSIT_S


@given(st.lists(SECONDS), st.lists(SECONDS), st.lists(SECONDS))
def test_delta_has_bounds_whatever_is_shown(
    openings: list[float], exchanges: list[float], shown: list[float]
) -> None:
    made = TransitTime()
    for seconds in openings:
        made.record_connect(seconds)
    for seconds in exchanges:
        made.record_exchange(seconds)
    for needed in shown:
        made.update_delta()
        assert MIN_TRANSIT_S <= made.delta_s <= MAX_TRANSIT_S
        before = made.delta_s
        if not made.increase_delta(partial(operator.le, needed)):
            assert made.delta_s == before
        assert MIN_TRANSIT_S <= made.delta_s <= MAX_TRANSIT_S


# What the limiter makes of it: 500 slots, 100 requests a second of 4 s each, and nobody else.


def night(travel_s: float, *, seen: float = 1.0, work_s: float = 4.0) -> set[Reason]:
    """The gateway holds each from travel_s after it is sent until travel_s before it is back; readings show
    that share of it. Every reason that was shown from the second second on."""
    reasons = set()
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    sent: dict[int, float] = {}
    for step in range(1200):
        now = 10 + step / 100
        for key in [key for key, at in sent.items() if at + 2 * travel_s + work_s <= now]:
            limiter.record_answer(key, now)
            del sent[key]
        if step % 50 == 0:
            there = sum(at + travel_s <= now < at + travel_s + work_s for at in sent.values())
            limiter.add_reading(Reading(Signal.REQUESTS, now, now, seen * there / 500, 0.0, 500), now)
        allowance = limiter.get_allowance(now)
        if step > 100:
            reasons.add(allowance.reason)
        if step > 2 and allowance.limit > len(sent):
            limiter.record_send(step, now)
            sent[step] = now
    return reasons


@pytest.mark.parametrize("travel_s", [0.0, 0.03, 0.1, 0.19])
def test_readings_of_our_pool_are_believed_however_long_requests_travel(travel_s: float) -> None:
    assert not any(reason.is_closed for reason in night(travel_s))


@pytest.mark.parametrize("work_s", [0.1, 4.0])
@pytest.mark.parametrize("travel_s", [0.0, 0.2])
def test_readings_that_do_not_show_us_are_disbelieved_however_long_requests_travel(
    travel_s: float, work_s: float
) -> None:
    assert Reason.IMPLAUSIBLE in night(travel_s, seen=0.0, work_s=work_s)


def test_short_requests_come_to_their_place_too() -> None:
    """Realtime took 40 of 64, and takes 20 now; requests of 40 ms, of which 5 ms are travel."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    for number in range(MIN_CONNECTS):
        limiter.record_answer(-number, 0.0, 0.004)
    sent: dict[int, float] = {}
    key, limit = 0, 0
    for step in range(6000):
        now = 10 + step / 500
        for old in [old for old, at in sent.items() if at + 0.04 <= now]:
            limiter.record_answer(old, now)
            del sent[old]
        if step % 250 == 0:
            there = sum(at + 0.002 <= now < at + 0.037 for at in sent.values())
            realtime = 40 if step < 3000 else 20
            limiter.add_reading(Reading(Signal.REQUESTS, now, now, (realtime + there) / 64, 0.0, 64), now)
        limit = limiter.get_allowance(now).limit
        for _ in range(min(3, limit - len(sent))):
            key += 1
            limiter.record_send(key, now)
            sent[key] = now
    assert limit >= 38
