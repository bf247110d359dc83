"""Grouping of waiting requests into calls."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan

import pytest

from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, WaitUntil, group_requests
from tests.grouping_simulation import SentGroup, simulate_grouping

RULE = GroupingRule(max_size=8, preferred_sizes=(4, 8), max_delay_s=0.1)
RULE_WITHOUT_PREFERRED = GroupingRule(max_size=8, max_delay_s=0.1)


def make_single_items(count: int, interval_s: float = 0.0) -> list[WaitingItem]:
    return [WaitingItem(1, number * interval_s) for number in range(count)]


def make_items(*each: int) -> list[WaitingItem]:
    return [WaitingItem(size, 0.0) for size in each]


def summarize(sent: list[SentGroup]) -> list[tuple[int, int]]:
    """Return size and time in ms of each group."""
    return [(sum(batch.sizes), round(batch.sent_at * 1000)) for batch in sent]


def test_single_items_are_grouped_to_the_preferred_size() -> None:
    assert summarize(simulate_grouping(make_single_items(16, 0.01), RULE)) == [
        (4, 30),
        (4, 70),
        (4, 110),
        (4, 150),
    ]


def test_items_that_arrive_during_a_call_make_the_next_one_larger() -> None:
    assert summarize(simulate_grouping(make_single_items(16, 0.01), RULE, max_calls=1, call_s=0.075)) == [
        (4, 30),
        (4, 105),
        (8, 180),
    ]


def test_group_is_sent_if_the_next_item_does_not_fit() -> None:
    assert summarize(simulate_grouping(make_items(3, 3, 3), RULE)) == [(6, 0), (3, 100)]


def test_sizes_of_items_are_added_up() -> None:
    assert summarize(simulate_grouping(make_items(5, 2, 4), RULE)) == [(7, 0), (4, 0)]


def test_without_a_delay_all_are_sent_at_once_in_preferred_sizes() -> None:
    rule = GroupingRule(max_size=8, preferred_sizes=(4, 8))
    sent = simulate_grouping(make_single_items(5), rule)
    assert summarize(sent) == [(4, 0), (1, 0)]


def test_exactly_full_group_is_sent_at_once() -> None:
    assert group_requests(make_items(5, 3), RULE_WITHOUT_PREFERRED, 0.0) == GroupReady(2)


def test_full_group_is_preferred_over_a_preferred_size() -> None:
    """A group of seven is better than one of four, and no waiting item makes it eight."""
    assert group_requests(make_items(4, 3, 2), RULE, 0.0) == GroupReady(2)


def test_largest_preferred_size_is_used() -> None:
    assert group_requests(make_single_items(7), GroupingRule(8, (2, 6, 4), 0.1), 0.0) == GroupReady(6)


def test_preferred_size_is_used_before_the_delay_ends() -> None:
    assert group_requests(make_single_items(7), RULE, 5.0) == GroupReady(4)


def test_preferred_sizes_above_the_maximum_are_ignored() -> None:
    assert group_requests(make_single_items(7), GroupingRule(8, (16, 64), 0.1), 0.0) == WaitUntil(0.1)


def test_item_above_the_maximum_is_sent_alone_and_in_order() -> None:
    assert summarize(simulate_grouping(make_items(2, 50, 2), RULE)) == [(2, 0), (50, 0), (2, 100)]
    assert group_requests(make_items(50), RULE, 0.0) == GroupReady(1)


def test_weight_limits_a_group_too() -> None:
    rule = GroupingRule(max_size=8, max_delay_s=0.1, max_weight=1000)
    heavy = [WaitingItem(1, 0.0, weight) for weight in (600.0, 400.0, 1.0, 2000.0)]
    assert [len(batch.items) for batch in simulate_grouping(heavy, rule)] == [2, 1, 1]
    assert group_requests(heavy[:2], rule, 0.0) == WaitUntil(0.1), "an item without weight may still arrive"


@pytest.mark.parametrize("weight", [nan, inf])
def test_item_of_unknown_weight_is_sent_alone(weight: float) -> None:
    rule = GroupingRule(max_size=8, max_delay_s=0.1, max_weight=1000)
    items = [WaitingItem(1, 0.0), WaitingItem(1, 0.0, weight), WaitingItem(1, 0.0)]
    assert [len(batch.items) for batch in simulate_grouping(items, rule)] == [1, 1, 1]


def test_size_below_one_counts_as_one_and_negative_weight_as_zero() -> None:
    assert group_requests(make_items(*[0] * 9), RULE_WITHOUT_PREFERRED, 0.0) == GroupReady(8)
    assert group_requests(make_items(-5, 8), RULE_WITHOUT_PREFERRED, 0.0) == GroupReady(1)
    rule = GroupingRule(max_size=8, max_weight=10)
    assert group_requests([WaitingItem(1, 0.0, -5.0), WaitingItem(1, 0.0, 12.0)], rule, 0.0) == GroupReady(1)


def test_delay_counts_from_the_oldest_item_wherever_it_is() -> None:
    """A returned item keeps its place, but has waited for longer."""
    items = [WaitingItem(1, 5.0), WaitingItem(1, 4.0), WaitingItem(1, 6.0)]
    assert group_requests(items, RULE_WITHOUT_PREFERRED, 4.05) == WaitUntil(4.1)
    assert group_requests(items, RULE_WITHOUT_PREFERRED, 4.1) == GroupReady(3)


def test_without_a_delay_an_item_from_the_future_is_sent_at_once() -> None:
    assert group_requests([WaitingItem(1, 5.0)], GroupingRule(8), 4.9) == GroupReady(1)


def test_group_is_sent_at_once_if_no_other_item_can_arrive() -> None:
    assert group_requests(make_single_items(3), RULE_WITHOUT_PREFERRED, 0.0) == WaitUntil(0.1)
    assert group_requests(make_single_items(3), RULE_WITHOUT_PREFERRED, 0.0, is_idle=True) == GroupReady(3)
    assert group_requests(
        make_single_items(3), GroupingRule(8, max_delay_s=0.1, idle_flush=False), 0.0, is_idle=True
    ) == WaitUntil(0.1)
    assert group_requests(make_single_items(5), RULE, 0.0, is_idle=True) == GroupReady(4)


def test_nothing_is_sent_without_items_or_without_room() -> None:
    assert group_requests([], RULE_WITHOUT_PREFERRED, 5.0, is_idle=True) == WaitUntil(inf)
    assert group_requests([], GroupingRule(8), 5.0) == WaitUntil(inf)
    assert group_requests(
        make_single_items(20), RULE_WITHOUT_PREFERRED, 5.0, has_room=False, is_idle=True
    ) == WaitUntil(inf)


def test_no_more_items_are_read_than_could_be_sent_together() -> None:
    read_items = 0

    def waiting() -> Iterator[WaitingItem]:
        nonlocal read_items
        while True:
            read_items += 1
            yield WaitingItem(1, 0.0)

    assert group_requests(waiting(), RULE, 0.0) == GroupReady(8)
    assert read_items == 8


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
