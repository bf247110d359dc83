"""Requests of different weights: their units stay within the limit, and heavy ones are sent as well."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.allowance import explain_allowance
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import Poll
from dispatcher.queue.contract import Lease, LeaseUnitsResult, Permit
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import QueueUnavailableError, Submission
from dispatcher.telemetry.metrics import Metrics
from tests.memory_queue import MemoryStore

CAPACITY = 40
MAX_UNITS = 38
"""Limit in units: floor(CAPACITY × (1 − reserve))."""
TRANSIT_S = 0.002
MAX_S = 0.8
"""Duration of the longest request."""


class Pool:
    """Pool behind the gateways of all dispatchers, which counts the units in it."""

    def __init__(self) -> None:
        self.units = self.bounded_units = self.max_bounded_units = 0
        """Units in the pool; the same with each request bounded by `MAX_UNITS`; the largest of these sums."""
        self.units_at_arrival: dict[str, int] = {}
        """Units in the pool when each request arrived, by the id of the request."""
        self.arrived_at: dict[str, float] = {}
        self.unit_s, self._changed_at = 0.0, 0.0
        """Units in the pool, summed over time; and the time up to which they are summed."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        loop = asyncio.get_running_loop()
        sent_at, units = loop.time(), get_weight(request)
        await asyncio.sleep(TRANSIT_S)
        self.units_at_arrival[request.id], self.arrived_at[request.id] = self.units, loop.time()
        self._add_units(units)
        self.bounded_units += min(units, MAX_UNITS)
        self.max_bounded_units = max(self.max_bounded_units, self.bounded_units)
        try:
            await asyncio.sleep(random.Random(request.id).uniform(0.2, MAX_S))
        finally:
            self._add_units(-units)
            self.bounded_units -= min(units, MAX_UNITS)
        return AttemptResult(Delivered(200, b"{}"), sent_at, loop.time())

    def _add_units(self, units: int) -> None:
        now = asyncio.get_running_loop().time()
        self.unit_s += self.units * (now - self._changed_at)
        self.units, self._changed_at = self.units + units, now

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...

    def send_reading(self, dispatcher: Dispatcher) -> None:
        """Give a dispatcher the reading that a poll would yield now."""
        now, signal = asyncio.get_running_loop().time(), Signal.REQUESTS
        reading = Reading(signal, now, now, min(1.0, self.units / CAPACITY), 0.0, CAPACITY)
        dispatcher.apply_poll(Poll(completed_at=now, signals=(signal,), readings=(reading,)))


def get_weight(request: Request) -> int:
    return int(request.metadata["weight"])


def build_submission(name: str, weight: int, number: int) -> Submission:
    deadline = 4_000_000_000 + number
    member = encode_member(name, {"n": number}, deadline, metadata={"weight": str(weight)})
    return Submission(member, deadline, name, "", deadline)


class DispatcherGroup:
    """Several dispatchers on one queue and one pool, with a reading each half second."""

    def __init__(self, tasks: asyncio.TaskGroup, store: MemoryStore, replicas: int) -> None:
        self.pool, self.store = Pool(), store
        self._tasks, self._started_count = tasks, 0
        self.dispatchers: list[tuple[Dispatcher, MemoryQueue, asyncio.Task[None]]] = []
        for _ in range(replicas):
            self.start()

    def start(self) -> None:
        self._started_count += 1
        queue = MemoryQueue(self.store, f"owner-{self._started_count}")
        limiter = Limiter(Policy(reserve=0.05, max_sys=CAPACITY), [Signal.REQUESTS])
        options = Options(retry=RetryPolicy(), lease_s=30, owner_timeout_s=5)
        journal = Journal(Metrics())
        dispatcher = Dispatcher(
            queue,
            self.pool,
            limiter,
            options,
            journal,
            random.Random(self._started_count),
            weigh_request=get_weight,
        )
        task = self._tasks.create_task(dispatcher.run())
        self.dispatchers.append((dispatcher, queue, task))
        self._tasks.create_task(self._send_readings(dispatcher, task))

    async def _send_readings(self, dispatcher: Dispatcher, task: asyncio.Task[None]) -> None:
        while not task.done():
            self.pool.send_reading(dispatcher)
            await asyncio.sleep(0.5)

    def kill(self) -> None:
        _, queue, task = self.dispatchers.pop(0)
        task.cancel()
        queue.close()
        self.start()

    def drain(self) -> None:
        for dispatcher, _, _ in self.dispatchers:
            dispatcher.drain(60)


def count_results(store: MemoryStore) -> Counter[str]:
    return Counter(decode_result(each).id for each in store.result_lists.get(store.default_result_list, ()))


@pytest.mark.parametrize("seed", range(3))
def test_three_dispatchers_keep_to_the_limit_in_units(seed: int) -> None:
    """One of them is killed. One request is heavier than the limit and runs alone."""
    rand = random.Random(seed)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        weights = {f"r-{number:03}": rand.randint(1, 8) for number in range(300)}
        weights |= {"r-100": 30, "r-200": 3 * CAPACITY}
        await store.submit(
            [build_submission(*each, number) for number, each in enumerate(sorted(weights.items()))]
        )
        async with asyncio.TaskGroup() as tasks:
            group = DispatcherGroup(tasks, store, 3)
            pool = group.pool
            give_up_at = loop.time() + 600
            next_kill = loop.time() + 7
            while (await store.count_requests()).pending + (await store.count_requests()).leased:
                assert loop.time() < give_up_at, "a request is never sent"
                await asyncio.sleep(0.05)
                if loop.time() > next_kill:
                    group.kill()
                    next_kill = float("inf")
            group.drain()
        assert count_results(store) == dict.fromkeys(weights, 1)
        assert pool.max_bounded_units == MAX_UNITS, "the limit is reached and never exceeded"
        assert pool.units_at_arrival["r-200"] == 0, "it runs alone"
        arrived = list(pool.units_at_arrival)
        for heavy in ("r-100", "r-200"):
            overtook = [name for name in arrived[: arrived.index(heavy)] if name > heavy]
            times = [pool.arrived_at[name] for name in overtook]
            assert max(times) - min(times) <= MAX_S + 0.25, "it is overtaken for the mean duration"


def run_until_few_wait(weights: dict[str, int], few: int) -> Pool:
    """Return the pool of two dispatchers when so few requests wait."""

    async def main() -> Pool:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        await store.submit([build_submission(*each, number) for number, each in enumerate(weights.items())])
        async with asyncio.TaskGroup() as tasks:
            group = DispatcherGroup(tasks, store, 2)
            while (await store.count_requests()).pending > few:
                assert loop.time() < 600
                await asyncio.sleep(0.05)
            group.drain()
        return group.pool

    return run_in_virtual_time(main())


def test_room_that_is_too_small_for_a_heavy_request_is_used_by_lighter_ones() -> None:
    weights = {f"r-{number:04}": 12 if number % 8 == 0 else 1 for number in range(1200)}
    pool = run_until_few_wait(weights, 200)
    busy_s = max(pool.arrived_at.values())
    # If nothing overtakes them, it is 0.91.
    assert pool.unit_s / busy_s / MAX_UNITS > 0.95


def test_heavy_request_is_sent_although_lighter_ones_always_wait() -> None:
    weights = {f"r-{number:04}": 30 if number == 500 else 1 for number in range(2000)}
    pool = run_until_few_wait(weights, 200)
    overtook = [
        at for name, at in pool.arrived_at.items() if name > "r-0500" and at < pool.arrived_at["r-0500"]
    ]
    assert len(overtook) > MAX_UNITS, "lighter ones use the room at first"
    assert max(overtook) - min(overtook) <= MAX_S, "and no longer than a request takes on average"


def test_request_whose_units_cannot_be_set_is_returned_and_sent_later() -> None:
    class FailingQueue(MemoryQueue):
        failures_left = 2

        async def set_lease_units(
            self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
        ) -> LeaseUnitsResult:
            if self.failures_left:
                self.failures_left -= 1
                raise QueueUnavailableError("Redis did not answer in time")
            return await super().set_lease_units(lease_units, permit)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        await store.submit([build_submission("heavy", 5, 1), build_submission("light", 1, 2)])
        queue, pool = FailingQueue(store, "owner"), Pool()
        limiter = Limiter(Policy(reserve=0.05, max_sys=CAPACITY), [Signal.REQUESTS])
        dispatcher = Dispatcher(
            queue,
            pool,
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
            weigh_request=get_weight,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            for _ in range(40):
                pool.send_reading(dispatcher)
                await asyncio.sleep(0.5)
            dispatcher.drain(5)
        assert queue.failures_left == 0
        assert count_results(store) == {"heavy": 1, "light": 1}
        assert pool.max_bounded_units == 6

    run_in_virtual_time(main())


def test_explanation_names_the_heavy_request_that_waits_for_room() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        weights = {"a-light": 1, "b-heavy": MAX_UNITS}
        await store.submit([build_submission(*each, number) for number, each in enumerate(weights.items())])
        pool, sentences = Pool(), []
        limiter = Limiter(Policy(reserve=0.05, max_sys=CAPACITY), [Signal.REQUESTS])
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            pool,
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
            weigh_request=get_weight,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            pool.send_reading(dispatcher)
            while len(pool.units_at_arrival) < 2:
                await asyncio.sleep(0.01)
                sentences.append(explain_allowance(dispatcher.get_allowance(), limiter.in_flight))
            dispatcher.drain(5)
        assert list(pool.units_at_arrival) == ["a-light", "b-heavy"]
        sentence_start = (
            "1 in flight under a limit 38, and the queue gives no more: the next request needs more than "
        )
        assert any(sentence_start + "the 37 units that are free" in each for each in sentences)
        assert "the next request needs" not in sentences[-1], "the heavy request was sent"

    run_in_virtual_time(main())
