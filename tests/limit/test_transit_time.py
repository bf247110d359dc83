"""Transit time δ of requests and answers, measured by connects and HTTP exchanges."""

from __future__ import annotations

import operator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.transit_time import (
    DEFAULT_TRANSIT_S,
    MAX_LOOP_DELAY_S,
    MAX_TRANSIT_S,
    MIN_CONNECTS,
    MIN_TRANSIT_S,
    TransitTime,
)

SECONDS = st.floats(-1, 100)


def make_transit_time(connect_s: float | None = None, exchange_s: float | None = None) -> TransitTime:
    transit_time = TransitTime()
    for _ in range(MIN_CONNECTS):
        if connect_s is not None:
            transit_time.record_connect(connect_s)
        if exchange_s is not None:
            transit_time.record_exchange(exchange_s)
    transit_time.update_delta()
    return transit_time


@pytest.mark.parametrize(
    ("connect_s", "exchange_s", "delta_s"),
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
def test_delta_is_the_duration_of_connects_or_the_default(
    connect_s: float | None, exchange_s: float | None, delta_s: float
) -> None:
    assert make_transit_time(connect_s, exchange_s).delta_s == pytest.approx(delta_s)


def test_delta_is_the_slowest_connect_once_there_are_enough() -> None:
    transit_time = TransitTime()
    for _ in range(MIN_CONNECTS - 1):
        transit_time.record_connect(0.001)
    transit_time.update_delta()
    assert transit_time.delta_s == DEFAULT_TRANSIT_S
    transit_time.record_connect(0.012)
    transit_time.update_delta()
    assert transit_time.delta_s == 0.012


def test_delta_is_increased_for_a_while_if_that_explains_a_reading() -> None:
    transit_time = make_transit_time()
    assert transit_time.increase_delta(lambda delta_s: delta_s >= 0.07)
    assert 0.07 <= transit_time.delta_s < 0.1
    for _ in range(500):
        transit_time.update_delta()
    assert transit_time.delta_s == DEFAULT_TRANSIT_S


@given(st.lists(SECONDS), st.lists(SECONDS), st.lists(SECONDS))
def test_delta_stays_within_its_bounds(
    connect_times: list[float], exchange_times: list[float], needed_times: list[float]
) -> None:
    transit_time = TransitTime()
    for seconds in connect_times:
        transit_time.record_connect(seconds)
    for seconds in exchange_times:
        transit_time.record_exchange(seconds)
    for needed in needed_times:
        transit_time.update_delta()
        assert MIN_TRANSIT_S <= transit_time.delta_s <= MAX_TRANSIT_S
        before = transit_time.delta_s
        if not transit_time.increase_delta(partial(operator.le, needed)):
            assert transit_time.delta_s == before
        assert MIN_TRANSIT_S <= transit_time.delta_s <= MAX_TRANSIT_S


# The limiter with a transit time: 500 slots, 100 requests of 4 s per second, and no other requests.


def simulate_requests(transit_s: float, *, shown_share: float = 1.0, work_s: float = 4.0) -> set[Reason]:
    """Return every reason that is shown from the second second on.

    Each request is in the pool from transit_s after it is sent until transit_s before its answer arrives.
    Readings show the given share of these requests.
    """
    reasons = set()
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    sent: dict[int, float] = {}
    for step in range(1200):
        now = 10 + step / 100
        for key in [key for key, at in sent.items() if at + 2 * transit_s + work_s <= now]:
            limiter.record_answer(key, now)
            del sent[key]
        if step % 50 == 0:
            in_pool = sum(at + transit_s <= now < at + transit_s + work_s for at in sent.values())
            limiter.add_reading(
                Reading(Signal.REQUESTS, now, now, shown_share * in_pool / 500, 0.0, 500), now
            )
        allowance = limiter.get_allowance(now)
        if step > 100:
            reasons.add(allowance.reason)
        if step > 2 and allowance.limit > len(sent):
            limiter.record_send(step, now)
            sent[step] = now
    return reasons


@pytest.mark.parametrize("transit_s", [0.0, 0.03, 0.1, 0.19])
def test_readings_of_our_pool_are_plausible_for_any_transit_time(transit_s: float) -> None:
    assert not any(reason.is_closed for reason in simulate_requests(transit_s))


@pytest.mark.parametrize("work_s", [0.1, 4.0])
@pytest.mark.parametrize("transit_s", [0.0, 0.2])
def test_readings_without_our_requests_are_implausible_for_any_transit_time(
    transit_s: float, work_s: float
) -> None:
    assert Reason.IMPLAUSIBLE in simulate_requests(transit_s, shown_share=0.0, work_s=work_s)


def test_short_requests_reach_the_limit() -> None:
    """Realtime requests fall from 40 to 20 of 64. Batch requests take 40 ms, with 5 ms of transit time."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    for number in range(MIN_CONNECTS):
        limiter.record_answer(-number, 0.0, 0.004)
    sent: dict[int, float] = {}
    key, limit = 0, 0
    for step in range(6000):
        now = 10 + step / 500
        for ended in [ended for ended, at in sent.items() if at + 0.04 <= now]:
            limiter.record_answer(ended, now)
            del sent[ended]
        if step % 250 == 0:
            in_pool = sum(at + 0.002 <= now < at + 0.037 for at in sent.values())
            realtime = 40 if step < 3000 else 20
            limiter.add_reading(Reading(Signal.REQUESTS, now, now, (realtime + in_pool) / 64, 0.0, 64), now)
        limit = limiter.get_allowance(now).limit
        for _ in range(min(3, limit - len(sent))):
            key += 1
            limiter.record_send(key, now)
            sent[key] = now
    assert limit >= 38


@pytest.mark.parametrize(("late_s", "added_s"), [(0.5, 0.5), (-1.0, 0.0), (3600.0, MAX_LOOP_DELAY_S)])
def test_delay_of_the_event_loop_is_added_up_to_its_maximum(late_s: float, added_s: float) -> None:
    transit = TransitTime()
    transit.set_loop_delay(late_s)
    transit.update_delta()
    assert transit.delta_s == DEFAULT_TRANSIT_S + added_s
    assert transit.increase_delta(lambda delta_s: delta_s > added_s + 0.15)
    assert added_s + 0.15 < transit.delta_s <= added_s + MAX_TRANSIT_S
