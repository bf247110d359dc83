"""The laws of `batched`: each caller its own result, and no item run more often than needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batched.calls import BatchRun, Raised
from dispatcher.batched.decorator import batched
from dispatcher.lab.simulation import virtual_loop

COUNTS = st.integers(0, 70)


def attempted(
    count: int, call: Callable[[list[int]], list[Any]], *, isolate: bool = True
) -> tuple[list[Any], list[list[int]]]:
    """The outcome of each item, and all calls."""
    attempt, calls = BatchRun[int, Any](range(count), isolate=isolate), []
    while part := attempt.next_part():
        calls.append(part)
        try:
            attempt.record_part(call(part))
        except LookupError as error:
            attempt.record_part(Raised(error))
    return attempt.outcomes, calls


def refusing(bad: set[int]) -> Callable[[list[int]], list[Any]]:
    """A function that raises where one of these is among its items."""

    def call(items: list[int]) -> list[Any]:
        if found := bad & set(items):
            raise LookupError(*sorted(found))
        return [("of", item) for item in items]

    return call


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_who_is_to_blame_alone_gets_what_was_raised(count: int, bad: set[int]) -> None:
    outcomes, calls = attempted(count, refusing(bad))
    for item, outcome in enumerate(outcomes):
        if item in bad:
            assert isinstance(outcome, Raised)
            assert outcome.error.args == (item,)
        else:
            assert outcome == ("of", item)
    assert all(calls), "no call is made for nothing"
    assert bool(calls) == (count > 0)


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_no_item_is_run_more_often_than_needed(count: int, bad: set[int]) -> None:
    _, calls = attempted(count, refusing(bad))
    answered: set[int] = set()
    raising: list[set[int]] = []
    for items in map(set, calls):
        assert not items & answered, "what was answered is not run again"
        known = any(items == whole - answered for whole in raising)
        assert not known or len(items) == 1, "what surely raises is not run, but alone"
        if items & bad:
            raising.append(items)
        else:
            answered |= items
    runs = Counter(item for items in calls for item in items)
    assert max(runs.values(), default=0) <= 1 + ceil(log2(max(count, 1)))


@given(COUNTS, st.integers(0, 69))
def test_one_to_blame_costs_few_calls(count: int, bad: int) -> None:
    _, calls = attempted(count, refusing({bad}))
    assert len(calls) <= 1 + 2 * ceil(log2(max(count, 1)))


@given(COUNTS, st.integers(1, 70))
def test_nobody_is_to_blame_where_there_were_too_many(count: int, most: int) -> None:
    """A batch that does not fit into memory: its halves do."""

    def call(items: list[int]) -> list[Any]:
        if len(items) > most:
            raise LookupError(len(items))
        return items

    outcomes, _ = attempted(count, call)
    assert outcomes == list(range(count))


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_all_get_it_where_nobody_is_sought(count: int, bad: set[int]) -> None:
    outcomes, calls = attempted(count, refusing(bad), isolate=False)
    assert len(calls) == min(count, 1)
    assert all(isinstance(each, Raised) == bool(bad & set(range(count))) for each in outcomes)


@dataclass(frozen=True)
class Ask:
    """An item: when it comes, and what becomes of it or its caller."""

    at: float
    fate: str
    leaves_after_s: float


ASKS = st.builds(
    Ask,
    st.integers(0, 200).map(lambda n: n / 200),
    st.sampled_from(["", "", "", "put", "raise"]),
    st.sampled_from([9.0, 9.0, 9.0, 0.0, 0.02, 0.1]),
)


@given(
    st.lists(ASKS, max_size=60),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.03, 0.2]),
    st.lists(st.integers(1, 12), max_size=2),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_caller_gets_its_own_result(
    asks: list[Ask],
    max_size: int,
    timeout_s: float,
    preferred_sizes: list[int],
    idle_flush: bool,
    concurrency: int,
    isolate: bool,
) -> None:
    calls: list[list[int]] = []

    @batched(
        max_size=max_size,
        timeout_s=timeout_s,
        preferred_sizes=preferred_sizes,
        idle_flush=idle_flush,
        concurrency=concurrency,
        isolate=isolate,
    )
    async def function(items: list[int]) -> list[Any]:
        calls.append(items)
        await asyncio.sleep(0.01 * len(items))
        if raising := [item for item in items if asks[item].fate == "raise"]:
            raise LookupError(raising[0])
        return [KeyError(item) if asks[item].fate == "put" else ("of", item) for item in items]

    async def caller(item: int) -> None:
        ask = asks[item]
        await asyncio.sleep(ask.at)
        asked = asyncio.create_task(function(item))
        await asyncio.wait([asked], timeout=ask.leaves_after_s)
        if not asked.done():
            assert ask.leaves_after_s < 9.0, "nothing waits for ever"
            asked.cancel()
            return
        match asked.exception():
            case None:
                assert (ask.fate, asked.result()) == ("", ("of", item))
            case KeyError() as error:
                assert (ask.fate, error.args) == ("put", (item,))
            case LookupError() as error:
                assert not isolate or (ask.fate, error.args) == ("raise", (item,))
            case error:
                pytest.fail(f"{error!r}")

    async def main() -> None:
        await asyncio.gather(*map(caller, range(len(asks))))
        assert function.waiting == 0
        await function.aclose()
        assert function.running == 0

    virtual_loop.run_in_virtual_time(main())
    assert all(0 < len(items) <= max_size for items in calls)
    if not isolate:
        runs = Counter(item for items in calls for item in items)
        assert max(runs.values(), default=1) == 1
