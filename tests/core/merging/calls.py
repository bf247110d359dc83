"""A model server behind a limit, in virtual time, and calls of the sizes that `CallSize` allows.

`python -m tests.core.merging.calls` prints the table of docs/how-to/batching.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, log2
from random import Random

from dispatcher.core.gateway.outcome import Delivered
from dispatcher.core.merging.call_size import CallSize
from dispatcher.core.merging.call_size_epochs import CallMeasurement
from dispatcher.core.merging.grouping import GroupingRule, GroupReady, MergeMode, WaitingItem, group_requests

REFUSED_S = 0.001


@dataclass(frozen=True)
class Server:
    """So many calls at once, the others wait for their turn."""

    takes_s: Callable[[int], float]
    """What a call of so many items takes, when its turn has come."""
    workers: int = 1
    max_limit: int | None = None
    """Longer lists are refused at once."""


def serial(call_s: float, item_s: float, workers: int = 1) -> Server:
    """One call after the other, and within it one item after the other."""
    return Server(lambda items: call_s + item_s * items, workers)


def parallel(call_s: float, item_s: float) -> Server:
    """All calls at once, and within each one item after the other: there merging never pays."""
    return serial(call_s, item_s, workers=10**6)


def logarithmic(call_s: float, step_s: float) -> Server:
    """One call after the other, which takes one step more where it has about twice as many items."""
    return Server(lambda items: call_s + step_s * log2(1 + items))


@dataclass
class PoolLine:
    """A dispatcher that holds at most `limit` single items at a time, as long as some come."""

    size: CallSize
    server: Server
    limit: int = 32
    max_delay_s: float = 0.02
    stretches: bool = False
    """`max_delay_s` is the least of it, where calls are slow."""
    jitter: float = 0.0
    """The server takes up to this share longer or shorter, so that calls fall into no step that only a
    machine without any noise could keep."""
    every_s: float = 0.0
    """They come one by one; 0: all are there from the beginning."""
    now: float = 1000.0
    done: int = 0
    """Items that were answered."""
    unit_s: float = 0.0
    """Units × seconds that they were held for."""
    most_held: int = 0
    calls: list[int] = field(default_factory=list)
    """Items of each that was sent."""
    refused: list[float] = field(default_factory=list)
    """When calls were sent that were refused."""
    _draws: Random = field(default_factory=lambda: Random(0))
    _came_at: float = 1000.0
    _held: int = 0
    _at_gateway: int = 0
    _rules: dict[tuple[int, float], GroupingRule] = field(default_factory=dict)
    _waiting: list[WaitingItem] = field(default_factory=list)
    _busy: list[float] = field(default_factory=list)
    """Until when each worker is that was ever needed."""
    _ends: list[tuple[float, int, int, list[WaitingItem], bool]] = field(default_factory=list)

    def run_batch(self, items: int) -> PoolLine:
        """Until so many more items were answered."""
        until = self.done + items
        while self.done < until:
            due = self._go()
            ends_at = self._ends[0][0] if self._ends else inf
            self.now = max(self.now, min(ends_at, due))
            while self._ends and self._ends[0][0] <= self.now:
                self._end()
        return self

    def becomes(self, server: Server) -> None:
        """Another server takes the place of this one."""
        self.server, self._busy = server, []

    def rate(self, items: int) -> float:
        """Items per unit-second, over so many more of them."""
        done, unit_s = self.done, self.unit_s
        self.run_batch(items)
        return (self.done - done) / (self.unit_s - unit_s)

    def _go(self) -> float:
        """Lease what fits, send what goes. When to look again, though no call has ended by then."""
        while self._held < self.limit and self._came_at <= self.now:
            self._came_at += self.every_s
            self._held += 1
            self._waiting.append(WaitingItem(1, self.now))
        self.most_held = max(self.most_held, self._held)
        full = self._held >= self.limit
        comes_at = inf if full else self._came_at
        nobody_comes = not self._at_gateway if full else bool(self.every_s)
        while self._waiting:
            most = self.size.choose_max_items(self.now)
            rule = most, self.size.compute_delay_s(self.max_delay_s) if self.stretches else self.max_delay_s
            if rule not in self._rules:
                self._rules = {rule: GroupingRule(most, self.size.preferred_sizes, rule[1])}
            decided = group_requests(self._waiting, self._rules[rule], self.now, is_idle=nobody_comes)
            if not isinstance(decided, GroupReady):
                return min(comes_at, decided.until)
            items, self._waiting = self._waiting[: decided.count], self._waiting[decided.count :]
            self._begin(most, items)
        return comes_at

    def _begin(self, most: int, items: list[WaitingItem]) -> None:
        server, begins_at = self.server, self.now
        refused = server.max_limit is not None and len(items) > server.max_limit
        if refused:
            self.refused.append(self.now)
            ends_at = self.now + REFUSED_S
        else:
            if len(self._busy) >= server.workers:
                begins_at = max(begins_at, heapq.heappop(self._busy))
            takes_s = server.takes_s(len(items)) * self._draws.uniform(1 - self.jitter, 1 + self.jitter)
            ends_at = begins_at + takes_s
            heapq.heappush(self._busy, ends_at)
        self.calls.append(len(items))
        self.size.record_send(most)
        self._at_gateway += len(items)
        heapq.heappush(self._ends, (ends_at, len(self.calls), most, items, refused))

    def _end(self) -> None:
        _, _, most, items, refused = heapq.heappop(self._ends)
        self._at_gateway -= len(items)
        if refused:
            body = b'{"error": "batch size %d > maximum allowed batch size %d"}'
            answer = Delivered(413, body % (len(items), self.server.max_limit or 0))
            assert self.size.learn_from_refusal(answer, len(items), 0, self.now)
            self._waiting[:0] = items
            return
        self._held -= len(items)
        self.done += len(items)
        unit_s = sum(self.now - item.arrived_at for item in items)
        self.unit_s += unit_s
        self.size.record_call(
            CallMeasurement(most, len(items), unit_s, min(item.arrived_at for item in items), self.now)
        )


def rate_of(
    size: int, server: Server, limit: int, max_delay_s: float = 10.0, *, jitter: float = 0.0
) -> float:
    """Items per unit-second where all calls may have so many, and it has settled."""
    line = PoolLine(CallSize(MergeMode.ON, size), server, limit, max_delay_s, jitter=jitter)
    return line.run_batch(4 * limit).rate(max(2000 if jitter else 200, 4 * limit))


def table() -> None:
    """Items a second through a limit of 64: off, on, auto, and auto with `max_delay_s: auto`."""
    modes = ((MergeMode.OFF, False), (MergeMode.ON, False), (MergeMode.AUTO, False), (MergeMode.AUTO, True))
    for about, server in {
        "one call at a time, 5 ms + 0.1 ms an item": serial(0.005, 0.0001),
        "four at a time, the same": serial(0.005, 0.0001, workers=4),
        "one at a time, 1 ms + 1 ms an item": serial(0.001, 0.001),
        "one at a time, 100 ms + 5 ms an item": serial(0.1, 0.005),
        "one at a time, 5 ms an item": serial(0.0, 0.005),
        "all at once, 5 ms + 0.1 ms an item": parallel(0.005, 0.0001),
        "all at once, 5 ms an item": parallel(0.0, 0.005),
    }.items():
        told = []
        for mode, stretches in modes:
            line = PoolLine(CallSize(mode, 32), server, 64, stretches=stretches).run_batch(20_000)
            began, items = line.now, 5000
            line.run_batch(items)
            size = f" ({line.size.best_size})" if mode is MergeMode.AUTO else ""
            told.append(f"{items / (line.now - began):,.0f}{size}")
        print(f"| {about} | {' | '.join(told)} |")


if __name__ == "__main__":
    table()
