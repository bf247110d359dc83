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
from dispatcher.dispatch.in_flight import Cut
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run
from dispatcher.ports import Forwarded, Submission
from dispatcher.telemetry.metrics import Metrics


class NeverReached:
    """A gateway that nothing must come to."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> Forwarded:
        raise AssertionError(f"{request.id} was sent")

    def connected(self, token: str) -> float | None:
        return None

    def resize(self, limit: int) -> None: ...


@pytest.mark.parametrize(("why", "handed_in"), [("drain", 1), ("cancelled", 1), ("lost", 0)])
def test_request_cut_before_its_first_step_leaves_nothing_behind(why: Cut, handed_in: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryStore(clock=loop.time)
        deadline = int(time.time()) + 10**6
        await store.submit([Submission(encode_member("r", b"{}", deadline), float(deadline))])
        limiter = Limiter(Policy(max_sys=10), [Signal.REQUESTS])
        limiter.reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"), NeverReached(), limiter, Options(RetryPolicy()), Journal(Metrics())
        )
        async with dispatcher._tasks:
            await dispatcher._take()  # no step of the queue in memory suspends: the task has not begun
            (held,) = dispatcher._holding
            dispatcher._holding.cut(held, why)
        assert dispatcher.running == 0
        assert len(dispatcher._handing.done) == handed_in
        if handed_in:
            await dispatcher._hand_in()
        assert len(dispatcher._holding) == 0

    run(main(), start=2.0)


class StandsStill(MemoryQueue):
    """Its owner stops right after a claim, or its machine sleeps, for so long."""

    still_s = asleep_s = slept_s = 0.0

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.slept_s

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        await asyncio.sleep(self.still_s)
        self.slept_s = self.asleep_s
        return await super().cancelled(requests)


class Answers(NeverReached):
    """`slow_s`: until the request can be written; that it may be is asked then."""

    slow_s = 0.0

    def __init__(self) -> None:
        self.sent: list[float] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> Forwarded:
        await asyncio.sleep(self.slow_s)
        now = asyncio.get_running_loop().time()
        if not may_send():
            return Forwarded(Unsent(), now, now)
        self.sent.append(now)
        return Forwarded(Delivered(200, b"{}"), now, now)


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
        limiter.reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        queue, gateway = StandsStill(store, "a"), Answers()
        queue.still_s, queue.asleep_s, gateway.slow_s = still_s, asleep_s, slow_s
        dispatcher = Dispatcher(
            queue, gateway, limiter, Options(RetryPolicy()), Journal(Metrics()), clock=queue.clock
        )
        async with dispatcher._tasks:
            await dispatcher._take()
        assert len(gateway.sent) == sent
        await dispatcher._hand_in()
        assert len(dispatcher._holding) == 0
        assert (await store.counts()).pending == 1 - sent

    run(main(), start=2.0)
