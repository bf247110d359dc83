"""`batched` with blocking functions: they run in threads, for callers in any event loop or thread."""

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
from dispatcher.common.grouping import GroupingRule
from tests.support import wait_until, wait_until_sync


class BlockingFunction:
    """A function over lists that returns only when `may_return` is released."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.called = threading.Semaphore(0)
        self.may_return = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.called.release()
        assert self.may_return.acquire(timeout=30)
        return [("result", item) for item in items]


def return_each(items: list[Any]) -> list[Any]:
    return [("result", item) for item in items]


def run_in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in a thread of its own, and return its results or exceptions."""
    outcomes: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            outcomes[index] = call()
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=return_each) for return_each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


async def test_event_loop_runs_while_the_function_blocks() -> None:
    blocking = BlockingFunction()
    async with batched()(blocking) as function:
        task = asyncio.create_task(function(1))
        await wait_until(lambda: blocking.called.acquire(blocking=False))
        blocking.may_return.release()
        assert await task == ("result", 1)


async def test_callers_in_loops_and_threads_share_a_call() -> None:
    blocking = BlockingFunction()
    function = batched(max_size=8)(blocking)
    first = asyncio.create_task(function("first"))
    await wait_until(lambda: blocking.called.acquire(blocking=False))
    in_this_loop = asyncio.create_task(function("here"))

    def call_in_another_loop() -> Any:
        return asyncio.run(function("another loop"))

    in_threads = asyncio.create_task(
        asyncio.to_thread(run_in_threads, call_in_another_loop, lambda: function.sync("a thread"))
    )
    await wait_until(lambda: function.waiting == 3)
    blocking.may_return.release(2)
    assert await in_threads == [("result", "another loop"), ("result", "a thread")]
    assert [await first, await in_this_loop] == [("result", "first"), ("result", "here")]
    assert [len(items) for items in blocking.calls] == [1, 3]
    await function.aclose()


def test_concurrency_limits_the_parallel_calls() -> None:
    blocking = BlockingFunction()
    with batched(max_size=1, concurrency=3)(blocking) as function:
        caller = threading.Thread(target=run_in_threads, args=[lambda: function.sync(1)] * 5)
        caller.start()
        for _ in range(3):
            assert blocking.called.acquire(timeout=10)
        wait_until_sync(lambda: (function.waiting, function.running) == (2, 3))
        assert not blocking.called.acquire(blocking=False)
        blocking.may_return.release(5)
        caller.join()
    assert len(blocking.calls) == 5


async def test_cancelled_callers_do_not_affect_the_others() -> None:
    blocking = BlockingFunction()
    function = batched(max_size=8)(blocking)
    running = asyncio.create_task(function("runs"))
    await wait_until(lambda: blocking.called.acquire(blocking=False))
    waiting, remaining = asyncio.create_task(function("waits")), asyncio.create_task(function("stays"))
    timed_out = asyncio.create_task(
        asyncio.to_thread(run_in_threads, lambda: function.sync("late", timeout=0.05))
    )
    [error] = await timed_out
    assert isinstance(error, TimeoutError)
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])
    assert function.waiting == 1
    blocking.may_return.release(2)
    assert await remaining == ("result", "stays")
    assert blocking.calls == [["runs"], ["stays"]]
    await function.aclose()


def test_each_caller_gets_its_own_error() -> None:
    def fail_some(items: list[int]) -> list[Any]:
        if 3 in items:
            raise LookupError("three")
        return [KeyError("two") if item == 2 else item for item in items]

    with batched(max_size=5, timeout_s=60, idle_flush=False)(fail_some) as function:
        outcomes = run_in_threads(*[lambda item=item: function.sync(item) for item in range(5)])
    assert [outcomes[n] for n in (0, 1, 4)] == [0, 1, 4]
    assert (repr(outcomes[2]), repr(outcomes[3])) == ("KeyError('two')", "LookupError('three')")


def test_sys_exit_is_a_batch_error() -> None:
    def exit_for_one(items: list[int]) -> list[int]:
        if 1 in items:
            sys.exit("bye")
        return items

    with batched()(exit_for_one) as function:
        [error] = run_in_threads(lambda: function.sync(1))
        assert isinstance(error, BatchError)
        assert "SystemExit: bye" in str(error)
        assert function.sync(2) == 2


def test_sys_exit_fails_only_its_item() -> None:
    def exit_for_one(items: list[int]) -> list[int]:
        if 1 in items:
            sys.exit("bye")
        return items

    with batched(max_size=4, timeout_s=60, idle_flush=False)(exit_for_one) as function:
        outcomes = run_in_threads(*[lambda item=item: function.sync(item) for item in range(4)])
    assert [return_each for return_each in outcomes if isinstance(return_each, int)] == [0, 2, 3]


def test_single_caller_does_not_wait_for_others() -> None:
    with batched(timeout_s=60)(return_each) as function:
        assert function.sync(1, timeout=30) == ("result", 1)


def test_call_runs_in_the_context_of_the_decoration() -> None:
    user: ContextVar[str] = ContextVar("user", default="nobody")
    user.set("decorator")

    @batched()
    def users(items: list[int]) -> list[str]:
        name = user.get()
        user.set("a call")
        return [name] * len(items)

    with users:
        user.set("caller")
        assert [users.sync(1), users.sync(1)] == ["decorator"] * 2


def test_returned_coroutine_is_an_error() -> None:
    async def return_items(items: list[int]) -> list[int]:
        return items

    def return_coroutine(items: list[int]) -> Any:
        return return_items(items)

    function: Batched[int, int] = batched()(return_coroutine)
    with function, pytest.raises(BatchError, match="a coroutine"):
        function.sync(1)


def test_recursive_call_is_rejected() -> None:
    """The call would wait for itself for ever."""

    @batched()
    def call_itself(items: list[int]) -> list[int]:
        return [call_itself.sync(item + 1) for item in items]

    with call_itself, pytest.raises(RuntimeError, match="waits for itself"):
        call_itself.sync(1)


async def test_sync_call_inside_an_event_loop_is_an_error() -> None:
    function = batched()(return_each)
    with pytest.raises(RuntimeError, match="await"):
        function.sync(1)
    assert await function(1) == ("result", 1)
    await function.aclose()


def test_full_queue_raises() -> None:
    blocking = BlockingFunction()
    with batched(max_size=1, max_waiting=2)(blocking) as function:
        first = threading.Thread(target=run_in_threads, args=[lambda: function.sync(0)])
        first.start()
        assert blocking.called.acquire(timeout=10)
        others = threading.Thread(target=run_in_threads, args=[lambda: function.sync(1)] * 2)
        others.start()
        wait_until_sync(lambda: function.waiting == 2)
        with pytest.raises(
            TooManyPendingError, match="2 items wait for BlockingFunction, and max_waiting=2 allows no more"
        ):
            function.sync(2)
        blocking.may_return.release(3)
        first.join()
        others.join()


def test_closing_answers_waiting_items_and_leaves_no_thread() -> None:
    before = threading.active_count()
    blocking = BlockingFunction()
    function = batched(max_size=2, timeout_s=60, idle_flush=False)(blocking)
    outcomes: list[Any] = []
    callers = threading.Thread(
        target=lambda: outcomes.extend(
            run_in_threads(*[lambda: function.sync(1)] * 5)
        )  # five waiting callers
    )
    callers.start()
    wait_until_sync(lambda: function.waiting == 3 and function.running == 1)
    blocking.may_return.release(3)
    function.close()
    callers.join()
    assert outcomes == [("result", 1)] * 5
    assert threading.active_count() == before
    with pytest.raises(ClosedError):
        function.sync(1)
    with pytest.raises(ClosedError), function:
        pass


async def test_caller_of_an_ended_loop_does_not_block_the_others() -> None:
    blocking = BlockingFunction()
    function = batched(max_size=8)(blocking)

    def run_and_end_loop() -> None:
        async def main() -> None:
            asyncio.ensure_future(function("ended loop"))  # noqa: RUF006 -- the task ends with its loop
            await wait_until(lambda: function.running == 1)

        asyncio.run(main())

    await asyncio.to_thread(run_and_end_loop)
    in_this_loop = asyncio.create_task(function("here"))
    await wait_until(lambda: function.waiting == 1)
    blocking.may_return.release(2)
    assert await in_this_loop == ("result", "here")
    await function.aclose()


def test_idle_thread_ends_and_a_later_call_starts_another() -> None:
    terms = CallTerms("each", GroupingRule(8), 100, 1, True, copy_context())
    waiters = ThreadWaiters[Any, Any](lambda _: FunctionWorker(return_each, terms), terms, idle_s=0.02)
    before = threading.active_count()
    for item in range(3):
        assert waiters.wait_for_result_in_thread(item, 10) == ("result", item)
        wait_until_sync(lambda: threading.active_count() == before)


class Model:
    @batched(max_size=8)
    def embed(self, texts: list[str]) -> list[int]:
        return [id(self)] * len(texts)


async def test_each_instance_has_its_own_queue() -> None:
    one, two = Model(), Model()
    outcomes = list(await asyncio.gather(one.embed("a"), two.embed("b"), one.embed("c")))
    assert outcomes == [id(one), id(two), id(one)]
    for model in (one, two):
        await model.embed.aclose()


EXITING_PROGRAM = """
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


def test_program_ends_while_a_call_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING_PROGRAM], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\nends\n", "")


def test_forked_process_has_its_own_threads() -> None:
    blocking = BlockingFunction()
    function = batched(max_size=8)(blocking)
    caller = threading.Thread(target=run_in_threads, args=[lambda: function.sync("before")])
    caller.start()
    assert blocking.called.acquire(timeout=10)
    child = os.fork()
    if not child:
        blocking.may_return.release()
        os._exit(0 if function.sync("in the child", timeout=10) == ("result", "in the child") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    blocking.may_return.release()
    caller.join()
    function.close()
