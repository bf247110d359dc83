"""Requests whose result list cannot be used are rejected before they are sent."""

from __future__ import annotations

import asyncio
import time

from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.metrics import Metrics
from tests.memory_queue import MemoryStore
from tests.queue.factories import InstantGateway


def build_submission(request_id: str, result_list: str) -> Submission:
    deadline = int(time.time()) + 10**6
    return Submission(
        encode_member(request_id, b"{}", deadline, results=result_list),
        float(deadline),
        request_id,
        "",
        deadline,
    )


def test_request_with_an_invalid_result_list_is_not_sent() -> None:
    """One key has the wrong type, and the settings forbid the other."""

    async def main() -> None:
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        wrong_type, forbidden, valid = "batch-results:wrong-type", "celery", "batch-results:valid"
        store.pool.invalid_lists.add(wrong_type)
        lists = enumerate((valid, wrong_type, forbidden, ""))
        await store.submit([build_submission(f"r-{number}", result_list) for number, result_list in lists])
        gateway, limiter = InstantGateway(), Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            gateway,
            limiter,
            Options(RetryPolicy()),
            Journal(Metrics()),
        )
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(5)
        dispatcher.drain(1.0)
        await task
        assert sorted(gateway.sent) == ["r-0", "r-3"]
        errors = {
            (result := decode_result(encoded)).id: str(result.error_code or "")
            for encoded in store.result_lists[store.default_result_list]
        }
        assert errors == {"r-1": "INVALID_REQUEST", "r-2": "INVALID_REQUEST", "r-3": ""}
        assert [decode_result(encoded).id for encoded in store.result_lists[valid]] == ["r-0"]

    run_in_virtual_time(main(), start=2.0)
