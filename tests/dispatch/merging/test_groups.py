"""Who waits for whom, until when, and who goes with whom."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.merging.call_size import CallSize
from dispatcher.core.merging.grouping import GroupingRule, MergeMode
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.merging.groups import BatchGroups
from dispatcher.dispatch.merging.merged_calls import BatchMember
from tests.dispatch.riders import RULE, rider, served_by


def ours(_held: InFlightLease) -> bool:
    return True


def formed(company: BatchGroups, now: float, *, nobody_comes: bool = False) -> list[list[int]]:
    """The entries of those that go now, call by call."""
    batches, gone = company.take_ready(now, is_complete=nobody_comes, is_lease_valid=ours)
    assert not gone
    return [[item.entry.lease.entry_id for item in items] for items, _ in batches]


def waiting(*items: BatchMember, now: float = 10.0, left_s: float = 1000.0) -> BatchGroups:
    company = BatchGroups()
    for item in items:
        company.add_member(item, now, left_s)
    return company


def test_those_of_one_key_go_together_as_soon_as_they_are_enough() -> None:
    served = served_by()
    company = waiting(*(rider(n, served) for n in range(1, 7)))
    assert len(company) == 6
    assert company.next_due_at == 10.0
    assert formed(company, 10.0) == [[1, 2, 3, 4]]
    assert len(company) == 2
    assert company.next_due_at == 11.0, "when the older of the others is due"


def test_company_is_waited_for_as_long_as_the_rule_says() -> None:
    served = served_by()
    company = waiting(rider(1, served))
    company.add_member(rider(2, served), 10.5, 1000.0)
    assert formed(company, 10.5) == []
    assert company.next_due_at == 11.0
    assert formed(company, 10.999) == []
    assert formed(company, 11.0) == [[1, 2]]
    assert not company.next_due_at
    assert len(company) == 0


def test_where_calls_are_slow_it_is_waited_for_longer_but_not_by_one_whose_deadline_is_near() -> None:
    class Slow(CallSize):
        def compute_delay_s(self, rule_s: float) -> float:
            return 3 * rule_s

        def choose_max_items(self, now: float) -> int:
            return 4

    kept = served_by()
    kept.size = Slow(MergeMode.AUTO, 4)
    assert formed(waiting(rider(3, kept)), 11.0) == [[3]], "its rule says how long, and no more"
    served = served_by(replace(RULE, can_stretch_delay=True))
    served.size = Slow(MergeMode.AUTO, 4)
    company = waiting(rider(1, served), left_s=6.1)
    assert formed(company, 12.9) == []
    assert formed(company, 13.0) == [[1]]
    assert formed(waiting(rider(2, served), left_s=6.0), 10.0) == [[2]]


def test_only_those_of_one_key_go_together_and_each_group_by_its_own_clock() -> None:
    served, patient = served_by(), served_by(replace(RULE, grouping=GroupingRule(4, max_delay_s=3.0)))
    company = waiting(rider(1, served, key="a"), rider(2, patient, key="b"), rider(3, served, key="a"))
    assert formed(company, 11.0) == [[1, 3]]
    assert company.next_due_at == 13.0
    assert formed(company, 13.0) == [[2]]


def test_where_nobody_can_come_nobody_is_waited_for() -> None:
    served = served_by()
    company = waiting(rider(1, served, key="a"), rider(2, served, key="b"), rider(3, served, key="a"))
    assert formed(company, 10.0) == []
    assert formed(company, 10.0, nobody_comes=True) == [[1, 3], [2]]


def test_without_idle_flush_they_wait_even_then() -> None:
    served = served_by(replace(RULE, grouping=GroupingRule(4, max_delay_s=1.0, idle_flush=False)))
    company = waiting(rider(1, served))
    assert formed(company, 10.0, nobody_comes=True) == []
    assert formed(company, 11.0) == [[1]]


@pytest.mark.parametrize("left_s", [2.0, 0.5, -1.0])
def test_one_whose_deadline_is_near_waits_for_nobody_and_takes_along_who_is_there(left_s: float) -> None:
    served = served_by()
    company = waiting(rider(1, served))
    company.add_member(rider(2, served), 10.0, left_s)
    assert formed(company, 10.0) == [[1, 2]]


def test_one_with_more_than_twice_the_delay_left_waits() -> None:
    served = served_by()
    assert formed(waiting(rider(1, served), left_s=2.01), 10.0) == []


def test_one_that_travels_alone_goes_at_once_and_joins_nobody() -> None:
    served = served_by(replace(RULE, grouping=GroupingRule(4, max_delay_s=1.0, idle_flush=False)))
    company = waiting(
        rider(1, served), rider(2, served, alone=True), rider(3, served, alone=True), rider(4, served)
    )
    assert formed(company, 10.0) == [[2], [3]]
    assert formed(company, 11.0) == [[1, 4]]


def test_who_waits_says_so_until_it_goes() -> None:
    served = served_by()
    one = rider(1, served)
    company = waiting(one)
    formed(company, 10.0)
    assert one.entry.is_in_batch_group
    formed(company, 11.0)
    assert not one.entry.is_in_batch_group


def test_who_was_cut_or_is_not_surely_ours_does_not_go() -> None:
    served = served_by()
    items = [rider(n, served) for n in range(1, 5)]
    company = waiting(*items)
    items[0].entry.stop_reason = "cancelled"
    batches, gone = company.take_ready(
        10.0, is_complete=False, is_lease_valid=lambda held: held.lease.entry_id != 3
    )
    assert [held.lease.entry_id for held in gone] == [1, 3]
    assert batches == [], "the others are no full call any more"
    assert len(company) == 2
    assert formed(company, 11.0) == [[2, 4]]


def test_where_all_were_cut_nobody_waits() -> None:
    served = served_by()
    one = rider(1, served)
    company = waiting(one)
    one.entry.stop_reason = "lost"
    batches, gone = company.take_ready(10.0, is_complete=False, is_lease_valid=ours)
    assert (batches, gone) == ([], [one.entry])
    assert (len(company), company.next_due_at) == (0, None)


def test_all_who_wait_are_given_up_at_once() -> None:
    served = served_by()
    items = [rider(1, served, key="a"), rider(2, served, key="b"), rider(3, served, key="a")]
    company = waiting(*items)
    assert {held.lease.entry_id for held in company.take_all()} == {1, 2, 3}
    assert (len(company), company.next_due_at) == (0, None)
    assert company.take_all() == []
    assert formed(company, 20.0) == []


def test_what_the_server_takes_bounds_a_call_and_so_do_its_tokens() -> None:
    served = served_by(replace(RULE, grouping=GroupingRule(32)))
    served.size.server_max_items = 3
    assert formed(waiting(*(rider(n, served) for n in range(1, 8))), 10.0) == [[1, 2, 3], [4, 5, 6], [7]]
    served.size.server_max_items = None
    items = [rider(n, served, "word " * 40) for n in range(1, 6)]
    served.size.server_max_tokens = 2 * items[0].part.tokens
    assert formed(waiting(*items), 10.0) == [[1, 2], [3, 4], [5]]


def test_a_call_says_how_large_it_might_have_been_and_is_counted_as_sent() -> None:
    went: list[int] = []

    class Counted(CallSize):
        def record_send(self, max_items: int) -> None:
            went.append(max_items)

    served = served_by()
    served.size = Counted(MergeMode.ON, 4)
    batches, _ = waiting(rider(1, served)).take_ready(11.0, is_complete=False, is_lease_valid=ours)
    assert [(len(items), most) for items, most in batches] == [(1, 4)]
    assert went == [4]


def test_lists_count_what_they_hold() -> None:
    served = served_by()
    company = waiting(
        rider(1, served, ["a", "b", "c"]), rider(2, served, ["d", "e"]), rider(3, served, ["f"] * 9)
    )
    assert formed(company, 10.0) == [[1], [2], [3]], "and what is longer than a call may be goes alone"


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 0.7),
            st.sampled_from("ab"),
            st.integers(1, 6),
            st.sampled_from([1000.0, 1.0]),
            st.booleans(),
            st.sampled_from(["", "", "", "cut", "not ours"]),
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_each_goes_once_in_order_with_its_like_and_in_time(
    arrivals: list[tuple[float, str, int, float, bool, str]], delay_s: float
) -> None:
    """Or is told as one that must not go."""
    served = served_by(replace(RULE, grouping=GroupingRule(4, max_delay_s=delay_s)))
    company, now = BatchGroups(), 10.0
    came: dict[int, tuple[float, BatchMember]] = {}
    foreign: set[int] = set()
    sent: dict[str, list[int]] = defaultdict(list)
    ended: list[int] = []

    def look(at: float) -> None:
        batches, gone = company.take_ready(
            at, is_complete=False, is_lease_valid=lambda held: held.lease.entry_id not in foreign
        )
        ended.extend(held.lease.entry_id for held in gone)
        for items, most in batches:
            assert most == 4
            assert len({item.key for item in items}) == 1
            assert len(items) == 1 or (
                sum(i.part.size for i in items) <= 4 and not any(i.is_sent_alone for i in items)
            )
            for item in items:
                entry = item.entry.lease.entry_id
                assert at <= came[entry][0] + delay_s + 1e-9
                assert item.entry.stop_reason is None
                assert entry not in foreign
                sent[f"{item.key}{item.is_sent_alone}"].append(entry)
                ended.append(entry)
        assert company.next_due_at is None or company.next_due_at > at

    for number, (after_s, key, size, left_s, alone, fate) in enumerate(arrivals):
        at = now + after_s
        while company.next_due_at is not None and company.next_due_at <= at:
            look(company.next_due_at)
        now = at
        item = rider(number, served, [f"text {n}" for n in range(size)], key=key, alone=alone)
        came[number] = (now, item)
        company.add_member(item, now, left_s)
        look(now)
        if fate == "cut" and item.entry.is_in_batch_group:
            item.entry.stop_reason = "cancelled"
        elif fate and item.entry.is_in_batch_group:
            foreign.add(number)
    while company.next_due_at is not None:
        assert company.next_due_at < inf
        look(company.next_due_at)
    assert sorted(ended) == list(range(len(arrivals)))
    assert all(entries == sorted(entries) for entries in sent.values())
    assert len(company) == 0
