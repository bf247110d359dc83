"""Each caller of a batched function gets its own result or an error, whatever the function returns or
raises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from math import inf
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.batched.stages import Stage
from dispatcher.batched.sync_functions import ThreadWaiters
from dispatcher.batched.waiting import CallTerms
from dispatcher.client import Batched, BatchError, WorkerCrashedError, WrongLengthError, batched
from dispatcher.common.grouping import GroupingRule
from tests.batched.misbehaving import (
    FATAL_ERRORS,
    ITEM_ERRORS,
    REJECTED_RESULTS,
    RETURNED_EXCEPTIONS,
    UNSENDABLE_RESULTS,
    UNUSUAL_RESULTS,
    VALID_RESULTS,
    Call,
    ClasslessResult,
    Misbehaving,
    behave,
)

batched_by_four = batched(max_size=4, timeout_s=60, idle_flush=False)
"""Decorator whose calls always have four items, so that a test knows which items share a call."""
MAX_WAIT_S = 30
"""Seconds after which a caller without an outcome counts as waiting for ever. Tests that pass never wait so
long."""


async def behave_async(calls: list[Call]) -> Any:
    return behave(calls)


class NoOutcomeError(Exception):
    """Placeholder for the outcome of a caller that got none."""


class CallMode:
    """A way to call a function and to wait for its results."""

    def __init__(self, name: str, function: Batched[Call, Any]) -> None:
        self.name, self.function = name, function

    def get_outcomes(self, calls: list[Call]) -> list[Any]:
        """Return the result or the error that each of these simultaneous callers got."""
        if self.name == "async, called from threads":
            with ThreadPoolExecutor(len(calls)) as threads:
                futures = [threads.submit(self.function.sync, call, timeout=MAX_WAIT_S) for call in calls]
                return [each.exception() or each.result() for each in futures]
        return run_on_loop(self.function, calls)


def run_on_loop(function: Batched[Call, Any], calls: list[Call]) -> list[Any]:
    """Return the outcome of each caller, with an event loop that is restarted after an exception that ends
    loops."""
    loop = asyncio.new_event_loop()
    try:
        tasks = [loop.create_task(get_outcome(function, call)) for call in calls]
        waiting = loop.create_task(asyncio.wait(tasks, timeout=MAX_WAIT_S))
        while not waiting.done():
            try:
                loop.run_until_complete(waiting)
            except (SystemExit, KeyboardInterrupt):
                continue
        return [each.result() if each.done() else NoOutcomeError() for each in tasks]
    finally:
        loop.close()


async def get_outcome(function: Batched[Call, Any], call: Call) -> Any:
    try:
        return await function(call)
    except Exception as error:
        return error


@pytest.fixture(scope="module", params=["async", "async, called from threads", "thread", "process"])
def call_mode(request: pytest.FixtureRequest) -> Iterator[CallMode]:
    name = request.param
    batched_function: Batched[Call, Any]
    match name:
        case "process":
            batched_function = batched_by_four(Misbehaving)()
        case "thread":
            batched_function = batched_by_four(behave)
        case _:
            batched_function = batched_by_four(behave_async)
    with batched_function:
        yield CallMode(name, batched_function)


def make_four_calls(behaviour: str) -> list[Call]:
    return [(0, "fine"), (1, "fine"), (2, behaviour), (3, "fine")]


def assert_later_calls_succeed(call_mode: CallMode) -> None:
    """Assert that later callers get their results, whatever happened to earlier ones."""
    assert call_mode.get_outcomes(make_four_calls("fine")) == [("result", n) for n in range(4)]


@pytest.mark.parametrize("behaviour", VALID_RESULTS)
def test_iterable_with_one_result_for_each_item_is_valid(call_mode: CallMode, behaviour: str) -> None:
    for number, outcome in enumerate(call_mode.get_outcomes(make_four_calls(behaviour))):
        expected: Any = {"array": [number, number], "column of an array": number}.get(
            behaviour, ("result", number)
        )
        assert np.array_equal(outcome, expected), outcome
    assert_later_calls_succeed(call_mode)


@pytest.mark.parametrize("behaviour", REJECTED_RESULTS)
def test_other_results_are_one_error_for_all_callers(call_mode: CallMode, behaviour: str) -> None:
    outcomes = call_mode.get_outcomes(make_four_calls(behaviour))
    assert {type(each) for each in outcomes} == {WrongLengthError}, outcomes
    message = "return a list of its rows" if "frame" in behaviour else "one result for each of 4 items"
    assert message in str(outcomes[0])
    assert_later_calls_succeed(call_mode)


@pytest.mark.parametrize("behaviour", ITEM_ERRORS)
def test_only_the_caller_of_the_failing_item_gets_the_error(call_mode: CallMode, behaviour: str) -> None:
    outcomes = call_mode.get_outcomes(make_four_calls(behaviour))
    item_error = outcomes.pop(2)
    assert isinstance(item_error, Exception)
    assert type(item_error) is not NoOutcomeError
    assert outcomes == [("result", 0), ("result", 1), ("result", 3)]
    assert_later_calls_succeed(call_mode)


@pytest.mark.parametrize("behaviour", FATAL_ERRORS)
def test_exception_that_ends_threads_or_loops_is_a_batch_error(call_mode: CallMode, behaviour: str) -> None:
    outcomes = call_mode.get_outcomes(make_four_calls(behaviour))
    assert isinstance(outcomes[2], BatchError), outcomes
    assert not isinstance(outcomes[2], WrongLengthError)
    for number in (0, 1, 3):
        assert outcomes[number] == ("result", number) or isinstance(outcomes[number], BatchError)
    assert_later_calls_succeed(call_mode)


@pytest.mark.parametrize("behaviour", RETURNED_EXCEPTIONS)
def test_returned_exception_is_raised_for_its_item(call_mode: CallMode, behaviour: str) -> None:
    outcomes = call_mode.get_outcomes(make_four_calls(behaviour))
    outcome = outcomes.pop(2)
    assert outcome is ValueError if behaviour == "class in its place" else isinstance(outcome, Exception)
    assert type(outcome) is not NoOutcomeError
    assert outcomes == [("result", 0), ("result", 1), ("result", 3)]
    assert_later_calls_succeed(call_mode)


@pytest.mark.parametrize("behaviour", UNUSUAL_RESULTS)
@pytest.mark.parametrize("function", [behave, behave_async])
def test_result_that_only_looks_like_an_exception_is_a_result(
    function: Callable[[list[Call]], Any], behaviour: str
) -> None:
    with batched_by_four(function) as batched_function:
        outcomes = run_on_loop(batched_function, make_four_calls(behaviour))
    assert issubclass(type(outcomes.pop(2)), Mock | ClasslessResult)
    assert outcomes == [("result", 0), ("result", 1), ("result", 3)]


@pytest.fixture(scope="module")
def process_mode() -> Iterator[CallMode]:
    with batched_by_four(Misbehaving)() as batched_function:
        yield CallMode("process", batched_function)


@pytest.mark.parametrize("behaviour", UNSENDABLE_RESULTS)
def test_result_that_cannot_be_sent_affects_only_its_item(process_mode: CallMode, behaviour: str) -> None:
    outcomes = process_mode.get_outcomes(make_four_calls(behaviour))
    assert isinstance(outcomes.pop(2), Exception)
    assert outcomes == [("result", 0), ("result", 1), ("result", 3)]


@pytest.mark.parametrize("behaviour", ["killed", "exits with running thread"])
def test_all_callers_of_a_dead_worker_get_the_error(process_mode: CallMode, behaviour: str) -> None:
    outcomes = process_mode.get_outcomes(make_four_calls(behaviour))
    assert {type(each) for each in outcomes} == {WorkerCrashedError}
    assert_later_calls_succeed(process_mode)


BEHAVIOURS = ["fine"] * 6 + [
    *VALID_RESULTS,
    *(name for name in REJECTED_RESULTS if name != "transposed array"),
    *ITEM_ERRORS,
    *FATAL_ERRORS,
    *RETURNED_EXCEPTIONS,
]
"""Behaviours for the property test. A transposed array is omitted, because with two items its length is
valid."""


@pytest.mark.parametrize("function", [behave, behave_async])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(BEHAVIOURS), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_each_caller_gets_its_own_result_or_an_error(
    function: Callable[[list[Call]], Any], behaviours: list[str], max_size: int, isolate: bool
) -> None:
    batched_function: Batched[Call, Any] = batched(max_size=max_size, timeout_s=0, isolate=isolate)(function)
    for number, outcome in enumerate(run_on_loop(batched_function, list(enumerate(behaviours)))):
        assert type(outcome) is not NoOutcomeError
        if isinstance(outcome, np.ndarray | np.generic):
            assert np.all(outcome == number)
        else:
            assert outcome == ("result", number) or isinstance(outcome, Exception) or outcome is ValueError
    batched_function.close()


class SlowStartWorker:
    """A worker whose start returns when `may_start` is set."""

    depth = 1

    def __init__(self) -> None:
        self.is_starting, self.may_start, self.has_ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def start(self) -> None:
        self.is_starting.set()
        self.may_start.wait(MAX_WAIT_S)

    def run_batch(self, items: list[Any], enter_stage: Callable[[Stage], None]) -> list[Any]:
        return [("result", item) for item in items]

    def end(self) -> None:
        self.has_ended.set()

    def kill(self) -> None: ...

    def forget_after_fork(self) -> None: ...


def test_worker_is_ended_although_its_start_is_not_awaited_any_more() -> None:
    worker = SlowStartWorker()
    terms = CallTerms("slow", GroupingRule(4), 100, 1, True, copy_context())
    waiters = ThreadWaiters[Any, Any](lambda _: worker, terms, idle_s=inf)
    started: list[Future[None]] = waiters.start_workers()
    assert worker.is_starting.wait(MAX_WAIT_S)
    started[0].cancel()
    worker.may_start.set()
    assert waiters.wait_for_result_in_thread(1, MAX_WAIT_S) == ("result", 1)
    waiters.close()
    waiters.wait_until_ended()
    assert worker.has_ended.is_set()
