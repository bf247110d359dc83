"""What is learned of the pool's capacity: from whom, how far the estimate falls, and how it grows again."""

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
    """Sights of a pool that is configured for so many requests, one a second."""

    def __init__(self, configured: float = 64, *, known: bool = True, every_s: float = 1.0) -> None:
        self.capacity = CapacityEstimate()
        self.configured = configured
        self.known = known
        self.every_s = every_s
        self.at = 0.0

    @property
    def estimate(self) -> float:
        """The capacity in requests."""
        return self.configured * (1.0 if self.capacity.share is None else self.capacity.share)

    def sees(
        self,
        running: float | None,
        waiting: float = 0.0,
        realtime: float = 20.0,
        *,
        surely: float | None = None,
        steady: bool = True,
        in_picker: bool = False,
        averages: tuple[float, float] | None = None,
        took_s: float = 1.0,
    ) -> float | None:
        """The learned capacity after such a reading. `None` if it is as configured."""
        self.at += self.every_s
        count = None
        if running is not None:
            count = PoolCounts(
                running,
                waiting,
                running if surely is None else surely,
                is_steady=steady,
                is_exact=surely is None,
                is_waiting_in_picker=in_picker,
            )
        sight = PoolSnapshot(
            sampled_at=self.at,
            configured_capacity=self.configured,
            is_capacity_known=self.known,
            realtime_requests=realtime,
            current_counts=count,
            average_counts=None if averages is None else PoolCounts(*averages, averages[0]),
            waiting_requests=waiting if count is None else 0.0,
            mean_duration_s=took_s,
        )
        self.capacity.learn_from_snapshot(sight, reserve=RESERVE, backoff=BETA)
        return None if self.capacity.share is None else self.estimate

    def learned(self, running: float) -> Pool:
        self.sees(running, running)
        assert self.sees(running, running + 1) == pytest.approx(running)
        return self

    def calm(self, readings: int, running: float | None = 1.0) -> list[float]:
        """The capacity after each of so many readings in which little runs and nobody waits."""
        return [self.configured if (found := self.sees(running)) is None else found for _ in range(readings)]


# Requests that wait.


def test_nothing_is_learned_while_nobody_waits_in_a_pool_of_known_capacity() -> None:
    pool = Pool()
    assert {pool.sees(running) for running in (0, 5, 40, 61, 64)} == {None}


def test_crowds_in_a_row_show_the_capacity_once_they_add_up() -> None:
    pool = Pool()
    found = [pool.sees(50, waiting) for waiting in (6, 7, 5, 6)]
    assert found == [None, None, None, pytest.approx(50)]


def test_one_crowd_alone_shows_nothing_however_large() -> None:
    pool = Pool()
    assert pool.sees(20, 500) is None
    assert pool.sees(20, 0) is None
    assert pool.sees(20, 500) is None


@pytest.mark.parametrize(("running", "waiting"), [(3, 0.9), (50, 4), (60, 5)])
def test_few_waiting_requests_do_not_contradict_a_known_capacity(running: float, waiting: float) -> None:
    """They wait for an endpoint while another is free, or for the server's next step."""
    pool = Pool()
    assert [pool.sees(running, waiting) for _ in range(50)] == [None] * 50


def test_all_samples_of_a_flush_are_one_witness() -> None:
    pool = Pool()
    assert [pool.sees(None, averages=(30, 20)) for _ in range(int(FLUSH_S))] == [None] * int(FLUSH_S)
    assert pool.sees(None, averages=(30, 20)) == pytest.approx(30), "5 s later another flush says the same"


def test_largest_number_that_ran_in_a_crowd_is_the_capacity() -> None:
    pool = Pool()
    pool.sees(40, 16)
    assert pool.sees(30, 30) == pytest.approx(40)


def test_pool_that_runs_its_known_capacity_has_it() -> None:
    pool = Pool().learned(30)
    assert pool.sees(63, 40) is None
    assert pool.sees(64, 400) is None


def test_requests_that_ran_earlier_do_not_keep_the_estimate_up() -> None:
    """What had been sent once counted as having run, and blocked every lower estimate for minutes."""
    pool = Pool(300)
    pool.sees(250)
    pool.sees(48, 140)
    assert pool.sees(48, 130) == pytest.approx(48)


def test_counts_of_different_moments_show_no_crowd_where_there_are_averages() -> None:
    pool = Pool()
    for _ in range(4):
        assert pool.sees(20, 30, surely=15, averages=(60, 0)) is None


def test_counts_of_different_moments_show_a_crowd_only_while_they_are_steady() -> None:
    moving, steady = Pool(), Pool()
    for _ in range(4):
        moving.sees(20, 30, surely=15, steady=False)
        steady.sees(20, 30, surely=15)
    assert moving.capacity.share is None
    assert steady.estimate == pytest.approx(20)


def test_requests_that_wait_in_the_picker_alone_show_a_crowd_beside_averages_without_one() -> None:
    pool = Pool()
    pool.sees(40, 20, surely=38, in_picker=True, averages=(40, 0))
    assert pool.sees(40, 20, surely=38, in_picker=True, averages=(40, 0)) == pytest.approx(40)


# Refusals.


def test_refusal_before_the_first_reading_teaches_nothing() -> None:
    pool = Pool()
    pool.capacity.record_refusal(3)
    assert pool.sees(None) is None


def test_refusal_leaves_most_of_realtime_and_of_ours_that_was_not_refused() -> None:
    pool = Pool(80)
    pool.sees(None, realtime=20)
    for _ in range(5):
        pool.capacity.record_refusal(55)
    assert pool.sees(None, realtime=15) == pytest.approx(FITTED_AT_REFUSAL * (55 - 5 + 20))


def test_refusal_takes_realtime_as_the_larger_of_the_readings_around_it() -> None:
    pool = Pool(80)
    pool.sees(None, realtime=5)
    pool.capacity.record_refusal(41)
    assert pool.sees(None, realtime=30) == pytest.approx(FITTED_AT_REFUSAL * (41 - 1 + 30))


def test_one_refusal_leaves_beta_of_the_estimate() -> None:
    """A request that is refused however much room there is takes nobody else's."""
    pool = Pool(192)
    pool.sees(None, realtime=0)
    for _ in range(40):
        pool.capacity.record_refusal(40)
    assert pool.sees(None, realtime=0) == pytest.approx(BETA * 192)


def test_refusal_takes_nothing_of_what_ran_lately_with_nobody_waiting() -> None:
    pool = Pool()
    pool.sees(61)
    pool.sees(30, realtime=4)
    pool.capacity.record_refusal(10)
    assert pool.sees(30, realtime=4) == pytest.approx(61)


def test_requests_that_ran_long_ago_do_not_soften_a_refusal() -> None:
    pool = Pool()
    pool.sees(61)
    pool.calm(int(RECENT_S) + 1, running=20)
    pool.capacity.record_refusal(10)
    assert pool.sees(20, realtime=20) == pytest.approx(BETA * 64)


def test_full_pool_explains_a_refusal() -> None:
    pool = Pool()
    pool.sees(30)
    pool.capacity.record_refusal(10)
    assert pool.sees(64, 8) is None
    pool.capacity.record_refusal(10)
    assert pool.sees(20) is None


def test_refusal_and_a_crowd_show_the_capacity_at_once() -> None:
    pool = Pool(192)
    pool.sees(20)
    pool.capacity.record_refusal(180)
    assert pool.sees(64, 8) == pytest.approx(64)


def test_refusal_never_raises_the_estimate() -> None:
    pool = Pool().learned(20)
    pool.capacity.record_refusal(5000)
    assert pool.sees(10) == pytest.approx(20)


def test_refusal_that_was_judged_before_teaches_nothing_more() -> None:
    pool = Pool(192)
    pool.sees(None)
    pool.capacity.record_refusal(41)
    before = pool.sees(None)
    pool.capacity.record_refusal(10, is_known=True, is_remote=True)
    assert pool.sees(None) == before


# How a ceiling is probed and dropped.


def test_ceiling_holds_and_is_then_probed_by_a_little() -> None:
    pool = Pool(2000).learned(100)
    found = pool.calm(12, running=99)
    held = math.ceil(HOLD_S) - 1
    assert found[:held] == [pytest.approx(100)] * held
    assert found[held] == pytest.approx(104 / (1 - RESERVE))


def test_little_that_runs_disproves_no_ceiling() -> None:
    pool = Pool(2000).learned(100)
    assert max(pool.calm(500, running=20)) == pytest.approx(104 / (1 - RESERVE))


def test_probe_that_makes_somebody_wait_fails_and_doubles_the_hold() -> None:
    pool = Pool(2000).learned(100)
    pool.calm(11, running=99)
    assert pool.sees(100, 2) == pytest.approx(100)
    assert pool.capacity.confirmations == 2
    assert pool.capacity.hold_s == 2 * HOLD_S
    found = pool.calm(25, running=99)
    assert found[:19] == [pytest.approx(100)] * 19
    assert found[20] > 104


def test_probes_that_succeed_drop_the_ceiling() -> None:
    pool = Pool(2000).learned(100)
    pool.calm(11, running=99)
    for _ in range(PROBE_SUCCESSES - 1):
        before = pool.estimate
        pool.sees(before * (1 - RESERVE))
        assert pool.estimate > 1.05 * before * (1 - RESERVE)
        assert pool.capacity.ceiling is not None
    pool.sees(pool.estimate * (1 - RESERVE))
    assert pool.capacity.ceiling is None


def test_counts_of_different_moments_disprove_a_ceiling_only_twice_in_a_row() -> None:
    pool = Pool(2000).learned(100)
    pool.calm(11, running=99)
    pool.sees(105, surely=103)
    assert pool.capacity.ceiling == pytest.approx(100 / 2000)
    pool.sees(105, surely=103)
    assert pool.capacity.ceiling == pytest.approx(103 / 2000)


def test_counts_of_different_moments_disprove_no_ceiling_beside_averages() -> None:
    """Averages are of one moment. Requests that the picker sent after it read the queues only seem to run."""
    pool = Pool(2000).learned(100)
    pool.calm(11, running=99)
    for _ in range(5):
        pool.sees(120, surely=110, averages=(99.0, 0.0))
    assert pool.capacity.ceiling == pytest.approx(100 / 2000)
    pool.sees(120, surely=110, averages=(103.0, 0.0))
    assert pool.capacity.ceiling == pytest.approx(103 / 2000)


def test_few_waiting_requests_in_averages_are_no_reason_to_grow_without_proof() -> None:
    pool = Pool(2000).learned(512)
    pool.calm(11, running=500)
    before = pool.estimate
    assert pool.sees(None, averages=(512.0, 4.0)) == pytest.approx(before)


def test_estimate_does_not_grow_while_anybody_waits() -> None:
    pool = Pool().learned(40)
    assert [pool.sees(40, 1) for _ in range(50)] == [pytest.approx(40)] * 50


def test_without_counts_of_running_requests_the_estimate_recovers_with_time_alone() -> None:
    pool = Pool(64)
    pool.sees(None)
    pool.capacity.record_refusal(30)
    assert pool.sees(None) is not None
    assert pool.calm(30, running=None)[-1] == 64


# A capacity that nobody names.


def unknown(configured: float = 8, every_s: float = 1.0) -> Pool:
    pool = Pool(configured, known=False, every_s=every_s)
    pool.sees(0, realtime=0)
    return pool


def test_unknown_capacity_stays_where_it_starts_while_nothing_runs() -> None:
    pool = unknown()
    assert [pool.sees(0, realtime=0) for _ in range(100)] == [8] * 100


def test_unknown_capacity_grows_only_as_far_as_what_ran_proves() -> None:
    pool = unknown(every_s=FLUSH_S)
    assert pool.sees(7, realtime=0) == pytest.approx(GROWTH * 7 / (1 - RESERVE))
    assert pool.sees(7, realtime=0) == pytest.approx(GROWTH * 7 / (1 - RESERVE)), "no more ran"
    assert pool.sees(50, realtime=0) == pytest.approx(GROWTH * 50 / (1 - RESERVE))


def test_unknown_capacity_grows_by_one_request_at_least() -> None:
    pool = unknown(1)
    assert pool.sees(1, realtime=0) == pytest.approx(2 / (1 - RESERVE))


def test_requests_that_may_wait_unseen_prove_no_room() -> None:
    pool = unknown()
    assert pool.sees(40, surely=5, realtime=0) == 8


def test_any_waiting_request_stops_the_growth_of_an_unknown_capacity() -> None:
    pool = unknown()
    assert pool.sees(20, 0.6, realtime=0) == 20
    assert pool.sees(20, 0.6, realtime=0) == 20


def test_counts_of_different_moments_prove_no_room_right_after_somebody_waited() -> None:
    """A picker may just have sent its waiting requests to model servers whose queues it has not reread."""
    pool = Pool(8, known=False)
    pool.sees(8, surely=8)
    grown = pool.estimate
    assert grown > 8
    pool.sees(9, 2.0, surely=9)
    pool.sees(12, surely=12)
    assert pool.estimate == grown
    pool.sees(12, surely=12)
    assert pool.estimate > grown


def test_crowd_shows_an_unknown_capacity() -> None:
    pool = unknown()
    pool.sees(50, realtime=0)
    pool.sees(48, 10, realtime=0)
    assert pool.sees(48, 9, realtime=0) == pytest.approx(48)


def test_one_flush_with_a_crowd_shows_an_unknown_capacity() -> None:
    pool = unknown()
    pool.sees(None, realtime=0, averages=(50, 0))
    assert pool.sees(None, realtime=0, averages=(48, 10)) == pytest.approx(48)


def test_capacity_that_is_proven_is_taken_at_once() -> None:
    pool = unknown()
    pool.sees(20, realtime=0)
    pool.configured, pool.known = 48, True
    assert pool.sees(20, realtime=0) is None


def test_ceiling_stands_when_a_larger_capacity_is_named() -> None:
    pool = unknown()
    pool.sees(48, 10, realtime=0)
    pool.sees(48, 10, realtime=0)
    pool.configured, pool.known = 300, True
    assert pool.sees(45, realtime=0) == pytest.approx(48)


# Bounds, in a pool that runs `true` requests at once and holds whatever is sent beyond in a queue.


class Server:
    """A pool that a dispatcher with endless work fills as far as the estimate allows."""

    def __init__(self, pool: Pool, true: int, realtime: int = 0) -> None:
        self.pool, self.true, self.realtime = pool, true, realtime
        self.max_limit = 0

    def beat(self) -> None:
        """Fill the pool by the estimate, then look at it."""
        room = math.floor(self.pool.estimate * (1 - RESERVE) + 1e-6)
        inside = max(self.realtime, room)
        self.max_limit = max(self.max_limit, inside)
        running = min(inside, self.true)
        self.pool.sees(running, inside - running, self.realtime)


def beats_to_find(start: float, true: int) -> int:
    """The bound on the time in which nine tenths of the true capacity are found, as the module states it."""
    return math.ceil(math.log(max(1.0, true / start)) / math.log(GROWTH)) + 2


@given(
    st.integers(1, 64),
    st.integers(8, 4000),
    st.floats(0, 0.9),
    st.sampled_from([FLUSH_S, 15.0, 60.0]),
)
def test_unknown_capacity_is_found_in_time_and_never_exceeded_by_more_than_a_quarter(
    endpoints: int, true: int, realtime: float, every_s: float
) -> None:
    true = max(true, 8 * endpoints)
    pool = unknown(8.0 * endpoints, every_s)
    server = Server(pool, true, int(realtime * true))
    bound = beats_to_find(8.0 * endpoints * (1 - RESERVE), true)
    # Each of the smallest steps adds one request only.
    for _ in range(bound + 8):
        server.beat()
    assert pool.estimate >= 0.9 * true
    for _ in range(200):
        server.beat()
        assert pool.estimate >= 0.9 * true
    assert server.max_limit <= max(1.25 * true, true + 1)


@given(
    st.integers(8, 4000),
    st.floats(0.02, 0.9),
    st.booleans(),
    st.sampled_from([1.0, FLUSH_S]),
)
def test_capacity_that_was_learned_too_low_is_found_again_in_time(
    true: int, low: float, known: bool, every_s: float
) -> None:
    pool = Pool(true if known else 8, known=known, every_s=every_s)
    pool.sees(1, realtime=0)
    learned = max(2, int(low * true))
    pool.learned(learned)
    server = Server(pool, true)
    hold = math.ceil(max(HOLD_S / every_s, HOLD_READINGS)) + 1
    # With readings each second the steps are smaller: 1.16 instead of 1.24.
    steps = math.ceil(math.log(max(1.0, true / learned)) / math.log(1.16 if every_s == 1.0 else GROWTH))
    for _ in range(hold + PROBE_SUCCESSES + steps + 10):
        server.beat()
    assert pool.estimate >= 0.9 * true


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
def test_nothing_that_readings_show_makes_a_known_capacity_larger_or_the_estimate_vanish(
    configured: int, known: bool, past: list[tuple[int | None, int, int, bool, bool]]
) -> None:
    pool = Pool(configured, known=known)
    for running, waiting, realtime, refused, mixed in past:
        if refused:
            pool.capacity.record_refusal(waiting)
        surely = running // 2 if mixed and running is not None else None
        found = pool.sees(running, waiting, realtime, surely=surely)
        assert found is None or found > 0
        assert not known or found is None or found < configured
        assert known or found is not None


def test_probe_goes_on_when_the_pool_shrinks_meanwhile() -> None:
    """The probe that was right for 25 slots let no whole request more than the ceiling run on 20."""
    pool = Pool(25)
    pool.learned(15.8)
    pool.calm(12, running=15)
    pool.configured = 20
    for _ in range(30):
        running = math.floor(pool.estimate * (1 - RESERVE) + 1e-6)
        pool.sees(running, realtime=0)
    assert pool.capacity.share is None
