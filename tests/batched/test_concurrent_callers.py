"""Many concurrent callers of batched functions: each gets its own result, whatever is raised, killed and
cancelled.

Also, 880 items take the time of a few.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from math import log10
from typing import Any

import pytest

from dispatcher.batched.stages import PIPELINE_DEPTH
from dispatcher.client import Batched, WorkerCrashedError, batched
from dispatcher.lab.simulation import virtual_loop
from tests.batched.pipelined import FaultyStages
from tests.client.batched_classes import FaultyModel, FaultyTransform, Item

CALLERS = 50
ITEMS = 400
FAULTS = ["fine"] * 40 + ["put", "raise", "leave"]
CRASHING_CALLERS = 6


def make_items(caller: int, faults: list[str]) -> list[Item]:
    random_generator = random.Random(caller)
    return [(caller, number, random_generator.choice(faults)) for number in range(ITEMS)]


class OutcomeCounter:
    """Check the outcome of each item and count the outcomes by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def check(self, item: Item, outcome: object) -> None:
        fault = item[2]
        match outcome:
            case WorkerCrashedError():
                kind = "crashed"
            case KeyError(args=args):
                assert (fault, args) == ("put", (item,))
                kind = "put"
            case LookupError(args=args):
                assert (fault, args) == ("raise", (item,))
                kind = "raise"
            case asyncio.CancelledError() | TimeoutError():
                assert fault == "leave"
                kind = "left"
            case _:
                assert outcome == ("result", item)
                assert fault in ("fine", "leave")
                kind = "answered"
        self.counts[kind] += 1

    async def run_task_caller(self, function: Batched[Item, Any], items: list[Item]) -> None:
        """Submit items one after the other, and sometimes several at once. Some calls are cancelled."""
        random_generator = random.Random(items[0][0])
        while items:
            batch, items = items[: (size := random_generator.choice([1, 1, 1, 7]))], items[size:]
            calls = [asyncio.create_task(function(item)) for item in batch]
            for task, item in zip(calls, batch, strict=True):
                if item[2] == "leave":
                    asyncio.get_running_loop().call_later(
                        random_generator.choice([0, 0.0005, 0.002]), task.cancel
                    )
            await asyncio.wait(calls)
            for task, item in zip(calls, batch, strict=True):
                outcome: object = asyncio.CancelledError() if task.cancelled() else task.exception()
                self.check(item, task.result() if outcome is None else outcome)

    def run_thread_caller(self, function: Batched[Item, Any], items: list[Item]) -> None:
        for item in items:
            try:
                outcome = function.sync(item, timeout=0.0005 if item[2] == "leave" else 60)
            except Exception as error:
                outcome = error
            self.check(item, outcome)


async def run_callers(
    function: Batched[Item, Any], items: Callable[[int], list[Item]], *, threads: bool
) -> Counter[str]:
    """Run all callers and return the counted outcomes. With `threads`, half of the callers are threads."""
    outcomes = OutcomeCounter()
    failed: list[BaseException] = []

    def run(caller: int) -> None:
        try:
            outcomes.run_thread_caller(function, items(caller))
        except BaseException as error:
            failed.append(error)

    task_count = CALLERS // 2 if threads else CALLERS
    threads_of_callers = [
        threading.Thread(target=run, args=(caller,)) for caller in range(task_count, CALLERS)
    ]
    for thread in threads_of_callers:
        thread.start()
    await asyncio.gather(*(outcomes.run_task_caller(function, items(caller)) for caller in range(task_count)))
    for thread in threads_of_callers:
        await asyncio.to_thread(thread.join)
    assert failed == []
    assert outcomes.counts.total() == CALLERS * ITEMS
    assert function.waiting == 0
    await function.aclose()
    return outcomes.counts


def count_expected(*faults: str) -> int:
    return sum(item[2] in faults for caller in range(CALLERS) for item in make_items(caller, FAULTS))


async def test_callers_of_an_async_function_get_their_own_outcomes() -> None:
    call_counts: Counter[Item] = Counter()

    async def function(items: list[Item]) -> list[Any]:
        call_counts.update(items)
        await asyncio.sleep(0)
        return FaultyTransform().transform(items)

    counts = await run_callers(
        batched(max_size=32, timeout_s=0.003, preferred_sizes=(8, 16))(function),
        lambda caller: make_items(caller, FAULTS),
        threads=False,
    )
    assert (counts["put"], counts["raise"]) == (count_expected("put"), count_expected("raise"))
    assert counts["answered"] >= count_expected("fine")
    assert max(call_counts.values()) <= 6, "one call, and one for each halving of 32"


async def test_callers_of_a_sync_function_get_their_own_outcomes() -> None:
    def function(items: list[Item]) -> list[Any]:
        return FaultyTransform().transform(items)

    counts = await run_callers(
        batched(max_size=32, timeout_s=0.003, concurrency=2)(function),
        lambda caller: make_items(caller, FAULTS),
        threads=True,
    )
    assert (counts["put"], counts["raise"]) == (count_expected("put"), count_expected("raise"))
    assert counts["answered"] >= count_expected("fine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "batches"),
    [
        (FaultyModel, 1),
        (batched(max_size=64, timeout_s=0.005)(FaultyStages), PIPELINE_DEPTH),
        (batched(max_size=64, timeout_s=0.005, hooks="caller", workers=2)(FaultyStages), PIPELINE_DEPTH),
    ],
    ids=["without hooks", "hooks in the worker", "hooks in this process, two workers"],
)
async def test_crashes_of_a_worker_process_fail_only_its_items(
    make_model: Callable[[], Batched[Item, Any]], batches: int
) -> None:
    """Some items kill the process: only the items of that moment fail, in as many batches."""

    def items(caller: int) -> list[Item]:
        items_of_caller = make_items(caller, FAULTS)
        if caller % (CALLERS // CRASHING_CALLERS) == 0:
            items_of_caller[200] = (caller, 200, "die")
        return items_of_caller

    crash_count = sum(item[2] == "die" for caller in range(CALLERS) for item in items(caller))
    counts = await run_callers(make_model(), items, threads=True)
    assert crash_count <= counts["crashed"] <= crash_count * 64 * batches
    assert counts["answered"] >= count_expected("fine") - crash_count * 64 * batches
    assert counts["put"] > count_expected("put") // 2


def compute_call_s(count: int) -> float:
    """Return the duration of a call of a model that runs a thousand items in four times the time of one."""
    return 0.01 * (1 + log10(count))


@pytest.mark.parametrize(("max_size", "min_speedup"), [(1000, 200), (200, 50)])
def test_880_items_take_the_time_of_a_few(max_size: int, min_speedup: float) -> None:
    """One call runs at a time and takes `compute_call_s`, in virtual time."""
    calls: list[int] = []

    @batched(max_size=max_size)
    async def model(items: list[int]) -> list[int]:
        calls.append(len(items))
        await asyncio.sleep(compute_call_s(len(items)))
        return [-item for item in items]

    async def main() -> float:
        started_at = asyncio.get_running_loop().time()
        assert await asyncio.gather(*map(model, range(880))) == [-item for item in range(880)]
        return asyncio.get_running_loop().time() - started_at

    one_by_one_s = 880 * compute_call_s(1)
    duration_s = virtual_loop.run_in_virtual_time(main())
    assert duration_s == pytest.approx(sum(map(compute_call_s, calls)))
    assert one_by_one_s / duration_s > min_speedup, calls
