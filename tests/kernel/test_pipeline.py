"""The pipeline of a claimed request: how often it waits for the queue, and which stage decides first."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dispatcher.features.models.availability import Listing, ModelTerms, WhenNotServed
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.options import FamilyOptions, ModelOptions
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import FamilyTerms, PinScope
from dispatcher.features.sequences.turns import Turn
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.options import index_options
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import ErrorCode, decode_result
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.metrics import Metrics
from tests.features.memory_queue import MemoryQueue, MemoryStore
from tests.kernel.scene import AnsweringGateway, find_part, open_limiter

CALL_S = 0.1
"""Duration of each call to the queue after a claim."""
START_S = 2.0
OPTIONS = Options(
    RetryPolicy(),
    of_features=index_options(
        ModelOptions(
            ModelTerms({"qwen": WhenNotServed.WAIT, "night": WhenNotServed.WAIT}),
            (FamilyOptions(FamilyTerms("qwen", VersionTemplate("qwen-v"), pin=PinScope.JOB)),),
        )
    ),
)
CALLS_AFTER_CLAIM = {
    "claim_turns",
    "check_cancelled",
    "find_invalid_result_lists",
    "pin_versions",
    "set_lease_units",
}


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


class Bench:
    def __init__(self, weight: int = 1) -> None:
        self.store = MemoryStore(clock=asyncio.get_running_loop().time)
        self.queue, self.gateway = SlowLookups(self.store), RecordingGateway()
        self.dispatcher = Dispatcher(
            self.queue,
            self.gateway,
            open_limiter(),
            OPTIONS,
            Journal(Metrics()),
            weigh_request=lambda _request: weight,
        )
        at = asyncio.get_running_loop().time()
        find_part(self.dispatcher, ModelRouter).update_listings([Listing("a", at, ("qwen-v1",))])

    async def submit(self, payload: bytes = b"{}", within_s: float = 10**6, **member: Any) -> None:
        until = int(asyncio.get_running_loop().time() + within_s)
        encoded = encode_member("r", payload, until, token="t", **member)
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
        await bench.submit(
            b'{"model":"qwen"}',
            results="batch-results:mine",
            labels={"job": "one"},
            extra=Turn("chat", 0),
        )
        await asyncio.sleep(3)
        assert set(bench.queue.call_counts) == CALLS_AFTER_CLAIM, "every stage asked the queue"
        assert bench.gateway.sent_at[0] - bench.queue.claimed_at[0] == pytest.approx(2 * CALL_S)

    run_on_bench(check, weight=2)


EXPECTED = {
    "past its deadline": ErrorCode.DEADLINE_EXCEEDED,
    "cancelled": ErrorCode.CANCELLED,
    "invalid list": ErrorCode.INVALID_REQUEST,
    "unknown model": ErrorCode.MODEL_NOT_FOUND,
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
        model = b'{"model":"nobody-knows-it"}' if "unknown model" in problems else b"{}"
        within_s = 0.0 if "past its deadline" in problems else 10**6
        await bench.submit(
            model, within_s, results="batch-results:mine" if "invalid list" in problems else ""
        )
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
