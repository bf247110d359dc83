"""Whoever derived something of a state sees that it changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.revision import Revised


@dataclass(slots=True)
class Switch(Revised):
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
    lambda limiter: limiter.pause(True, 3),
    lambda limiter: limiter.drain(3),
    lambda limiter: limiter.queue("away", 3),
    lambda limiter: limiter.unreachable(3, "refused"),
    lambda limiter: [limiter.bare_answer(3, 2.9, "empty 503") for _ in range(3)],
    lambda limiter: limiter.overloaded(3, until=4, capacity=False, in_flight=0),
    lambda limiter: limiter.capacity(8, 3),
    lambda limiter: limiter.settings(Policy(reserve=0.5), 3),
    lambda limiter: limiter.settings(Policy(max_in_flight=1), 3),
    lambda limiter: limiter.uses(Signal),
    lambda limiter: limiter.reading_failed(Reason.UNREADABLE, "away", 3),
    lambda limiter: limiter.leases(3, others=0, young=0, lost=1),
    lambda limiter: limiter.reading(Reading(Signal.REQUESTS, 2.9, 2.9, 0.5, 0, 64), 3),
]


@pytest.mark.parametrize("event", EVENTS)
def test_answer_that_an_event_changes_is_not_given_again(event: Callable[[Limiter], object]) -> None:
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    limiter.leases(0, others=0, young=0, lost=0)
    limiter.reading(Reading(Signal.REQUESTS, 1, 1, 0.2, 0, 64), 1)
    before = limiter.allowance(3)
    assert before is limiter.allowance(3)
    event(limiter)
    assert limiter.allowance(3).limit < before.limit


def test_shared_limit_told_again_by_a_better_known_clock_costs_no_decision() -> None:
    """Each claim tells it, and it counts with the next reading alone."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    limiter.reading(Reading(Signal.REQUESTS, 1, 1, 0.2, 0, 64), 1)
    limiter.allowance(2)
    limiter.leases(2, others=0, young=0, lost=0)
    before = limiter.allowance(3)
    for number in range(3):
        limiter.shared(before.limit, 1 + number * 1e-5)
        limiter.leases(3 + number, others=0, young=0, lost=0)
        limiter.pause(False, 3)
    assert limiter.allowance(3) is before
