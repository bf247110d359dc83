"""A blocking call that hangs delays only its own next run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from dispatcher.signals.blocking_call import BlockingCalls, StillRunningError
from tests.support import wait_until


async def test_call_runs_in_another_thread() -> None:
    assert await BlockingCalls("t").run(threading.get_ident, 5) != threading.get_ident()


async def test_exception_of_the_call_is_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await BlockingCalls("t").run(fail, 5)


async def test_second_call_is_not_started_while_the_first_hangs() -> None:
    calls, may_return = BlockingCalls("t"), threading.Event()
    with pytest.raises(TimeoutError):
        await calls.run(may_return.wait, 0.05)
    with pytest.raises(StillRunningError, match="hanging for 0 s"):
        await calls.run(may_return.wait, 0.05)
    may_return.set()

    async def has_returned() -> bool:
        try:
            return await calls.run(lambda: True, 5)
        except StillRunningError:
            return False

    await wait_until(has_returned, what="the thread has returned")


async def test_cancelled_wait_leaves_the_thread_running() -> None:
    calls, may_return, started = BlockingCalls("t"), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        may_return.wait()

    waiting = asyncio.create_task(calls.run(call, 60))
    await wait_until(started.is_set)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StillRunningError):
        await calls.run(call, 5)
    may_return.set()


def test_process_ends_while_a_call_hangs() -> None:
    """The interpreter joins the threads of an executor at its end, but not this thread."""
    script = """
import asyncio, contextlib, time
from dispatcher.signals.blocking_call import BlockingCalls

async def main():
    with contextlib.suppress(TimeoutError):
        await BlockingCalls("t").run(lambda: time.sleep(600), 0.05)

asyncio.run(main())
print("ended")
"""
    started_at = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"ended\n"
    assert done.stderr == b""
    assert time.monotonic() - started_at < 60
