"""Properties of `batched`: each caller gets its own result, and no item runs more often than needed."""

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


def run_batch(
    count: int, call: Callable[[list[int]], list[Any]], *, isolate: bool = True
) -> tuple[list[Any], list[list[int]]]:
    """Return the outcome of each item, and the items of each call."""
    run, calls = BatchRun[int, Any](range(count), isolate=isolate), []
    while part := run.next_part():
        calls.append(part)
        try:
            run.record_part(call(part))
        except LookupError as error:
            run.record_part(Raised(error))
    return run.outcomes, calls


def make_failing_function(failing: set[int]) -> Callable[[list[int]], list[Any]]:
    """Return a function that raises if one of these items is among its items."""

    def call(items: list[int]) -> list[Any]:
        if found := failing & set(items):
            raise LookupError(*sorted(found))
        return [("of", item) for item in items]

    return call


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_only_the_failing_items_get_the_exception(count: int, failing: set[int]) -> None:
    outcomes, calls = run_batch(count, make_failing_function(failing))
    for item, outcome in enumerate(outcomes):
        if item in failing:
            assert isinstance(outcome, Raised)
            assert outcome.error.args == (item,)
        else:
            assert outcome == ("of", item)
    assert all(calls), "no call is empty"
    assert bool(calls) == (count > 0)


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_no_item_runs_more_often_than_needed(count: int, failing: set[int]) -> None:
    _, calls = run_batch(count, make_failing_function(failing))
    answered: set[int] = set()
    failed_calls: list[set[int]] = []
    for items in map(set, calls):
        assert not items & answered, "an item that succeeded does not run again"
        is_known_to_fail = any(items == items_before - answered for items_before in failed_calls)
        assert not is_known_to_fail or len(items) == 1, (
            "a call that is known to fail is not made, unless it has a single item"
        )
        if items & failing:
            failed_calls.append(items)
        else:
            answered |= items
    runs = Counter(item for items in calls for item in items)
    assert max(runs.values(), default=0) <= 1 + ceil(log2(max(count, 1)))


@given(COUNTS, st.integers(0, 69))
def test_one_failing_item_costs_a_logarithmic_number_of_calls(count: int, failing: int) -> None:
    _, calls = run_batch(count, make_failing_function({failing}))
    assert len(calls) <= 1 + 2 * ceil(log2(max(count, 1)))


@given(COUNTS, st.integers(1, 70))
def test_batch_that_is_too_large_is_split_until_all_items_succeed(count: int, max_count: int) -> None:
    """The function fails like one that runs out of memory with too many items."""

    def call(items: list[int]) -> list[Any]:
        if len(items) > max_count:
            raise LookupError(len(items))
        return items

    outcomes, _ = run_batch(count, call)
    assert outcomes == list(range(count))


@given(COUNTS, st.sets(st.integers(0, 69)))
def test_all_items_get_the_exception_without_isolation(count: int, failing: set[int]) -> None:
    outcomes, calls = run_batch(count, make_failing_function(failing), isolate=False)
    assert len(calls) == min(count, 1)
    assert all(isinstance(each, Raised) == bool(failing & set(range(count))) for each in outcomes)


@dataclass(frozen=True)
class CallerPlan:
    """Start time of a caller, outcome of its item, and the time after which the caller gives up."""

    starts_at: float
    outcome: str
    leaves_after_s: float


CALLER_PLANS = st.builds(
    CallerPlan,
    st.integers(0, 200).map(lambda n: n / 200),
    st.sampled_from(["", "", "", "put", "raise"]),
    st.sampled_from([9.0, 9.0, 9.0, 0.0, 0.02, 0.1]),
)


@given(
    st.lists(CALLER_PLANS, max_size=60),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.03, 0.2]),
    st.lists(st.integers(1, 12), max_size=2),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_caller_gets_its_own_result(
    plans: list[CallerPlan],
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
        if failing_items := [item for item in items if plans[item].outcome == "raise"]:
            raise LookupError(failing_items[0])
        return [KeyError(item) if plans[item].outcome == "put" else ("of", item) for item in items]

    async def caller(item: int) -> None:
        plan = plans[item]
        await asyncio.sleep(plan.starts_at)
        task = asyncio.create_task(function(item))
        await asyncio.wait([task], timeout=plan.leaves_after_s)
        if not task.done():
            assert plan.leaves_after_s < 9.0, "a caller waits for ever"
            task.cancel()
            return
        match task.exception():
            case None:
                assert (plan.outcome, task.result()) == ("", ("of", item))
            case KeyError() as error:
                assert (plan.outcome, error.args) == ("put", (item,))
            case LookupError() as error:
                assert not isolate or (plan.outcome, error.args) == ("raise", (item,))
            case error:
                pytest.fail(f"{error!r}")

    async def main() -> None:
        await asyncio.gather(*map(caller, range(len(plans))))
        assert function.waiting == 0
        await function.aclose()
        assert function.running == 0

    virtual_loop.run_in_virtual_time(main())
    assert all(0 < len(items) <= max_size for items in calls)
    if not isolate:
        runs = Counter(item for items in calls for item in items)
        assert max(runs.values(), default=1) == 1
