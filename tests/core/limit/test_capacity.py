"""Learned capacity of a pool: what lowers the estimate, how far, and how it grows again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.limit.capacity import (
    FITTED_AT_REFUSAL,
    GROWTH,
    HOLD_READINGS,
    HOLD_S,
    PROBE_SUCCESSES,
    RECENT_S,
    CapacityEstimate,
    PoolCounts,
    PoolSnapshot,
)
from dispatcher.core.limit.picker_inference import FLUSH_S

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
        average_counts: tuple[float, float] | None = None,
        mean_duration_s: float = 1.0,
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
            )
        snapshot = PoolSnapshot(
            sampled_at=self.now,
            configured_capacity=self.configured,
            is_capacity_known=self.is_known,
            realtime_requests=realtime,
            current_counts=counts,
            average_counts=None if average_counts is None else PoolCounts(*average_counts, average_counts[0]),
            waiting_requests=waiting if counts is None else 0.0,
            mean_duration_s=mean_duration_s,
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


def test_single_reading_with_many_waiting_requests_shows_no_capacity() -> None:
    pool = Pool()
    assert pool.record_reading(20, 500) is None
    assert pool.record_reading(20, 0) is None
    assert pool.record_reading(20, 500) is None


@pytest.mark.parametrize(("running", "waiting"), [(3, 0.9), (50, 4), (60, 5)])
def test_few_waiting_requests_do_not_contradict_a_known_capacity(running: float, waiting: float) -> None:
    """They may wait for a certain endpoint while another is free, or for the next step of a server."""
    pool = Pool()
    assert [pool.record_reading(running, waiting) for _ in range(50)] == [None] * 50


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


def test_requests_that_ran_long_ago_do_not_limit_the_effect_of_a_refusal() -> None:
    pool = Pool()
    pool.record_reading(61)
    pool.record_quiet_readings(int(RECENT_S) + 1, running=20)
    pool.capacity.record_refusal(10)
    assert pool.record_reading(20, realtime=20) == pytest.approx(BETA * 64)


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


# Probes above a ceiling.


def test_ceiling_is_held_and_then_exceeded_by_a_little() -> None:
    pool = Pool(2000).learn_capacity(100)
    estimates = pool.record_quiet_readings(12, running=99)
    hold_count = math.ceil(HOLD_S) - 1
    assert estimates[:hold_count] == [pytest.approx(100)] * hold_count
    assert estimates[hold_count] == pytest.approx(104 / (1 - RESERVE))


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


def test_one_flush_with_waiting_requests_shows_an_unknown_capacity() -> None:
    pool = make_unknown_pool()
    pool.record_reading(None, realtime=0, average_counts=(50, 0))
    assert pool.record_reading(None, realtime=0, average_counts=(48, 10)) == pytest.approx(48)


def test_capacity_that_becomes_known_applies_at_once() -> None:
    pool = make_unknown_pool()
    pool.record_reading(20, realtime=0)
    pool.configured, pool.is_known = 48, True
    assert pool.record_reading(20, realtime=0) is None


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
