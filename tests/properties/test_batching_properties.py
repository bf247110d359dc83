"""The laws of the former, one test each: each sentence of its rule."""

from __future__ import annotations

from itertools import accumulate
from math import inf, nextafter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.merging.grouping import (
    GroupingRule,
    GroupReady,
    GroupTrigger,
    WaitingItem,
    WaitUntil,
    group_requests,
)
from tests.formers import play

# Eighths of a second add up without rounding: what is due at a time is due then.
TIMES = st.integers(0, 80).map(lambda eighths: eighths / 8)
ITEMS = st.builds(WaitingItem, st.integers(1, 12), TIMES, st.integers(0, 6).map(float))
WAITING = st.lists(ITEMS, max_size=30).map(lambda items: sorted(items, key=lambda each: each.arrived_at))
SIZES = st.integers(1, 10)
EITHER = st.booleans()
DELAYS = st.integers(0, 24).map(lambda eighths: eighths / 8)


def rules(
    max_size: st.SearchStrategy[int] = SIZES,
    max_delay_s: st.SearchStrategy[float] = DELAYS,
    idle_flush: st.SearchStrategy[bool] = EITHER,
) -> st.SearchStrategy[GroupingRule]:
    return st.builds(
        GroupingRule,
        max_size=max_size,
        preferred_sizes=st.lists(st.integers(1, 14), max_size=3).map(tuple),
        max_delay_s=max_delay_s,
        idle_flush=idle_flush,
        max_weight=st.one_of(st.just(inf), st.integers(1, 12).map(float)),
    )


LIMITED = rules()
RULES = rules(max_delay_s=st.one_of(DELAYS, st.just(inf)))
PATIENT = rules(max_size=st.just(1000), max_delay_s=st.sampled_from([4.0, 100.0, inf]))


def fits(items: list[WaitingItem], rule: GroupingRule) -> bool:
    size, weight = sum(each.size for each in items), sum(each.weight for each in items)
    return size <= rule.max_size and weight <= rule.max_weight


def most(items: list[WaitingItem], rule: GroupingRule) -> int:
    """The longest beginning that fits, and one item in any case."""
    return max((n for n in range(1, len(items) + 1) if fits(items[:n], rule)), default=min(1, len(items)))


@given(WAITING, RULES, TIMES, st.booleans(), st.booleans())
def test_the_rules_in_their_order(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, room: bool, alone: bool
) -> None:
    """The whole of it, said a second time, and slowly."""
    answer = group_requests(waiting, rule, now, has_room=room, is_idle=alone)
    gathered = most(waiting, rule)
    reached = list(accumulate(each.size for each in waiting[:gathered]))
    met = [n for n, size in enumerate(reached, 1) if size in rule.preferred_sizes]
    nobody_fits = gathered < len(waiting) or (reached and reached[-1] >= rule.max_size)
    if not room or not waiting:
        assert answer == WaitUntil(inf)
    elif nobody_fits or not fits(waiting[:gathered], rule):
        assert answer == GroupReady(gathered, GroupTrigger.FULL)
    elif met:
        assert answer == GroupReady(met[-1], GroupTrigger.PREFERRED)
    elif rule.max_delay_s == 0 or now >= min(each.arrived_at for each in waiting) + rule.max_delay_s:
        assert answer == GroupReady(len(waiting), GroupTrigger.DUE)
    elif alone and rule.idle_flush:
        assert answer == GroupReady(len(waiting), GroupTrigger.IDLE)
    else:
        assert answer == WaitUntil(min(each.arrived_at for each in waiting) + rule.max_delay_s)


@given(WAITING, RULES, TIMES, st.booleans())
def test_no_batch_is_above_the_most_but_a_single_item(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, alone: bool
) -> None:
    answer = group_requests(waiting, rule, now, is_idle=alone)
    if isinstance(answer, GroupReady):
        assert 1 <= answer.count <= len(waiting)
        assert answer.count == 1 or fits(waiting[: answer.count], rule)


@given(WAITING, RULES | PATIENT, TIMES, st.booleans())
def test_wait_until_is_the_earliest_time_at_which_the_answer_changes(
    waiting: list[WaitingItem], rule: GroupingRule, now: float, alone: bool
) -> None:
    answer = group_requests(waiting, rule, now, is_idle=alone)
    if isinstance(answer, GroupReady):
        return
    assert answer.until > now
    before = min(nextafter(answer.until, -inf), 1e9)
    for at in (now, (now + before) / 2, before):
        assert group_requests(waiting, rule, at, is_idle=alone) == answer
    if answer.until < inf:
        assert isinstance(group_requests(waiting, rule, answer.until, is_idle=alone), GroupReady)


@given(WAITING, WAITING, RULES, TIMES)
def test_a_batch_that_is_full_is_the_same_whoever_else_comes(
    waiting: list[WaitingItem], later: list[WaitingItem], rule: GroupingRule, now: float
) -> None:
    answer = group_requests(waiting, rule, now)
    if isinstance(answer, GroupReady) and answer.trigger is GroupTrigger.FULL:
        assert group_requests(waiting + later, rule, now) == answer


@given(WAITING, LIMITED, st.sampled_from([1, 2, inf]), st.sampled_from([0.125, 1.0]), st.booleans())
def test_every_item_goes_exactly_once_and_in_order(
    arrivals: list[WaitingItem], rule: GroupingRule, calls: float, takes_s: float, alone_known: bool
) -> None:
    sent = play(arrivals, rule, calls=calls, takes_s=takes_s, alone_known=alone_known)
    assert [number for batch in sent for number in batch.items] == list(range(len(arrivals)))


@given(WAITING, LIMITED, st.booleans())
def test_nothing_waits_longer_than_its_delay_while_there_is_room(
    arrivals: list[WaitingItem], rule: GroupingRule, alone_known: bool
) -> None:
    for batch in play(arrivals, rule, alone_known=alone_known):
        assert all(batch.at <= arrivals[number].arrived_at + rule.max_delay_s for number in batch.items)


@given(WAITING, rules(idle_flush=st.just(True)))
def test_nothing_stays_once_it_is_known_that_nobody_else_comes(
    arrivals: list[WaitingItem], rule: GroupingRule
) -> None:
    """However long the delay."""
    last = max((each.arrived_at for each in arrivals), default=0.0)
    assert all(batch.at <= last for batch in play(arrivals, rule, alone_known=True))


@given(st.lists(TIMES, max_size=30).map(sorted), LIMITED, st.sampled_from([1, inf]))
def test_with_one_size_that_is_preferred_only_the_delay_makes_another(
    since: list[float], rule: GroupingRule, calls: float
) -> None:
    rule = GroupingRule(4, (4,), rule.max_delay_s)
    for batch in play([WaitingItem(1, at) for at in since], rule, calls=calls, takes_s=0.25):
        assert sum(batch.sizes) == 4 or batch.at >= since[batch.items[0]] + rule.max_delay_s
