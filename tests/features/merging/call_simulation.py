"""Simulation in virtual time of a dispatcher that sends merged calls to a model server.

The calls have the sizes that `CallSize` allows. `python -m tests.features.merging.call_simulation` prints the
table of docs/how-to/merging.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, log2
from random import Random

from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, group_requests
from dispatcher.features.merging.call_size import CallMeasurement, CallSize
from dispatcher.features.merging.rules import MergeMode
from dispatcher.requests.outcomes.outcome import Delivered

REFUSAL_S = 0.001


@dataclass(frozen=True)
class ModelServer:
    """Model server that works on some calls at once. Other calls wait for their turn."""

    compute_call_s: Callable[[int], float]
    """Return the duration of a call with this number of items, without its wait."""
    workers: int = 1
    max_items: int | None = None
    """Longest list that is accepted. Longer ones are refused at once."""


def serial(call_s: float, item_s: float, workers: int = 1) -> ModelServer:
    """Return a server that works on one call after the other, and on its items one by one."""
    return ModelServer(lambda items: call_s + item_s * items, workers)


def parallel(call_s: float, item_s: float) -> ModelServer:
    """Return a server that works on all calls at once, and on their items one by one. Merging never pays."""
    return serial(call_s, item_s, workers=10**6)


def logarithmic(call_s: float, step_s: float) -> ModelServer:
    """Return a server whose calls take one step longer if they have about twice as many items."""
    return ModelServer(lambda items: call_s + step_s * log2(1 + items))


@dataclass
class SimulatedDispatcher:
    """Dispatcher that leases at most `limit` single items at a time."""

    size: CallSize
    server: ModelServer
    limit: int = 32
    max_delay_s: float = 0.02
    can_stretch_delay: bool = False
    """True if items wait longer than `max_delay_s` if calls are slow."""
    jitter: float = 0.0
    """Share by which the durations of calls vary, so that calls do not run in an artificial rhythm."""
    arrival_interval_s: float = 0.0
    """Time between two arrivals of items. 0 if all are there from the beginning."""
    now: float = 1000.0
    answered_items: int = 0
    unit_s: float = 0.0
    """Unit-seconds for which the answered items were leased."""
    max_leased: int = 0
    call_sizes: list[int] = field(default_factory=list)
    """Number of items of each call that was sent."""
    refusal_times: list[float] = field(default_factory=list)
    """Times at which refused calls were sent."""
    _random: Random = field(default_factory=lambda: Random(0))
    _next_arrival_at: float = 1000.0
    _leased: int = 0
    _in_flight: int = 0
    _rules: dict[tuple[int, float], GroupingRule] = field(default_factory=dict)
    _waiting: list[WaitingItem] = field(default_factory=list)
    _busy_until: list[float] = field(default_factory=list)
    """End of the last call of each worker that was ever needed."""
    _call_ends: list[tuple[float, int, int, list[WaitingItem], bool]] = field(default_factory=list)

    def run_batch(self, items: int) -> SimulatedDispatcher:
        """Run until this number of further items was answered."""
        until = self.answered_items + items
        while self.answered_items < until:
            due_at = self._send_ready_calls()
            ends_at = self._call_ends[0][0] if self._call_ends else inf
            self.now = max(self.now, min(ends_at, due_at))
            while self._call_ends and self._call_ends[0][0] <= self.now:
                self._end_next_call()
        return self

    def replace_server(self, server: ModelServer) -> None:
        self.server, self._busy_until = server, []

    def measure_rate(self, items: int) -> float:
        """Run until this number of further items was answered. Return items per unit-second."""
        answered_before, unit_s_before = self.answered_items, self.unit_s
        self.run_batch(items)
        return (self.answered_items - answered_before) / (self.unit_s - unit_s_before)

    def _send_ready_calls(self) -> float:
        """Lease items within the limit and send groups. Return when to continue even if no call ends."""
        while self._leased < self.limit and self._next_arrival_at <= self.now:
            self._next_arrival_at += self.arrival_interval_s
            self._leased += 1
            self._waiting.append(WaitingItem(1, self.now))
        self.max_leased = max(self.max_leased, self._leased)
        is_full = self._leased >= self.limit
        next_arrival_at = inf if is_full else self._next_arrival_at
        is_idle = not self._in_flight if is_full else bool(self.arrival_interval_s)
        while self._waiting:
            max_items = self.size.choose_max_items(self.now)
            delay_s = self.max_delay_s
            if self.can_stretch_delay:
                delay_s = self.size.compute_delay_s(delay_s)
            key = max_items, delay_s
            if key not in self._rules:
                self._rules = {key: GroupingRule(max_items, self.size.preferred_sizes, delay_s)}
            decision = group_requests(self._waiting, self._rules[key], self.now, is_idle=is_idle)
            if not isinstance(decision, GroupReady):
                return min(next_arrival_at, decision.until)
            items, self._waiting = self._waiting[: decision.count], self._waiting[decision.count :]
            self._begin_call(max_items, items)
        return next_arrival_at

    def _begin_call(self, max_items: int, items: list[WaitingItem]) -> None:
        server, begins_at = self.server, self.now
        is_refused = server.max_items is not None and len(items) > server.max_items
        if is_refused:
            self.refusal_times.append(self.now)
            ends_at = self.now + REFUSAL_S
        else:
            if len(self._busy_until) >= server.workers:
                begins_at = max(begins_at, heapq.heappop(self._busy_until))
            noise = self._random.uniform(1 - self.jitter, 1 + self.jitter)
            ends_at = begins_at + server.compute_call_s(len(items)) * noise
            heapq.heappush(self._busy_until, ends_at)
        self.call_sizes.append(len(items))
        self.size.record_send(max_items)
        self._in_flight += len(items)
        heapq.heappush(self._call_ends, (ends_at, len(self.call_sizes), max_items, items, is_refused))

    def _end_next_call(self) -> None:
        _, _, max_items, items, is_refused = heapq.heappop(self._call_ends)
        self._in_flight -= len(items)
        if is_refused:
            body = b'{"error": "batch size %d > maximum allowed batch size %d"}'
            answer = Delivered(413, body % (len(items), self.server.max_items or 0))
            assert self.size.learn_from_refusal(answer, len(items), 0, self.now)
            self._waiting[:0] = items
            return
        self._leased -= len(items)
        self.answered_items += len(items)
        unit_s = sum(self.now - item.arrived_at for item in items)
        self.unit_s += unit_s
        began_at = min(item.arrived_at for item in items)
        self.size.record_call(CallMeasurement(max_items, len(items), unit_s, began_at, self.now))


def measure_rate_of_size(
    size: int, server: ModelServer, limit: int, max_delay_s: float = 10.0, *, jitter: float = 0.0
) -> float:
    """Return items per unit-second in the steady state if all calls may have this size."""
    dispatcher = SimulatedDispatcher(CallSize(MergeMode.ON, size), server, limit, max_delay_s, jitter=jitter)
    return dispatcher.run_batch(4 * limit).measure_rate(max(2000 if jitter else 200, 4 * limit))


def print_table() -> None:
    """Print items per second with a limit of 64: off, on, auto, and auto with `max_delay_s: auto`."""
    modes = ((MergeMode.OFF, False), (MergeMode.ON, False), (MergeMode.AUTO, False), (MergeMode.AUTO, True))
    for description, server in {
        "one call at a time, 5 ms + 0.1 ms an item": serial(0.005, 0.0001),
        "four at a time, the same": serial(0.005, 0.0001, workers=4),
        "one at a time, 1 ms + 1 ms an item": serial(0.001, 0.001),
        "one at a time, 100 ms + 5 ms an item": serial(0.1, 0.005),
        "one at a time, 5 ms an item": serial(0.0, 0.005),
        "all at once, 5 ms + 0.1 ms an item": parallel(0.005, 0.0001),
        "all at once, 5 ms an item": parallel(0.0, 0.005),
    }.items():
        cells = []
        for mode, can_stretch_delay in modes:
            dispatcher = SimulatedDispatcher(
                CallSize(mode, 32), server, 64, can_stretch_delay=can_stretch_delay
            ).run_batch(20_000)
            began_at, items = dispatcher.now, 5000
            dispatcher.run_batch(items)
            size = f" ({dispatcher.size.best_size})" if mode is MergeMode.AUTO else ""
            cells.append(f"{items / (dispatcher.now - began_at):,.0f}{size}")
        print(f"| {description} | {' | '.join(cells)} |")


if __name__ == "__main__":
    print_table()
