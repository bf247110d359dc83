"""Learned capacity of a pool: what lowers the estimate, how far, and how it grows again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.limit.capacity import (
    FITTED_AT_REFUSAL,
    FREQUENT_S,
    GROWTH,
    GROWTH_CAREFUL,
    GROWTH_FREQUENT,
    GROWTH_REALTIME,
    HOLD_READINGS,
    HOLD_S,
    LONG_REQUEST_S,
    PROBE_STEP,
    PROBE_SUCCESSES,
    RECENT_S,
    CapacityEstimate,
    PoolCounts,
    PoolSnapshot,
)
from dispatcher.limit.picker_inference import FLUSH_S

BETA, RESERVE = 0.7, 0.05


class Pool:
    """Capacity estimate of a pool that is configured for this many requests and read at a fixed interval."""

    def __init__(self, configured: float = 64, *, is_known: bool = True, interval_s: float = 1.0) -> None:
        self.capacity = CapacityEstimate()
        self.configured = configured
        self.is_known = is_known
        self.interval_s = interval_s
        self.now = 0.0

    @property
    def estimate(self) -> float:
        """Estimated capacity in requests."""
        return self.configured * (1.0 if self.capacity.share is None else self.capacity.share)

    def record_reading(
        self,
        running: float | None,
        waiting: float = 0.0,
        realtime: float = 20.0,
        *,
        certainly_running: float | None = None,
        is_steady: bool = True,
        is_waiting_in_picker: bool = False,
        is_uneven: bool = False,
        average_counts: tuple[float, float] | None = None,
        mean_duration_s: float = 1.0,
        ended_requests: int = 0,
        present_requests: float = 0.0,
    ) -> float | None:
        """Record a reading and return the learned capacity. `None` if it equals the configured one."""
        self.now += self.interval_s
        counts = None
        if running is not None:
            counts = PoolCounts(
                running,
                waiting,
                running if certainly_running is None else certainly_running,
                is_steady=is_steady,
                is_exact=certainly_running is None,
                is_waiting_in_picker=is_waiting_in_picker,
                is_uneven=is_uneven,
            )
        snapshot = PoolSnapshot(
            sampled_at=self.now,
            configured_capacity=self.configured,
            is_capacity_known=self.is_known,
            realtime_requests=realtime,
            current_counts=counts,
            average_counts=None
            if average_counts is None
            else PoolCounts(*average_counts, average_counts[0], is_uneven=is_uneven),
            waiting_requests=waiting if counts is None else 0.0,
            mean_duration_s=mean_duration_s,
            ended_requests=ended_requests,
            present_requests=present_requests,
        )
        self.capacity.learn_from_snapshot(snapshot, reserve=RESERVE, backoff=BETA)
        return None if self.capacity.share is None else self.estimate

    def learn_capacity(self, running: float) -> Pool:
        self.record_reading(running, running)
        assert self.record_reading(running, running + 1) == pytest.approx(running)
        return self

    def record_quiet_readings(self, count: int, running: float | None = 1.0) -> list[float]:
        """Record readings in which few requests run and none waits. Return the capacity after each one."""
        return [
            self.configured if (estimate := self.record_reading(running)) is None else estimate
            for _ in range(count)
        ]


# Requests that wait.


def test_known_capacity_is_not_corrected_while_no_request_waits() -> None:
    pool = Pool()
    assert {pool.record_reading(running) for running in (0, 5, 40, 61, 64)} == {None}


def test_several_readings_with_waiting_requests_show_the_capacity() -> None:
    pool = Pool()
    estimates = [pool.record_reading(50, waiting) for waiting in (6, 7, 5, 6)]
    assert estimates == [None, None, None, pytest.approx(50)]


@pytest.mark.parametrize(("clean_readings", "learned"), [(0, 20), (1, 20), (2, 20), (3, None), (10, None)])
def test_two_readings_with_many_waiting_requests_show_the_capacity_if_few_lie_between(
    clean_readings: int, learned: int | None
) -> None:
    """Slices that are revoked for waiting requests make these disappear until the limit has opened again."""
    pool = Pool()
    assert pool.record_reading(20, 500) is None
    for _ in range(clean_readings):
        assert pool.record_reading(20, 0) is None
    assert pool.record_reading(20, 500) == learned


def test_readings_without_waiting_requests_are_counted_anew_after_each_with_some() -> None:
    pool = Pool()
    learned = [pool.record_reading(50, waiting) for waiting in (5, 0, 0, 5, 0, 0, 5, 0, 0, 5)]
    assert learned == [None] * 9 + [pytest.approx(50)]


@pytest.mark.parametrize(("running", "waiting"), [(3, 0.9), (50, 4), (60, 5)])
def test_few_waiting_requests_do_not_contradict_a_known_capacity(running: float, waiting: float) -> None:
    """They may wait for a certain endpoint while another is free, or for the next step of a server."""
    pool = Pool()
    assert [pool.record_reading(running, waiting) for _ in range(50)] == [None] * 50


def test_backlog_of_a_tenth_in_four_readings_contradicts_a_known_capacity() -> None:
    pool = Pool()
    assert [pool.record_reading(50, 5) for _ in range(4)] == [None, None, None, pytest.approx(50)]


def test_all_samples_of_a_flush_count_as_one_reading() -> None:
    pool = Pool()
    assert [pool.record_reading(None, average_counts=(30, 20)) for _ in range(int(FLUSH_S))] == [None] * int(
        FLUSH_S
    )
    assert pool.record_reading(None, average_counts=(30, 20)) == pytest.approx(30), (
        "the next flush, 5 s later, confirms the number"
    )


def test_capacity_is_the_largest_number_that_ran_while_requests_waited() -> None:
    pool = Pool()
    pool.record_reading(40, 16)
    assert pool.record_reading(30, 30) == pytest.approx(40)


def test_learned_capacity_is_dropped_when_the_known_one_runs() -> None:
    pool = Pool().learn_capacity(30)
    assert pool.record_reading(63, 40) is None
    assert pool.record_reading(64, 400) is None


def test_known_capacity_is_right_if_97_percent_of_it_run_whatever_waits() -> None:
    """Exact counts or averages show it."""
    assert Pool(100).learn_capacity(30).record_reading(96.9, 40) == pytest.approx(96.9)
    assert Pool(100).learn_capacity(30).record_reading(97, 40) is None
    assert Pool(100).learn_capacity(30).record_reading(20, 20, average_counts=(97, 0)) is None
    assert Pool(100).learn_capacity(30).record_reading(97, 20, average_counts=(20, 5)) is None


def test_requests_that_ran_earlier_do_not_keep_the_estimate_high() -> None:
    """In an earlier version, sent requests counted as having run and blocked lower estimates for minutes."""
    pool = Pool(300)
    pool.record_reading(250)
    pool.record_reading(48, 140)
    assert pool.record_reading(48, 130) == pytest.approx(48)


def test_counts_of_different_moments_are_ignored_if_there_are_averages() -> None:
    pool = Pool()
    for _ in range(4):
        assert pool.record_reading(20, 30, certainly_running=15, average_counts=(60, 0)) is None


def test_counts_of_different_moments_show_the_capacity_only_while_they_are_steady() -> None:
    moving_pool, steady_pool = Pool(), Pool()
    for _ in range(4):
        moving_pool.record_reading(20, 30, certainly_running=15, is_steady=False)
        steady_pool.record_reading(20, 30, certainly_running=15)
    assert moving_pool.capacity.share is None
    assert steady_pool.estimate == pytest.approx(20)


def test_requests_that_wait_in_the_picker_show_the_capacity_although_the_averages_do_not() -> None:
    pool = Pool()
    pool.record_reading(40, 20, certainly_running=38, is_waiting_in_picker=True, average_counts=(40, 0))
    assert pool.record_reading(
        40, 20, certainly_running=38, is_waiting_in_picker=True, average_counts=(40, 0)
    ) == pytest.approx(40)


# Refusals.


def test_refusal_before_the_first_reading_is_ignored() -> None:
    pool = Pool()
    pool.capacity.record_refusal(3)
    assert pool.record_reading(None) is None


def test_refusal_lowers_the_estimate_to_most_of_the_requests_that_were_not_refused() -> None:
    pool = Pool(80)
    pool.record_reading(None, realtime=20)
    for _ in range(5):
        pool.capacity.record_refusal(55)
    assert pool.record_reading(None, realtime=15) == pytest.approx(FITTED_AT_REFUSAL * (55 - 5 + 20))


def test_refusal_assumes_the_larger_number_of_realtime_requests_of_the_readings_around_it() -> None:
    pool = Pool(80)
    pool.record_reading(None, realtime=5)
    pool.capacity.record_refusal(41)
    assert pool.record_reading(None, realtime=30) == pytest.approx(FITTED_AT_REFUSAL * (41 - 1 + 30))


def test_refusal_leaves_at_least_the_backoff_share_of_the_estimate() -> None:
    """A request that is refused at any load must not reduce the capacity for all others."""
    pool = Pool(192)
    pool.record_reading(None, realtime=0)
    for _ in range(40):
        pool.capacity.record_refusal(40)
    assert pool.record_reading(None, realtime=0) == pytest.approx(BETA * 192)


def test_refusal_does_not_lower_the_estimate_below_what_ran_recently_without_waiting() -> None:
    pool = Pool()
    pool.record_reading(61)
    pool.record_reading(30, realtime=4)
    pool.capacity.record_refusal(10)
    assert pool.record_reading(30, realtime=4) == pytest.approx(61)


@pytest.mark.parametrize(("age_s", "expected"), [(RECENT_S, 61), (RECENT_S + 1, BETA * 64)])
def test_requests_that_ran_long_ago_do_not_limit_the_effect_of_a_refusal(
    age_s: float, expected: float
) -> None:
    pool = Pool()
    pool.record_reading(61)
    pool.record_quiet_readings(int(age_s) - 1, running=20)
    pool.capacity.record_refusal(10)
    assert pool.record_reading(20, realtime=20) == pytest.approx(expected)


def test_recent_requests_span_thirty_readings_if_these_are_rare() -> None:
    pool = Pool(interval_s=10.0)
    pool.record_reading(61)
    pool.record_quiet_readings(29, running=20)
    pool.capacity.record_refusal(10)
    assert pool.record_reading(20, realtime=20) == pytest.approx(61)


def test_refusal_by_a_full_pool_is_ignored() -> None:
    pool = Pool()
    pool.record_reading(30)
    pool.capacity.record_refusal(10)
    assert pool.record_reading(64, 8) is None
    pool.capacity.record_refusal(10)
    assert pool.record_reading(20) is None


def test_refusal_together_with_waiting_requests_shows_the_capacity_at_once() -> None:
    pool = Pool(192)
    pool.record_reading(20)
    pool.capacity.record_refusal(180)
    assert pool.record_reading(64, 8) == pytest.approx(64)


def test_refusal_never_raises_the_estimate() -> None:
    pool = Pool().learn_capacity(20)
    pool.capacity.record_refusal(5000)
    assert pool.record_reading(10) == pytest.approx(20)


def test_known_refusal_is_ignored() -> None:
    pool = Pool(192)
    pool.record_reading(None)
    pool.capacity.record_refusal(41)
    before = pool.record_reading(None)
    pool.capacity.record_refusal(10, is_known=True, is_remote=True)
    assert pool.record_reading(None) == before


FITTED = 50
"""Requests that were present at the refusals below, those refused left out."""


@pytest.mark.parametrize(
    ("mean_duration_s", "ended", "expected"),
    [
        (1.0, 10, FITTED),
        (0.01, 10, FITTED),
        (1.0, 9, FITTED_AT_REFUSAL * FITTED),
        (1.01, 10, FITTED_AT_REFUSAL * FITTED),
        (0.0, 10, FITTED_AT_REFUSAL * FITTED),
    ],
    ids=["short", "very short", "more than a tenth refused", "longer than a second", "not known"],
)
def test_refusal_of_a_tenth_of_short_requests_leaves_all_others(
    mean_duration_s: float, ended: int, expected: float
) -> None:
    pool = Pool(64)
    pool.record_reading(None, realtime=0)
    pool.capacity.record_refusal(FITTED + 1)
    assert pool.record_reading(
        None, realtime=0, mean_duration_s=mean_duration_s, ended_requests=ended
    ) == pytest.approx(expected)


def test_refused_share_of_short_requests_counts_those_that_ended_since_the_previous_refusal() -> None:
    pool = Pool(64)
    pool.record_reading(None, realtime=0)
    for _ in range(10):
        pool.capacity.record_refusal(61)
    estimate = pool.record_reading(None, realtime=0, mean_duration_s=0.5, ended_requests=1000)
    assert estimate == pytest.approx(FITTED_AT_REFUSAL * 51)
    pool.capacity.record_refusal(47)
    estimate = pool.record_reading(None, realtime=0, mean_duration_s=0.5, ended_requests=1009)
    assert estimate == pytest.approx(FITTED_AT_REFUSAL * 46)


@pytest.mark.parametrize(("present", "growth"), [(45, 1 + PROBE_STEP), (44, 1.0)])
def test_probe_above_refusals_of_short_requests_continues_while_most_requests_are_there(
    present: int, growth: float
) -> None:
    """No reading can show that they run, because they are too short."""
    pool = Pool(64)
    pool.record_reading(None, realtime=0)
    pool.capacity.record_refusal(FITTED + 1)
    pool.record_reading(None, realtime=0, mean_duration_s=0.5, ended_requests=1000)
    for _ in range(int(HOLD_S)):
        pool.record_reading(1, realtime=0, mean_duration_s=0.5, present_requests=1)
    probed = pool.estimate
    assert probed == pytest.approx(FITTED * (1 + PROBE_STEP) / (1 - RESERVE))
    pool.record_reading(1, realtime=0, mean_duration_s=0.5, present_requests=present)
    assert pool.estimate == pytest.approx(growth * probed)


# Probes above a ceiling.


@pytest.mark.parametrize(
    ("interval_s", "mean_duration_s", "hold_s"),
    [(1.0, 1.0, HOLD_S), (20.0, 1.0, 80.0), (900.0, 1.0, 240.0), (1.0, 30.0, 30.0), (-5.0, 30.0, 30.0)],
    ids=["at least", "four readings", "rare readings", "a request", "clock set back"],
)
def test_hold_time_spans_four_readings_or_the_duration_of_a_request(
    interval_s: float, mean_duration_s: float, hold_s: float
) -> None:
    pool = Pool(interval_s=interval_s)
    pool.record_reading(1, mean_duration_s=mean_duration_s)
    pool.record_reading(1, mean_duration_s=mean_duration_s)
    assert pool.capacity.hold_s == hold_s


def test_ceiling_is_held_and_then_exceeded_by_a_little() -> None:
    pool = Pool(2000).learn_capacity(100)
    estimates = pool.record_quiet_readings(12, running=99)
    hold_count = math.ceil(HOLD_S) - 1
    assert estimates[:hold_count] == [pytest.approx(100)] * hold_count
    assert estimates[hold_count] == pytest.approx(104 / (1 - RESERVE))


@pytest.mark.parametrize(("ceiling", "probed"), [(10, 11), (10.5, 12), (100, 104), (25, 26)])
def test_probe_exceeds_the_ceiling_by_at_least_one_whole_request(ceiling: float, probed: float) -> None:
    pool = Pool(2048).learn_capacity(ceiling)
    assert pool.record_quiet_readings(12)[-1] == pytest.approx(probed / (1 - RESERVE))


def test_ceiling_is_not_dropped_while_few_requests_run() -> None:
    pool = Pool(2000).learn_capacity(100)
    assert max(pool.record_quiet_readings(500, running=20)) == pytest.approx(104 / (1 - RESERVE))


def test_probe_that_makes_requests_wait_doubles_the_hold_time() -> None:
    pool = Pool(2000).learn_capacity(100)
    pool.record_quiet_readings(11, running=99)
    assert pool.record_reading(100, 2) == pytest.approx(100)
    assert pool.capacity.confirmations == 2
    assert pool.capacity.hold_s == 2 * HOLD_S
    estimates = pool.record_quiet_readings(25, running=99)
    assert estimates[:19] == [pytest.approx(100)] * 19
    assert estimates[20] > 104


def test_successful_probes_drop_the_ceiling() -> None:
    pool = Pool(2000).learn_capacity(100)
    pool.record_quiet_readings(11, running=99)
    for _ in range(PROBE_SUCCESSES - 1):
        before = pool.estimate
        pool.record_reading(before * (1 - RESERVE))
        assert pool.estimate > 1.05 * before * (1 - RESERVE)
        assert pool.capacity.ceiling is not None
    pool.record_reading(pool.estimate * (1 - RESERVE))
    assert pool.capacity.ceiling is None


def test_half_a_request_above_the_ceiling_raises_it() -> None:
    pool = Pool(2048).learn_capacity(128)
    pool.record_quiet_readings(11, running=127)
    pool.record_reading(128.25)
    assert pool.capacity.ceiling == 128 / 2048
    pool.record_reading(128.5)
    assert pool.capacity.ceiling == 128.5 / 2048


def test_counts_of_different_moments_raise_the_ceiling_only_twice_in_a_row() -> None:
    pool = Pool(2000).learn_capacity(100)
    pool.record_quiet_readings(11, running=99)
    pool.record_reading(105, certainly_running=103)
    assert pool.capacity.ceiling == pytest.approx(100 / 2000)
    pool.record_reading(105, certainly_running=103)
    assert pool.capacity.ceiling == pytest.approx(103 / 2000)


def test_counts_of_different_moments_do_not_raise_the_ceiling_if_there_are_averages() -> None:
    """Averages are of one moment. Other counts include requests sent after the picker read the queues."""
    pool = Pool(2000).learn_capacity(100)
    pool.record_quiet_readings(11, running=99)
    for _ in range(5):
        pool.record_reading(120, certainly_running=110, average_counts=(99.0, 0.0))
    assert pool.capacity.ceiling == pytest.approx(100 / 2000)
    pool.record_reading(120, certainly_running=110, average_counts=(103.0, 0.0))
    assert pool.capacity.ceiling == pytest.approx(103 / 2000)


def test_estimate_does_not_grow_while_averages_show_a_few_waiting_requests() -> None:
    pool = Pool(2000).learn_capacity(512)
    pool.record_quiet_readings(11, running=500)
    before = pool.estimate
    assert pool.record_reading(None, average_counts=(512.0, 4.0)) == pytest.approx(before)


def test_estimate_does_not_grow_while_a_request_waits() -> None:
    pool = Pool().learn_capacity(40)
    assert [pool.record_reading(40, 1) for _ in range(50)] == [pytest.approx(40)] * 50


def test_estimate_recovers_with_time_if_running_requests_are_not_counted() -> None:
    pool = Pool(64)
    pool.record_reading(None)
    pool.capacity.record_refusal(30)
    assert pool.record_reading(None) is not None
    assert pool.record_quiet_readings(30, running=None)[-1] == 64


# Pools of unknown capacity.


def make_unknown_pool(configured: float = 8, interval_s: float = 1.0) -> Pool:
    pool = Pool(configured, is_known=False, interval_s=interval_s)
    pool.record_reading(0, realtime=0)
    return pool


def test_unknown_capacity_keeps_its_start_value_while_nothing_runs() -> None:
    pool = make_unknown_pool()
    assert [pool.record_reading(0, realtime=0) for _ in range(100)] == [8] * 100


def test_unknown_capacity_of_one_request_keeps_its_start_value_while_nothing_runs() -> None:
    pool = make_unknown_pool(1)
    assert pool.record_reading(0, realtime=0) == 1


@pytest.mark.parametrize(
    ("interval_s", "mean_duration_s", "growth", "growth_realtime"),
    [
        (FREQUENT_S, 0.0, GROWTH_FREQUENT, GROWTH_CAREFUL),
        (FREQUENT_S, 0.1, GROWTH_FREQUENT, GROWTH_REALTIME),
        (FREQUENT_S, LONG_REQUEST_S - 0.1, GROWTH_FREQUENT, GROWTH_REALTIME),
        (FREQUENT_S, LONG_REQUEST_S, GROWTH_FREQUENT, GROWTH_CAREFUL),
        (FREQUENT_S + 0.1, LONG_REQUEST_S, GROWTH, GROWTH_REALTIME),
    ],
)
def test_growth_depends_on_the_interval_of_readings_and_the_duration_of_requests(
    interval_s: float, mean_duration_s: float, growth: float, growth_realtime: float
) -> None:
    for realtime, may_run in (
        (0, growth * 50),
        (50, growth_realtime * 50),
        (20, growth * 30 + growth_realtime * 20),
    ):
        pool = make_unknown_pool(interval_s=interval_s)
        estimate = pool.record_reading(50, realtime=realtime, mean_duration_s=mean_duration_s)
        assert estimate == pytest.approx(may_run / (1 - RESERVE))


def test_unknown_capacity_grows_from_the_larger_of_two_counts() -> None:
    for running, average in ((30, 40), (40, 30)):
        pool = make_unknown_pool()
        estimate = pool.record_reading(running, realtime=0, average_counts=(average, 0))
        assert estimate == pytest.approx(GROWTH_FREQUENT * 40 / (1 - RESERVE))


def test_unknown_capacity_grows_only_by_a_factor_of_what_ran() -> None:
    pool = make_unknown_pool(interval_s=FLUSH_S)
    assert pool.record_reading(7, realtime=0) == pytest.approx(GROWTH * 7 / (1 - RESERVE))
    assert pool.record_reading(7, realtime=0) == pytest.approx(GROWTH * 7 / (1 - RESERVE)), (
        "no more requests ran than before"
    )
    assert pool.record_reading(50, realtime=0) == pytest.approx(GROWTH * 50 / (1 - RESERVE))


def test_unknown_capacity_grows_by_at_least_one_request() -> None:
    pool = make_unknown_pool(1)
    assert pool.record_reading(1, realtime=0) == pytest.approx(2 / (1 - RESERVE))


def test_requests_that_may_not_be_running_prove_no_room() -> None:
    pool = make_unknown_pool()
    assert pool.record_reading(40, certainly_running=5, realtime=0) == 8


def test_any_waiting_request_stops_the_growth_of_an_unknown_capacity() -> None:
    pool = make_unknown_pool()
    assert pool.record_reading(20, 0.6, realtime=0) == 20
    assert pool.record_reading(20, 0.6, realtime=0) == 20


@pytest.mark.parametrize(
    ("running", "waiting", "stops"), [(20, 0.5, True), (20, 0.4, False), (500, 5, True), (500, 4.9, False)]
)
def test_half_a_request_or_a_hundredth_that_waits_stops_the_growth(
    running: float, waiting: float, stops: bool
) -> None:
    pool = make_unknown_pool()
    estimate = pool.record_reading(running, waiting, realtime=0)
    assert estimate == (running if stops else pytest.approx(GROWTH_FREQUENT * running / (1 - RESERVE)))


def test_exact_count_above_the_estimate_raises_estimate_and_ceiling_even_if_requests_wait() -> None:
    pool = make_unknown_pool()
    assert pool.record_reading(16, 0.5, realtime=0) == 16
    assert pool.capacity.ceiling is None
    pool.record_reading(16, 4, realtime=0)
    assert pool.record_reading(16, 4, realtime=0) == 16
    assert pool.record_reading(48, 0.5, realtime=0) == 48
    assert pool.capacity.ceiling == 48 / 8


def test_counts_of_different_moments_prove_no_room_right_after_requests_waited() -> None:
    """The picker may have sent waiting requests to model servers whose queues it has not read again."""
    pool = Pool(8, is_known=False)
    pool.record_reading(8, certainly_running=8)
    grown = pool.estimate
    assert grown > 8
    pool.record_reading(9, 2.0, certainly_running=9)
    pool.record_reading(12, certainly_running=12)
    assert pool.estimate == grown
    pool.record_reading(12, certainly_running=12)
    assert pool.estimate > grown


def test_waiting_requests_show_an_unknown_capacity() -> None:
    pool = make_unknown_pool()
    pool.record_reading(50, realtime=0)
    pool.record_reading(48, 10, realtime=0)
    assert pool.record_reading(48, 9, realtime=0) == pytest.approx(48)


def test_one_flush_with_waiting_requests_shows_no_capacity() -> None:
    pool = make_unknown_pool()
    pool.record_reading(None, realtime=0, average_counts=(50, 0))
    grown = pool.estimate
    assert pool.record_reading(None, realtime=0, average_counts=(30, 5)) == grown
    for running in (48, 47, 48):
        assert pool.record_reading(None, realtime=0, average_counts=(running, 0)) == grown
    assert pool.record_reading(None, realtime=0, average_counts=(30, 5)) == grown


def test_two_flushes_with_waiting_requests_show_an_unknown_capacity() -> None:
    pool = make_unknown_pool()
    pool.record_reading(None, realtime=0, average_counts=(50, 0))
    pool.record_reading(None, realtime=0, average_counts=(48, 10))
    assert pool.record_reading(None, realtime=0, average_counts=(48, 9)) == pytest.approx(48)


def test_flush_with_waiting_requests_shows_the_capacity_if_requests_still_wait() -> None:
    pool = make_unknown_pool()
    pool.record_reading(50, certainly_running=50, realtime=0, average_counts=(50, 0))
    learned = pool.record_reading(49, 8, certainly_running=40, realtime=0, average_counts=(48, 10))
    assert learned == pytest.approx(48)


@pytest.mark.parametrize(
    ("running", "waiting", "still_waits"),
    [(20, 1.0, True), (20, 0.75, False), (48, 1.2, False), (48, 1.5, True)],
)
def test_requests_still_wait_if_at_least_one_and_three_percent_do(
    running: float, waiting: float, still_waits: bool
) -> None:
    pool = make_unknown_pool()
    pool.record_reading(50, certainly_running=50, realtime=0, average_counts=(50, 0))
    before = pool.estimate
    learned = pool.record_reading(
        running, waiting, certainly_running=running, realtime=0, average_counts=(48, 10)
    )
    assert learned == (48 if still_waits else before)


def test_single_waiting_request_in_two_readings_shows_an_unknown_capacity() -> None:
    pool = make_unknown_pool()
    pool.record_reading(16, 1, realtime=0)
    assert pool.record_reading(16, 1, realtime=0) == 16
    assert pool.capacity.ceiling == 16 / 8


@pytest.mark.parametrize("is_known", [True, False])
def test_requests_that_wait_while_other_endpoints_have_room_show_no_capacity(is_known: bool) -> None:
    pool = Pool(64, is_known=is_known)
    pool.record_reading(40)
    estimate = pool.estimate
    for flushed in (30.0, 31.0, 32.0, 33.0):
        pool.record_reading(33, 15, is_uneven=True)
        pool.record_reading(None, average_counts=(flushed, 15), is_uneven=True)
    assert pool.capacity.ceiling is None
    assert pool.estimate == estimate


def test_refusal_while_requests_wait_in_one_endpoint_shows_no_capacity() -> None:
    pool = Pool(64)
    pool.record_reading(40)
    pool.capacity.record_refusal(40)
    assert pool.record_reading(33, 15, is_uneven=True) is None


def test_probe_does_not_fail_because_one_endpoint_is_full() -> None:
    pool = Pool(64).learn_capacity(40)
    pool.record_quiet_readings(int(HOLD_S) + 1)
    probed = pool.estimate
    assert probed > 40
    pool.record_reading(36, 5, is_uneven=True)
    assert pool.estimate == probed


def test_capacity_that_becomes_known_applies_at_once() -> None:
    pool = make_unknown_pool()
    pool.record_reading(20, realtime=0)
    pool.configured, pool.is_known = 48, True
    assert pool.record_reading(20, realtime=0) is None


def test_ceiling_close_to_a_capacity_that_becomes_known_is_dropped() -> None:
    for ceiling, expected in ((96, 96), (97, None)):
        pool = make_unknown_pool(100)
        pool.record_reading(ceiling, 40, realtime=0)
        pool.record_reading(ceiling, 40, realtime=0)
        pool.is_known = True
        assert pool.record_reading(45, realtime=0) == expected


def test_ceiling_is_kept_when_a_larger_capacity_becomes_known() -> None:
    pool = make_unknown_pool()
    pool.record_reading(48, 10, realtime=0)
    pool.record_reading(48, 10, realtime=0)
    pool.configured, pool.is_known = 300, True
    assert pool.record_reading(45, realtime=0) == pytest.approx(48)


# Bounds, in a pool with a true capacity that queues all further requests.


class FilledPool:
    """Pool that a dispatcher with unlimited requests fills as far as the estimate allows."""

    def __init__(self, pool: Pool, true_capacity: int, realtime: int = 0) -> None:
        self.pool, self.true_capacity, self.realtime = pool, true_capacity, realtime
        self.max_limit = 0

    def fill_and_read(self) -> None:
        """Fill the pool up to the estimate, then record a reading."""
        room = math.floor(self.pool.estimate * (1 - RESERVE) + 1e-6)
        in_pool = max(self.realtime, room)
        self.max_limit = max(self.max_limit, in_pool)
        running = min(in_pool, self.true_capacity)
        self.pool.record_reading(running, in_pool - running, self.realtime)


def count_steps_to_find(start: float, true_capacity: int) -> int:
    """Return the largest number of steps until nine tenths of the true capacity are found."""
    return math.ceil(math.log(max(1.0, true_capacity / start)) / math.log(GROWTH)) + 2


@given(
    st.integers(1, 64),
    st.integers(8, 4000),
    st.floats(0, 0.9),
    st.sampled_from([FLUSH_S, 15.0, 60.0]),
)
def test_unknown_capacity_is_found_in_time_and_exceeded_by_at_most_a_quarter(
    endpoints: int, true_capacity: int, realtime_share: float, interval_s: float
) -> None:
    true_capacity = max(true_capacity, 8 * endpoints)
    pool = make_unknown_pool(8.0 * endpoints, interval_s)
    filled_pool = FilledPool(pool, true_capacity, int(realtime_share * true_capacity))
    step_bound = count_steps_to_find(8.0 * endpoints * (1 - RESERVE), true_capacity)
    # The smallest steps add only one request each.
    for _ in range(step_bound + 8):
        filled_pool.fill_and_read()
    assert pool.estimate >= 0.9 * true_capacity
    for _ in range(200):
        filled_pool.fill_and_read()
        assert pool.estimate >= 0.9 * true_capacity
    assert filled_pool.max_limit <= max(1.25 * true_capacity, true_capacity + 1)


@given(
    st.integers(8, 4000),
    st.floats(0.02, 0.9),
    st.booleans(),
    st.sampled_from([1.0, FLUSH_S]),
)
def test_capacity_that_was_learned_too_low_is_corrected_in_time(
    true_capacity: int, learned_share: float, is_known: bool, interval_s: float
) -> None:
    pool = Pool(true_capacity if is_known else 8, is_known=is_known, interval_s=interval_s)
    pool.record_reading(1, realtime=0)
    learned = max(2, int(learned_share * true_capacity))
    pool.learn_capacity(learned)
    filled_pool = FilledPool(pool, true_capacity)
    hold_steps = math.ceil(max(HOLD_S / interval_s, HOLD_READINGS)) + 1
    # With readings each second the steps are smaller: 1.16 instead of 1.24.
    steps = math.ceil(
        math.log(max(1.0, true_capacity / learned)) / math.log(1.16 if interval_s == 1.0 else GROWTH)
    )
    for _ in range(hold_steps + PROBE_SUCCESSES + steps + 10):
        filled_pool.fill_and_read()
    assert pool.estimate >= 0.9 * true_capacity


@given(
    st.sampled_from([1, 8, 20, 64, 512, 2000]),
    st.booleans(),
    st.lists(
        st.tuples(
            st.integers(0, 2000) | st.none(),
            st.integers(0, 2000),
            st.integers(0, 2000),
            st.booleans(),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_estimate_is_positive_and_below_a_known_capacity_in_every_history(
    configured: int, is_known: bool, history: list[tuple[int | None, int, int, bool, bool]]
) -> None:
    pool = Pool(configured, is_known=is_known)
    for running, waiting, realtime, refused, has_mixed_counts in history:
        if refused:
            pool.capacity.record_refusal(waiting)
        certainly_running = running // 2 if has_mixed_counts and running is not None else None
        estimate = pool.record_reading(running, waiting, realtime, certainly_running=certainly_running)
        assert estimate is None or estimate > 0
        assert not is_known or estimate is None or estimate < configured
        assert is_known or estimate is not None


def test_ceiling_is_probed_further_when_the_pool_shrinks() -> None:
    """With 20 slots, the step that was large enough for 25 slots adds less than one whole request."""
    pool = Pool(25)
    pool.learn_capacity(15.8)
    pool.record_quiet_readings(12, running=15)
    pool.configured = 20
    for _ in range(30):
        running = math.floor(pool.estimate * (1 - RESERVE) + 1e-6)
        pool.record_reading(running, realtime=0)
    assert pool.capacity.share is None


# Refusals that do not depend on the load, while requests are short.


class ShortRequests:
    """Dispatcher with requests of 0.1 s that fill the limit, read every 0.2 s."""

    def __init__(self, capacity: int = 48) -> None:
        self.estimate = CapacityEstimate()
        self.capacity = capacity
        self.now, self.ended = 0.0, 0
        self.read(running=4)

    @property
    def assumed(self) -> float:
        return self.capacity * (1.0 if self.estimate.share is None else self.estimate.share)

    def read(self, running: float, present: float = 0.0) -> None:
        self.now += 0.2
        counts = PoolCounts(running, 0.0, running)
        snapshot = PoolSnapshot(
            self.now,
            self.capacity,
            True,
            0.0,
            current_counts=counts,
            mean_duration_s=0.1,
            ended_requests=self.ended,
            present_requests=present,
        )
        self.estimate.learn_from_snapshot(snapshot, reserve=0.0, backoff=BETA)

    def fill(self, refused: int) -> None:
        """Fill the limit, of which so many are refused, and read when half of the others have ended."""
        sent = int(self.assumed)
        for _ in range(refused):
            self.estimate.record_refusal(sent)
        self.ended += sent
        if refused:
            left = 0.4 * (sent - refused)
            self.read(running=left, present=left)
        else:
            self.read(running=0.85 * sent, present=sent)


def test_refusals_of_few_short_requests_take_little_of_the_capacity() -> None:
    pool = ShortRequests()
    for _ in range(5 * 60 * 5):
        pool.fill(refused=2)
    assert pool.assumed >= 0.85 * 48


def test_few_refusals_lower_the_capacity_of_a_pool_that_is_much_smaller_than_configured() -> None:
    pool = ShortRequests()
    while pool.assumed >= 24:
        pool.fill(refused=int(0.5 * pool.assumed))
    before = pool.assumed
    for _ in range(10):
        pool.fill(refused=1)
    assert pool.assumed < 0.9 * before


def test_capacity_is_back_soon_after_refusals_of_short_requests_end() -> None:
    pool = ShortRequests()
    for _ in range(6):
        pool.fill(refused=int(0.5 * pool.assumed))
    assert pool.assumed < 24
    quiet_since = pool.now
    while pool.assumed < 48:
        pool.fill(refused=0)
        assert pool.now - quiet_since < HOLD_S + 10


@pytest.mark.parametrize("capacity", [8, 20, 40])
def test_smaller_pool_that_refuses_short_requests_is_respected(capacity: int) -> None:
    pool = ShortRequests()
    sent_above = 0.0
    for _ in range(5 * 60 * 5):
        sent_above += max(0.0, int(pool.assumed) - capacity)
        pool.fill(refused=max(0, int(pool.assumed) - capacity))
    assert sent_above / (5 * 60 * 5) < 0.1 * capacity
