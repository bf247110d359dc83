"""A dispatcher of batches in virtual time, for the tests of the former."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from dispatcher.core.merging.grouping import (
    GroupingRule,
    GroupReady,
    GroupTrigger,
    WaitingItem,
    group_requests,
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch that went: when, which items by their number, and why."""

    at: float
    items: tuple[int, ...]
    sizes: tuple[int, ...]
    by: GroupTrigger


def play(
    arrivals: Iterable[WaitingItem],
    rule: GroupingRule,
    *,
    takes_s: float = 0.0,
    calls: float = inf,
    alone_known: bool = False,
) -> list[Sent]:
    """What goes when. `calls`: so many at once, each of which takes `takes_s`. `alone_known`: the former is
    told when no further item can come."""
    coming = sorted(enumerate(arrivals), key=lambda each: each[1].arrived_at)
    waiting: list[tuple[int, WaitingItem]] = []
    ends: list[float] = []
    sent: list[Sent] = []
    now = coming[0][1].arrived_at if coming else 0.0
    while coming or waiting:
        while coming and coming[0][1].arrived_at <= now:
            waiting.append(coming.pop(0))
        ends = [end for end in ends if end > now]
        answer = group_requests(
            (item for _, item in waiting),
            rule,
            now,
            has_room=len(ends) < calls,
            is_idle=alone_known and not coming,
        )
        if isinstance(answer, GroupReady):
            going, waiting = waiting[: answer.count], waiting[answer.count :]
            numbers, sizes = tuple(n for n, _ in going), tuple(item.size for _, item in going)
            sent.append(Sent(now, numbers, sizes, answer.trigger))
            if takes_s:
                ends.append(now + takes_s)
            continue
        before = now
        now = min(answer.until, *(item.arrived_at for _, item in coming[:1]), *ends, inf)
        assert before < now < inf, "it waits for something that comes, and later"
    return sent
