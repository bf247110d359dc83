"""What `batched` adds to the function that it calls: time, CPU, and how large the calls are.

The long form prints a table, with PyPI's `batched` beside it where that is installed (it is no dependency):
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
from tests.floors import beside

Call = Callable[[int], Awaitable[int]]
MAX_SIZE = 200
ITEMS = 2000
MOST = 2.5
"""Of a future that a callback resolves, which any caller of anything awaits; seen: 1.7 to 1.9 times."""


async def closed_loop(call: Call, callers: int, each: int) -> list[float]:
    """So many callers that ask again when they are answered; how long each waited, in s."""
    waited: list[float] = []

    async def caller(name: int) -> None:
        for number in range(each):
            begun_at = time.perf_counter()
            item = name * each + number
            assert await call(item) == item
            waited.append(time.perf_counter() - begun_at)

    await asyncio.gather(*map(caller, range(callers)))
    return waited


async def resolved(item: int) -> int:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    loop.call_soon(future.set_result, item)
    return await future


async def identity(items: list[int]) -> list[int]:
    return items


async def test_an_item_costs_little_more_than_the_future_that_its_caller_awaits() -> None:
    function = batched(max_size=MAX_SIZE)(identity)

    async def ours() -> float:
        begun = time.process_time()
        await closed_loop(function, MAX_SIZE, ITEMS // MAX_SIZE)
        return time.process_time() - begun

    async def floor() -> float:
        begun = time.process_time()
        await closed_loop(resolved, MAX_SIZE, ITEMS // MAX_SIZE)
        return time.process_time() - begun

    cost = await beside(ours, floor)
    assert cost.ratio < MOST, cost


def cost_s(count: int) -> float:
    """What a call takes: 5 ms for one item, 10 ms for 200."""
    return 0.005 * (1 + log2(count) / log2(MAX_SIZE))


def made(kind: str, *, sync: bool, timeout_s: float, calls: list[int]) -> Call:
    def blocking(items: list[int]) -> list[int]:
        calls.append(len(items))
        time.sleep(cost_s(len(items)))
        return items

    async def waiting(items: list[int]) -> list[int]:
        calls.append(len(items))
        await asyncio.sleep(cost_s(len(items)))
        return items

    if kind == "batched of PyPI":
        theirs: Any = importlib.import_module("batched")
        options = {"batch_size": MAX_SIZE, "timeout_ms": timeout_s * 1000}
        call: Call = (
            theirs.dynamically(**options)(blocking).acall
            if sync
            else theirs.aio.dynamically(**options)(waiting)
        )
        return call
    flush = kind == "ours"
    decorate = batched(max_size=MAX_SIZE, timeout_s=timeout_s, idle_flush=flush)
    return decorate(blocking) if sync else decorate(waiting)


KINDS = ["ours", "ours, idle_flush=False"]
if importlib.util.find_spec("batched") is not None:
    KINDS.append("batched of PyPI")


@pytest.mark.long
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_time_that_it_adds(sync: bool) -> None:
    """With the same numbers: calls of 200 at the most, 100 ms at the longest."""
    print(f"\n{'sync' if sync else 'async'} function")
    print("| callers | who | items/s | waited, median | p99 | call alone | CPU an item | items a call |")
    for callers, each in ((1, 20), (10, 20), (200, 20), (2000, 5)):
        for kind in KINDS:
            calls: list[int] = []
            call = made(kind, sync=sync, timeout_s=0.1, calls=calls)
            await closed_loop(call, 1, 1)
            calls.clear()
            begun_at, begun_cpu = time.perf_counter(), time.process_time()
            waited = sorted(await closed_loop(call, callers, each))
            took_s, cpu_s = time.perf_counter() - begun_at, time.process_time() - begun_cpu
            alone_ms = cost_s(round(mean(calls))) * 1000
            print(
                f"| {callers:,} | {kind} | {len(waited) / took_s:,.0f} | {median(waited) * 1000:.1f} ms "
                f"| {waited[int(len(waited) * 0.99)] * 1000:.1f} ms | {alone_ms:.1f} ms "
                f"| {cpu_s / len(waited) * 1e6:.0f} µs | {mean(calls):.0f} |"
            )
            if kind == "ours":
                rounds = max(1, callers / MAX_SIZE)
                assert median(waited) * 1000 < 3 * rounds * alone_ms + 10


@pytest.mark.long
@pytest.mark.parametrize("max_size", [200, 1000])
async def test_880_items(max_size: int) -> None:
    """A function that sleeps for 10 ms × (1 + log10(n)), one call at a time, in real time."""

    def model(items: list[int]) -> list[int]:
        time.sleep(0.01 * (1 + log10(len(items))))
        return items

    begun_at = time.perf_counter()
    for item in range(880):
        model([item])
    one_by_one_s = time.perf_counter() - begun_at
    async with batched(max_size=max_size)(model) as function:
        begun_at = time.perf_counter()
        assert await asyncio.gather(*map(function, range(880))) == list(range(880))
        took_s = time.perf_counter() - begun_at
    ratio = one_by_one_s / took_s
    print(f"\nmax_size {max_size}: {one_by_one_s:.2f} s one by one, {took_s:.3f} s: {ratio:.0f} ×")
    assert ratio > (150 if max_size == 1000 else 40)
