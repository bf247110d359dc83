"""What telemetry costs a request: the real loop with its journal, beside the same loop with a mute one.

The queue in memory and a gateway that answers at once leave little but the loop, so that what the journal
adds shows. It is held against what a request costs a whole dispatcher process (test_throughput.py): at most
8 % of that.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.utilization import UtilizationMeter
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.ports import AttemptResult, Submission
from dispatcher.telemetry.events import divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.floors import beside
from tests.support import wait_until

REQUESTS = 2000
LIMIT = 64
SHARE = 0.08
WHOLE_IN_LOOPS = 4
"""A process forwards over HTTP and claims from Redis: a request costs it more than so many times what the
loop alone takes (260 to 330 µs against some 50)."""
ANSWER = Delivered(
    200,
    b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"%s"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":12,"total_tokens":19}}' % (b"x" * 500),
)


class Mute(Journal):
    """Hears, and keeps nothing."""

    def _nothing(self, *_args: object, **_named: object) -> None: ...

    record_state = record_sent = record_attempt = record_completion = _nothing


class AtOnce:
    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return AttemptResult(ANSWER, now, now)

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


async def through_the_loop(journal: Journal, cost: Callable[[], float]) -> float:
    """What REQUESTS requests cost, by a meter that only rises."""
    loop = asyncio.get_running_loop()
    store = MemoryStore(clock=loop.time)
    deadline = int(time.time()) + 10**6
    await store.submit(
        [
            Submission(
                encode_member(f"r-{n}", b'{"prompt":"hi"}', deadline, created=1_764_000_000), float(deadline)
            )
            for n in range(REQUESTS)
        ]
    )
    limiter = Limiter(Policy(max_sys=LIMIT * 4, max_in_flight=LIMIT, max_age_s=1000), [Signal.REQUESTS])
    queue = MemoryQueue(store, "a")
    dispatcher = Dispatcher(queue, AtOnce(), limiter, Options(RetryPolicy()), journal)
    now = loop.time()
    began = cost()
    limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, LIMIT * 4), now)
    running = loop.create_task(dispatcher.run())
    await wait_until(
        lambda: sum(map(len, store.result_lists.values())) == REQUESTS, what="all to be answered"
    )
    spent = cost() - began
    dispatcher.drain(1.0)
    await running
    return spent


class Calls:
    """How many functions were called, of Python and of C: the same count on every machine, however busy."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> float:
        return float(self._count)

    def _heard(self, _frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self._count += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._heard)
        try:
            yield
        finally:
            sys.setprofile(before)


async def test_telemetry_adds_at_most_a_fifth_to_the_calls_that_the_loop_makes() -> None:
    """What 8 % of a request's CPU are (below) in counts, which no neighbour moves."""
    told, calls = Journal(Metrics("qwen")), Calls()
    with divert_events(lambda _event, _fields: None), calls.counting():
        ours = await through_the_loop(told, calls) / REQUESTS
        floor = await through_the_loop(Mute(Metrics("qwen")), calls) / REQUESTS
    print(f"{ours:.1f} calls a request in the loop, {floor:.1f} without: +{ours / floor - 1:.1%}")
    assert sum(told.meter.reason_s.values()) > 0, "it was told"
    assert ours / floor - 1 < 0.2


@pytest.mark.long
async def test_telemetry_costs_at_most_8_percent_of_a_request() -> None:
    told = Journal(Metrics("qwen"))
    with divert_events(lambda _event, _fields: None):
        cost = await beside(
            lambda: through_the_loop(told, time.process_time),
            lambda: through_the_loop(Mute(Metrics("qwen")), time.process_time),
            pairs=7,
        )
    added = cost.ratio - 1
    ours, floor = (seconds / REQUESTS * 1e6 for seconds in (cost.ours, cost.floor))
    print(f"{ours:.0f} µs a request in the loop, {floor:.0f} without: +{added:.1%}")
    assert isinstance(told.meter, UtilizationMeter)
    assert sum(told.meter.reason_s.values()) > 0, "it was told"
    assert added / WHOLE_IN_LOOPS < SHARE
