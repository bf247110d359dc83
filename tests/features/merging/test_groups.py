"""Batch groups: which requests are sent together, and how long they wait."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.call_size import CallSize
from dispatcher.features.merging.groups import BatchGroups
from dispatcher.features.merging.merged_calls import BatchMember
from dispatcher.features.merging.rules import MergeMode
from dispatcher.kernel.in_flight import InFlightLease
from tests.features.merging.batch_members import RULE, build_member, build_target


def is_valid(_entry: InFlightLease) -> bool:
    return True


def take_ready_ids(groups: BatchGroups, now: float, *, is_complete: bool = False) -> list[list[int]]:
    """Return the entry ids of the requests that are ready now, for each call."""
    calls, stopped = groups.take_ready(now, is_complete=is_complete, is_lease_valid=is_valid)
    assert not stopped
    return [[member.entry.lease.entry_id for member in members] for members, _ in calls]


def build_groups(*members: BatchMember, now: float = 10.0, left_s: float = 1000.0) -> BatchGroups:
    groups = BatchGroups()
    for member in members:
        groups.add_member(member, now, left_s)
    return groups


def test_members_with_one_key_are_sent_together_when_a_call_is_full() -> None:
    target = build_target()
    groups = build_groups(*(build_member(n, target) for n in range(1, 7)))
    assert len(groups) == 6
    assert groups.next_due_at == 10.0
    assert take_ready_ids(groups, 10.0) == [[1, 2, 3, 4]]
    assert len(groups) == 2
    assert groups.next_due_at == 11.0, "the older one of the two that are left"


def test_member_waits_for_others_for_max_delay_s() -> None:
    target = build_target()
    groups = build_groups(build_member(1, target))
    groups.add_member(build_member(2, target), 10.5, 1000.0)
    assert take_ready_ids(groups, 10.5) == []
    assert groups.next_due_at == 11.0
    assert take_ready_ids(groups, 10.999) == []
    assert take_ready_ids(groups, 11.0) == [[1, 2]]
    assert not groups.next_due_at
    assert len(groups) == 0


def test_delay_is_stretched_for_slow_calls_unless_the_deadline_is_near() -> None:
    class SlowCallSize(CallSize):
        def compute_delay_s(self, rule_s: float) -> float:
            return 3 * rule_s

        def choose_max_items(self, now: float) -> int:
            return 4

    without_stretching = build_target()
    without_stretching.size = SlowCallSize(MergeMode.AUTO, 4)
    assert take_ready_ids(build_groups(build_member(3, without_stretching)), 11.0) == [[3]], (
        "the rule does not allow to stretch the delay"
    )
    target = build_target(replace(RULE, can_stretch_delay=True))
    target.size = SlowCallSize(MergeMode.AUTO, 4)
    groups = build_groups(build_member(1, target), left_s=6.1)
    assert take_ready_ids(groups, 12.9) == []
    assert take_ready_ids(groups, 13.0) == [[1]]
    assert take_ready_ids(build_groups(build_member(2, target), left_s=6.0), 10.0) == [[2]]


def test_each_group_has_its_own_key_and_its_own_delay() -> None:
    target, slow_target = (
        build_target(),
        build_target(replace(RULE, grouping=GroupingRule(4, max_delay_s=3.0))),
    )
    groups = build_groups(
        build_member(1, target, key="a"),
        build_member(2, slow_target, key="b"),
        build_member(3, target, key="a"),
    )
    assert take_ready_ids(groups, 11.0) == [[1, 3]]
    assert groups.next_due_at == 13.0
    assert take_ready_ids(groups, 13.0) == [[2]]


def test_complete_groups_are_sent_without_a_delay() -> None:
    target = build_target()
    groups = build_groups(
        build_member(1, target, key="a"), build_member(2, target, key="b"), build_member(3, target, key="a")
    )
    assert take_ready_ids(groups, 10.0) == []
    assert take_ready_ids(groups, 10.0, is_complete=True) == [[1, 3], [2]]


def test_complete_groups_wait_without_idle_flush() -> None:
    target = build_target(replace(RULE, grouping=GroupingRule(4, max_delay_s=1.0, idle_flush=False)))
    groups = build_groups(build_member(1, target))
    assert take_ready_ids(groups, 10.0, is_complete=True) == []
    assert take_ready_ids(groups, 11.0) == [[1]]


@pytest.mark.parametrize("left_s", [2.0, 0.5, -1.0])
def test_member_near_its_deadline_is_sent_immediately_with_its_group(left_s: float) -> None:
    target = build_target()
    groups = build_groups(build_member(1, target))
    groups.add_member(build_member(2, target), 10.0, left_s)
    assert take_ready_ids(groups, 10.0) == [[1, 2]]


def test_member_with_more_than_twice_the_delay_left_waits() -> None:
    target = build_target()
    assert take_ready_ids(build_groups(build_member(1, target), left_s=2.01), 10.0) == []


def test_member_that_is_sent_alone_is_sent_immediately_and_not_merged() -> None:
    target = build_target(replace(RULE, grouping=GroupingRule(4, max_delay_s=1.0, idle_flush=False)))
    groups = build_groups(
        build_member(1, target),
        build_member(2, target, is_sent_alone=True),
        build_member(3, target, is_sent_alone=True),
        build_member(4, target),
    )
    assert take_ready_ids(groups, 10.0) == [[2], [3]]
    assert take_ready_ids(groups, 11.0) == [[1, 4]]


def test_stopped_and_invalid_leases_are_not_sent() -> None:
    target = build_target()
    members = [build_member(n, target) for n in range(1, 5)]
    groups = build_groups(*members)
    members[0].entry.stop_reason = "cancelled"
    calls, stopped = groups.take_ready(
        10.0, is_complete=False, is_lease_valid=lambda entry: entry.lease.entry_id != 3
    )
    assert [entry.lease.entry_id for entry in stopped] == [1, 3]
    assert calls == [], "the other members do not fill a call"
    assert len(groups) == 2
    assert take_ready_ids(groups, 11.0) == [[2, 4]]


def test_group_is_removed_when_all_its_members_are_stopped() -> None:
    target = build_target()
    member = build_member(1, target)
    groups = build_groups(member)
    member.entry.stop_reason = "lost"
    calls, stopped = groups.take_ready(10.0, is_complete=False, is_lease_valid=is_valid)
    assert (calls, stopped) == ([], [member.entry])
    assert (len(groups), groups.next_due_at) == (0, None)


def test_take_all_removes_all_members() -> None:
    target = build_target()
    members = [
        build_member(1, target, key="a"),
        build_member(2, target, key="b"),
        build_member(3, target, key="a"),
    ]
    groups = build_groups(*members)
    assert {entry.lease.entry_id for entry in groups.take_all()} == {1, 2, 3}
    assert (len(groups), groups.next_due_at) == (0, None)
    assert groups.take_all() == []
    assert take_ready_ids(groups, 20.0) == []


def test_server_limits_on_items_and_tokens_bound_a_call() -> None:
    target = build_target(replace(RULE, grouping=GroupingRule(32)))
    target.size.server_max_items = 3
    assert take_ready_ids(build_groups(*(build_member(n, target) for n in range(1, 8))), 10.0) == [
        [1, 2, 3],
        [4, 5, 6],
        [7],
    ]
    target.size.server_max_items = None
    members = [build_member(n, target, "word " * 40) for n in range(1, 6)]
    target.size.server_max_tokens = 2 * members[0].part.tokens
    assert take_ready_ids(build_groups(*members), 10.0) == [[1, 2], [3, 4], [5]]


def test_ready_call_has_the_maximum_size_and_is_recorded_as_sent() -> None:
    recorded: list[int] = []

    class RecordingCallSize(CallSize):
        def record_send(self, max_items: int) -> None:
            recorded.append(max_items)

    target = build_target()
    target.size = RecordingCallSize(MergeMode.ON, 4)
    calls, _ = build_groups(build_member(1, target)).take_ready(
        11.0, is_complete=False, is_lease_valid=is_valid
    )
    assert [(len(members), max_items) for members, max_items in calls] == [(1, 4)]
    assert recorded == [4]


def test_lists_count_the_number_of_their_items() -> None:
    target = build_target()
    groups = build_groups(
        build_member(1, target, ["a", "b", "c"]),
        build_member(2, target, ["d", "e"]),
        build_member(3, target, ["f"] * 9),
    )
    assert take_ready_ids(groups, 10.0) == [[1], [2], [3]], "a list longer than a call is sent alone"


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 0.7),
            st.sampled_from("ab"),
            st.integers(1, 6),
            st.sampled_from([1000.0, 1.0]),
            st.booleans(),
            st.sampled_from(["", "", "", "stopped", "invalid"]),
        ),
        max_size=40,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_each_member_is_sent_once_in_order_with_its_key_and_in_time_or_reported_as_stopped(
    arrivals: list[tuple[float, str, int, float, bool, str]], delay_s: float
) -> None:
    target = build_target(replace(RULE, grouping=GroupingRule(4, max_delay_s=delay_s)))
    groups, now = BatchGroups(), 10.0
    added: dict[int, tuple[float, BatchMember]] = {}
    invalid_ids: set[int] = set()
    sent: dict[str, list[int]] = defaultdict(list)
    ended: list[int] = []

    def take_ready(at: float) -> None:
        calls, stopped = groups.take_ready(
            at, is_complete=False, is_lease_valid=lambda entry: entry.lease.entry_id not in invalid_ids
        )
        ended.extend(entry.lease.entry_id for entry in stopped)
        for members, max_items in calls:
            assert max_items == 4
            assert len({member.key for member in members}) == 1
            assert len(members) == 1 or (
                sum(member.part.size for member in members) <= 4
                and not any(member.is_sent_alone for member in members)
            )
            for member in members:
                entry_id = member.entry.lease.entry_id
                assert at <= added[entry_id][0] + delay_s + 1e-9
                assert member.entry.stop_reason is None
                assert entry_id not in invalid_ids
                sent[f"{member.key}{member.is_sent_alone}"].append(entry_id)
                ended.append(entry_id)
        assert groups.next_due_at is None or groups.next_due_at > at

    for number, (after_s, key, size, left_s, is_sent_alone, fate) in enumerate(arrivals):
        at = now + after_s
        while groups.next_due_at is not None and groups.next_due_at <= at:
            take_ready(groups.next_due_at)
        now = at
        member = build_member(
            number, target, [f"text {n}" for n in range(size)], key=key, is_sent_alone=is_sent_alone
        )
        added[number] = (now, member)
        groups.add_member(member, now, left_s)
        take_ready(now)
        if fate == "stopped" and number not in ended:
            member.entry.stop_reason = "cancelled"
        elif fate and number not in ended:
            invalid_ids.add(number)
    while groups.next_due_at is not None:
        assert groups.next_due_at < inf
        take_ready(groups.next_due_at)
    assert sorted(ended) == list(range(len(arrivals)))
    assert all(entries == sorted(entries) for entries in sent.values())
    assert len(groups) == 0
