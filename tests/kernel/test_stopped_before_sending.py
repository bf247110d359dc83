"""Requests that are stopped, or whose lease becomes doubtful, between claim and sending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.in_flight import StopReason
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy, Unsent
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.metrics import Metrics
from tests.memory_queue import MemoryStore


class UnusedGateway:
    """Gateway that no request may reach."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        raise AssertionError(f"{request.id} was sent")

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


@pytest.mark.parametrize(("reason", "completion_count"), [("drain", 1), ("cancelled", 1), ("lost", 0)])
def test_lease_stopped_before_the_first_step_of_its_task_is_completed_or_removed(
    reason: StopReason, completion_count: int
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time)
        deadline = int(time.time()) + 10**6
        await store.submit([Submission(encode_member("r", b"{}", deadline), float(deadline))])
        limiter = Limiter(Policy(max_sys=10), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            UnusedGateway(),
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
        )
        async with dispatcher._tasks as tasks:
            dispatcher._runner.use_task_group(tasks)
            # No call of the queue in memory suspends, so the task of the request has not started yet.
            await dispatcher._claimer.claim_work()
            (entry,) = dispatcher._in_flight
            dispatcher._in_flight.stop_waiting(entry, reason)
        assert dispatcher.running_count == 0
        assert len(dispatcher.context.pending) == completion_count
        if completion_count:
            await dispatcher._flush_completions()
        assert len(dispatcher._in_flight) == 0

    run_in_virtual_time(main(), start=2.0)


class StallingQueue(MemoryQueue):
    """Queue whose owner stalls right after a claim, or whose machine sleeps."""

    stall_s = sleep_s = slept_for_s = 0.0

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_for_s

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        await asyncio.sleep(self.stall_s)
        self.slept_for_s = self.sleep_s
        return await super().check_cancelled(requests)


class AnsweringGateway(UnusedGateway):
    """Gateway that answers every request that may be sent."""

    connect_s = 0.0
    """Time until a request can be written. Only then the gateway checks whether it may be sent."""

    def __init__(self) -> None:
        self.sent: list[float] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        await asyncio.sleep(self.connect_s)
        now = asyncio.get_running_loop().time()
        if not may_send():
            return AttemptResult(Unsent(), now, now)
        self.sent.append(now)
        return AttemptResult(Delivered(200, b"{}"), now, now)


@pytest.mark.parametrize(
    ("stall_s", "sleep_s", "connect_s", "sent"),
    [(4.9, 0, 0, 1), (5.1, 0, 0, 0), (0, 4.9, 0, 1), (0, 5.1, 0, 0), (0, 0, 4.9, 1), (0, 0, 5.1, 0)],
)
def test_request_claimed_before_a_long_stall_is_returned_and_not_sent(
    stall_s: float, sleep_s: float, connect_s: float, sent: int
) -> None:
    """Other dispatchers may presume this one dead by then and run the request themselves."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time)
        deadline = int(time.time()) + 10**6
        await store.submit([Submission(encode_member("r", b"{}", deadline, token="t"), float(deadline))])
        limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        queue, gateway = StallingQueue(store, "a"), AnsweringGateway()
        queue.stall_s, queue.sleep_s, gateway.connect_s = stall_s, sleep_s, connect_s
        dispatcher = Dispatcher(
            queue,
            gateway,
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
            clock=queue.clock,
        )
        async with dispatcher._tasks as tasks:
            dispatcher._runner.use_task_group(tasks)
            await dispatcher._claimer.claim_work()
        assert len(gateway.sent) == sent
        await dispatcher._flush_completions()
        assert len(dispatcher._in_flight) == 0
        assert (await store.count_requests()).pending == 1 - sent

    run_in_virtual_time(main(), start=2.0)
