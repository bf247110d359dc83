"""The pipeline of a claimed request: how often it waits for the queue, and which stage decides first."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.completions import build_error
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.metrics import Metrics
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import AnsweringGateway, open_limiter
from tests.memory_queue import MemoryStore

CALL_S = 0.1
"""Duration of each call to the queue after a claim."""
START_S = 2.0
CALLS_AFTER_CLAIM = {"check_cancelled", "find_invalid_result_lists", "set_lease_units"}


class SlowLookups(MemoryQueue):
    """Queue whose calls after a claim take `CALL_S` each."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, "a")
        self.call_counts: Counter[str] = Counter()
        self.claimed_at: list[float] = []

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in CALLS_AFTER_CLAIM or not inspect.iscoroutinefunction(method):
            return method

        async def call_slowly(*args: Any, **named: Any) -> Any:
            self.call_counts[name] += 1
            await asyncio.sleep(CALL_S)
            return await method(*args, **named)

        return call_slowly

    async def claim(self, *args: Any, **named: Any) -> Any:
        reply = await super().claim(*args, **named)
        if reply.leases:
            self.claimed_at.append(asyncio.get_running_loop().time())
        return reply


class RecordingGateway(AnsweringGateway):
    def __init__(self) -> None:
        super().__init__()
        self.sent_at: list[float] = []

    async def forward(self, *args: Any, **named: Any) -> Any:
        self.sent_at.append(asyncio.get_running_loop().time())
        return await super().forward(*args, **named)


class FeatureStage:
    """Stage of a feature that looks up requests with its header, and rejects those whose header says so."""

    def __init__(self, queue: SlowLookups, context: KernelContext, header: str, code: ErrorCode) -> None:
        self._queue, self._context = queue, context
        self._header, self._code = header, code

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        is_needed = any(self._header in claimed.request.headers for claimed in requests)
        return self._call_queue() if is_needed else None

    async def _call_queue(self) -> None:
        self._queue.call_counts[self._header] += 1
        await asyncio.sleep(CALL_S)

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        rejected = [each for each in requests if each.request.headers.get(self._header) == "reject"]
        for each in rejected:
            self._context.complete(build_error(each.entry.lease, each.request, self._code, "rejected"))
        return [each for each in requests if each not in rejected]


class Bench:
    def __init__(self, weight: int = 1) -> None:
        self.store = MemoryStore(clock=asyncio.get_running_loop().time)
        self.queue, self.gateway = SlowLookups(self.store), RecordingGateway()
        self.dispatcher = Dispatcher(
            self.queue,
            self.gateway,
            open_limiter(),
            Options(RetryPolicy()),
            Journal(Metrics()),
            weigh_request=lambda _request: weight,
            build_hooks=lambda context: Hooks(
                first_stages=(FeatureStage(self.queue, context, "x-first", ErrorCode.SEQUENCE_ABORTED),),
                stages=(FeatureStage(self.queue, context, "x-later", ErrorCode.MODEL_NOT_FOUND),),
            ),
        )

    async def submit(self, within_s: float = 10**6, **member: Any) -> None:
        until = int(asyncio.get_running_loop().time() + within_s)
        encoded = encode_member("r", b"{}", until, token="t", **member)
        await self.store.submit([Submission(encoded, float(until), "r", "t", until)])

    async def read_error(self) -> str:
        """Return the error of the only result. Empty if there is no result."""
        found = self.store.list_results()
        return str(decode_result(found[0]).error_code or "answered") if found else ""


def run_on_bench(check: Callable[[Bench], Awaitable[None]], *, weight: int = 1) -> None:
    async def main() -> None:
        bench = Bench(weight)
        running = asyncio.create_task(bench.dispatcher.run())
        await check(bench)
        bench.dispatcher.drain(1.0)
        await running

    run_in_virtual_time(main(), start=START_S)


def test_request_that_needs_nothing_is_sent_without_a_wait() -> None:
    async def check(bench: Bench) -> None:
        until = int(START_S) + 10**6
        await bench.store.submit([Submission(encode_member("r", b"{}", until), float(until))])
        await asyncio.sleep(1)
        assert not bench.queue.call_counts
        assert bench.gateway.sent_at == bench.queue.claimed_at

    run_on_bench(check)


def test_request_that_needs_every_stage_waits_for_the_queue_twice() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit(results="batch-results:mine", headers={"x-first": "", "x-later": ""})
        await asyncio.sleep(3)
        expected = {*CALLS_AFTER_CLAIM, "x-first", "x-later"}
        assert set(bench.queue.call_counts) == expected, "every stage asked the queue"
        assert bench.gateway.sent_at[0] - bench.queue.claimed_at[0] == pytest.approx(2 * CALL_S)

    run_on_bench(check, weight=2)


EXPECTED = {
    "past its deadline": ErrorCode.DEADLINE_EXCEEDED,
    "rejected by a first stage": ErrorCode.SEQUENCE_ABORTED,
    "cancelled": ErrorCode.CANCELLED,
    "invalid list": ErrorCode.INVALID_REQUEST,
    "rejected by a later stage": ErrorCode.MODEL_NOT_FOUND,
}
"""Problems of a request in the order in which the stages look for them, each with its error."""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pair
        for pair in itertools.combinations_with_replacement(EXPECTED, 2)
        # With an invalid list, the queue writes that error in place of any other result.
        if pair[1] != "invalid list" or pair[0] == "invalid list"
    ],
)
def test_first_stage_with_a_problem_decides(first: str, second: str) -> None:
    problems = {first, second}

    async def check(bench: Bench) -> None:
        if "cancelled" in problems:
            await bench.store.cancel_request("r", "t", is_token_known=True)
        if "invalid list" in problems:
            bench.store.pool.invalid_lists.add("batch-results:mine")
        headers = {
            header: "reject"
            for header, problem in (
                ("x-first", "rejected by a first stage"),
                ("x-later", "rejected by a later stage"),
            )
            if problem in problems
        }
        within_s = 0.0 if "past its deadline" in problems else 10**6
        results = "batch-results:mine" if "invalid list" in problems else ""
        await bench.submit(within_s, results=results, headers=headers)
        await asyncio.sleep(3)
        assert await bench.read_error() == EXPECTED[first]
        assert bench.gateway.sent == []

    run_on_bench(check)


def test_gate_that_closes_during_a_lookup_returns_the_request() -> None:
    async def check(bench: Bench) -> None:
        await bench.submit()
        await asyncio.sleep(CALL_S / 2)
        assert bench.queue.claimed_at
        at = asyncio.get_running_loop().time()
        bench.dispatcher.limiter.record_refusal(at, retry_at=at + 5.0, is_out_of_capacity=False, in_flight=0)
        await asyncio.sleep(1)
        assert bench.gateway.sent == []
        assert (await bench.store.count_requests()).pending == 1

    run_on_bench(check)
