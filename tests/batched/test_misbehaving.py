"""Under `batched`, each caller gets its own result or an error, whatever the function returns or raises."""

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

from dispatcher.batched.sync_functions import ThreadWaiters
from dispatcher.batched.waiting import CallTerms
from dispatcher.client import Batched, BatchError, WorkerCrashedError, WrongLengthError, batched
from dispatcher.core.merging.grouping import GroupingRule
from tests.batched.misbehaving import (
    ALONE,
    BLAMED,
    FATAL,
    FROM_PROCESS,
    REFUSED,
    RESULTS,
    RIGHT,
    Call,
    Claims,
    Misbehaving,
    behave,
)

TOGETHER = batched(max_size=4, timeout_s=600, idle_flush=False)
"""A decorator whose calls always have four items, so that a test knows which items are called together."""
HANGS_S = 30
"""Seconds after which a caller without an outcome counts as waiting for ever. Tests that pass never wait."""


async def behave_async(calls: list[Call]) -> Any:
    return behave(calls)


class StillWaitsError(Exception):
    """Stands for the outcome of a caller that has none."""


class Mode:
    """One way in which a function is called, and in which its callers wait."""

    def __init__(self, name: str, function: Batched[Call, Any]) -> None:
        self.name, self.function = name, function

    def outcomes(self, calls: list[Call]) -> list[Any]:
        """Return the result or the error that each of these simultaneous callers got."""
        if self.name == "async, called from threads":
            with ThreadPoolExecutor(len(calls)) as threads:
                futures = [threads.submit(self.function.sync, call, timeout=HANGS_S) for call in calls]
                return [each.exception() or each.result() for each in futures]
        return on_loop(self.function, calls)


def on_loop(function: Batched[Call, Any], calls: list[Call]) -> list[Any]:
    """Return what each caller got, on a loop that is restarted when a task raises what ends a loop."""
    loop = asyncio.new_event_loop()
    try:
        tasks = [loop.create_task(outcome(function, call)) for call in calls]
        waiting = loop.create_task(asyncio.wait(tasks, timeout=HANGS_S))
        while not waiting.done():
            try:
                loop.run_until_complete(waiting)
            except (SystemExit, KeyboardInterrupt):
                continue
        return [each.result() if each.done() else StillWaitsError() for each in tasks]
    finally:
        loop.close()


async def outcome(function: Batched[Call, Any], call: Call) -> Any:
    try:
        return await function(call)
    except Exception as error:
        return error


@pytest.fixture(scope="module", params=["async", "async, called from threads", "thread", "process"])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    name = request.param
    made: Batched[Call, Any]
    match name:
        case "process":
            made = TOGETHER(Misbehaving)()
        case "thread":
            made = TOGETHER(behave)
        case _:
            made = TOGETHER(behave_async)
    with made:
        yield Mode(name, made)


def four(fate: str) -> list[Call]:
    return [(0, "fine"), (1, "fine"), (2, fate), (3, "fine")]


def assert_goes_on(mode: Mode) -> None:
    """Assert that later callers are served, whatever happened to earlier ones."""
    assert mode.outcomes(four("fine")) == [("of", n) for n in range(4)]


@pytest.mark.parametrize("fate", RIGHT)
def test_what_iterates_over_one_result_for_each_is_right(mode: Mode, fate: str) -> None:
    for number, got in enumerate(mode.outcomes(four(fate))):
        wanted: Any = {"array": [number, number], "column of an array": number}.get(fate, ("of", number))
        assert np.array_equal(got, wanted), got
    assert_goes_on(mode)


@pytest.mark.parametrize("fate", REFUSED)
def test_what_is_no_result_for_each_is_one_clear_error(mode: Mode, fate: str) -> None:
    told = mode.outcomes(four(fate))
    assert {type(each) for each in told} == {WrongLengthError}, told
    said = "return a list of its rows" if "frame" in fate else "one result for each of 4 items"
    assert said in str(told[0])
    assert_goes_on(mode)


@pytest.mark.parametrize("fate", BLAMED)
def test_who_is_to_blame_alone_has_the_error(mode: Mode, fate: str) -> None:
    told = mode.outcomes(four(fate))
    blamed = told.pop(2)
    assert isinstance(blamed, Exception)
    assert type(blamed) is not StillWaitsError
    assert told == [("of", 0), ("of", 1), ("of", 3)]
    assert_goes_on(mode)


@pytest.mark.parametrize("fate", FATAL)
def test_what_ends_a_thread_or_a_loop_is_an_error_of_the_call(mode: Mode, fate: str) -> None:
    told = mode.outcomes(four(fate))
    assert isinstance(told[2], BatchError), told
    assert not isinstance(told[2], WrongLengthError)
    for number in (0, 1, 3):
        assert told[number] == ("of", number) or isinstance(told[number], BatchError)
    assert_goes_on(mode)


@pytest.mark.parametrize("fate", ALONE)
def test_an_exception_in_an_items_place_is_its_own(mode: Mode, fate: str) -> None:
    told = mode.outcomes(four(fate))
    got = told.pop(2)
    assert got is ValueError if fate == "class in its place" else isinstance(got, Exception)
    assert type(got) is not StillWaitsError
    assert told == [("of", 0), ("of", 1), ("of", 3)]
    assert_goes_on(mode)


@pytest.mark.parametrize("fate", RESULTS)
@pytest.mark.parametrize("function", [behave, behave_async])
def test_what_only_claims_to_be_an_exception_is_a_result(
    function: Callable[[list[Call]], Any], fate: str
) -> None:
    with TOGETHER(function) as made:
        told = on_loop(made, four(fate))
    assert issubclass(type(told.pop(2)), Mock | Claims)
    assert told == [("of", 0), ("of", 1), ("of", 3)]


@pytest.fixture(scope="module")
def process() -> Iterator[Mode]:
    with TOGETHER(Misbehaving)() as made:
        yield Mode("process", made)


@pytest.mark.parametrize("fate", FROM_PROCESS)
def test_a_result_that_no_process_can_send_harms_no_other(process: Mode, fate: str) -> None:
    told = process.outcomes(four(fate))
    assert isinstance(told.pop(2), Exception)
    assert told == [("of", 0), ("of", 1), ("of", 3)]


@pytest.mark.parametrize("fate", ["killed", "exits beside a thread"])
def test_all_whom_a_dead_worker_held_have_the_error(process: Mode, fate: str) -> None:
    told = process.outcomes(four(fate))
    assert {type(each) for each in told} == {WorkerCrashedError}
    assert_goes_on(process)


FATES = ["fine"] * 6 + [
    *RIGHT,
    *(name for name in REFUSED if name != "transposed array"),
    *BLAMED,
    *FATAL,
    *ALONE,
]
"""Fates for the property test. A transposed array is left out, because with two items its length is right."""


@pytest.mark.parametrize("function", [behave, behave_async])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(FATES), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_each_caller_has_its_own_result_or_an_error(
    function: Callable[[list[Call]], Any], fates: list[str], max_size: int, isolate: bool
) -> None:
    made: Batched[Call, Any] = batched(max_size=max_size, timeout_s=0, isolate=isolate)(function)
    for number, got in enumerate(on_loop(made, list(enumerate(fates)))):
        assert type(got) is not StillWaitsError
        if isinstance(got, np.ndarray | np.generic):
            assert np.all(got == number)
        else:
            assert got == ("of", number) or isinstance(got, Exception) or got is ValueError
    made.close()


class BeginsSlowly:
    """A worker that becomes ready when `let` is set."""

    def __init__(self) -> None:
        self.entered, self.let, self.record_completion = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def start(self) -> None:
        self.entered.set()
        self.let.wait(HANGS_S)

    def run_batch(self, items: list[Any]) -> list[Any]:
        return [("of", item) for item in items]

    def end(self) -> None:
        self.record_completion.set()

    def kill(self) -> None: ...

    def forget_after_fork(self) -> None: ...


def test_a_worker_whose_start_nobody_awaits_any_more_ends_with_the_rest() -> None:
    worker = BeginsSlowly()
    terms = CallTerms("slow", GroupingRule(4), inf, 1, True, copy_context())
    waiters = ThreadWaiters[Any, Any](lambda: worker, terms, idle_s=inf)
    ready: list[Future[None]] = waiters.start_threads()
    assert worker.entered.wait(HANGS_S)
    ready[0].cancel()
    worker.let.set()
    assert waiters.wait_for_result_in_thread(1, HANGS_S) == ("of", 1)
    waiters.close()
    waiters.wait_until_ended()
    assert worker.record_completion.is_set()


def test_a_delay_longer_than_a_thread_can_wait_is_no_error() -> None:
    function = batched(max_size=2, timeout_s=1e12, idle_flush=False)(behave)
    assert on_loop(function, four("fine")) == [("of", n) for n in range(4)]
    function.close()
