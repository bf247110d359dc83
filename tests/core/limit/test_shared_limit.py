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
    made.record_lease_counts(-1.0, other_owners_units=0, just_leased_units=0, lost_units=0)
    made.add_reading(reading(0.0, 95 - limit_at_0), 0.0)
    assert made.get_allowance(0.5).limit == limit_at_0
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
    one.set_shared_limit(shared, read_at=1.0)
    one.record_lease_counts(1.5, other_owners_units=0, just_leased_units=0, lost_units=0)
    one.record_lease_counts(2.5, other_owners_units=60, just_leased_units=60, lost_units=0)
    one.add_reading(reading(2.0, 60), 2.0)
    assert one.get_allowance(3.0).limit == limit


def test_own_newer_limit_counts_and_an_echo_of_it_changes_nothing() -> None:
    one = replica(40)
    one.set_shared_limit(7, read_at=0.01)
    one.record_lease_counts(1.5, other_owners_units=0, just_leased_units=0, lost_units=0)
    one.record_lease_counts(2.5, other_owners_units=40, just_leased_units=40, lost_units=0)
    one.add_reading(reading(2.0, 90), 2.0)
    assert one.get_allowance(3.0).limit == 40


def test_leases_lost_since_the_shared_reading_lower_it() -> None:
    one = replica(10)
    one.set_shared_limit(60, read_at=1.0)
    one.record_lease_counts(1.5, other_owners_units=60, just_leased_units=60, lost_units=5)
    one.record_lease_counts(2.5, other_owners_units=60, just_leased_units=60, lost_units=5)
    one.add_reading(reading(2.0, 60), 2.0)
    assert one.get_allowance(3.0).limit == 55


def taught(one: Limiter, at: float) -> float:
    """The capacity by which it reckons."""
    budget = one.get_allowance(at).budget
    assert budget is not None
    return budget.max_sys


def test_largest_number_in_flight_at_refusals_under_one_reading_is_what_was_there() -> None:
    """Ours knew of itself alone: 46 were in flight, one of them refused, beside 35 of realtime."""
    one = replica(60)
    one.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=1)
    one.record_refusal(1.001, retry_at=0.0, is_out_of_capacity=True, in_flight=46, is_remote=True)
    one.add_reading(reading(2.0, 35), 2.0)
    assert taught(one, 2.5) == pytest.approx(0.9 * (46 - 1 + 35))


def test_refusal_heard_of_again_after_a_reading_teaches_nothing() -> None:
    one = replica(60)
    one.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=40)
    one.add_reading(reading(2.0, 35), 2.0)
    before = taught(one, 2.5)
    assert before < 100
    one.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    one.add_reading(reading(3.0, 35), 3.0)
    assert taught(one, 3.5) == before


def test_refusal_from_before_it_knew_the_pool_teaches_a_new_replica_nothing() -> None:
    """The queue tells it to whoever comes, as long as it is the newest."""
    one = Limiter(POLICY, (Signal.SATURATION,))
    one.record_refusal(-900.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    one.add_reading(reading(0.0, 20), 0.0)
    assert taught(one, 0.5) == 100
    one.record_refusal(-900.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    one.add_reading(reading(1.0, 20), 1.0)
    assert taught(one, 1.5) == 100
