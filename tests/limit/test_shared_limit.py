"""Limits and refusals that other replicas share: a reading moves the newest limit of any replica."""

from __future__ import annotations

import pytest

from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.refusals import REMOTE_CLOCK_ERROR_S

POLICY = Policy(reserve=0.05, max_sys=100)


def make_reading(at: float, used: int) -> Reading:
    return Reading(Signal.SATURATION, at, at, f_sys=used / 100, f_epp=0.0, max_sys=100)


def make_replica(limit_at_0: int) -> Limiter:
    """Return a limiter whose newest reading, at time 0, left this limit."""
    limiter = Limiter(POLICY, (Signal.SATURATION,))
    limiter.record_lease_counts(-1.0, other_owners_units=0, just_leased_units=0, lost_units=0)
    limiter.add_reading(make_reading(0.0, 95 - limit_at_0), 0.0)
    assert limiter.get_allowance(0.5).limit == limit_at_0
    return limiter


@pytest.mark.parametrize(
    ("shared", "limit"),
    [
        (60, 60),  # the reading proves a limit between 0 + 35 and 60 + 35
        (20, 35),
        (95, 95),
    ],
)
def test_reading_moves_the_newest_limit_of_any_replica(shared: int, limit: int) -> None:
    """Another replica has 60 in flight, by counts that are too far apart to be certain."""
    replica = make_replica(10)
    replica.set_shared_limit(shared, read_at=1.0)
    replica.record_lease_counts(1.5, other_owners_units=0, just_leased_units=0, lost_units=0)
    replica.record_lease_counts(2.5, other_owners_units=60, just_leased_units=60, lost_units=0)
    replica.add_reading(make_reading(2.0, 60), 2.0)
    assert replica.get_allowance(3.0).limit == limit


@pytest.mark.parametrize("read_at", [0.01, REMOTE_CLOCK_ERROR_S])
def test_newer_own_limit_takes_precedence_over_the_shared_one(read_at: float) -> None:
    """A shared limit that is newer by no more than the clock error may be our own."""
    replica = make_replica(40)
    replica.set_shared_limit(7, read_at)
    replica.record_lease_counts(1.5, other_owners_units=0, just_leased_units=0, lost_units=0)
    replica.record_lease_counts(2.5, other_owners_units=40, just_leased_units=40, lost_units=0)
    replica.add_reading(make_reading(2.0, 90), 2.0)
    assert replica.get_allowance(3.0).limit == 40


def test_leases_lost_since_the_shared_reading_lower_the_limit() -> None:
    replica = make_replica(10)
    replica.set_shared_limit(60, read_at=1.0)
    replica.record_lease_counts(1.5, other_owners_units=60, just_leased_units=60, lost_units=5)
    replica.record_lease_counts(2.5, other_owners_units=60, just_leased_units=60, lost_units=5)
    replica.add_reading(make_reading(2.0, 60), 2.0)
    assert replica.get_allowance(3.0).limit == 55


def get_learned_capacity(replica: Limiter, at: float) -> float:
    """Return the capacity that the limiter assumes."""
    budget = replica.get_allowance(at).budget
    assert budget is not None
    return budget.max_sys


def test_largest_number_in_flight_of_several_refusals_determines_the_capacity() -> None:
    """This replica counted only its own request. In fact 46 were in flight beside 35 realtime requests."""
    replica = make_replica(60)
    replica.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=1)
    replica.record_refusal(1.001, retry_at=0.0, is_out_of_capacity=True, in_flight=46, is_remote=True)
    replica.add_reading(make_reading(2.0, 35), 2.0)
    assert get_learned_capacity(replica, 2.5) == pytest.approx(0.9 * (46 - 1 + 35))


def test_refusal_that_is_reported_again_after_a_reading_is_ignored() -> None:
    replica = make_replica(60)
    replica.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=40)
    replica.add_reading(make_reading(2.0, 35), 2.0)
    before = get_learned_capacity(replica, 2.5)
    assert before < 100
    replica.record_refusal(1.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    replica.add_reading(make_reading(3.0, 35), 3.0)
    assert get_learned_capacity(replica, 3.5) == before


def test_new_replica_ignores_refusals_from_before_its_first_reading() -> None:
    """The queue returns the newest refusal to every new replica."""
    replica = Limiter(POLICY, (Signal.SATURATION,))
    replica.record_refusal(-900.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    replica.add_reading(make_reading(0.0, 20), 0.0)
    assert get_learned_capacity(replica, 0.5) == 100
    replica.record_refusal(-900.0, retry_at=0.0, is_out_of_capacity=True, in_flight=10, is_remote=True)
    replica.add_reading(make_reading(1.0, 20), 1.0)
    assert get_learned_capacity(replica, 1.5) == 100
