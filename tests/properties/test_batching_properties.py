"""Properties of the grouping of requests, one test for each sentence of its rule."""

from __future__ import annotations

from itertools import accumulate
from math import inf, nextafter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, WaitUntil, group_requests
from tests.grouping_simulation import simulate_grouping

# Eighths of a second are added without rounding errors, so due times are exact.
TIMES = st.integers(0, 80).map(lambda eighths: eighths / 8)
ITEMS = st.builds(WaitingItem, st.integers(1, 12), TIMES, st.integers(0, 6).map(float))
WAITING = st.lists(ITEMS, max_size=30).map(lambda items: sorted(items, key=lambda each: each.arrived_at))
SIZES = st.integers(1, 10)
BOOLEANS = st.booleans()
DELAYS = st.integers(0, 24).map(lambda eighths: eighths / 8)


def build_rules(
    max_size: st.SearchStrategy[int] = SIZES,
    max_delay_s: st.SearchStrategy[float] = DELAYS,
    idle_flush: st.SearchStrategy[bool] = BOOLEANS,
) -> st.SearchStrategy[GroupingRule]:
    return st.builds(
        GroupingRule,
        max_size=max_size,
        preferred_sizes=st.lists(st.integers(1, 14), max_size=3).map(tuple),
        max_delay_s=max_delay_s,
        idle_flush=idle_flush,
        max_weight=st.one_of(st.just(inf), st.integers(1, 12).map(float)),
    )


FINITE_RULES = build_rules()
RULES = build_rules(max_delay_s=st.one_of(DELAYS, st.just(inf)))
LONG_DELAY_RULES = build_rules(max_size=st.just(1000), max_delay_s=st.sampled_from([4.0, 100.0, inf]))


def fits(items: list[WaitingItem], rule: GroupingRule) -> bool:
    size, weight = sum(each.size for each in items), sum(each.weight for each in items)
    return size <= rule.max_size and weight <= rule.max_weight


def count_fitting(items: list[WaitingItem], rule: GroupingRule) -> int:
    """Return the number of first items that fit, but at least one."""
    return max((n for n in range(1, len(items) + 1) if fits(items[:n], rule)), default=min(1, len(items)))


def is_full(items: list[WaitingItem], rule: GroupingRule) -> bool:
    """Return whether no other item can join the first ones."""
    fitting = items[: count_fitting(items, rule)]
    is_exceeded = len(fitting) < len(items) or not fits(fitting, rule)
    return is_exceeded or sum(each.size for each in fitting) >= rule.max_size


@given(WAITING, RULES, TIMES, st.booleans(), st.booleans())
def test_rules_apply_in_their_order(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, has_room: bool, is_idle: bool
) -> None:
    """This is a second, slow implementation of the whole rule."""
    answer = group_requests(waiting, rule, now, has_room=has_room, is_idle=is_idle)
    fitting_count = count_fitting(waiting, rule)
    sizes = list(accumulate(each.size for each in waiting[:fitting_count]))
    preferred_counts = [n for n, size in enumerate(sizes, 1) if size in rule.preferred_sizes]
    if not has_room or not waiting:
        assert answer == WaitUntil(inf)
    elif is_full(waiting, rule):
        assert answer == GroupReady(fitting_count)
    elif preferred_counts:
        assert answer == GroupReady(preferred_counts[-1])
    else:
        due_at = min(each.arrived_at for each in waiting) + rule.max_delay_s
        is_due = rule.max_delay_s == 0 or now >= due_at or (is_idle and rule.idle_flush)
        assert answer == (GroupReady(len(waiting)) if is_due else WaitUntil(due_at))


@given(WAITING, RULES, TIMES, st.booleans())
def test_group_of_several_items_never_exceeds_the_limits(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, is_idle: bool
) -> None:
    answer = group_requests(waiting, rule, now, is_idle=is_idle)
    if isinstance(answer, GroupReady):
        assert 1 <= answer.count <= len(waiting)
        assert answer.count == 1 or fits(waiting[: answer.count], rule)


@given(WAITING, RULES | LONG_DELAY_RULES, TIMES, st.booleans())
def test_wait_until_is_the_earliest_time_at_which_the_answer_changes(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, is_idle: bool
) -> None:
    answer = group_requests(waiting, rule, now, is_idle=is_idle)
    if isinstance(answer, GroupReady):
        return
    assert answer.until > now
    before = min(nextafter(answer.until, -inf), 1e9)
    for at in (now, (now + before) / 2, before):
        assert group_requests(waiting, rule, at, is_idle=is_idle) == answer
    if answer.until < inf:
        assert isinstance(group_requests(waiting, rule, answer.until, is_idle=is_idle), GroupReady)


@given(WAITING, WAITING, RULES, TIMES)
def test_full_group_does_not_change_with_later_items(
    waiting: list[WaitingItem], later: list[WaitingItem], rule: GroupingRule, now: float
) -> None:
    answer = group_requests(waiting, rule, now)
    if isinstance(answer, GroupReady) and is_full(waiting, rule):
        assert group_requests(waiting + later, rule, now) == answer


@given(WAITING, FINITE_RULES, st.sampled_from([1, 2, inf]), st.sampled_from([0.125, 1.0]), st.booleans())
def test_every_item_is_sent_exactly_once_and_in_order(
    arrivals: list[WaitingItem], rule: GroupingRule, max_calls: float, call_s: float, is_idle_known: bool
) -> None:
    groups = simulate_grouping(
        arrivals, rule, max_calls=max_calls, call_s=call_s, is_idle_known=is_idle_known
    )
    assert [number for group in groups for number in group.items] == list(range(len(arrivals)))


@given(WAITING, FINITE_RULES, st.booleans())
def test_no_item_waits_longer_than_max_delay_while_there_is_room(
    arrivals: list[WaitingItem], rule: GroupingRule, is_idle_known: bool
) -> None:
    for group in simulate_grouping(arrivals, rule, is_idle_known=is_idle_known):
        assert all(group.sent_at <= arrivals[number].arrived_at + rule.max_delay_s for number in group.items)


@given(WAITING, build_rules(idle_flush=st.just(True)))
def test_idle_flush_sends_all_items_once_no_other_can_arrive(
    arrivals: list[WaitingItem], rule: GroupingRule
) -> None:
    """This holds for any delay."""
    last = max((each.arrived_at for each in arrivals), default=0.0)
    assert all(group.sent_at <= last for group in simulate_grouping(arrivals, rule, is_idle_known=True))


@given(st.lists(TIMES, max_size=30).map(sorted), FINITE_RULES, st.sampled_from([1, inf]))
def test_groups_of_another_than_the_preferred_size_are_sent_only_after_the_delay(
    arrival_times: list[float], rule: GroupingRule, max_calls: float
) -> None:
    rule = GroupingRule(4, (4,), rule.max_delay_s)
    for group in simulate_grouping(
        [WaitingItem(1, at) for at in arrival_times], rule, max_calls=max_calls, call_s=0.25
    ):
        assert sum(group.sizes) == 4 or group.sent_at >= arrival_times[group.items[0]] + rule.max_delay_s
