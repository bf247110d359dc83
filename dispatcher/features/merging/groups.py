"""Batch groups: members with equal keys wait here until the grouping rule sends the first of them
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, group_requests
from dispatcher.features.merging.merged_calls import BatchMember, MergeTarget

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dispatcher.kernel.in_flight import InFlightLease


@dataclass(slots=True, eq=False)
class _BatchGroup:
    """Members with one key, in order of arrival."""

    target: MergeTarget
    members: list[BatchMember] = field(default_factory=list)
    next_check_at: float = float("-inf")
    """Time before which nothing changes, unless another member arrives."""


ReadyCall = tuple[list[BatchMember], int]
"""Members that are sent together now, and the largest number of items allowed."""


class BatchGroups:
    """All batch groups of one process."""

    def __init__(self) -> None:
        self.next_due_at: float | None = None
        """Time of the next check. `None` if no member waits."""
        self._groups: dict[Hashable, _BatchGroup] = {}

    def __len__(self) -> int:
        """Number of members that wait."""
        return sum(len(group.members) for group in self._groups.values())

    @property
    def unweighted_count(self) -> int:
        """Number of members that count no unit yet, because they will share the unit of a call."""
        return sum(
            not member.entry.lease.units for group in self._groups.values() for member in group.members
        )

    def add_member(self, member: BatchMember, now: float, left_s: float) -> None:
        """Add a member that may be sent from now on.

        `left_s` is the time to its deadline. If that is short, or the member is sent alone, it waits for no
        others.
        """
        delay_s = member.target.delay_s
        since = now if left_s > 2 * delay_s and not member.is_sent_alone else float("-inf")
        member.waiting = WaitingItem(member.part.size, since, float(member.part.tokens))
        # A member that is sent alone is a group of its own.
        key = (member.key, member.token) if member.is_sent_alone else member.key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _BatchGroup(member.target)
        group.members.append(member)
        group.next_check_at = now
        self.next_due_at = now

    def take_ready(
        self, now: float, *, is_complete: bool, is_lease_valid: Callable[[InFlightLease], bool]
    ) -> tuple[list[ReadyCall], list[InFlightLease]]:
        """Return the calls that are ready, and the leases that must not be sent: stopped, lost, or not
        certainly still held.

        `is_complete` says that no other request can arrive soon, except for the next turns of sequences.
        """
        ready: list[ReadyCall] = []
        stopped: list[InFlightLease] = []
        self.next_due_at = None
        for key, group in list(self._groups.items()):
            # Most groups are not due: skip the check of each lease, which this loop runs at every turn.
            if now >= group.next_check_at or is_complete:
                stale = [
                    member
                    for member in group.members
                    if member.entry.stop_reason or not is_lease_valid(member.entry)
                ]
                if stale:
                    stopped += [member.entry for member in stale]
                    group.members = [member for member in group.members if member not in stale]
                ready.extend(_take_ready_calls(group, now, is_complete=is_complete))
            if not group.members:
                del self._groups[key]
            elif self.next_due_at is None or group.next_check_at < self.next_due_at:
                self.next_due_at = group.next_check_at
        return ready, stopped

    def take_all(self) -> list[InFlightLease]:
        """Remove and return all members, because the gate has closed or the process ends."""
        entries = [member.entry for group in self._groups.values() for member in group.members]
        self._groups.clear()
        self.next_due_at = None
        return entries


def _take_ready_calls(group: _BatchGroup, now: float, *, is_complete: bool) -> Iterator[ReadyCall]:
    size = group.target.size
    while group.members:
        max_items = size.choose_max_items(now)
        rule = _bound_rule(group.target, max_items)
        # The next turns of sequences in flight are not in the queue yet, but can join.
        is_idle = is_complete and not group.target.in_flight_turns
        decided = group_requests(
            (member.waiting for member in group.members if member.waiting),
            rule,
            now,
            is_idle=is_idle or group.members[0].is_sent_alone,
        )
        if not isinstance(decided, GroupReady):
            group.next_check_at = decided.until
            return
        members, group.members = group.members[: decided.count], group.members[decided.count :]
        size.record_send(max_items)
        yield members, max_items


def _bound_rule(target: MergeTarget, max_items: int) -> GroupingRule:
    """Return the grouping rule within what the server is known to accept."""
    rule, tokens, delay_s = target.rule.grouping, target.size.server_max_tokens, target.delay_s
    if max_items >= rule.max_size and tokens >= rule.max_weight and delay_s == rule.max_delay_s:
        return rule
    max_items, tokens = min(max_items, rule.max_size), min(tokens, rule.max_weight)
    return replace(rule, max_size=max_items, max_weight=tokens, max_delay_s=delay_s)
