"""`batched` under fire: whatever is raised, killed and given up around it, each caller gets its own result.

And what it is for: 880 items in the time of a few.
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

from dispatcher.client import Batched, WorkerCrashedError, batched
from dispatcher.lab.simulation import virtual_loop
from tests.client.models import Fated, FatedModel, Item

CALLERS = 50
ITEMS = 400
FATES = ["fine"] * 40 + ["put", "raise", "leave"]
CRASHES = 6


def items_of(caller: int, fates: list[str]) -> list[Item]:
    chance = random.Random(caller)
    return [(caller, number, chance.choice(fates)) for number in range(ITEMS)]


class Ledger:
    """What became of each item."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()

    def check(self, item: Item, outcome: object) -> None:
        fate = item[2]
        match outcome:
            case WorkerCrashedError():
                kind = "crashed"
            case KeyError(args=args):
                assert (fate, args) == ("put", (item,))
                kind = "put"
            case LookupError(args=args):
                assert (fate, args) == ("raise", (item,))
                kind = "raise"
            case asyncio.CancelledError() | TimeoutError():
                assert fate == "leave"
                kind = "left"
            case _:
                assert outcome == ("of", item)
                assert fate in ("fine", "leave")
                kind = "answered"
        self.told[kind] += 1

    async def task(self, function: Batched[Item, Any], items: list[Item]) -> None:
        """One after the other, and now and then several at once; some are given up."""
        chance = random.Random(items[0][0])
        while items:
            several, items = items[: (many := chance.choice([1, 1, 1, 7]))], items[many:]
            asked = [asyncio.create_task(function(item)) for item in several]
            for task, item in zip(asked, several, strict=True):
                if item[2] == "leave":
                    asyncio.get_running_loop().call_later(chance.choice([0, 0.0005, 0.002]), task.cancel)
            await asyncio.wait(asked)
            for task, item in zip(asked, several, strict=True):
                outcome: object = asyncio.CancelledError() if task.cancelled() else task.exception()
                self.check(item, task.result() if outcome is None else outcome)

    def thread(self, function: Batched[Item, Any], items: list[Item]) -> None:
        for item in items:
            try:
                outcome = function.sync(item, timeout=0.0005 if item[2] == "leave" else 60)
            except Exception as error:
                outcome = error
            self.check(item, outcome)


async def fire(
    function: Batched[Item, Any], items: Callable[[int], list[Item]], *, threads: bool
) -> Counter[str]:
    """Half of the callers are tasks, half of them threads."""
    ledger = Ledger()
    failed: list[BaseException] = []

    def run(caller: int) -> None:
        try:
            ledger.thread(function, items(caller))
        except BaseException as error:
            failed.append(error)

    half = CALLERS // 2 if threads else CALLERS
    others = [threading.Thread(target=run, args=(caller,)) for caller in range(half, CALLERS)]
    for thread in others:
        thread.start()
    await asyncio.gather(*(ledger.task(function, items(caller)) for caller in range(half)))
    for thread in others:
        await asyncio.to_thread(thread.join)
    assert failed == []
    assert ledger.told.total() == CALLERS * ITEMS
    assert function.waiting == 0
    await function.aclose()
    return ledger.told


def expected(*fates: str) -> int:
    return sum(item[2] in fates for caller in range(CALLERS) for item in items_of(caller, FATES))


async def test_async_function() -> None:
    ran: Counter[Item] = Counter()

    async def function(items: list[Item]) -> list[Any]:
        ran.update(items)
        await asyncio.sleep(0)
        return Fated().transform(items)

    told = await fire(
        batched(max_size=32, timeout_s=0.003, preferred_sizes=(8, 16))(function),
        lambda caller: items_of(caller, FATES),
        threads=False,
    )
    assert (told["put"], told["raise"]) == (expected("put"), expected("raise"))
    assert told["answered"] >= expected("fine")
    assert max(ran.values()) <= 6, "once, and once for each halving of 32"


async def test_sync_function() -> None:
    def function(items: list[Item]) -> list[Any]:
        return Fated().transform(items)

    told = await fire(
        batched(max_size=32, timeout_s=0.003, concurrency=2)(function),
        lambda caller: items_of(caller, FATES),
        threads=True,
    )
    assert (told["put"], told["raise"]) == (expected("put"), expected("raise"))
    assert told["answered"] >= expected("fine")


async def test_worker_process() -> None:
    """Some items kill it: they fail what it held then, and nothing else."""

    def items(caller: int) -> list[Item]:
        made = items_of(caller, FATES)
        if caller % (CALLERS // CRASHES) == 0:
            made[200] = (caller, 200, "die")
        return made

    deadly = sum(item[2] == "die" for caller in range(CALLERS) for item in items(caller))
    told = await fire(FatedModel(), items, threads=True)
    assert deadly <= told["crashed"] <= deadly * 64
    assert told["answered"] >= expected("fine") - deadly * 64
    assert told["put"] > expected("put") // 2


def cost_s(count: int) -> float:
    """What a call takes: a model that runs a thousand items in four times the time of one."""
    return 0.01 * (1 + log10(count))


@pytest.mark.parametrize(("max_size", "least"), [(1000, 200), (200, 50)])
def test_880_items_take_the_time_of_a_few(max_size: int, least: float) -> None:
    """One call at a time, each as long as `cost_s` says: in virtual time."""
    calls: list[int] = []

    @batched(max_size=max_size)
    async def model(items: list[int]) -> list[int]:
        calls.append(len(items))
        await asyncio.sleep(cost_s(len(items)))
        return [-item for item in items]

    async def main() -> float:
        begun_at = asyncio.get_running_loop().time()
        assert await asyncio.gather(*map(model, range(880))) == [-item for item in range(880)]
        return asyncio.get_running_loop().time() - begun_at

    one_by_one_s = 880 * cost_s(1)
    took_s = virtual_loop.run_in_virtual_time(main())
    assert took_s == pytest.approx(sum(map(cost_s, calls)))
    assert one_by_one_s / took_s > least, calls
