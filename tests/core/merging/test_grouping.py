"""Which of those that wait go now, together."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan

import pytest

from dispatcher.core.merging.grouping import (
    GroupingRule,
    GroupReady,
    GroupTrigger,
    WaitingItem,
    WaitUntil,
    group_requests,
)
from tests.formers import Sent, play

RULE = GroupingRule(max_size=8, preferred_sizes=(4, 8), max_delay_s=0.1)
IDLE = GroupingRule(max_size=8, max_delay_s=0.1)


def ones(count: int, every_s: float = 0.0) -> list[WaitingItem]:
    return [WaitingItem(1, number * every_s) for number in range(count)]


def sizes(*each: int) -> list[WaitingItem]:
    return [WaitingItem(size, 0.0) for size in each]


def told(sent: list[Sent]) -> list[tuple[int, int]]:
    """Size and time in ms of each batch."""
    return [(sum(batch.sizes), round(batch.at * 1000)) for batch in sent]


def test_single_items_go_by_the_preferred_size() -> None:
    assert told(play(ones(16, 0.01), RULE)) == [(4, 30), (4, 70), (4, 110), (4, 150)]


def test_what_comes_while_a_call_runs_makes_the_next_one_larger() -> None:
    assert told(play(ones(16, 0.01), RULE, calls=1, takes_s=0.075)) == [(4, 30), (4, 105), (8, 180)]


def test_what_does_not_fit_beside_others_is_waited_for_no_longer() -> None:
    assert told(play(sizes(3, 3, 3), RULE)) == [(6, 0), (3, 100)]


def test_sizes_add_up_over_items_of_several() -> None:
    assert told(play(sizes(5, 2, 4), RULE)) == [(7, 0), (4, 0)]


def test_without_a_delay_all_go_at_once_and_preferred_sizes_first() -> None:
    rule = GroupingRule(max_size=8, preferred_sizes=(4, 8))
    sent = play(ones(5), rule)
    assert told(sent) == [(4, 0), (1, 0)]
    assert [batch.by for batch in sent] == [GroupTrigger.PREFERRED, GroupTrigger.DUE]


def test_a_batch_that_is_exactly_full_waits_for_nobody() -> None:
    assert group_requests(sizes(5, 3), IDLE, 0.0) == GroupReady(2, GroupTrigger.FULL)


def test_full_comes_before_preferred() -> None:
    """Seven are worth more than four, and nothing that waits makes it eight."""
    assert group_requests(sizes(4, 3, 2), RULE, 0.0) == GroupReady(2, GroupTrigger.FULL)


def test_the_largest_preferred_size_counts() -> None:
    assert group_requests(ones(7), GroupingRule(8, (2, 6, 4), 0.1), 0.0) == GroupReady(
        6, GroupTrigger.PREFERRED
    )


def test_a_preferred_size_comes_before_the_delay() -> None:
    assert group_requests(ones(7), RULE, 5.0) == GroupReady(4, GroupTrigger.PREFERRED)


def test_preferred_sizes_that_no_batch_may_have_are_passed_over() -> None:
    assert group_requests(ones(7), GroupingRule(8, (16, 64), 0.1), 0.0) == WaitUntil(0.1)


def test_an_item_above_the_most_goes_alone_and_in_its_turn() -> None:
    assert told(play(sizes(2, 50, 2), RULE)) == [(2, 0), (50, 0), (2, 100)]
    assert group_requests(sizes(50), RULE, 0.0) == GroupReady(1, GroupTrigger.FULL)


def test_a_weight_bounds_a_batch_as_well() -> None:
    rule = GroupingRule(max_size=8, max_delay_s=0.1, max_weight=1000)
    heavy = [WaitingItem(1, 0.0, weight) for weight in (600.0, 400.0, 1.0, 2000.0)]
    assert [len(batch.items) for batch in play(heavy, rule)] == [2, 1, 1]
    assert group_requests(heavy[:2], rule, 0.0) == WaitUntil(0.1), "one of no weight may come"


@pytest.mark.parametrize("weight", [nan, inf])
def test_what_weighs_nobody_knows_how_much_goes_alone(weight: float) -> None:
    rule = GroupingRule(max_size=8, max_delay_s=0.1, max_weight=1000)
    items = [WaitingItem(1, 0.0), WaitingItem(1, 0.0, weight), WaitingItem(1, 0.0)]
    assert [len(batch.items) for batch in play(items, rule)] == [1, 1, 1]


def test_an_item_of_no_size_counts_one_and_a_negative_weight_nothing() -> None:
    assert group_requests(sizes(*[0] * 9), IDLE, 0.0) == GroupReady(8, GroupTrigger.FULL)
    assert group_requests(sizes(-5, 8), IDLE, 0.0) == GroupReady(1, GroupTrigger.FULL)
    rule = GroupingRule(max_size=8, max_weight=10)
    assert group_requests([WaitingItem(1, 0.0, -5.0), WaitingItem(1, 0.0, 12.0)], rule, 0.0) == GroupReady(
        1, GroupTrigger.FULL
    )


def test_the_oldest_counts_wherever_it_stands() -> None:
    """What was given back stands at its own place, and has waited for longer."""
    items = [WaitingItem(1, 5.0), WaitingItem(1, 4.0), WaitingItem(1, 6.0)]
    assert group_requests(items, IDLE, 4.05) == WaitUntil(4.1)
    assert group_requests(items, IDLE, 4.1) == GroupReady(3, GroupTrigger.DUE)


def test_without_a_delay_a_clock_that_is_behind_holds_nothing_up() -> None:
    assert group_requests([WaitingItem(1, 5.0)], GroupingRule(8), 4.9) == GroupReady(1, GroupTrigger.DUE)


def test_when_nobody_else_can_come_there_is_nothing_to_wait_for() -> None:
    assert group_requests(ones(3), IDLE, 0.0) == WaitUntil(0.1)
    assert group_requests(ones(3), IDLE, 0.0, is_idle=True) == GroupReady(3, GroupTrigger.IDLE)
    assert group_requests(
        ones(3), GroupingRule(8, max_delay_s=0.1, idle_flush=False), 0.0, is_idle=True
    ) == WaitUntil(0.1)
    assert group_requests(ones(5), RULE, 0.0, is_idle=True) == GroupReady(4, GroupTrigger.PREFERRED)


def test_nothing_goes_where_nothing_waits_or_nothing_may_go() -> None:
    assert group_requests([], IDLE, 5.0, is_idle=True) == WaitUntil(inf)
    assert group_requests([], GroupingRule(8), 5.0) == WaitUntil(inf)
    assert group_requests(ones(20), IDLE, 5.0, has_room=False, is_idle=True) == WaitUntil(inf)


def test_it_looks_at_no_more_than_could_go_together() -> None:
    looked = 0

    def waiting() -> Iterator[WaitingItem]:
        nonlocal looked
        while True:
            looked += 1
            yield WaitingItem(1, 0.0)

    assert group_requests(waiting(), RULE, 0.0) == GroupReady(8, GroupTrigger.FULL)
    assert looked == 8


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"max_size": 0}, "max_size"),
        ({"preferred_sizes": (4, 0)}, "preferred_sizes"),
        ({"max_delay_s": -1.0}, "max_delay_s"),
        ({"max_delay_s": nan}, "max_delay_s"),
        ({"max_weight": 0.0}, "max_weight"),
        ({"max_weight": nan}, "max_weight"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_name(numbers: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        GroupingRule(**({"max_size": 8} | numbers))  # type: ignore[arg-type]
