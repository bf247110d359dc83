"""A result that has no place to go: known before the work, which is not done for nothing."""

from __future__ import annotations

import asyncio
import time

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.result import decode_result
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import Submission
from dispatcher.telemetry.metrics import Metrics
from tests.queue.made import Answers


def submission(name: str, results: str) -> Submission:
    until = int(time.time()) + 10**6
    return Submission(encode_member(name, b"{}", until, results=results), float(until), name, "", until)


def test_a_request_whose_list_takes_no_result_is_not_sent() -> None:
    """A key of another kind; a list that the settings forbid."""

    async def scene() -> None:
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        taken, forbidden, fit = "batch-results:taken", "celery", "batch-results:fit"
        store.pool.invalid_lists.add(taken)
        lists = enumerate((fit, taken, forbidden, ""))
        await store.submit([submission(f"r-{number}", name) for number, name in lists])
        gateway, limiter = Answers(), Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"), gateway, limiter, Options(RetryPolicy()), Journal(Metrics())
        )
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(5)
        dispatcher.drain(1.0)
        await task
        assert sorted(gateway.sent) == ["r-0", "r-3"]
        told = {
            (one := decode_result(raw)).id: str(one.error_code or "")
            for raw in store.result_lists[store.default_result_list]
        }
        assert told == {"r-1": "INVALID_REQUEST", "r-2": "INVALID_REQUEST", "r-3": ""}
        assert [decode_result(raw).id for raw in store.result_lists[fit]] == ["r-0"]

    run_in_virtual_time(scene(), start=2.0)
