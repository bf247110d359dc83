"""`batched` on functions that block: they run in threads, for callers of any loop and thread."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

from dispatcher.batched.sync_functions import FunctionWorker, ThreadWaiters
from dispatcher.batched.waiting import CallTerms
from dispatcher.client import Batched, BatchError, ClosedError, TooManyPendingError, batched
from dispatcher.core.merging.grouping import GroupingRule
from tests.support import wait_until, wait_until_sync


class Held:
    """A function over lists that does not return before it is let."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.let = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.entered.release()
        assert self.let.acquire(timeout=30)
        return [("of", item) for item in items]


def each(items: list[Any]) -> list[Any]:
    return [("of", item) for item in items]


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What each returned, or raised, in a thread of its own."""
    told: list[Any] = [None] * len(calls)

    def run(place: int, call: Callable[[], Any]) -> None:
        try:
            told[place] = call()
        except BaseException as error:
            told[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


async def test_the_loop_goes_on_while_the_function_blocks() -> None:
    held = Held()
    async with batched()(held) as function:
        task = asyncio.create_task(function(1))
        await wait_until(lambda: held.entered.acquire(blocking=False))
        held.let.release()
        assert await task == ("of", 1)


async def test_callers_of_loops_and_threads_share_a_call() -> None:
    held = Held()
    function = batched(max_size=8)(held)
    first = asyncio.create_task(function("first"))
    await wait_until(lambda: held.entered.acquire(blocking=False))
    here = asyncio.create_task(function("here"))

    def elsewhere() -> Any:
        return asyncio.run(function("another loop"))

    there = asyncio.create_task(asyncio.to_thread(in_threads, elsewhere, lambda: function.sync("a thread")))
    await wait_until(lambda: function.waiting == 3)
    held.let.release(2)
    assert await there == [("of", "another loop"), ("of", "a thread")]
    assert [await first, await here] == [("of", "first"), ("of", "here")]
    assert [len(items) for items in held.calls] == [1, 3]
    await function.aclose()


def test_so_many_calls_run_at_once_as_may() -> None:
    held = Held()
    with batched(max_size=1, concurrency=3)(held) as function:
        caller = threading.Thread(target=in_threads, args=[lambda: function.sync(1)] * 5)
        caller.start()
        for _ in range(3):
            assert held.entered.acquire(timeout=10)
        wait_until_sync(lambda: (function.waiting, function.running) == (2, 3))
        assert not held.entered.acquire(blocking=False)
        held.let.release(5)
        caller.join()
    assert len(held.calls) == 5


async def test_who_leaves_leaves_the_others_alone() -> None:
    held = Held()
    function = batched(max_size=8)(held)
    runs = asyncio.create_task(function("runs"))
    await wait_until(lambda: held.entered.acquire(blocking=False))
    waits, stays = asyncio.create_task(function("waits")), asyncio.create_task(function("stays"))
    late = asyncio.create_task(asyncio.to_thread(in_threads, lambda: function.sync("late", timeout=0.05)))
    [gave_up] = await late
    assert isinstance(gave_up, TimeoutError)
    for task in (runs, waits):
        task.cancel()
    await asyncio.wait([runs, waits])
    assert function.waiting == 1
    held.let.release(2)
    assert await stays == ("of", "stays")
    assert held.calls == [["runs"], ["stays"]]
    await function.aclose()


def test_each_gets_the_error_that_is_its_own() -> None:
    def picky(items: list[int]) -> list[Any]:
        if 3 in items:
            raise LookupError("three")
        return [KeyError("two") if item == 2 else item for item in items]

    with batched(max_size=5, timeout_s=600, idle_flush=False)(picky) as function:
        told = in_threads(*[lambda item=item: function.sync(item) for item in range(5)])
    assert [told[n] for n in (0, 1, 4)] == [0, 1, 4]
    assert (repr(told[2]), repr(told[3])) == ("KeyError('two')", "LookupError('three')")


def test_a_function_that_would_end_the_thread_does_not() -> None:
    def leaves(items: list[int]) -> list[int]:
        if 1 in items:
            sys.exit("bye")
        return items

    with batched()(leaves) as function:
        [told] = in_threads(lambda: function.sync(1))
        assert isinstance(told, BatchError)
        assert "SystemExit: bye" in str(told)
        assert function.sync(2) == 2


def test_who_would_end_the_thread_is_alone_to_blame() -> None:
    def leaves(items: list[int]) -> list[int]:
        if 1 in items:
            sys.exit("bye")
        return items

    with batched(max_size=4, timeout_s=600, idle_flush=False)(leaves) as function:
        told = in_threads(*[lambda item=item: function.sync(item) for item in range(4)])
    assert [each for each in told if isinstance(each, int)] == [0, 2, 3]


def test_one_who_is_alone_waits_for_nobody() -> None:
    with batched(timeout_s=600)(each) as function:
        assert function.sync(1, timeout=30) == ("of", 1)


def test_a_call_runs_in_the_context_in_which_it_was_decorated() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    user.set("who decorates")

    @batched()
    def users(items: list[int]) -> list[str]:
        told = user.get()
        user.set("a call")
        return [told] * len(items)

    with users:
        user.set("who calls")
        assert [users.sync(1), users.sync(1)] == ["who decorates"] * 2


def test_a_coroutine_that_nobody_awaits_is_an_error() -> None:
    async def real(items: list[int]) -> list[int]:
        return items

    def forgetful(items: list[int]) -> Any:
        return real(items)

    function: Batched[int, int] = batched()(forgetful)
    with function, pytest.raises(BatchError, match="a coroutine"):
        function.sync(1)


def test_a_call_from_within_its_own_call_is_refused() -> None:
    """It would wait for itself for ever."""

    @batched()
    def again(items: list[int]) -> list[int]:
        return [again.sync(item + 1) for item in items]

    with again, pytest.raises(RuntimeError, match="waits for itself"):
        again.sync(1)


async def test_where_a_loop_runs_it_is_awaited() -> None:
    function = batched()(each)
    with pytest.raises(RuntimeError, match="await"):
        function.sync(1)
    assert await function(1) == ("of", 1)
    await function.aclose()


def test_more_than_may_wait_are_refused_where_that_is_asked_for() -> None:
    held = Held()
    with batched(max_size=1, max_queue=2, when_full="raise")(held) as function:
        first = threading.Thread(target=in_threads, args=[lambda: function.sync(0)])
        first.start()
        assert held.entered.acquire(timeout=10)
        others = threading.Thread(target=in_threads, args=[lambda: function.sync(1)] * 2)
        others.start()
        wait_until_sync(lambda: function.waiting == 2)
        with pytest.raises(TooManyPendingError, match="2 items wait"):
            function.sync(2)
        held.let.release(3)
        first.join()
        others.join()


def test_closing_answers_what_waits_and_leaves_no_thread() -> None:
    before = threading.active_count()
    held = Held()
    function = batched(max_size=2, timeout_s=600, idle_flush=False)(held)
    told: list[Any] = []
    callers = threading.Thread(
        target=lambda: told.extend(in_threads(*[lambda: function.sync(1)] * 5))  # a line of five
    )
    callers.start()
    wait_until_sync(lambda: function.waiting == 3 and function.running == 1)
    held.let.release(3)
    function.close()
    callers.join()
    assert told == [("of", 1)] * 5
    assert threading.active_count() == before
    with pytest.raises(ClosedError):
        function.sync(1)
    with pytest.raises(ClosedError), function:
        pass


async def test_a_loop_that_has_ended_holds_up_nobody() -> None:
    held = Held()
    function = batched(max_size=8)(held)

    def gone() -> None:
        async def main() -> None:
            asyncio.ensure_future(function("gone"))  # noqa: RUF006 -- it ends with its loop
            await wait_until(lambda: function.running == 1)

        asyncio.run(main())

    await asyncio.to_thread(gone)
    here = asyncio.create_task(function("here"))
    await wait_until(lambda: function.waiting == 1)
    held.let.release(2)
    assert await here == ("of", "here")
    await function.aclose()


def test_a_thread_with_nothing_to_do_ends_and_another_one_follows() -> None:
    terms = CallTerms("each", GroupingRule(8), 100, 1, True, copy_context())
    waiters = ThreadWaiters[Any, Any](lambda: FunctionWorker(each, terms), terms, idle_s=0.02)
    before = threading.active_count()
    for item in range(3):
        assert waiters.wait_for_result_in_thread(item, 10) == ("of", item)
        wait_until_sync(lambda: threading.active_count() == before)


class Model:
    @batched(max_size=8)
    def embed(self, texts: list[str]) -> list[int]:
        return [id(self)] * len(texts)


async def test_each_instance_has_a_line_of_its_own() -> None:
    one, two = Model(), Model()
    told = list(await asyncio.gather(one.embed("a"), two.embed("b"), one.embed("c")))
    assert told == [id(one), id(two), id(one)]
    for model in (one, two):
        await model.embed.aclose()


EXIT = """
import threading, time
from dispatcher.client import batched

@batched()
def slow(items):
    if 1 in items:
        time.sleep(600)
    return items

print(slow.sync(0))
threading.Thread(target=lambda: slow.sync(1), daemon=True).start()
while not slow.running:
    time.sleep(0.01)
print("ends")
"""


def test_a_program_ends_whatever_still_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\nends\n", "")


def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    held = Held()
    function = batched(max_size=8)(held)
    caller = threading.Thread(target=in_threads, args=[lambda: function.sync("before")])
    caller.start()
    assert held.entered.acquire(timeout=10)
    child = os.fork()
    if not child:
        held.let.release()
        os._exit(0 if function.sync("in the child", timeout=10) == ("of", "in the child") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.let.release()
    caller.join()
    function.close()
