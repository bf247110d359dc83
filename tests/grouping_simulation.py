"""Simulation in virtual time of a dispatcher that groups requests, for the tests of `group_requests`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, group_requests


@dataclass(frozen=True, slots=True)
class SentGroup:
    """A group that was sent: time, numbers and sizes of its items."""

    sent_at: float
    items: tuple[int, ...]
    sizes: tuple[int, ...]


def simulate_grouping(
    arrivals: Iterable[WaitingItem],
    rule: GroupingRule,
    *,
    call_s: float = 0.0,
    max_calls: float = inf,
    is_idle_known: bool = False,
) -> list[SentGroup]:
    """Return the groups that are sent and when.

    At most `max_calls` calls run at once, and each takes `call_s`. If `is_idle_known` is set,
    `group_requests` is informed as soon as no further item can arrive.
    """
    arriving = sorted(enumerate(arrivals), key=lambda each: each[1].arrived_at)
    waiting: list[tuple[int, WaitingItem]] = []
    call_ends: list[float] = []
    sent: list[SentGroup] = []
    now = arriving[0][1].arrived_at if arriving else 0.0
    while arriving or waiting:
        while arriving and arriving[0][1].arrived_at <= now:
            waiting.append(arriving.pop(0))
        call_ends = [end for end in call_ends if end > now]
        decision = group_requests(
            (item for _, item in waiting),
            rule,
            now,
            has_room=len(call_ends) < max_calls,
            is_idle=is_idle_known and not arriving,
        )
        if isinstance(decision, GroupReady):
            taken, waiting = waiting[: decision.count], waiting[decision.count :]
            numbers, sizes = tuple(n for n, _ in taken), tuple(item.size for _, item in taken)
            sent.append(SentGroup(now, numbers, sizes))
            if call_s:
                call_ends.append(now + call_s)
            continue
        before = now
        now = min(decision.until, *(item.arrived_at for _, item in arriving[:1]), *call_ends, inf)
        assert before < now < inf, "the simulation waits for a later event that will happen"
    return sent
