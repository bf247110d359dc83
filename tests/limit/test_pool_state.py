"""State of the pool as the limiter reports it: realtime requests, the largest limit, problems."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.limit.budget import MAX_PLAUSIBLE_REQUESTS, KvUse, Policy, Reading, Reason, Signal
from dispatcher.limit.limiter import Limiter

SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS
T0 = 1000.0
SLOTS = 64.0
"""Capacity of the pool: a power of two, so that shares of it are exact."""
POLICY = Policy(reserve=0.0)


def make_reading(
    load: float, in_picker: float = 0.0, signal: Signal = REQUESTS, at: float = T0, **rest: Any
) -> Reading:
    """Return a reading of `load` requests, some of which wait in the picker."""
    return Reading(signal, at, at, (load - in_picker) / SLOTS, in_picker / SLOTS, SLOTS, **rest)


def make_limiter(*readings: Reading, in_flight: int = 0, policy: Policy = POLICY) -> Limiter:
    """Return a limiter with these readings, whose requests in flight were sent long before."""
    limiter = Limiter(policy, {reading.signal: None for reading in readings} or (REQUESTS,))
    for key in range(in_flight):
        limiter.record_send(key, T0 - 60)
    for reading in readings:
        limiter.add_reading(reading, reading.closed_at)
        limiter.get_allowance(reading.closed_at + 0.25)
    return limiter


# Realtime requests, outside the picker's queue and in it.


@pytest.mark.parametrize(
    ("load", "in_picker", "in_flight", "expected"),
    [
        (48, 8, 0, (40, 8)),
        (48, 8, 10, (30, 8)),
        (48, 8, 44, (0, 4)),
        (48, 8, 60, (0, 0)),
        (0, 0, 0, (0, 0)),
    ],
    ids=["none of ours", "ours run", "ours run, and some wait", "fewer than ours", "idle pool"],
)
def test_batch_requests_are_subtracted_from_running_requests_first(
    load: float, in_picker: float, in_flight: int, expected: tuple[float, float]
) -> None:
    limiter = make_limiter(make_reading(load, in_picker), in_flight=in_flight)
    assert limiter.realtime_requests == expected


def test_realtime_requests_are_unknown_without_a_plausible_reading() -> None:
    assert make_limiter().realtime_requests == (None, None)
    assert make_limiter(make_reading(-1)).realtime_requests == (None, None)
    assert make_limiter(make_reading(1.01 * MAX_PLAUSIBLE_REQUESTS)).realtime_requests == (None, None)
    assert make_limiter(make_reading(MAX_PLAUSIBLE_REQUESTS)).realtime_requests == (MAX_PLAUSIBLE_REQUESTS, 0)


def test_newest_signal_that_counts_requests_shows_the_realtime_requests() -> None:
    older, newer = make_reading(30), make_reading(20, signal=SATURATION, at=T0 + 1)
    assert make_limiter(older, newer).realtime_requests == (20, 0)
    score = make_reading(10, signal=SATURATION, at=T0 + 1, is_request_count=False)
    assert make_limiter(older, score).realtime_requests == (30, 0)
    assert make_limiter(score).realtime_requests == (10, 0)


def test_counts_beside_a_pressure_score_show_the_realtime_requests() -> None:
    score = make_reading(10, 6, is_request_count=False, running=20.0, waiting=9.0)
    assert make_limiter(score, in_flight=5).realtime_requests == (20 + 9 - 6 - 5, 6)
    count = make_reading(40, 6, running=20.0, waiting=9.0)
    assert make_limiter(count, in_flight=5).realtime_requests == (40 - 6 - 5, 6)


# The rest of the state.


def test_largest_limit_is_that_of_the_smallest_signal() -> None:
    assert make_limiter().max_limit is None
    small = Reading(SATURATION, T0, T0, 0.5, 0.0, 40)
    assert make_limiter(make_reading(30), small).max_limit == 40
    assert make_limiter(small, make_reading(30)).max_limit == 40


def test_units_in_flight_at_a_refusal_include_the_refused_ones() -> None:
    limiter = make_limiter(make_reading(30), in_flight=7)
    assert limiter.count_in_flight_at_refusal(T0 + 1, units=3) == 10


def test_median_duration_is_that_of_requests_that_were_sent() -> None:
    limiter = make_limiter(make_reading(30))
    assert limiter.median_duration_s == 0
    limiter.record_answer("never sent", T0)
    for key, took_s in enumerate((2.0, 4.0, 9.0)):
        limiter.record_send(key, T0)
        limiter.record_answer(key, T0 + took_s)
    assert limiter.median_duration_s == 4


def test_units_are_sent_at_a_pace_only_if_a_picker_chooses_among_several_endpoints() -> None:
    for endpoints, has_pace in ((None, False), (1.0, False), (2.0, True)):
        assert make_limiter(make_reading(30, picker_endpoints=endpoints)).has_send_pace is has_pace


def test_problem_of_the_newest_poll_is_shown() -> None:
    assert make_limiter(make_reading(30)).signals_problem is None
    limiter = make_limiter()
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1)
    assert limiter.signals_problem == "timed out"


def test_pool_is_known_while_readings_are_fresh_and_can_be_taken() -> None:
    limiter = make_limiter(make_reading(30))
    assert limiter.knows_pool(T0 + 1)
    assert limiter.knows_pool(T0 + POLICY.max_age_s)
    assert not limiter.knows_pool(T0 + POLICY.max_age_s + 0.1)
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1, closes_at=T0 + 2)
    assert limiter.knows_pool(T0 + 1.9)
    assert not limiter.knows_pool(T0 + 2)


# When the allowance is computed, and for how long it is valid.


def test_allowance_is_computed_once_until_something_changes() -> None:
    limiter = make_limiter(make_reading(30))
    limiter.set_paused(True, T0 + 1)
    allowance = limiter.get_allowance(T0 + 1)
    assert limiter.get_allowance(T0 + 1.1) is allowance
    limiter.set_paused(False, T0 + 1.2)
    assert limiter.get_allowance(T0 + 1.2) is not allowance


def test_next_check_is_later_than_now() -> None:
    """Otherwise the dispatch loop would not rest."""
    limiter = make_limiter(make_reading(30))
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1, closes_at=T0 + 2)
    for now in (T0 + 1, T0 + 2):
        next_check_at = limiter.get_allowance(now).next_check_at
        assert next_check_at is not None
        assert next_check_at > now


def test_no_check_is_due_if_only_an_event_can_change_the_allowance() -> None:
    limiter = Limiter(Policy(max_in_flight=5), (REQUESTS,))
    assert limiter.get_allowance(T0).next_check_at is None


def test_pool_without_headroom_is_full_and_not_saturated() -> None:
    limiter = make_limiter(make_reading(SLOTS), in_flight=20)
    limiter.set_policy(Policy(reserve=0.0, max_in_flight=5), T0 + 1)
    assert limiter.get_allowance(T0 + 1).reason is Reason.FULL


def test_probe_is_due_at_the_time_that_was_named() -> None:
    limiter = make_limiter(make_reading(30))
    limiter.record_connection_failure(T0 + 1, "refused")
    due_at = limiter.get_allowance(T0 + 1).next_check_at
    assert due_at is not None
    assert limiter.get_allowance(due_at).probe_limit == 34


def test_newest_use_of_the_kv_memory_counts() -> None:
    limiter = Limiter(Policy(max_sys=10), [Signal.SATURATION, Signal.REQUESTS])
    older, newer = KvUse(0.4, None, 1, 0.0, 1.0), KvUse(0.5, None, 1, 1.0, 2.0)
    seen = [limiter.kv_use]
    for signal, use, at in (
        (Signal.SATURATION, newer, 2.0),
        (Signal.REQUESTS, older, 1.0),
        (Signal.SATURATION, None, 5.0),
        (Signal.REQUESTS, newer, 5.0),
    ):
        limiter.add_reading(Reading(signal, at, at, 0.0, 0.0, 10, kv_use=use), 5.0)
        limiter.get_allowance(7.0)
        seen.append(limiter.kv_use)
    assert seen == [None, newer, newer, None, newer]


@pytest.mark.parametrize(("late_s", "window"), [(1.0, (4.0, 10.0)), (3600.0, (10.0, 10.0))])
def test_window_of_the_kv_memory_ends_when_the_sample_arrives_at_the_latest(
    late_s: float, window: tuple[float, float]
) -> None:
    limiter, at = Limiter(Policy(max_sys=10), [Signal.REQUESTS]), 10.0 + late_s
    use = KvUse(0.4, None, 1, min(4.0, at - 6) if late_s == 1.0 else at - 6, at)
    limiter.add_reading(Reading(Signal.REQUESTS, at, at, 0.0, 0.0, 10, kv_use=use), 10.0)
    limiter.get_allowance(12.0)
    assert limiter.kv_use == KvUse(0.4, None, 1, *window)


def test_units_of_other_replicas_in_a_window_are_bounded_by_the_counts_around_it() -> None:
    limiter = Limiter(Policy(max_sys=10), [Signal.REQUESTS])
    for at, units in ((1.0, 3), (2.0, 5), (3.0, 4)):
        limiter.record_lease_counts(at, other_owners_units=units, just_leased_units=0, lost_units=0)
    assert limiter.bound_other_owners(1.5, 2.5) == (3, 5)
    assert limiter.bound_other_owners(2.5, 3.5) == (0, 5)
