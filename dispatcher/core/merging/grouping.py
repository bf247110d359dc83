"""The former of batches: which of those that wait go now, together. Pure.

Items go in the order in which they came: what is formed is the first so many of those that wait. They are
gathered one by one, and the first of these that holds decides:

    full        with the next one it would be more than the rule allows    what was gathered goes
    preferred   a preferred size was met on the way                        those that make the largest such
    due         the oldest has waited for max_delay_s                      what was gathered goes
    alone       nobody else can come now, and the rule has idle_flush      what was gathered goes

Else they wait until the oldest is due, unless something happens before. An item larger than the rule allows
goes alone. An answer costs a look at those that could go together, however many wait.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dispatcher.core.merging.shapes import Shape


class FormedBy(enum.StrEnum):
    """Why a batch goes now."""

    FULL = "full"
    PREFERRED = "preferred"
    DUE = "due"
    ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Forming:
    """One rule's numbers. ValueError for those that make no sense."""

    max_size: int
    """What the sizes of a batch's items come to, at the most."""
    preferred_sizes: tuple[int, ...] = ()
    """Those above max_size are never met."""
    max_delay_s: float = 0.0
    """How long the oldest waits for others, where there is room."""
    idle_flush: bool = True
    """Send what there is when nobody else can come."""
    max_weight: float = inf
    """A second measure that sums up beside the size: the tokens of a call."""

    def __post_init__(self) -> None:
        if not self.max_size >= 1:
            raise ValueError(f"max_size: at least 1, not {self.max_size}")
        if any(not size >= 1 for size in self.preferred_sizes):
            raise ValueError(f"preferred_sizes: at least 1 each, not {self.preferred_sizes}")
        if not self.max_delay_s >= 0:
            raise ValueError(f"max_delay_s: 0 or more, not {self.max_delay_s}")
        if not self.max_weight > 0:
            raise ValueError(f"max_weight: above 0, not {self.max_weight}")


CHECK_EVERY = 200


class Mode(enum.StrEnum):
    OFF = "off"
    AUTO = "auto"
    ON = "on"


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Which requests may travel together, and how many."""

    paths: tuple[str, ...]
    """Patterns; the first rule that has one for a path counts."""
    shape: Shape
    mode: Mode
    forming: Forming
    unit_per_call: bool = False
    """A call counts one unit, however many items it has; else each item does."""
    stretches: bool = False
    """Company is waited for longer than `forming` says where calls are slow."""
    max_items: int | None = None
    """A longer list is sent in several calls; None: until the server says what it takes."""
    check_every: int = CHECK_EVERY
    """Number of merged calls per check. A check sends one item of the call again on its own, and compares
    the two answers."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One item."""

    size: int
    """Less than 1 counts as 1."""
    since: float
    weight: float = 0.0
    """Less than 0 counts as 0; what is no number fits nowhere."""


@dataclass(frozen=True, slots=True)
class Form:
    """The first `count` of those that wait go now, together. Then ask again: more may be able to go."""

    count: int
    by: FormedBy


@dataclass(frozen=True, slots=True)
class Wait:
    """None goes before `until` (inf: never), unless one more comes, room does, or nobody else can come."""

    until: float


def form(
    waiting: Iterable[Waiting], rule: Forming, now: float, *, room: bool = True, alone: bool = False
) -> Form | Wait:
    """What goes now of those that wait, given in the order in which they came.

    `room`: a batch may be sent. `alone`: nobody else can come now. `now` and `since` are of one clock, which
    does not go back.
    """
    if not room:
        return Wait(inf)
    together, preferred, oldest, full = _gathered(waiting, rule)
    if full:
        return Form(together, FormedBy.FULL)
    if preferred:
        return Form(preferred, FormedBy.PREFERRED)
    due = oldest + rule.max_delay_s
    if together and (now >= due or not rule.max_delay_s):
        return Form(together, FormedBy.DUE)
    if together and alone and rule.idle_flush:
        return Form(together, FormedBy.ALONE)
    return Wait(due)


def _gathered(waiting: Iterable[Waiting], rule: Forming) -> tuple[int, int, float, bool]:
    """How many could go together, how many make the largest preferred size, since when the oldest of them
    waits, and whether no other one can join them."""
    count = size = preferred = 0
    weight, oldest = 0.0, inf
    max_size, max_weight, preferred_sizes = rule.max_size, rule.max_weight, rule.preferred_sizes
    for item in waiting:
        # Looked at with each arrival. Built-in functions would make it four times as slow.
        size += item.size
        if item.size < 1:
            size += 1 - item.size
        if not item.weight <= 0.0:
            weight += item.weight
        over = size > max_size or not weight <= max_weight
        if over and count:
            return count, preferred, oldest, True
        count += 1
        if over or size == max_size:
            return count, preferred, oldest, True
        if item.since < oldest:
            oldest = item.since
        if size in preferred_sizes:
            preferred = count
    return count, preferred, oldest, False
