"""Orphaned leases count against budget.max_in_flight until a reading shows that their requests ended."""

from __future__ import annotations

import pytest

from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.lease_losses import LeaseLosses
from dispatcher.limit.limiter import Limiter

MAX_IN_FLIGHT = 10
ORPHAN_TIMEOUT_S = 30.0


def make_reading(
    at: float, running: float, *, is_request_count: bool = True, window_s: float = 0.0
) -> Reading:
    return Reading(
        Signal.REQUESTS,
        at - window_s,
        at,
        f_sys=running / 100,
        f_epp=0.0,
        max_sys=100,
        is_request_count=is_request_count,
    )


def make_capped_limiter(max_in_flight: int | None = MAX_IN_FLIGHT) -> Limiter:
    """Return a limiter where 6 of 10 leases of others were reclaimed from a silent owner, known at 10.2."""
    limiter = Limiter(
        Policy(max_in_flight=max_in_flight, orphan_timeout_s=ORPHAN_TIMEOUT_S), (Signal.REQUESTS,)
    )
    limiter.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    limiter.add_reading(make_reading(1.0, 10), 1.0)
    limiter.record_lease_counts(9.9, other_owners_units=10, just_leased_units=0, lost_units=0)
    assert limiter.get_allowance(9.9).limit == (95 if max_in_flight is None else max_in_flight)
    limiter.record_lease_counts(
        10.2, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=6
    )
    return limiter


def compute_limit_after(limiter: Limiter, *readings: Reading) -> int:
    """Return the limit after these readings, each followed by lease counts as in the dispatch loop."""
    for reading in readings:
        limiter.add_reading(reading, reading.closed_at)
        limiter.record_lease_counts(
            reading.closed_at + 0.1, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=6
        )
    return limiter.get_allowance(readings[-1].closed_at + 0.1).limit


def test_orphaned_leases_count_against_max_in_flight_until_a_reading_shows_their_end() -> None:
    limiter = make_capped_limiter()
    assert limiter.get_allowance(10.3).limit == MAX_IN_FLIGHT - 6
    assert compute_limit_after(limiter, make_reading(11, 10)) == MAX_IN_FLIGHT - 6
    assert compute_limit_after(limiter, make_reading(12, 7)) == MAX_IN_FLIGHT - 3
    assert compute_limit_after(limiter, make_reading(13, 4)) == MAX_IN_FLIGHT


def test_reading_from_before_the_newest_loss_does_not_show_the_end_of_orphaned_leases() -> None:
    """When it was taken, the owner was still alive, so there were fewer orphaned leases than now."""
    limiter = make_capped_limiter()
    assert compute_limit_after(limiter, make_reading(11, 10)) == MAX_IN_FLIGHT - 6
    limiter.record_lease_counts(
        11.5, other_owners_units=1, just_leased_units=0, lost_units=9, orphaned_units=9
    )
    assert limiter.get_allowance(11.6).limit == MAX_IN_FLIGHT - 9


def test_reading_that_does_not_count_requests_does_not_show_the_end_of_orphaned_leases() -> None:
    assert (
        compute_limit_after(make_capped_limiter(), make_reading(11, 0, is_request_count=False))
        == MAX_IN_FLIGHT - 6
    )


def test_orphaned_leases_that_realtime_may_hide_count_until_the_orphan_timeout() -> None:
    limiter = make_capped_limiter()
    assert compute_limit_after(limiter, make_reading(11, 60)) == MAX_IN_FLIGHT - 6
    last_reading = make_reading(10.2 + ORPHAN_TIMEOUT_S - 0.15, 60)
    assert compute_limit_after(limiter, last_reading) == MAX_IN_FLIGHT - 6
    next_check_at = limiter.get_allowance(last_reading.closed_at + 0.1).next_check_at
    assert next_check_at is not None
    assert next_check_at == pytest.approx(10.2 + ORPHAN_TIMEOUT_S, abs=1e-3)
    assert limiter.get_allowance(next_check_at).limit == MAX_IN_FLIGHT


def test_fraction_of_an_orphaned_lease_counts_as_one() -> None:
    assert compute_limit_after(make_capped_limiter(), make_reading(11, 6.5)) == MAX_IN_FLIGHT - 3


def test_leases_of_owners_that_certainly_ended_are_not_orphaned() -> None:
    limiter = Limiter(Policy(max_in_flight=MAX_IN_FLIGHT), (Signal.REQUESTS,))
    limiter.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    limiter.add_reading(make_reading(1.0, 60), 1.0)
    limiter.record_lease_counts(
        10.2, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0
    )
    limiter.record_lease_counts(
        10.9, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0
    )
    assert compute_limit_without_orphans(limiter, 11.0) == MAX_IN_FLIGHT


def compute_limit_without_orphans(limiter: Limiter, at: float) -> int:
    limiter.add_reading(make_reading(at, 60), at)
    limiter.record_lease_counts(
        at + 0.1, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0
    )
    return limiter.get_allowance(at + 0.1).limit


def test_orphaned_leases_do_not_lower_the_limit_further_without_max_in_flight() -> None:
    """A reading contains their requests as load of the pool, so the room that it proves is free."""
    limiter = make_capped_limiter(None)
    assert limiter.get_allowance(10.3).limit == 95 - 6
    assert compute_limit_after(limiter, make_reading(11, 10)) == 95 - 6


def test_orphaned_leases_that_use_up_max_in_flight_are_named() -> None:
    limiter = Limiter(Policy(max_in_flight=MAX_IN_FLIGHT), (Signal.REQUESTS,))
    limiter.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    limiter.add_reading(make_reading(1.0, 10), 1.0)
    limiter.record_lease_counts(
        10.2, other_owners_units=0, just_leased_units=0, lost_units=10, orphaned_units=10
    )
    limiter.add_reading(make_reading(11, 10), 11)
    allowance = limiter.get_allowance(11.1)
    assert (allowance.limit, allowance.reason) == (0, Reason.NO_ROOM)
    assert "silent" in allowance.detail
    assert "max_in_flight" in allowance.detail


def test_leases_lost_before_the_first_count_do_not_lower_the_limit() -> None:
    limiter = Limiter(Policy(max_in_flight=MAX_IN_FLIGHT), (Signal.REQUESTS,))
    limiter.record_lease_counts(
        10.0, other_owners_units=0, just_leased_units=0, lost_units=500, orphaned_units=400
    )
    limiter.add_reading(make_reading(10.5, 50), 10.5)
    assert limiter.get_allowance(11).limit == MAX_IN_FLIGHT


def test_losses_count_from_the_time_at_which_they_were_recorded() -> None:
    losses = LeaseLosses()
    assert [losses.lost_units, losses.count_lost_before(5)] == [0, 0]
    assert not losses.record_counts(1, 3, 1)
    assert losses.record_counts(2, 3, 1)
    assert losses.record_counts(4, 8, 5)
    assert [losses.count_lost_before(at) for at in (0, 1, 3.9, 4, 9)] == [3, 3, 3, 8, 8]
    assert losses.estimate_orphans(3, []) == (4, 4)
    assert losses.estimate_orphans(4, [])[0] == 0
    assert losses.estimate_orphans(3, [(4, 2.0), (3.9, 0.0), (5, float("nan"))]) == (2, 4)
    assert losses.estimate_orphans(3, [(5, -7.0)]) == (0, 4)
    assert not losses.record_counts(9, 2, 2), "a smaller counter means that the queue was emptied"
    assert [losses.lost_units, losses.estimate_orphans(0, [])[0]] == [2, 0]


def test_leases_lost_without_an_orphan_do_not_count_as_the_first_orphaned_ones() -> None:
    losses = LeaseLosses()
    for at, lost, orphaned in ((1, 3, 1), (4, 8, 1), (6, 9, 4)):
        losses.record_counts(at, lost, orphaned)
    assert losses.estimate_orphans(0, []) == (3, 6)
