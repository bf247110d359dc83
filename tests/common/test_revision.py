"""Revisions show that a state has changed, so that values derived from it are computed anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dispatcher.common.revision import Revisioned
from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.limit.limiter import Limiter


@dataclass(slots=True)
class Switch(Revisioned):
    is_on: bool = False
    name: str = ""


def test_only_a_changed_value_increases_the_revision() -> None:
    switch = Switch()
    before = switch.revision
    switch.is_on, switch.name = False, ""
    assert switch.revision == before
    switch.is_on = True
    assert switch.revision == before + 1
    switch.is_on = False
    assert switch.revision == before + 2


EVENTS: list[Callable[[Limiter], object]] = [
    lambda limiter: limiter.set_paused(True, 3),
    lambda limiter: limiter.start_draining(3),
    lambda limiter: limiter.set_queue_problem("away", 3),
    lambda limiter: limiter.record_connection_failure(3, "refused"),
    lambda limiter: [limiter.record_intermediary_error(3, 2.9, "empty 503") for _ in range(3)],
    lambda limiter: limiter.record_refusal(3, retry_at=4, is_out_of_capacity=False, in_flight=0),
    lambda limiter: limiter.set_capacity_bound(8, 3),
    lambda limiter: limiter.set_policy(Policy(reserve=0.5), 3),
    lambda limiter: limiter.set_policy(Policy(max_in_flight=1), 3),
    lambda limiter: limiter.set_signals(Signal),
    lambda limiter: limiter.record_read_failure(Reason.UNREADABLE, "away", 3),
    lambda limiter: limiter.record_lease_counts(3, other_owners_units=0, just_leased_units=0, lost_units=1),
    lambda limiter: limiter.add_reading(Reading(Signal.REQUESTS, 2.9, 2.9, 0.5, 0, 64), 3),
]


@pytest.mark.parametrize("event", EVENTS)
def test_event_that_changes_the_allowance_invalidates_the_cached_one(
    event: Callable[[Limiter], object],
) -> None:
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    limiter.record_lease_counts(0, other_owners_units=0, just_leased_units=0, lost_units=0)
    limiter.add_reading(Reading(Signal.REQUESTS, 1, 1, 0.2, 0, 64), 1)
    before = limiter.get_allowance(3)
    assert before is limiter.get_allowance(3)
    event(limiter)
    assert limiter.get_allowance(3).limit < before.limit


def test_repeated_shared_limit_does_not_invalidate_the_cached_allowance() -> None:
    """Each claim returns the shared limit with a more precise time. Only the next reading uses it."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    limiter.add_reading(Reading(Signal.REQUESTS, 1, 1, 0.2, 0, 64), 1)
    limiter.get_allowance(2)
    limiter.record_lease_counts(2, other_owners_units=0, just_leased_units=0, lost_units=0)
    before = limiter.get_allowance(3)
    for number in range(3):
        limiter.set_shared_limit(before.limit, 1 + number * 1e-5)
        limiter.record_lease_counts(3 + number, other_owners_units=0, just_leased_units=0, lost_units=0)
        limiter.set_paused(False, 3)
    assert limiter.get_allowance(3) is before
