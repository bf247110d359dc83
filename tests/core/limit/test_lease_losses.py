"""What silent owners left running: it counts against a cap of our own until a reading shows it gone."""

from __future__ import annotations

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.lease_losses import LeaseLosses
from dispatcher.core.limit.limiter import Limiter

CAP = 10
STRAY_S = 30.0


def reading(at: float, running: float, *, exact: bool = True, window_s: float = 0.0) -> Reading:
    return Reading(
        Signal.REQUESTS,
        at - window_s,
        at,
        f_sys=running / 100,
        f_epp=0.0,
        max_sys=100,
        is_request_count=exact,
    )


def capped(cap: int | None = CAP) -> Limiter:
    """10 in flight of others, of which 6 are taken back from a silent one, as is known at 10.2."""
    made = Limiter(Policy(max_in_flight=cap, orphan_timeout_s=STRAY_S), (Signal.REQUESTS,))
    made.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    made.add_reading(reading(1.0, 10), 1.0)
    made.record_lease_counts(9.9, other_owners_units=10, just_leased_units=0, lost_units=0)
    assert made.get_allowance(9.9).limit == (95 if cap is None else cap)
    made.record_lease_counts(10.2, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=6)
    return made


def limit_by(made: Limiter, *readings: Reading) -> int:
    """The limit by readings, each followed by a count as the loop has it."""
    for each in readings:
        made.add_reading(each, each.closed_at)
        made.record_lease_counts(
            each.closed_at + 0.1, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=6
        )
    return made.get_allowance(readings[-1].closed_at + 0.1).limit


def test_strays_count_against_the_cap_until_a_reading_shows_them_gone() -> None:
    made = capped()
    assert made.get_allowance(10.3).limit == CAP - 6
    assert limit_by(made, reading(11, 10)) == CAP - 6
    assert limit_by(made, reading(12, 7)) == CAP - 3
    assert limit_by(made, reading(13, 4)) == CAP


def test_reading_of_before_the_newest_loss_says_nothing_of_it() -> None:
    """It had them for an owner's that lived, and so saw fewer strays than there are now."""
    made = capped()
    assert limit_by(made, reading(11, 10)) == CAP - 6
    made.record_lease_counts(11.5, other_owners_units=1, just_leased_units=0, lost_units=9, orphaned_units=9)
    assert made.get_allowance(11.6).limit == CAP - 9


def test_reading_that_does_not_count_requests_says_nothing_of_strays() -> None:
    assert limit_by(capped(), reading(11, 0, exact=False)) == CAP - 6


def test_realtime_may_hide_strays_but_only_for_so_long() -> None:
    made = capped()
    assert limit_by(made, reading(11, 60)) == CAP - 6
    last = reading(10.2 + STRAY_S - 0.15, 60)
    assert limit_by(made, last) == CAP - 6
    asked_again_at = made.get_allowance(last.closed_at + 0.1).next_check_at
    assert asked_again_at is not None
    assert asked_again_at == pytest.approx(10.2 + STRAY_S, abs=1e-3)
    assert made.get_allowance(asked_again_at).limit == CAP


def test_half_a_request_counts_as_one() -> None:
    assert limit_by(capped(), reading(11, 6.5)) == CAP - 3


def test_leases_of_owners_proven_gone_leave_no_strays() -> None:
    made = Limiter(Policy(max_in_flight=CAP), (Signal.REQUESTS,))
    made.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    made.add_reading(reading(1.0, 60), 1.0)
    made.record_lease_counts(10.2, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0)
    made.record_lease_counts(10.9, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0)
    assert limit_by_others(made, 11.0) == CAP


def limit_by_others(made: Limiter, at: float) -> int:
    made.add_reading(reading(at, 60), at)
    made.record_lease_counts(
        at + 0.1, other_owners_units=4, just_leased_units=0, lost_units=6, orphaned_units=0
    )
    return made.get_allowance(at + 0.1).limit


def test_without_a_cap_of_our_own_a_reading_is_enough() -> None:
    """It has the strays inside, as somebody's load: what it proves free is free."""
    made = capped(None)
    assert made.get_allowance(10.3).limit == 95 - 6
    assert limit_by(made, reading(11, 10)) == 95 - 6


def test_strays_that_fill_the_cap_are_named() -> None:
    made = Limiter(Policy(max_in_flight=CAP), (Signal.REQUESTS,))
    made.record_lease_counts(0.0, other_owners_units=10, just_leased_units=0, lost_units=0)
    made.add_reading(reading(1.0, 10), 1.0)
    made.record_lease_counts(
        10.2, other_owners_units=0, just_leased_units=0, lost_units=10, orphaned_units=10
    )
    made.add_reading(reading(11, 10), 11)
    allowance = made.get_allowance(11.1)
    assert (allowance.limit, allowance.reason) == (0, Reason.NO_ROOM)
    assert "silent" in allowance.detail
    assert "max_in_flight" in allowance.detail


def test_first_count_is_a_beginning_whatever_was_lost_before() -> None:
    made = Limiter(Policy(max_in_flight=CAP), (Signal.REQUESTS,))
    made.record_lease_counts(
        10.0, other_owners_units=0, just_leased_units=0, lost_units=500, orphaned_units=400
    )
    made.add_reading(reading(10.5, 50), 10.5)
    assert made.get_allowance(11).limit == CAP


def test_losses_are_known_from_when_they_were_told() -> None:
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
    assert not losses.record_counts(9, 2, 2), "a queue that was emptied"
    assert [losses.lost_units, losses.estimate_orphans(0, [])[0]] == [2, 0]
