"""What is learned of the pool's capacity: from whom, how far it falls, and how it comes back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.capacity import FITTED, HOLD, LATELY, Capacity, Sight

BETA = 0.7


class Pool:
    """Sights of a pool that is configured for so many requests, one a second."""

    def __init__(self, configured: float = 64) -> None:
        self.capacity = Capacity()
        self.configured = configured
        self.at = 0.0

    def sees(
        self,
        running: float | None,
        waiting: float = 0.0,
        realtime: float = 20.0,
        *,
        flushed: bool = False,
    ) -> float | None:
        """What fits, in requests, after such a reading; None: as configured."""
        self.at += 1.0
        self.capacity.reading(Sight(self.at, self.configured, running, waiting, flushed, realtime), BETA)
        return None if self.capacity.share is None else self.capacity.share * self.configured

    def learned(self, running: float) -> Pool:
        self.sees(running, running)
        assert self.sees(running, running + 1) == pytest.approx(running)
        return self

    def calm(self, readings: int, running: float | None = 1.0) -> list[float]:
        """What fits, reading by reading, where little runs and nobody waits."""
        return [self.configured if (fits := self.sees(running)) is None else fits for _ in range(readings)]


# Who waits.


def test_nothing_is_learned_of_a_pool_in_which_nobody_waits() -> None:
    pool = Pool()
    assert {pool.sees(running) for running in (0, 5, 40, 61, 64)} == {None}


def test_crowds_in_a_row_teach_once_they_weigh_enough() -> None:
    pool = Pool()
    fitting = [pool.sees(50, waiting) for waiting in (6, 7, 5, 6)]
    assert fitting == [None, None, None, pytest.approx(50)]


def test_one_crowd_alone_teaches_nothing_however_large() -> None:
    pool = Pool()
    assert pool.sees(20, 500) is None
    assert pool.sees(20, 0) is None
    assert pool.sees(20, 500) is None


@pytest.mark.parametrize(("running", "waiting"), [(3, 0.9), (50, 4), (60, 5)])
def test_few_who_wait_teach_nothing_however_often(running: float, waiting: float) -> None:
    """For an endpoint while another is free, or for the server's next step."""
    pool = Pool()
    assert [pool.sees(running, waiting) for _ in range(50)] == [None] * 50


def test_averages_of_one_flush_are_one_witness() -> None:
    pool = Pool()
    assert [pool.sees(30, 20, flushed=True) for _ in range(5)] == [None] * 5
    assert pool.sees(30, 20, flushed=True) == pytest.approx(30), "5 s later it is another that says the same"
    assert [pool.sees(10, flushed=True) for _ in range(5 * HOLD)] == [pytest.approx(30)] * 5 * HOLD
    assert (pool.sees(10, flushed=True) or 64) > 30


def test_most_that_ran_in_a_crowd_is_what_fits() -> None:
    pool = Pool()
    pool.sees(40, 16)
    assert pool.sees(30, 30) == pytest.approx(40)


def test_pool_that_runs_its_configuration_has_it() -> None:
    pool = Pool().learned(30)
    assert pool.sees(63, 40) is None
    assert pool.sees(64, 400) is None


def test_few_who_wait_suffice_where_a_capacity_is_learned() -> None:
    pool = Pool().learned(40)
    pool.calm(HOLD + 6)
    pool.sees(48)
    assert pool.sees(48, 3) == pytest.approx(48)
    assert pool.sees(47, 5) == pytest.approx(48), "more ran a moment ago"


# Refusals.


def test_refusal_before_anything_was_read_teaches_nothing() -> None:
    pool = Pool()
    pool.capacity.refused(3)
    assert pool.sees(None) is None


def test_refusal_leaves_most_of_realtime_and_ours_that_was_not_refused() -> None:
    pool = Pool(80)
    pool.sees(None, realtime=20)
    for _ in range(5):
        pool.capacity.refused(55)
    assert pool.sees(None, realtime=15) == pytest.approx(FITTED * (55 - 5 + 20))


def test_refusal_takes_realtime_as_the_larger_of_the_readings_around_it() -> None:
    pool = Pool(80)
    pool.sees(None, realtime=5)
    pool.capacity.refused(41)
    assert pool.sees(None, realtime=30) == pytest.approx(FITTED * (41 - 1 + 30))


def test_one_refusal_leaves_beta_of_what_was() -> None:
    """Whoever is refused whatever the room takes nobody else's."""
    pool = Pool(192)
    pool.sees(None, realtime=0)
    for _ in range(40):
        pool.capacity.refused(40)
    assert pool.sees(None, realtime=0) == pytest.approx(BETA * 192)


def test_refusal_takes_nothing_of_what_ran_lately_with_nobody_waiting() -> None:
    pool = Pool()
    pool.sees(61)
    pool.sees(30, realtime=4)
    pool.capacity.refused(10)
    assert pool.sees(30, realtime=4) == pytest.approx(61)


def test_what_ran_long_ago_counts_no_more() -> None:
    pool = Pool()
    pool.sees(61)
    pool.calm(LATELY, running=20)
    pool.capacity.refused(10)
    assert pool.sees(20, realtime=20) == pytest.approx(BETA * 64)


def test_full_pool_explains_a_refusal() -> None:
    pool = Pool()
    pool.sees(30)
    pool.capacity.refused(10)
    assert pool.sees(64, 8) is None
    pool.capacity.refused(10)
    assert pool.sees(20) is None


def test_refusal_and_a_crowd_teach_what_runs() -> None:
    pool = Pool(192)
    pool.sees(20)
    pool.capacity.refused(180)
    assert pool.sees(64, 8) == pytest.approx(64)


def test_refusal_never_raises_what_fits() -> None:
    pool = Pool().learned(20)
    pool.capacity.refused(5000)
    assert pool.sees(10) == pytest.approx(20)


def test_refusal_that_is_told_again_after_it_was_judged_is_none() -> None:
    pool = Pool(192)
    pool.sees(None)
    pool.capacity.refused(41)
    before = pool.sees(None)
    pool.capacity.refused(10, known=True, heard=True)
    assert pool.sees(None) == before


# How it comes back.


def test_it_stays_for_a_while_and_then_rises_ever_faster() -> None:
    fitting = [20.0, *Pool(2000).learned(20).calm(LATELY)]
    rises = [after / before for before, after in pairwise(fitting)]
    assert rises[:HOLD] == [1.0] * HOLD
    rising = rises[HOLD : fitting.index(2000) - 1]
    assert 1 < rising[0] < 1.02
    assert all(later > earlier for earlier, later in pairwise(rising))


def test_it_rises_at_once_to_what_runs_with_nobody_waiting() -> None:
    assert Pool().learned(20).sees(33) == pytest.approx(33)


def test_it_does_not_rise_while_anybody_waits() -> None:
    pool = Pool().learned(40)
    pool.calm(HOLD + 2)
    before = pool.sees(40, 1)
    assert before is not None
    assert [pool.sees(40, 1) for _ in range(50)] == [before] * 50


@given(
    st.sampled_from([1, 8, 20, 64, 512, 2000]),
    st.lists(
        st.tuples(
            st.integers(0, 2000) | st.none(), st.integers(0, 2000), st.integers(0, 2000), st.booleans()
        ),
        max_size=40,
    ),
)
def test_whatever_was_it_is_forgotten_within_thirty_readings(
    configured: int, past: list[tuple[int | None, int, int, bool]]
) -> None:
    pool = Pool(configured)
    for running, waiting, realtime, refused in past:
        if refused:
            pool.capacity.refused(waiting)
        fits = pool.sees(running, waiting, realtime)
        assert fits is None or 0 < fits < configured
    assert pool.calm(30, running=None)[-1] == configured
