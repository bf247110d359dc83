"""Overhead of `batched`: added time, CPU, and size of the calls.

The long form prints a table, which includes `batched` of PyPI if that is installed (it is not a dependency):
`pytest -s -m long tests/benchmarks/test_batched.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from math import log2, log10
from statistics import mean, median
from typing import Any

import pytest

from dispatcher.client import batched
from tests.batched.pipelined import SleepingStages
from tests.cost_comparison import compare_costs

Call = Callable[[int], Awaitable[int]]
MAX_SIZE = 200
ITEMS = 2000
MAX_RATIO = 2.5
"""Maximum cost relative to awaiting a future that a callback resolves. Measured: 1.7 to 1.9."""


async def run_callers(call: Call, callers: int, calls_per_caller: int) -> list[float]:
    """Run callers that call again after each answer. Return the waiting times in seconds."""
    wait_times_s: list[float] = []

    async def caller(name: int) -> None:
        for number in range(calls_per_caller):
            started_at = time.perf_counter()
            item = name * calls_per_caller + number
            assert await call(item) == item
            wait_times_s.append(time.perf_counter() - started_at)

    await asyncio.gather(*map(caller, range(callers)))
    return wait_times_s


async def await_resolved_future(item: int) -> int:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    loop.call_soon(future.set_result, item)
    return await future


async def identity(items: list[int]) -> list[int]:
    return items


async def test_item_costs_little_more_than_the_future_that_its_caller_awaits() -> None:
    function = batched(max_size=MAX_SIZE)(identity)

    async def measure_batched() -> float:
        started_at = time.process_time()
        await run_callers(function, MAX_SIZE, ITEMS // MAX_SIZE)
        return time.process_time() - started_at

    async def measure_baseline() -> float:
        started_at = time.process_time()
        await run_callers(await_resolved_future, MAX_SIZE, ITEMS // MAX_SIZE)
        return time.process_time() - started_at

    cost = await compare_costs(measure_batched, measure_baseline)
    assert cost.ratio < MAX_RATIO, cost


def compute_call_s(count: int) -> float:
    """Return the duration of a call: 5 ms for one item, 10 ms for 200."""
    return 0.005 * (1 + log2(count) / log2(MAX_SIZE))


def make_batched(kind: str, *, sync: bool, timeout_s: float, calls: list[int]) -> Call:
    def blocking(items: list[int]) -> list[int]:
        calls.append(len(items))
        time.sleep(compute_call_s(len(items)))
        return items

    async def waiting(items: list[int]) -> list[int]:
        calls.append(len(items))
        await asyncio.sleep(compute_call_s(len(items)))
        return items

    if kind == "batched of PyPI":
        pypi_batched: Any = importlib.import_module("batched")
        options = {"batch_size": MAX_SIZE, "timeout_ms": timeout_s * 1000}
        call: Call = (
            pypi_batched.dynamically(**options)(blocking).acall
            if sync
            else pypi_batched.aio.dynamically(**options)(waiting)
        )
        return call
    idle_flush = kind == "ours"
    decorate = batched(max_size=MAX_SIZE, timeout_s=timeout_s, idle_flush=idle_flush)
    return decorate(blocking) if sync else decorate(waiting)


KINDS = ["ours", "ours, idle_flush=False"]
if importlib.util.find_spec("batched") is not None:
    KINDS.append("batched of PyPI")


@pytest.mark.long
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_added_time_is_small(sync: bool) -> None:
    """All variants have the same limits: at most 200 items per call and a delay of at most 100 ms."""
    print(f"\n{'sync' if sync else 'async'} function")
    print(
        "| callers | variant | items/s | waited, median | p99 | single call | CPU per item | items per call |"
    )
    for callers, calls_per_caller in ((1, 20), (10, 20), (200, 20), (2000, 5)):
        for kind in KINDS:
            calls: list[int] = []
            call = make_batched(kind, sync=sync, timeout_s=0.1, calls=calls)
            await run_callers(call, 1, 1)
            calls.clear()
            started_at, cpu_started_at = time.perf_counter(), time.process_time()
            wait_times_s = sorted(await run_callers(call, callers, calls_per_caller))
            duration_s, cpu_s = time.perf_counter() - started_at, time.process_time() - cpu_started_at
            call_ms = compute_call_s(round(mean(calls))) * 1000
            print(
                f"| {callers:,} | {kind} | {len(wait_times_s) / duration_s:,.0f} | "
                f"{median(wait_times_s) * 1000:.1f} ms "
                f"| {wait_times_s[int(len(wait_times_s) * 0.99)] * 1000:.1f} ms | {call_ms:.1f} ms "
                f"| {cpu_s / len(wait_times_s) * 1e6:.0f} µs | {mean(calls):.0f} |"
            )
            if kind == "ours":
                rounds = max(1, callers / MAX_SIZE)
                assert median(wait_times_s) * 1000 < 3 * rounds * call_ms + 10


@pytest.mark.long
@pytest.mark.parametrize("max_size", [200, 1000])
async def test_batching_880_items_is_faster_than_single_calls(max_size: int) -> None:
    """Call a function that sleeps for 10 ms × (1 + log10(n)), one call at a time, in real time."""

    def run_model(items: list[int]) -> list[int]:
        time.sleep(0.01 * (1 + log10(len(items))))
        return items

    started_at = time.perf_counter()
    for item in range(880):
        run_model([item])
    one_by_one_s = time.perf_counter() - started_at
    async with batched(max_size=max_size)(run_model) as function:
        started_at = time.perf_counter()
        assert await asyncio.gather(*map(function, range(880))) == list(range(880))
        duration_s = time.perf_counter() - started_at
    ratio = one_by_one_s / duration_s
    print(f"\nmax_size {max_size}: {one_by_one_s:.2f} s one by one, {duration_s:.3f} s: {ratio:.0f} ×")
    assert ratio > (150 if max_size == 1000 else 40)


@pytest.mark.long
async def test_pipeline_of_eight_calls() -> None:
    """The three stages of a class take 100 ms each."""
    stage_s = 0.1
    async with batched(max_size=64, batch_hooks=True)(SleepingStages)(stage_s) as model:
        begun_at = time.perf_counter()
        assert await asyncio.gather(*map(model, range(512))) == list(range(512))
        took_s = time.perf_counter() - begun_at
    print(f"\n8 calls of 3 × {stage_s} s: {took_s:.3f} s, one after the other {24 * stage_s:.1f} s")
    assert 10 * stage_s <= took_s < 15 * stage_s
