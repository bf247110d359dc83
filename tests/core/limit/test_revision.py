"""Whoever derived something of a state sees that it changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.revision import Revisioned


@dataclass(slots=True)
class Switch(Revisioned):
    on: bool = False
    name: str = ""


def test_another_value_is_a_revision_and_the_same_is_none() -> None:
    switch = Switch()
    before = switch.revision
    switch.on, switch.name = False, ""
    assert switch.revision == before
    switch.on = True
    assert switch.revision == before + 1
    switch.on = False
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
def test_answer_that_an_event_changes_is_not_given_again(event: Callable[[Limiter], object]) -> None:
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    limiter.record_lease_counts(0, other_owners_units=0, just_leased_units=0, lost_units=0)
    limiter.add_reading(Reading(Signal.REQUESTS, 1, 1, 0.2, 0, 64), 1)
    before = limiter.get_allowance(3)
    assert before is limiter.get_allowance(3)
    event(limiter)
    assert limiter.get_allowance(3).limit < before.limit


def test_shared_limit_told_again_by_a_better_known_clock_costs_no_decision() -> None:
    """Each claim tells it, and it counts with the next reading alone."""
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
