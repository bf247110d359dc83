"""Requests of mixed weights: what is at the gateway never passes the limit, and heavy ones get their turn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy
from dispatcher.core.limit.allowance import explain_allowance
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import Poll
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.core.requests.result import decode_result
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import AttemptResult, Lease, LeaseUnitsResult, Permit, QueueUnavailableError, Submission
from dispatcher.telemetry.metrics import Metrics

SLOTS = 40
MOST = 38
"""floor(SLOTS × (1 − reserve))."""
TRAVEL_S = 0.002


class Pool:
    """What the gateways of all dispatchers lead to: it counts the units in it."""

    def __init__(self) -> None:
        self.units = self.counted = self.greatest = 0
        """What is in it; what that counts, where one that is heavier than all we may take counts that; the
        most that ever was counted."""
        self.beside: dict[str, int] = {}
        """What was there when each request came, by its id."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        loop = asyncio.get_running_loop()
        began, units = loop.time(), weight_of(request)
        await asyncio.sleep(TRAVEL_S)
        self.beside[request.id] = self.units
        self.units += units
        self.counted += min(units, MOST)
        self.greatest = max(self.greatest, self.counted)
        try:
            await asyncio.sleep(random.Random(request.id).uniform(0.2, 0.8))
        finally:
            self.units -= units
            self.counted -= min(units, MOST)
        return AttemptResult(Delivered(200, b"{}"), began, loop.time())

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...

    def tell(self, dispatcher: Dispatcher) -> None:
        """What a poll of now shows."""
        now, signal = asyncio.get_running_loop().time(), Signal.REQUESTS
        reading = Reading(signal, now, now, min(1.0, self.units / SLOTS), 0.0, SLOTS)
        dispatcher.apply_poll(Poll(completed_at=now, signals=(signal,), readings=(reading,)))


def weight_of(request: Request) -> int:
    return int(request.metadata["weight"])


def submission(name: str, weight: int, number: int) -> Submission:
    deadline = 4_000_000_000 + number
    member = encode_member(name, {"n": number}, deadline, metadata={"weight": str(weight)})
    return Submission(member, deadline, name, "", deadline)


class Team:
    """Some dispatchers on one queue and one pool, with a reading each half second."""

    def __init__(self, tasks: asyncio.TaskGroup, store: MemoryStore, replicas: int) -> None:
        self.pool, self.store = Pool(), store
        self._tasks, self._made = tasks, 0
        self.members: list[tuple[Dispatcher, MemoryQueue, asyncio.Task[None]]] = []
        for _ in range(replicas):
            self.start()

    def start(self) -> None:
        self._made += 1
        queue = MemoryQueue(self.store, f"owner-{self._made}")
        limiter = Limiter(Policy(reserve=0.05, max_sys=SLOTS), [Signal.REQUESTS])
        options = Options(retry=RetryPolicy(), lease_s=30, owner_timeout_s=5)
        journal = Journal(Metrics())
        dispatcher = Dispatcher(
            queue, self.pool, limiter, options, journal, random.Random(self._made), weigh_request=weight_of
        )
        task = self._tasks.create_task(dispatcher.run())
        self.members.append((dispatcher, queue, task))
        self._tasks.create_task(self._handle_buffered_requests(dispatcher, task))

    async def _handle_buffered_requests(self, dispatcher: Dispatcher, task: asyncio.Task[None]) -> None:
        while not task.done():
            self.pool.tell(dispatcher)
            await asyncio.sleep(0.5)

    def kill(self) -> None:
        _, queue, task = self.members.pop(0)
        task.cancel()
        queue.close()
        self.start()

    def drain_version(self) -> None:
        for dispatcher, _, _ in self.members:
            dispatcher.drain(60)


def results(store: MemoryStore) -> Counter[str]:
    return Counter(decode_result(each).id for each in store.result_lists.get(store.default_result_list, ()))


@pytest.mark.parametrize("seed", range(3))
def test_three_dispatchers_keep_to_the_limit_in_units(seed: int) -> None:
    """One of them is killed; one request is heavier than the pool, and goes alone."""
    drawn = random.Random(seed)

    async def play() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        weights = {f"r-{number:03}": drawn.randint(1, 8) for number in range(300)}
        weights |= {"r-100": 30, "r-200": 3 * SLOTS}
        await store.submit([submission(*each, number) for number, each in enumerate(sorted(weights.items()))])
        async with asyncio.TaskGroup() as tasks:
            team = Team(tasks, store, 3)
            pool = team.pool
            ended_at = loop.time() + 600
            next_kill = loop.time() + 7
            while (await store.count_requests()).pending + (await store.count_requests()).leased:
                assert loop.time() < ended_at, "something starves"
                await asyncio.sleep(0.05)
                if loop.time() > next_kill:
                    team.kill()
                    next_kill = float("inf")
            team.drain_version()
        assert results(store) == dict.fromkeys(weights, 1)
        assert pool.greatest == MOST, "never more, and no slot wasted"
        assert pool.beside["r-200"] == 0, "it went alone"
        came = list(pool.beside)
        for heavy in ("r-100", "r-200"):
            overtook = [name for name in came[: came.index(heavy)] if name > heavy]
            assert len(overtook) <= MOST, "those who were claimed with it, before it was read"

    run_in_virtual_time(play())


def test_what_cannot_be_weighed_is_given_back_and_sent_later() -> None:
    class Away(MemoryQueue):
        times = 2

        async def set_lease_units(
            self, lease_units: Sequence[tuple[Lease, int]], permit: Permit
        ) -> LeaseUnitsResult:
            if self.times:
                self.times -= 1
                raise QueueUnavailableError("Redis did not answer in time")
            return await super().set_lease_units(lease_units, permit)

    async def play() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        await store.submit([submission("heavy", 5, 1), submission("light", 1, 2)])
        queue, pool = Away(store, "owner"), Pool()
        limiter = Limiter(Policy(reserve=0.05, max_sys=SLOTS), [Signal.REQUESTS])
        dispatcher = Dispatcher(
            queue, pool, limiter, Options(RetryPolicy()), Journal(Metrics()), weigh_request=weight_of
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            for _ in range(40):
                pool.tell(dispatcher)
                await asyncio.sleep(0.5)
            dispatcher.drain(5)
        assert queue.times == 0
        assert results(store) == {"heavy": 1, "light": 1}
        assert pool.greatest == 6

    run_in_virtual_time(play())


def test_heavy_one_that_waits_for_room_is_what_the_sentence_names() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(loop.time, unix_origin=1.7e9)
        weights = {"a-light": 1, "b-heavy": MOST}
        await store.submit([submission(*each, number) for number, each in enumerate(weights.items())])
        pool, sentences = Pool(), []
        limiter = Limiter(Policy(reserve=0.05, max_sys=SLOTS), [Signal.REQUESTS])
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            pool,
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
            weigh_request=weight_of,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            pool.tell(dispatcher)
            while len(pool.beside) < 2:
                await asyncio.sleep(0.01)
                sentences.append(explain_allowance(dispatcher.get_allowance(), limiter.in_flight))
            dispatcher.drain(5)
        assert list(pool.beside) == ["a-light", "b-heavy"]
        told = "1 in flight under a limit 38, and the queue gives no more: the next request needs more than "
        assert any(told + "the 37 units that are free" in each for each in sentences)
        assert "weighs" not in sentences[-1], "its turn came"

    run_in_virtual_time(play())
