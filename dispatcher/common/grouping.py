"""Decide which of the waiting requests are sent now, together.

Items are sent in the order in which they arrived, so a group consists of the first waiting items. Items are
gathered one by one, and the first condition that is true decides:

    full        with the next item the group would exceed the rule      what was gathered is sent
    preferred   a preferred size was reached on the way                 the largest such group is sent
    due         the oldest item has waited for max_delay_s              what was gathered is sent
    idle        no other item can arrive now, and idle_flush is set     what was gathered is sent

Otherwise the items wait until the oldest is due, unless something happens before. An item that is larger than
the rule allows is sent alone. A decision reads only the items that could be sent together, however many wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class GroupingRule:
    """Limits of one rule. Raise `ValueError` if they are invalid."""

    max_size: int
    """Largest sum of the sizes of a group's items."""
    preferred_sizes: tuple[int, ...] = ()
    """Preferred sizes. Sizes above max_size are never reached."""
    max_delay_s: float = 0.0
    """Longest time that the oldest item waits for others, while there is room."""
    idle_flush: bool = True
    """True to send what was gathered if no other item can arrive."""
    max_weight: float = inf
    """Largest sum of a second measure besides the size: the tokens of a call."""

    def __post_init__(self) -> None:
        if not self.max_size >= 1:
            raise ValueError(f"max_size: at least 1, not {self.max_size}")
        if any(not size >= 1 for size in self.preferred_sizes):
            raise ValueError(f"preferred_sizes: at least 1 each, not {self.preferred_sizes}")
        if not self.max_delay_s >= 0:
            raise ValueError(f"max_delay_s: 0 or more, not {self.max_delay_s}")
        if not self.max_weight > 0:
            raise ValueError(f"max_weight: above 0, not {self.max_weight}")


@dataclass(frozen=True, slots=True)
class WaitingItem:
    """An item that waits to be sent."""

    size: int
    """Size of the item. A size below 1 counts as 1."""
    arrived_at: float
    weight: float = 0.0
    """Weight of the item. A weight below 0 counts as 0; NaN fits into no group with other items."""


@dataclass(frozen=True, slots=True)
class GroupReady:
    """The first `count` waiting items are sent now, together. Callers then ask again, because more may be
    sent."""

    count: int


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing is sent before `until` (infinity: never), unless an item arrives, room appears, or no item can
    arrive."""

    until: float


def group_requests(
    waiting: Iterable[WaitingItem],
    rule: GroupingRule,
    now: float,
    *,
    has_room: bool = True,
    is_idle: bool = False,
) -> GroupReady | WaitUntil:
    """Return which of the waiting items, given in order of arrival, are sent now.

    `has_room`: a group may be sent. `is_idle`: no other item can arrive now. `now` and `arrived_at` are of
    one clock, which never goes back.
    """
    if not has_room:
        return WaitUntil(inf)
    gathered, preferred, oldest_at, is_full = _measure_group(waiting, rule)
    if is_full:
        return GroupReady(gathered)
    if preferred:
        return GroupReady(preferred)
    due_at = oldest_at + rule.max_delay_s
    if gathered and (now >= due_at or not rule.max_delay_s):
        return GroupReady(gathered)
    if gathered and is_idle and rule.idle_flush:
        return GroupReady(gathered)
    return WaitUntil(due_at)


def _measure_group(waiting: Iterable[WaitingItem], rule: GroupingRule) -> tuple[int, int, float, bool]:
    """Return how many items could be sent together, how many make the largest preferred size, since when the
    oldest of them waits, and whether no other item can join them."""
    count = size = preferred = 0
    weight, oldest_at = 0.0, inf
    max_size, max_weight, preferred_sizes = rule.max_size, rule.max_weight, rule.preferred_sizes
    for item in waiting:
        # This loop runs for each arrival. With max() and similar functions it is four times as slow.
        size += item.size
        if item.size < 1:
            size += 1 - item.size
        # Negated comparisons, here and below, treat NaN as too heavy.
        if not item.weight <= 0.0:
            weight += item.weight
        is_over = size > max_size or not weight <= max_weight
        if is_over and count:
            return count, preferred, oldest_at, True
        count += 1
        # Exactly full, or a first item that exceeds the rule and is sent alone.
        if is_over or size == max_size:
            return count, preferred, oldest_at, True
        if item.arrived_at < oldest_at:
            oldest_at = item.arrived_at
        if size in preferred_sizes:
            preferred = count
    return count, preferred, oldest_at, False
