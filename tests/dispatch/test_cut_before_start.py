"""What happens to a request in the very moment between its claim and its first step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy, Unsent
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.dispatch.in_flight import StopReason
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import AttemptResult, Submission
from dispatcher.telemetry.metrics import Metrics


class NeverReached:
    """A gateway that nothing must come to."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        raise AssertionError(f"{request.id} was sent")

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


@pytest.mark.parametrize(("why", "handed_in"), [("drain", 1), ("cancelled", 1), ("lost", 0)])
def test_request_cut_before_its_first_step_leaves_nothing_behind(why: StopReason, handed_in: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time)
        deadline = int(time.time()) + 10**6
        await store.submit([Submission(encode_member("r", b"{}", deadline), float(deadline))])
        limiter = Limiter(Policy(max_sys=10), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"), NeverReached(), limiter, Options(RetryPolicy()), Journal(Metrics())
        )
        async with dispatcher._tasks:
            await dispatcher._claim_work()  # no step of the queue in memory suspends: the task has not begun
            (held,) = dispatcher._in_flight
            dispatcher._in_flight.stop_waiting(held, why)
        assert dispatcher.running_count == 0
        assert len(dispatcher._flusher.pending) == handed_in
        if handed_in:
            await dispatcher._flush_completions()
        assert len(dispatcher._in_flight) == 0

    run_in_virtual_time(main(), start=2.0)


class StandsStill(MemoryQueue):
    """Its owner stops right after a claim, or its machine sleeps, for so long."""

    still_s = asleep_s = slept_s = 0.0

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_s

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        await asyncio.sleep(self.still_s)
        self.slept_s = self.asleep_s
        return await super().check_cancelled(requests)


class Answers(NeverReached):
    """`slow_s`: until the request can be written; that it may be is asked then."""

    slow_s = 0.0

    def __init__(self) -> None:
        self.sent: list[float] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        await asyncio.sleep(self.slow_s)
        now = asyncio.get_running_loop().time()
        if not may_send():
            return AttemptResult(Unsent(), now, now)
        self.sent.append(now)
        return AttemptResult(Delivered(200, b"{}"), now, now)


@pytest.mark.parametrize(
    ("still_s", "asleep_s", "slow_s", "sent"),
    [(4.9, 0, 0, 1), (5.1, 0, 0, 0), (0, 4.9, 0, 1), (0, 5.1, 0, 0), (0, 0, 4.9, 1), (0, 0, 5.1, 0)],
)
def test_request_claimed_before_we_stood_still_is_not_sent_after_it(
    still_s: float, asleep_s: float, slow_s: float, sent: int
) -> None:
    """By then we may have been taken for dead, and it may run elsewhere: it is given back, if it is ours."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time)
        deadline = int(time.time()) + 10**6
        await store.submit([Submission(encode_member("r", b"{}", deadline, token="t"), float(deadline))])
        limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        queue, gateway = StandsStill(store, "a"), Answers()
        queue.still_s, queue.asleep_s, gateway.slow_s = still_s, asleep_s, slow_s
        dispatcher = Dispatcher(
            queue, gateway, limiter, Options(RetryPolicy()), Journal(Metrics()), clock=queue.clock
        )
        async with dispatcher._tasks:
            await dispatcher._claim_work()
        assert len(gateway.sent) == sent
        await dispatcher._flush_completions()
        assert len(dispatcher._in_flight) == 0
        assert (await store.count_requests()).pending == 1 - sent

    run_in_virtual_time(main(), start=2.0)
