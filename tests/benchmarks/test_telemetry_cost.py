"""Cost of telemetry: the dispatch loop with its journal, compared with the same loop with a silent journal.

With a queue in memory and a gateway that answers at once, the loop is almost the only cost, so that the cost
of the journal can be measured. It may be at most 8 % of what a request costs a dispatcher process
(test_throughput.py).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

import pytest

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.utilization import UtilizationMeter
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.events import divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.cost_comparison import compare_costs
from tests.function_calls import CallCounter
from tests.memory_queue import MemoryStore
from tests.support import wait_until

REQUESTS = 2000
LIMIT = 64
MAX_FRACTION = 0.08
PROCESS_COST_IN_LOOPS = 4
"""Cost of a request for a whole process, in units of the cost of the loop alone (at least).

A process also forwards over HTTP and claims from Redis: 300 to 430 µs instead of 55 to 80 µs.
"""
ANSWER = Delivered(
    200,
    b'{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"%s"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":12,"total_tokens":19}}' % (b"x" * 500),
)


class SilentJournal(Journal):
    """Journal that ignores all notifications."""

    def _ignore(self, *_args: object, **_named: object) -> None: ...

    record_state = record_sent = record_attempt = record_completion = _ignore


class InstantGateway:
    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return AttemptResult(ANSWER, now, now)

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


async def measure_loop_cost(journal: Journal, read_meter: Callable[[], float]) -> float:
    """Return the cost of REQUESTS requests, as the increase of a meter."""
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
    dispatcher = Dispatcher(queue, InstantGateway(), limiter, Options(RetryPolicy()), journal)
    now = loop.time()
    gc.collect()  # so that no run pays for the objects of the one before
    cost_before = read_meter()
    limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, LIMIT * 4), now)
    task = loop.create_task(dispatcher.run())
    await wait_until(
        lambda: sum(map(len, store.result_lists.values())) == REQUESTS, what="all requests to be answered"
    )
    cost = read_meter() - cost_before
    dispatcher.drain(1.0)
    await task
    return cost


async def test_telemetry_adds_at_most_fifty_function_calls_to_a_request() -> None:
    """Fifty calls correspond to 8 % of the CPU of a request. Their number does not depend on the load, nor on
    the calls of the rest of the loop."""
    journal, call_counter = Journal(Metrics("qwen")), CallCounter()
    with divert_events(lambda _event, _fields: None), call_counter.count():
        with_journal = await measure_loop_cost(journal, call_counter) / REQUESTS
        without_journal = await measure_loop_cost(SilentJournal(Metrics("qwen")), call_counter) / REQUESTS
    print(
        f"{with_journal:.1f} calls per request in the loop, {without_journal:.1f} without: "
        f"+{with_journal - without_journal:.1f}"
    )
    assert sum(journal.meter.reason_s.values()) > 0, "the journal was notified"
    assert with_journal - without_journal < 50


@pytest.mark.long
async def test_telemetry_costs_at_most_8_percent_of_a_request() -> None:
    journal = Journal(Metrics("qwen"))
    with divert_events(lambda _event, _fields: None):
        comparison = await compare_costs(
            lambda: measure_loop_cost(journal, time.process_time),
            lambda: measure_loop_cost(SilentJournal(Metrics("qwen")), time.process_time),
        )
    added_fraction = comparison.ratio - 1
    with_journal, without_journal = (
        seconds / REQUESTS * 1e6 for seconds in (comparison.ours, comparison.baseline)
    )
    print(
        f"{with_journal:.0f} µs per request in the loop, {without_journal:.0f} without: +{added_fraction:.1%}"
    )
    assert isinstance(journal.meter, UtilizationMeter)
    assert sum(journal.meter.reason_s.values()) > 0, "the journal was notified"
    assert added_fraction / PROCESS_COST_IN_LOOPS < MAX_FRACTION
