"""What another replica has learned of the pool: a reading moves the newest limit, whoever had it."""

from __future__ import annotations

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter

POLICY = Policy(reserve=0.05, max_sys=100)


def reading(at: float, used: int) -> Reading:
    return Reading(Signal.SATURATION, at, at, f_sys=used / 100, f_epp=0.0, max_sys=100)


def replica(limit_at_0: int) -> Limiter:
    """One whose own newest reading, of t = 0, left a limit of so many."""
    made = Limiter(POLICY, (Signal.SATURATION,))
    made.leases(-1.0, others=0, young=0, lost=0)
    made.reading(reading(0.0, 95 - limit_at_0), 0.0)
    assert made.allowance(0.5).limit == limit_at_0
    return made


@pytest.mark.parametrize(
    ("shared", "limit"),
    [
        (60, 60),  # between what the reading proves at least (0 + 35) and at the most (60 + 35)
        (20, 35),
        (95, 95),
    ],
)
def test_reading_moves_the_newest_limit_of_any_replica(shared: int, limit: int) -> None:
    """60 in flight by another, the counts too far apart to be sure of one of them."""
    one = replica(10)
    one.shared(shared, read_at=1.0)
    one.leases(1.5, others=0, young=0, lost=0)
    one.leases(2.5, others=60, young=60, lost=0)
    one.reading(reading(2.0, 60), 2.0)
    assert one.allowance(3.0).limit == limit


def test_own_newer_limit_counts_and_an_echo_of_it_changes_nothing() -> None:
    one = replica(40)
    one.shared(7, read_at=0.01)
    one.leases(1.5, others=0, young=0, lost=0)
    one.leases(2.5, others=40, young=40, lost=0)
    one.reading(reading(2.0, 90), 2.0)
    assert one.allowance(3.0).limit == 40


def test_leases_lost_since_the_shared_reading_lower_it() -> None:
    one = replica(10)
    one.shared(60, read_at=1.0)
    one.leases(1.5, others=60, young=60, lost=5)
    one.leases(2.5, others=60, young=60, lost=5)
    one.reading(reading(2.0, 60), 2.0)
    assert one.allowance(3.0).limit == 55


def taught(one: Limiter, at: float) -> float:
    """The capacity by which it reckons."""
    budget = one.allowance(at).budget
    assert budget is not None
    return budget.max_sys


def test_largest_number_in_flight_at_refusals_under_one_reading_is_what_was_there() -> None:
    """Ours knew of itself alone: 46 were in flight, one of them refused, beside 35 of realtime."""
    one = replica(60)
    one.overloaded(1.0, until=0.0, capacity=True, in_flight=1)
    one.overloaded(1.001, until=0.0, capacity=True, in_flight=46, heard=True)
    one.reading(reading(2.0, 35), 2.0)
    assert taught(one, 2.5) == pytest.approx(0.9 * (46 - 1 + 35))


def test_refusal_heard_of_again_after_a_reading_teaches_nothing() -> None:
    one = replica(60)
    one.overloaded(1.0, until=0.0, capacity=True, in_flight=40)
    one.reading(reading(2.0, 35), 2.0)
    before = taught(one, 2.5)
    assert before < 100
    one.overloaded(1.0, until=0.0, capacity=True, in_flight=10, heard=True)
    one.reading(reading(3.0, 35), 3.0)
    assert taught(one, 3.5) == before


def test_refusal_from_before_it_knew_the_pool_teaches_a_new_replica_nothing() -> None:
    """The queue tells it to whoever comes, as long as it is the newest."""
    one = Limiter(POLICY, (Signal.SATURATION,))
    one.overloaded(-900.0, until=0.0, capacity=True, in_flight=10, heard=True)
    one.reading(reading(0.0, 20), 0.0)
    assert taught(one, 0.5) == 100
    one.overloaded(-900.0, until=0.0, capacity=True, in_flight=10, heard=True)
    one.reading(reading(1.0, 20), 1.0)
    assert taught(one, 1.5) == 100
