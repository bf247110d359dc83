"""Batch groups: members with equal keys wait here until the grouping rule sends the first of them
together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dispatcher.core.merging.grouping import Form, Forming, Waiting, form
from dispatcher.dispatch.merging.merged_calls import BatchItem, ServedModel

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dispatcher.dispatch.in_flight import HeldLease


@dataclass(slots=True, eq=False)
class _Waiters:
    """Members with one key, in order of arrival."""

    served: ServedModel
    items: list[BatchItem] = field(default_factory=list)
    until: float = float("-inf")
    """Time before which nothing changes, unless another member arrives."""


Formed = tuple[list[BatchItem], int]
"""Members that are sent together now, and the largest number of items allowed."""


class Company:
    """All batch groups of one process."""

    def __init__(self) -> None:
        self.next_at: float | None = None
        """Time of the next check. `None` if no member waits."""
        self._groups: dict[Hashable, _Waiters] = {}

    def __len__(self) -> int:
        """Number of members that wait."""
        return sum(len(group.items) for group in self._groups.values())

    @property
    def weightless(self) -> int:
        """Number of members that count no unit yet, because they will share the unit of a call."""
        return sum(not item.held.lease.units for each in self._groups.values() for item in each.items)

    def add(self, item: BatchItem, now: float, left_s: float) -> None:
        """Add a member that may be sent from now on.

        `left_s` is the time to its deadline. If that is short, or the member is sent alone, it waits for no
        others.
        """
        delay_s = item.served.delay_s
        since = now if left_s > 2 * delay_s and not item.alone else float("-inf")
        item.waiting = Waiting(item.part.size, since, float(item.part.tokens))
        # A member that is sent alone is a group of its own.
        key = (item.key, item.token) if item.alone else item.key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Waiters(item.served)
        group.items.append(item)
        group.until = now
        self.next_at = now

    def formed(
        self, now: float, *, nobody_comes: bool, ours: Callable[[HeldLease], bool]
    ) -> tuple[list[Formed], list[HeldLease]]:
        """Return the calls that are ready, and the leases that must not be sent: stopped, lost, or not
        certainly still held.

        `is_complete` says that no other request can arrive soon.
        """
        batches: list[Formed] = []
        gone: list[HeldLease] = []
        self.next_at = None
        for key, group in list(self._groups.items()):
            # Most groups are not due: skip the check of each lease, which this loop runs at every turn.
            if now >= group.until or nobody_comes:
                stale = [item for item in group.items if item.held.cut or not ours(item.held)]
                if stale:
                    gone += [item.held for item in stale]
                    group.items = [item for item in group.items if item not in stale]
                batches.extend(_formed(group, now, nobody_comes=nobody_comes))
            if not group.items:
                del self._groups[key]
            elif self.next_at is None or group.until < self.next_at:
                self.next_at = group.until
        return batches, gone

    def given_up(self) -> list[HeldLease]:
        """Remove and return all members, because the gate has closed or the process ends."""
        held = [item.held for group in self._groups.values() for item in group.items]
        self._groups.clear()
        self.next_at = None
        return held


def _formed(group: _Waiters, now: float, *, nobody_comes: bool) -> Iterator[Formed]:
    size = group.served.size
    while group.items:
        most = size.most(now)
        rule = _bounded(group.served, most)
        alone = nobody_comes or group.items[0].alone
        decided = form((item.waiting for item in group.items if item.waiting), rule, now, alone=alone)
        if not isinstance(decided, Form):
            group.until = decided.until
            return
        items, group.items = group.items[: decided.count], group.items[decided.count :]
        for item in items:
            item.held.waits = False
        size.goes(most)
        yield items, most


def _bounded(served: ServedModel, most: int) -> Forming:
    """Return the grouping rule within what the server is known to accept."""
    rule, tokens, delay_s = served.rule.forming, served.size.tokens, served.delay_s
    if most >= rule.max_size and tokens >= rule.max_weight and delay_s == rule.max_delay_s:
        return rule
    most, tokens = min(most, rule.max_size), min(tokens, rule.max_weight)
    return replace(rule, max_size=most, max_weight=tokens, max_delay_s=delay_s)
